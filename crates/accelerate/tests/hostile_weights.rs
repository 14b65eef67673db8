//! Weight files and indexes that were made to do harm: refused in no time, in little memory, and with a message that
//! names the file and the place.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(unreachable_pub, reason = "cases and bounds are modules of several crates")]

mod hostile;
#[path = "hostile/indexes.rs"]
mod indexes;
#[path = "hostile/weights.rs"]
mod weights;

use accelerate::checkpoint::{LoadOptions, checkpoint_shapes, load_checkpoint_in_model, load_file, save_file};
use accelerate::nn::{Init, LoadReport, ParamStore, StateDict};
use accelerate::tch::{Device, Kind, Tensor};
use hostile::{Outcome, check_refused, outcome};
use indexes::{INDEX, LARGE_INDEXES, indexes};
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;
use weights::{HostileFile, LARGE_FILES, file, files, header};

const F32: &str = r#""F32""#;

fn load(path: &Path) -> accelerate::Result<LoadReport> {
    let store = ParamStore::new(Device::Cpu);
    store.root().param("w", ([1], Init::Zeros))?;
    load_checkpoint_in_model(&store, path, &LoadOptions::default())
}

/// The path of this name in a folder, with these bytes.
fn written(folder: &TempDir, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.path().join(name);
    fs::write(&path, bytes).unwrap();
    path
}

/// A folder with one good file, whose tensor is `w`.
fn folder_with_shard() -> TempDir {
    let folder = TempDir::new().unwrap();
    written(&folder, "a.safetensors", file(header(F32, "[1]", "[0,4]"), 4));
    folder
}

#[test]
fn codes_are_not_taken_for_numbers() {
    for beside in ["w.SCB", "w.quant_state.bitsandbytes__nf4"] {
        let folder = TempDir::new().unwrap();
        let tensors = [("w", Tensor::from_slice(&[7f32])), (beside, Tensor::from_slice(&[1f32]))];
        let state: StateDict = tensors.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect();
        save_file(&state, folder.path().join("model.safetensors")).unwrap();
        for strict in [true, false] {
            let store = ParamStore::new(Device::Cpu);
            store.root().param("w", ([1], Init::Zeros)).unwrap();
            let options = LoadOptions { strict, ..Default::default() };
            let error = load_checkpoint_in_model(&store, folder.path(), &options).unwrap_err();
            assert!(
                error.to_string().contains(beside) && error.to_string().contains("BnbQuantizationConfig"),
                "{error}"
            );
            assert_eq!(store.get("w").unwrap().get().unwrap().double_value(&[0]), 0.0);
        }
    }
}

#[test]
fn a_file_that_was_made_to_do_harm_is_refused_by_every_reader() {
    let folder = TempDir::new().unwrap();
    let mut num_cases = 0;
    for HostileFile { name, bytes, part } in files() {
        let path = written(&folder, "hostile.safetensors", bytes);
        check_refused(&name, &path, &[part], || load_file(&path));
        check_refused(&name, &path, &[part], || load(&path));
        check_refused(&name, &path, &[part], || checkpoint_shapes(folder.path()));
        num_cases += 1;
    }
    assert!(num_cases > 130, "{num_cases}");
}

#[test]
fn a_header_of_a_hundred_megabytes_costs_neither_time_nor_memory() {
    let folder = TempDir::new().unwrap();
    for (name, bytes, part) in LARGE_FILES {
        let path = written(&folder, "hostile.safetensors", bytes());
        check_refused(name, &path, &[part], || checkpoint_shapes(&path));
    }
}

#[test]
fn an_index_that_was_made_to_do_harm_is_refused() {
    let folder = folder_with_shard();
    let mut num_cases = 0;
    for (name, bytes, part) in indexes() {
        let path = written(&folder, INDEX, bytes);
        check_refused(&name, &path, &[part], || load(folder.path()));
        check_refused(&name, &path, &[part], || checkpoint_shapes(&path));
        num_cases += 1;
    }
    assert!(num_cases > 75, "{num_cases}");
}

#[test]
fn an_index_of_a_million_names_costs_neither_time_nor_memory() {
    let folder = folder_with_shard();
    for (name, bytes, part) in LARGE_INDEXES {
        let path = written(&folder, INDEX, bytes());
        check_refused(name, &path, &[part], || load(&path));
    }
}

#[test]
fn the_largest_header_that_is_allowed_is_read_in_no_time() {
    let folder = TempDir::new().unwrap();
    let entry =
        |index: usize| format!(r#""t{index}":{{"dtype":"U8","shape":[],"data_offsets":[{index},{}]}}"#, index + 1);
    let number = 150_000;
    let bytes = file(format!("{{{}}}", (0..number).map(entry).collect::<Vec<_>>().join(",")), number);
    let path = written(&folder, "model.safetensors", &bytes);
    let outcome = outcome("as many tensors as are read", &path, bytes.len() as u64, || checkpoint_shapes(&path));
    assert!(matches!(outcome, Outcome::Read), "{outcome:?}");
}

/// What it is, how to put it into a place, and what the message has to say.
type Place = (&'static str, fn(&Path), &'static str);

/// What has no end, or is no file.
fn places_without_a_file() -> [Place; 4] {
    [
        ("a device", |path| symlink("/dev/zero", path).unwrap(), "is a device"),
        ("a full device", |path| symlink("/dev/full", path).unwrap(), "is a device"),
        ("a folder", |path| fs::create_dir(path).unwrap(), "is a folder"),
        (
            "a pipe that nobody writes into",
            |path| assert!(Command::new("mkfifo").arg(path).status().unwrap().success()),
            "is a pipe",
        ),
    ]
}

#[test]
fn a_device_a_pipe_or_a_folder_in_the_place_of_a_file_is_named() {
    for (name, put, part) in places_without_a_file() {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("model.safetensors");
        put(&path);
        check_refused(name, &path, &[part], || load_file(&path));
        check_refused(name, &path, &[part], || load(folder.path()));
    }
}

#[test]
fn a_device_a_pipe_or_a_folder_in_the_place_of_a_shard_is_named() {
    for (name, put, part) in places_without_a_file() {
        let folder = folder_with_shard();
        let shard = folder.path().join("b.safetensors");
        put(&shard);
        written(&folder, INDEX, r#"{"weight_map":{"w":"a.safetensors","v":"b.safetensors"}}"#);
        check_refused(name, &shard, &[part], || load(folder.path()));
    }
}

#[test]
fn a_device_a_pipe_or_a_folder_in_the_place_of_an_index_is_named() {
    for (name, put, part) in &places_without_a_file()[..2] {
        let folder = folder_with_shard();
        let index = folder.path().join(INDEX);
        put(&index);
        check_refused(name, &index, &[part], || load(folder.path()));
    }
    for (name, put, part) in &places_without_a_file()[3..] {
        let folder = folder_with_shard();
        let index = folder.path().join(INDEX);
        put(&index);
        check_refused(name, &index, &[part], || load(&index));
    }
}

#[test]
fn an_index_that_names_itself_or_a_link_to_nowhere_is_refused() {
    let folder = folder_with_shard();
    let index = written(&folder, INDEX, format!(r#"{{"weight_map":{{"w":"{INDEX}"}}}}"#));
    check_refused("itself", &index, &["its header claims"], || load(&index));
    symlink("nowhere", folder.path().join("b.safetensors")).unwrap();
    fs::write(&index, r#"{"weight_map":{"w":"b.safetensors"}}"#).unwrap();
    check_refused("a link to nowhere", &index, &["b.safetensors", "no such file"], || load(&index));
}

#[test]
fn a_tensor_that_no_memory_holds_is_named_with_its_file() {
    let folder = TempDir::new().unwrap();
    let num_bytes = 1_u64 << 43;
    let whole = file(header(r#""U8""#, &format!("[{num_bytes}]"), &format!("[0,{num_bytes}]")), 0);
    let path = written(&folder, "sparse.safetensors", &whole);
    // Nothing of it is on the disk.
    File::options().write(true).open(&path).unwrap().set_len(whole.len() as u64 + num_bytes).unwrap();
    let parts = ["`w`", "takes 8796093022208 bytes", "out of memory"];
    let message = check_refused("8 TiB", &path, &parts, || load_file(&path));
    assert!(!message.contains(".cpp") && !message.contains("frame #"), "{message}");
    assert!(load_file(&path).unwrap_err().is_out_of_memory());
    // Nothing is allocated for a tensor that does not fit the model.
    check_refused("8 TiB for one element", &path, &["but the model has [1]"], || load(&path));
}

#[test]
fn ten_thousand_names_and_shapes_that_do_not_fit_make_a_short_message() {
    let folder = TempDir::new().unwrap();
    let store = ParamStore::new(Device::Cpu);
    for index in 0..1000 {
        store.root().param(&format!("{}{index}", "m".repeat(100)), ([1], Init::Zeros)).unwrap();
        store.root().param(&format!("{}{index}", "s".repeat(100)), ([1], Init::Zeros)).unwrap();
    }
    let long_shape = [1; 40];
    let state: StateDict = ["s", "u"]
        .into_iter()
        .flat_map(|letter| (0..1000).map(move |index| (format!("{}{index}", letter.repeat(100)), long_shape)))
        .map(|(name, shape)| (name, Tensor::zeros(shape, (Kind::Float, Device::Cpu))))
        .collect();
    let path = folder.path().join("other.safetensors");
    save_file(&state, &path).unwrap();
    let parts = ["1000 missing: mmm", "1000 unexpected: uuu", "1000 of another shape: sss", "more"];
    check_refused("all differ", &path, &parts, || load_checkpoint_in_model(&store, &path, &LoadOptions::default()));
}

#[test]
fn ten_thousand_files_without_weights_make_a_short_message() {
    let folder = TempDir::new().unwrap();
    for index in 0..10_000 {
        written(&folder, &format!("{}{index}", "f".repeat(200)), "");
    }
    check_refused("no weights", folder.path(), &["fff", "more"], || load(folder.path()));
}
