//! Manifests that lie.

use super::{Case, DESCRIPTION, MANIFEST};
use serde_json::{Value, json};
use std::fs;

fn text(name: &str, part: &'static str, content: impl Into<Vec<u8>>) -> Case {
    let content = content.into();
    Case::new(name, MANIFEST, part, move |saved| fs::write(saved.path(MANIFEST), &content).unwrap())
}

fn lie(name: &str, part: &'static str, change: fn(&mut Value)) -> Case {
    Case::new(name, MANIFEST, part, move |saved| saved.list(change))
}

/// The first file of the manifest says something else.
fn file(name: &str, part: &'static str, key: &'static str, value: Value) -> Case {
    Case::new(name, MANIFEST, part, move |saved| saved.list(|manifest| manifest["files"][0][key] = value.clone()))
}

pub fn cases() -> Vec<Case> {
    [texts(), lies(), files(), numbers(), others()].into_iter().flatten().collect()
}

fn texts() -> Vec<Case> {
    let head = r#"{"format":"accelerate-save","version":1,"files":[]"#;
    vec![
        text("nothing", "EOF while parsing", ""),
        text("blanks", "EOF while parsing", " ".repeat(1000)),
        text("half of it", "EOF while parsing", r#"{"format":"#),
        text("a list", "expected a string", r#"[["accelerate-save"], 1, 2, 3, 4, 5]"#),
        text("null", "invalid type: null", "null"),
        text("a number", "invalid type: integer", "7"),
        text("something behind it", "trailing characters", format!("{head}}}{{}}")),
        text("the list of files twice", "duplicate field", format!(r#"{head},"files":[]}}"#)),
        text("no UTF-8", "control character", [head.as_bytes(), b",\"\xff\x01\":1}"].concat()),
        text("lists in lists", "invalid type: sequence", format!(r#"{{"files":{}"#, "[".repeat(100_000))),
        text("objects in objects", "invalid type: map", r#"{"files":"#.repeat(100_000)),
        text("17 MiB of blanks", "17825792 bytes", vec![b' '; 17 << 20]),
        text("an unknown key of 1 MB", "unknown field", format!(r#"{{"{}":1}}"#, "k".repeat(1_000_000))),
    ]
}

fn lies() -> Vec<Case> {
    vec![
        lie("another format", "it has format `pickle`", |manifest| manifest["format"] = json!("pickle")),
        lie("version 2", "version 2", |manifest| manifest["version"] = json!(2)),
        lie("version 0", "version 0", |manifest| manifest["version"] = json!(0)),
        lie("version -1", "invalid value: integer `-1`", |manifest| manifest["version"] = json!(-1)),
        lie("version 1.0", "floating point", |manifest| manifest["version"] = json!(1.0)),
        lie("no version", "missing field `version`", |manifest| {
            drop(manifest.as_object_mut().unwrap().remove("version"))
        }),
        lie("no files", "missing field `files`", |manifest| drop(manifest.as_object_mut().unwrap().remove("files"))),
        lie("files that are an object", "expected a sequence", |manifest| manifest["files"] = json!({})),
        lie("an unknown key", "unknown field", |manifest| manifest["url"] = json!("http://elsewhere")),
        lie("an outdated file above", "not the name of an outdated file", |manifest| {
            manifest["outdated"] = json!(["../x"])
        }),
        lie("the description as outdated", "as new and as outdated", |manifest| {
            manifest["outdated"] = json!([DESCRIPTION])
        }),
        lie("a manifest as outdated", "not the name of an outdated file", |manifest| {
            manifest["outdated"] = json!([MANIFEST])
        }),
        lie("a file twice", "twice", |manifest| {
            let first = manifest["files"][0].clone();
            manifest["files"].as_array_mut().unwrap().push(first);
        }),
    ]
}

fn files() -> Vec<Case> {
    // The file that is there is in no list any more, and that is what is told.
    let unlisted = |case: Case| Case { file: "model.safetensors".to_owned(), part: "not in the manifest", ..case };
    let outside = "is not the name of a file in its folder";
    vec![
        file("a file above", outside, "name", json!("../model.safetensors")),
        file("an absolute path", outside, "name", json!("/etc/passwd")),
        file("a hidden file", outside, "name", json!(".bashrc")),
        file("a file below", outside, "name", json!("below/model.safetensors")),
        file("no name", outside, "name", json!("")),
        file("a NUL in a name", outside, "name", json!("model\0.safetensors")),
        unlisted(file("a name of 1 MB", "", "name", json!("n".repeat(1_000_000)))),
        unlisted(file("a name that clears the screen", "", "name", json!("\u{1b}[2Jmodel.safetensors"))),
        file("a number as a name", "expected a string", "name", json!(7)),
        file("a checksum of 31 digits", "is not 32 hexadecimal digits", "xxh3_128", json!("0".repeat(31))),
        file("a checksum of letters", "is not 32 hexadecimal digits", "xxh3_128", json!("g".repeat(32))),
        file("a sample of letters", "is not 32 hexadecimal digits", "sample", json!("g".repeat(32))),
        file("a temporary name above", "which no save gives", "temporary_name", json!("../.checkpoint.a.saving")),
        file("a temporary name of another save", "which no save gives", "temporary_name", json!(".model.a.saving")),
        file("a temporary name without end", "which no save gives", "temporary_name", json!(".checkpoint.a")),
    ]
}

fn numbers() -> Vec<Case> {
    let size = |name: &str, part: &'static str, number: &'static str| {
        Case::new(name, MANIFEST, part, move |saved| {
            let manifest = fs::read_to_string(saved.path(MANIFEST)).unwrap();
            let (before, rest) = manifest.split_once(r#""bytes": "#).unwrap();
            let after = &rest[rest.find(',').unwrap()..];
            fs::write(saved.path(MANIFEST), format!(r#"{before}"bytes": {number}{after}"#)).unwrap();
        })
    };
    vec![
        size("a negative size", "invalid value: integer `-5`", "-5"),
        size("a size with a fraction", "floating point", "5.5"),
        size("a size of 2^64", "floating point", "18446744073709551616"),
        size("a size of 1e999", "number out of range", "1e999"),
        size("a size of NaN", "expected value", "NaN"),
        size("a size as a text", "invalid type: string", r#""5""#),
        size("no size", "invalid type: null", "null"),
    ]
}

/// What a manifest leaves out, or says of files that are right.
fn others() -> Vec<Case> {
    vec![
        Case::new("the description is not listed", "", "", |saved| {
            saved.list(|manifest| manifest["files"].as_array_mut().unwrap().retain(|file| file["name"] != DESCRIPTION));
        }),
        Case::new("weights are not listed", "model.safetensors", "not in the manifest", |saved| {
            saved.list(|manifest| {
                manifest["files"].as_array_mut().unwrap().retain(|file| file["name"] != "model.safetensors");
            });
        }),
        Case::new("a size of 2^64 - 1", "model.safetensors", "were saved", |saved| {
            saved.list(|manifest| {
                let files = manifest["files"].as_array_mut().unwrap();
                let file = files.iter_mut().find(|file| file["name"] == "model.safetensors").unwrap();
                file["bytes"] = json!(u64::MAX);
            });
        }),
        Case::new("a file that is not there", "absent.safetensors", "No such file", |saved| {
            saved.list(|manifest| {
                let mut file = manifest["files"][0].clone();
                file["name"] = json!("absent.safetensors");
                manifest["files"].as_array_mut().unwrap().push(file);
            });
        }),
        Case::new("no manifest", MANIFEST, "is not a checkpoint", |saved| {
            fs::remove_file(saved.path(MANIFEST)).unwrap();
        }),
        Case::new("a folder as the manifest", MANIFEST, "is a folder", |saved| {
            fs::remove_file(saved.path(MANIFEST)).unwrap();
            fs::create_dir(saved.path(MANIFEST)).unwrap();
        }),
        Case::new("an endless manifest", MANIFEST, "is a device", |saved| {
            fs::remove_file(saved.path(MANIFEST)).unwrap();
            std::os::unix::fs::symlink("/dev/zero", saved.path(MANIFEST)).unwrap();
        }),
        Case::new("a manifest of a model that was saved by itself", MANIFEST, "is not a checkpoint", |saved| {
            fs::rename(saved.path(MANIFEST), saved.path("model.manifest.json")).unwrap();
        }),
    ]
}
