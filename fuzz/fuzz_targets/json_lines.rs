#![no_main]
//! One JSON value on each line: rows of any kind, and rows of a type.

use accelerate::data::readers::JsonLinesDataset;
use accelerate_fuzz::{Row, check, with_file};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

fuzz_target!(|input: &[u8]| {
    with_file(input, |path| {
        check(JsonLinesDataset::<Value>::from_files([path]), |rows, index| drop(rows.place(index)));
        check(JsonLinesDataset::<Row>::from_files([path]), |rows, index| drop(rows.place(index)));
    });
});
