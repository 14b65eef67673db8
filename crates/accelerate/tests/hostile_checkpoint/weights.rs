//! Weight files that lie, with a manifest that vouches for them.

use super::Case;
use super::run::{Saved, zeros};
use accelerate::tch::{Kind, Tensor};
use std::collections::BTreeMap;
use std::fs;

/// The file of the first rank.
const MODEL: &str = "model.rank-00000-of-00002.safetensors";
const OPTIMIZER: &str = "optimizer.rank-00000-of-00002.safetensors";

fn tensors(name: &str, part: &'static str, change: fn(&mut BTreeMap<String, Tensor>)) -> Case {
    Case::new(name, MODEL, part, move |saved| saved.weigh(MODEL, change))
}

fn bytes(name: &str, part: &'static str, change: fn(Vec<u8>) -> Vec<u8>) -> Case {
    Case::new(name, MODEL, part, move |saved| saved.put(MODEL, change(fs::read(saved.path(MODEL)).unwrap())))
}

fn with_length(length: u64) -> Vec<u8> {
    [&length.to_le_bytes()[..], b"{}"].concat()
}

pub fn cases() -> Vec<Case> {
    vec![
        tensors("no tensors", "there is no tensor", BTreeMap::clear),
        tensors("a tensor less", "there is no tensor `hidden.weight`", |all| drop(all.remove("hidden.weight"))),
        tensors("a tensor renamed", "there is no tensor `hidden.weight`", |all| {
            let tensor = all.remove("hidden.weight").unwrap();
            all.insert("hidden.weights".to_owned(), tensor);
        }),
        tensors("an element less", "`hidden.weight` has shape", |all| {
            let fewer = all["hidden.weight"].numel() as i64 - 1;
            all.insert("hidden.weight".to_owned(), zeros(&[fewer], Kind::Float));
        }),
        tensors("many elements more", "`hidden.weight` has shape", |all| {
            all.insert("hidden.weight".to_owned(), zeros(&[10_000_000], Kind::Float));
        }),
        tensors("another type", "has elements of type F64", |all| {
            let tensor = all["hidden.weight"].to_kind(Kind::Double);
            all.insert("hidden.weight".to_owned(), tensor);
        }),
        tensors("another shape of as many", "`hidden.weight` has shape", |all| {
            let tensor = all["hidden.weight"].unsqueeze(0);
            all.insert("hidden.weight".to_owned(), tensor);
        }),
        bytes("nothing", "not a safetensors file", |_| Vec::new()),
        bytes("a header of 2^64 - 1 bytes", "not a safetensors file", |_| with_length(u64::MAX)),
        bytes("a header of 100 MB", "not a safetensors file", |_| with_length(100_000_000)),
        bytes("a header that is longer than the file", "not a safetensors file", |_| with_length(3)),
        bytes("a file that was cut off", "it was cut off", |mut file| {
            file.pop();
            file
        }),
        bytes("something behind the data", "lengthened", |mut file| {
            file.push(0);
            file
        }),
        bytes("a pickle", "not a safetensors file", |_| b"\x80\x04cos\nsystem\n(S'true'\ntR.".to_vec()),
        bytes("a header that is a list", "its header cannot be understood", |_| {
            [&2u64.to_le_bytes()[..], b"[]"].concat()
        }),
        Case::new("the file of another rank", MODEL, "", |saved: &Saved| {
            let other = fs::read(saved.path("model.rank-00001-of-00002.safetensors")).unwrap();
            saved.put(MODEL, other);
        }),
        Case::new("the file of another object", MODEL, "there is no tensor", |saved: &Saved| {
            let other = fs::read(saved.path(OPTIMIZER)).unwrap();
            saved.put(MODEL, other);
        }),
    ]
}
