#![no_main]
//! Sizes as people write them. What is written of a size is a size, and not far from it.

use accelerate_core::weight_files::{format_size, parse_size};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Ok(bytes) = parse_size(text) else { return };
    let again = parse_size(&format_size(bytes)).expect("what was written can be read");
    assert!(again.abs_diff(bytes) <= bytes / 100, "{text:?}: {bytes}, and then {again}");
});
