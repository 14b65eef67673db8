//! Files that were made to do harm, through the reader of `estimate-memory`.

#![allow(clippy::expect_used)]
#![allow(unreachable_pub, reason = "the cases are modules of test programs, too")]

#[path = "../../../../accelerate/tests/hostile/mod.rs"]
mod hostile;
#[path = "../../../../accelerate/tests/hostile/indexes.rs"]
mod indexes;
#[path = "../../../../accelerate/tests/hostile/weights.rs"]
mod weights;

use super::{EstimateError, inventory, local};
use accelerate_core::plan::Inventory;
use hostile::{Outcome, check_refused, outcome};
use indexes::{INDEX, LARGE_INDEXES, indexes};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use weights::{HostileFile, LARGE_FILES, file, files, header};

fn read_inventory(model: &Path) -> Result<Inventory, EstimateError> {
    let (files, first) = local(model)?;
    inventory(files.as_ref(), &first)
}

#[test]
fn a_file_that_was_made_to_do_harm_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hostile.safetensors");
    for HostileFile { name, bytes, part } in files() {
        fs::write(&path, bytes).unwrap();
        check_refused(&name, &path, &[part], || read_inventory(folder.path()));
    }
    for (name, bytes, part) in LARGE_FILES {
        fs::write(&path, bytes()).unwrap();
        check_refused(name, &path, &[part], || read_inventory(&path));
    }
}

#[test]
fn an_index_that_was_made_to_do_harm_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("a.safetensors"), file(header(r#""F32""#, "[1]", "[0,4]"), 4)).unwrap();
    let path = folder.path().join(INDEX);
    for (name, bytes, part) in indexes() {
        fs::write(&path, bytes).unwrap();
        check_refused(&name, &path, &[part], || read_inventory(folder.path()));
    }
    for (name, bytes, part) in LARGE_INDEXES {
        fs::write(&path, bytes()).unwrap();
        check_refused(name, &path, &[part], || read_inventory(&path));
    }
}

#[test]
fn a_device_or_a_folder_in_the_place_of_a_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let [device, inner] = ["zero.safetensors", "folder.safetensors"].map(|name| folder.path().join(name));
    symlink("/dev/zero", &device).unwrap();
    fs::create_dir(&inner).unwrap();
    check_refused("a device", &device, &["is a device"], || read_inventory(&device));
    let index = folder.path().join(INDEX);
    for (name, part) in [("zero", "is a device"), ("folder", "is a folder")] {
        fs::write(&index, format!(r#"{{"weight_map":{{"w":"{name}.safetensors"}}}}"#)).unwrap();
        let shard = folder.path().join(format!("{name}.safetensors"));
        check_refused(name, &shard, &[part], || read_inventory(&index));
    }
}

#[test]
fn the_largest_header_that_is_allowed_is_read_in_no_time() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let entry = |index| format!(r#""h.{index}.w":{{"dtype":"U8","shape":[],"data_offsets":[{index},{}]}}"#, index + 1);
    let number = 150_000;
    let bytes = file(format!("{{{}}}", (0..number).map(entry).collect::<Vec<_>>().join(",")), number);
    fs::write(&path, &bytes).unwrap();
    let outcome = outcome("as many tensors as are read", &path, bytes.len() as u64, || read_inventory(&path));
    assert!(matches!(outcome, Outcome::Read), "{outcome:?}");
}
