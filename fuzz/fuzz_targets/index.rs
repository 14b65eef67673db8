#![no_main]
//! Indices of weight files: read, written, and read again.

use accelerate_core::weight_files::Index;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Ok(index) = Index::from_json(text) else { return };
    assert!(index.files().iter().all(|file| !file.contains('/')));
    let written = index.to_json().expect("what was read can be written");
    assert_eq!(Index::from_json(&written).expect("what was written can be read"), index);
});
