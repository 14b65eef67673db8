#![no_main]
//! Lists of the files of a save: read, written, and read again.

use accelerate_core::weight_files::{SaveManifest, is_saved_file_name};
use libfuzzer_sys::fuzz_target;

const STEM: &str = "model";

fuzz_target!(|text: &str| {
    let Ok(manifest) = SaveManifest::from_json(text, STEM) else { return };
    for file in &manifest.files {
        assert!(is_saved_file_name(&file.name));
        assert_eq!(manifest.file(&file.name), Some(file));
    }
    let written = manifest.to_json().expect("what was read can be written");
    assert_eq!(SaveManifest::from_json(&written, STEM).expect("what was written can be read"), manifest);
});
