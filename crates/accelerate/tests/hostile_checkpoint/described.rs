//! Descriptions that lie, with a manifest that vouches for them.

use super::{Case, DESCRIPTION};
use serde_json::{Value, json};
use std::fs;

const MODEL: &str = "model.safetensors";

/// Changes one value of the description, by JSON pointer.
fn set(name: &str, part: &'static str, pointer: &'static str, value: Value) -> Case {
    Case::new(name, DESCRIPTION, part, move |saved| {
        saved.describe(|description| {
            let (parent, key) = pointer.rsplit_once('/').unwrap();
            let parent = description.pointer_mut(parent).unwrap_or_else(|| panic!("{pointer} is not there"));
            match parent {
                Value::Array(list) => list[key.parse::<usize>().unwrap()] = value.clone(),
                parent => parent[key] = value.clone(),
            }
        });
    })
}

fn change(name: &str, part: &'static str, change: fn(&mut Value)) -> Case {
    Case::new(name, DESCRIPTION, part, move |saved| saved.describe(change))
}

/// The description and this file contradict each other, and the file is named.
fn names(file: &str, case: Case) -> Case {
    Case { file: file.to_owned(), ..case }
}

fn text(name: &str, part: &'static str, content: impl Into<Vec<u8>>) -> Case {
    let content = content.into();
    Case::new(name, DESCRIPTION, part, move |saved| saved.put(DESCRIPTION, &content))
}

/// Replaces one number in the text: those that JSON values of Rust cannot hold.
fn number(name: &str, part: &'static str, key: &'static str, number: &'static str) -> Case {
    Case::new(name, DESCRIPTION, part, move |saved| {
        let description = fs::read_to_string(saved.path(DESCRIPTION)).unwrap();
        let (before, rest) = description.split_once(&format!(r#""{key}":"#)).unwrap();
        let after = &rest[rest.find([',', '}']).unwrap()..];
        saved.put(DESCRIPTION, format!(r#"{before}"{key}":{number}{after}"#));
    })
}

fn remove(description: &mut Value, parent: &str, key: &str) {
    description.pointer_mut(parent).unwrap().as_object_mut().unwrap().remove(key).unwrap();
}

/// Of a checkpoint of one process.
pub fn cases() -> Vec<Case> {
    [texts(), counts(), files(), objects(), tensors(), values()].into_iter().flatten().collect()
}

fn texts() -> Vec<Case> {
    let head = r#"{"format":"accelerate-checkpoint","version":1,"world_size":1"#;
    vec![
        text("nothing", "EOF while parsing", ""),
        text("a list", "expected struct Checkpoint", "[]"),
        text("no UTF-8", "expected value", b"\xff\xfe{}".to_vec()),
        text("the objects twice", "duplicate field", format!(r#"{head},"objects":{{}},"objects":{{}}}}"#)),
        text("no objects", "there is none of", format!("{head}}}")),
        text("lists in lists", "invalid type: sequence", format!(r#"{head},"objects":{}"#, "[".repeat(100_000))),
        text(
            "values in values",
            "recursion limit",
            format!(r#"{head},"objects":{{"a":{{"values":{}"#, "[".repeat(1_000_000)),
        ),
        text("300 thousand objects", "more", {
            let objects: Vec<String> = (0..300_000).map(|number| format!(r#""o{number}":{{}}"#)).collect();
            format!(r#"{head},"objects":{{{}}}}}"#, objects.join(","))
        }),
        text("one object twice", "twice", format!(r#"{head},"objects":{{"model":{{}},"model":{{}}}}}}"#)),
        text(
            "an object with a name of 1 MB",
            "",
            format!(r#"{head},"objects":{{"{}":{{}}}}}}"#, "n".repeat(1_000_000)),
        ),
        text("an object whose name clears the screen", "", format!(r#"{head},"objects":{{"\u001b[2J":{{}}}}}}"#)),
    ]
}

fn counts() -> Vec<Case> {
    vec![
        set("another format", "it has format `pickle`", "/format", json!("pickle")),
        set("version 2", "version 2", "/version", json!(2)),
        set("no process", "it is of 0 processes", "/world_size", json!(0)),
        set("2^40 processes", "it is of 1099511627776 processes", "/world_size", json!(1u64 << 40)),
        set("a fraction of a process", "floating point", "/world_size", json!(0.5)),
        set("two share a model of one process", "of which 2 share a model", "/shard_size", json!(2)),
        set("nobody shares a model", "of which 0 share a model", "/shard_size", json!(0)),
        number("minus one process", "invalid value: integer `-1`", "world_size", "-1"),
        number("NaN processes", "expected value", "world_size", "NaN"),
        number("1e999 processes", "number out of range", "world_size", "1e999"),
        number("2^64 processes", "floating point", "world_size", "18446744073709551616"),
        number("2^63 steps in a window", "its counts are not those of a run", "step", "9223372036854775808"),
        set("2^63 batches in a window", "its counts are not those of a run", "/accumulation/seen", json!(1u64 << 63)),
        set("checkpoint 2^63", "its counts are not those of a run", "/iteration", json!(1u64 << 63)),
        set(
            "values of a rank that is not there",
            "it has values of rank 1",
            "/objects/model/values_of_ranks",
            json!({"1": 2}),
        ),
        set("values of rank -1", "integer `-1`", "/objects/model/values_of_ranks", json!({"-1": 2})),
        set("an unknown key", "unknown field", "/pickle", json!("gASVAAAA")),
    ]
}

fn files() -> Vec<Case> {
    let outside = "is not the name of a file in its folder";
    vec![
        set("a file above", outside, "/files/0", json!("../model.safetensors")),
        set("an absolute path", outside, "/files/0", json!("/etc/passwd")),
        set("a hidden file", outside, "/files/0", json!(".model.safetensors")),
        set("a file below", outside, "/files/0", json!("below/model.safetensors")),
        set("a NUL", outside, "/files/0", json!("model\0.safetensors")),
        set("no name", outside, "/files/0", json!("")),
        set("itself", "not a safetensors file", "/files/0", json!(DESCRIPTION)),
        names(
            "absent.safetensors",
            set("a file that nothing vouches for", "not in the manifest", "/files/0", json!("absent.safetensors")),
        ),
        change("an object that is left out", "none of its tensors is in it", |it| {
            remove(it, "/objects", "random_states")
        }),
        set("no files", "it lists 0 files", "/files", json!([])),
        set("a text", "expected a sequence", "/files", json!("model.safetensors")),
        Case::new("files exchanged", "optimizer.safetensors", "there is no tensor", |saved| {
            saved.describe(|description| description["files"].as_array_mut().unwrap().swap(0, 1));
        }),
    ]
}

fn objects() -> Vec<Case> {
    vec![
        change("no model", "none of its tensors is in it", |it| remove(it, "/objects", "model")),
        change("no optimizer", "none of its tensors is in it", |it| remove(it, "/objects", "optimizer")),
        change("no registered value", "there is none of custom_checkpoint_0", |it| {
            remove(it, "/objects", "custom_checkpoint_0")
        }),
        set("a second model", "model_1 was neither prepared nor registered", "/objects/model_1", json!({})),
        set("a model that is null", "invalid type: null", "/objects/model", Value::Null),
        set("a model that is a list", "", "/objects/model", json!([1, {}, {}, {}])),
        set("no tensors", "none of its tensors is in it", "/objects/model/tensors", json!({})),
        set("an unknown key", "unknown field", "/objects/model/code", json!("import os")),
        Case::new("random numbers of nobody", DESCRIPTION, "random_states", |saved| {
            let name = saved.weights("random_states");
            saved.weigh(&name, |all| all.values_mut().for_each(|state| *state = state.f_zeros_like().unwrap()));
        }),
        names(
            MODEL,
            set(
                "tensors of a scheduler",
                "scheduler",
                "/objects/scheduler/tensors",
                json!({"x": {"dtype": "F32", "shape": [1], "pieces": [{"file": 0}]}}),
            ),
        ),
    ]
}

fn tensors() -> Vec<Case> {
    let weight = |name: &str, part: &'static str, key: &str, value: Value| {
        set(name, part, format!("/objects/model/tensors/hidden.weight/{key}").leak(), value)
    };
    let mut cases = vec![
        weight("no type", "unknown variant", "dtype", json!("STRING")),
        weight("a shape of a million dims", "has 1000000 dims", "shape", json!(vec![1; 1_000_000])),
        weight("a negative shape", "integer `-5`", "shape", json!([-5])),
        weight("no pieces", "is in no file", "pieces", json!([])),
        weight("a file that is not listed", "is in file 9", "pieces/0/file", json!(9)),
        weight("a file of -1", "integer `-1`", "pieces/0/file", json!(-1)),
        change("a tensor less", "hidden.weight", |it| remove(it, "/objects/model/tensors", "hidden.weight")),
        change("a moment less", "exp_avg.hidden.weight", |it| {
            remove(it, "/objects/optimizer/tensors", "exp_avg.hidden.weight")
        }),
        names("optimizer.safetensors", weight("another file", "there is no tensor", "pieces/0/file", json!(1))),
    ];
    let at_odds = [
        weight("another type", "has elements of type F32, not F64", "dtype", json!("F64")),
        weight("another shape", "has shape [5, 3], not [1, 5]", "shape", json!([1, 5])),
        weight("a huge shape", "has shape [5, 3], not", "shape", json!([1u64 << 62, 1u64 << 62])),
        change("a tensor that no file has", "there is no tensor `extra`", |it| {
            it["objects"]["model"]["tensors"]["extra"] = it["objects"]["model"]["tensors"]["hidden.weight"].clone();
        }),
        change("a parameter in the place of another", "has shape", |it| {
            let tensors = &mut it["objects"]["model"]["tensors"];
            (tensors["hidden.weight"], tensors["head.weight"]) =
                (tensors["head.weight"].clone(), tensors["hidden.weight"].clone());
        }),
    ];
    cases.extend(at_odds.map(|case| names(MODEL, case)));
    cases
}

/// What objects make of values that are not theirs.
const LOOK_AHEAD: &str = "/objects/dataloader/values/look_ahead";

/// Rows were read ahead with a generator of which so many numbers were left, behind this one; all of them are 0.
fn looks_ahead(name: &str, part: &'static str, &[left, next]: &[u16; 2]) -> Case {
    let mut state = vec![0; 5056];
    state[8..10].copy_from_slice(&left.to_le_bytes());
    state[16..18].copy_from_slice(&next.to_le_bytes());
    set(name, part, LOOK_AHEAD, json!({ "read": state }))
}

fn values() -> Vec<Case> {
    let of = |object: &'static str, name: &str, value: Value| {
        let pointer: &'static str = format!("/objects/{object}/values").leak();
        set(&format!("{object}: {name}"), object, pointer, value)
    };
    let mut cases = Vec::new();
    for object in ["optimizer", "scheduler", "dataloader", "custom_checkpoint_0"] {
        cases.extend([
            of(object, "null", Value::Null),
            of(object, "a list of lists", json!([[[]]])),
            of(object, "a text", json!("x".repeat(100_000))),
        ]);
    }
    cases.extend([
        set("a negative step of the schedule", "scheduler", "/objects/scheduler/values/last_epoch", json!(-1)),
        set("an epoch at the end of all numbers", "dataloader", "/objects/dataloader/values/epoch", json!(u64::MAX)),
        set(
            "rows at the end of all numbers",
            "no run reaches",
            "/objects/dataloader/values/rows_delivered",
            json!(u64::MAX),
        ),
        looks_ahead(
            "a generator that would read behind its numbers",
            "624 numbers are left behind the one at 624",
            &[624, 624],
        ),
        looks_ahead("a generator that draws nothing but 0", "all its numbers are 0", &[1, 0]),
        looks_ahead("a generator without numbers", "0 numbers are left", &[0, 0]),
        set("a generator of two bytes", "it has 2 bytes", LOOK_AHEAD, json!({"made": [1, 2]})),
        set("an order of two bytes", "it has 2 bytes", "/objects/dataloader/values/random", json!({"sampler": [1, 2]})),
        set("something unknown ahead", "unknown field", LOOK_AHEAD, json!({"bogus": 1})),
        set("two rates of one group", "scheduler", "/objects/scheduler/values/base_lrs", json!([0.1, 0.1])),
        set("no groups", "optimizer", "/objects/optimizer/values/param_groups", json!([])),
        set("a rate that is a text", "optimizer", "/objects/optimizer/values/param_groups/0/lr", json!("fast")),
        set(
            "weights that grow",
            "weight_decay is -0.1",
            "/objects/optimizer/values/param_groups/0/weight_decay",
            json!(-0.1),
        ),
        set("an average of nothing new", "beta1 is 1", "/objects/optimizer/values/param_groups/0/momentum", json!(1.0)),
        set(
            "an average that grows",
            "beta2 is 1.5",
            "/objects/optimizer/values/param_groups/0/options/betas",
            json!([0.9, 1.5]),
        ),
        set("what a rank keeps that is not there", "is of none of the ranks", "/objects/kept_by_rank_1", json!({})),
        set("gradients of a rank that is not there", "is of none of the ranks", "/objects/gradients_7", json!({})),
    ]);
    cases
}

/// Of a checkpoint of two processes that share every tensor. Long because it is a table of cases.
pub fn cases_of_parts() -> Vec<Case> {
    let layout = |name: &str, part: &'static str, key: &'static str, value: Value| {
        let pointer = format!("/objects/model/tensors/hidden.weight/pieces/0/layout/{key}").leak();
        set(name, part, pointer, value)
    };
    // The description and a file of weights contradict each other, and the file is named.
    let at_odds = |case: Case| Case { file: String::new(), part: "is not what the checkpoint says of it", ..case };
    vec![
        layout("elements beyond the end", "", "elements", json!({"start": 0, "end": 16})),
        layout("elements from behind", "", "elements", json!({"start": 3, "end": 1})),
        layout("2^64 - 1 elements", "", "elements", json!({"start": 0, "end": u64::MAX})),
        layout("minus one element", "integer `-1`", "elements", json!({"start": -1, "end": 1})),
        layout("elements that are null in part", "invalid type: null", "elements", json!({"start": null, "end": 1})),
        at_odds(layout("fewer elements than are in the file", "", "elements", json!({"start": 0, "end": 1}))),
        layout("other elements", "", "elements", json!({"start": 1, "end": 14})),
        at_odds(layout("no elements", "", "elements", json!({"start": 0, "end": 0}))),
        layout("another shape", "and a piece is", "shape", json!([3, 5])),
        layout("a huge shape", "", "shape", json!([1u64 << 40, 1u64 << 40])),
        layout("no shape", "invalid type: null", "shape", Value::Null),
        layout("a slice of a dim that is not there", "", "slice", json!({"dim": 7, "indices": {"start": 0, "end": 1}})),
        layout("a slice beyond the end", "", "slice", json!({"dim": 0, "indices": {"start": 0, "end": 99}})),
        layout("blocks of nothing", "", "block_elements", json!(0)),
        layout("an unknown key", "unknown field", "stride", json!(2)),
        change("a hole", "are in no file", |it| {
            let pieces = it["objects"]["model"]["tensors"]["hidden.weight"]["pieces"].as_array_mut().unwrap();
            pieces.truncate(1);
        }),
        change("a piece twice", "in its pieces", |it| {
            let pieces = it["objects"]["model"]["tensors"]["hidden.weight"]["pieces"].as_array_mut().unwrap();
            pieces.push(pieces[0].clone());
        }),
        change("a piece a million times", "in its pieces", |it| {
            let pieces = it["objects"]["model"]["tensors"]["hidden.weight"]["pieces"].as_array_mut().unwrap();
            *pieces = vec![pieces[0].clone(); 100_000];
        }),
        change("a small file as a large tensor", "has two pieces in the file", |it| {
            let tensor = &mut it["objects"]["model"]["tensors"]["hidden.weight"];
            let piece = &tensor["pieces"][0];
            let (file, held) = (piece["file"].clone(), piece["layout"]["elements"]["end"].as_u64().unwrap());
            let part = |number| json!({"shape": [held * 10_000], "elements": {"start": number * held, "end": (number + 1) * held}});
            let pieces: Vec<Value> = (0..10_000).map(|number| json!({"file": file, "layout": part(number)})).collect();
            (tensor["shape"], tensor["pieces"]) = (json!([held * 10_000]), json!(pieces));
        }),
        change("a file twice", "lists the file", |it| it["files"][1] = it["files"][0].clone()),
        change("columns of 2^40 rows", "runs of elements", |it| {
            let tensor = &mut it["objects"]["model"]["tensors"]["hidden.weight"];
            let shape = [1u64 << 40, 2];
            tensor["shape"] = json!(shape);
            for column in 0..2u64 {
                let slice = json!({"dim": 1, "indices": {"start": column, "end": column + 1}});
                tensor["pieces"][column as usize]["layout"] = json!({"shape": shape, "slice": slice});
            }
        }),
        at_odds(change("no pieces with layouts", "has shape", |it| {
            let pieces = it["objects"]["model"]["tensors"]["hidden.weight"]["pieces"].as_array_mut().unwrap();
            pieces.iter_mut().for_each(|piece| drop(piece.as_object_mut().unwrap().remove("layout")));
        })),
        change("state in blocks that is none", "", |it| {
            it["objects"]["model"]["tensors"]["hidden.weight"]["is_elementwise"] = json!(false);
        }),
        at_odds(change("pieces of ranks exchanged", "", |it| {
            let pieces = it["objects"]["model"]["tensors"]["hidden.weight"]["pieces"].as_array_mut().unwrap();
            (pieces[0]["file"], pieces[1]["file"]) = (pieces[1]["file"].clone(), pieces[0]["file"].clone());
        })),
        set("one process in place of two", "of which 2 share a model", "/world_size", json!(1)),
        set("three processes in place of two", "of which 2 share a model", "/world_size", json!(3)),
    ]
}
