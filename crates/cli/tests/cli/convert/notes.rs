//! Notes that safetensors files have about themselves, there and back.

use std::collections::BTreeMap;
use std::fs;

use accelerate_core::checkpoint::STEM;
use serde_json::{Value, json};

use super::{copied, own, run, tensors_in};
use crate::checkpoint::folders::{notes_in, put_notes, write_checkpoint, write_manifest};

fn author() -> BTreeMap<String, String> {
    [("author", "me"), ("format", "pt")].map(|(key, note)| (key.to_owned(), note.to_owned())).into()
}

fn left_out(report: &str) -> Vec<String> {
    let report: Value = serde_json::from_str(report).unwrap();
    let text = |it: &Value| format!("{}: {}", it["what"].as_str().unwrap(), it["reason"].as_str().unwrap());
    report["left_out"].as_array().unwrap().iter().map(text).collect()
}

#[test]
fn notes_of_a_model_are_the_same_on_both_sides() {
    let folder = copied("named");
    let path = |name: &str| folder.path().join(name);
    put_notes(&path("src/model.safetensors"), &[("author", "me")]);
    run(folder.path(), "convert src dst").expect(0, &[]);
    run(folder.path(), "verify dst").expect(0, &[]);
    run(folder.path(), "convert dst python").expect(0, &[]);
    for file in ["dst/model.safetensors", "python/model.safetensors"] {
        assert_eq!(notes_in(&path(file)), author(), "{file}");
    }
    assert_eq!(notes_in(&path("dst/optimizer.safetensors")), [("format".to_owned(), "pt".to_owned())].into());
}

#[test]
fn notes_in_which_files_differ_are_listed() {
    let folder = copied("named");
    let src = folder.path().join("src");
    let names: Vec<String> = tensors_in(&src.join("model.safetensors")).into_keys().collect();
    let files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    // Each has all tensors, and the index takes half of them from each.
    let half = |place: usize| files[usize::from(place >= names.len() / 2)];
    let map: BTreeMap<&String, &str> = names.iter().enumerate().map(|(place, name)| (name, half(place))).collect();
    fs::write(src.join("model.safetensors.index.json"), json!({ "weight_map": map }).to_string()).unwrap();
    for (file, part) in files.into_iter().zip(["1", "2"]) {
        fs::copy(src.join("model.safetensors"), src.join(file)).unwrap();
        put_notes(&src.join(file), &[("author", "me"), ("part", part)]);
    }
    fs::remove_file(src.join("model.safetensors")).unwrap();
    let found = run(folder.path(), "convert src dst --json");
    found.expect(0, &[]);
    assert!(left_out(&found.stdout).contains(&"model: notes part: its files differ in these".to_owned()), "{found:?}");
    assert_eq!(notes_in(&folder.path().join("dst/model.safetensors")), author());
}

/// A pickle has none.
#[test]
fn notes_of_what_becomes_a_pickle_are_listed() {
    let folder = tempfile::tempdir().unwrap();
    let (tensors, values) = own();
    write_checkpoint(&folder.path().join("own"), 1, &tensors, &values);
    for file in ["model.safetensors", "optimizer.safetensors"] {
        put_notes(&folder.path().join("own").join(file), &[("author", "me"), ("format", "pt")]);
    }
    write_manifest(&folder.path().join("own"), STEM);
    let found = run(folder.path(), "convert own python --json");
    found.expect(0, &[]);
    let notes: Vec<String> = left_out(&found.stdout).into_iter().filter(|it| it.contains("notes")).collect();
    assert_eq!(notes, ["optimizer: notes author: files of torch.save have no notes about themselves"]);
    assert_eq!(notes_in(&folder.path().join("python/model.safetensors")), author());
}
