#![no_main]
//! Values separated by commas and by tabs: names of columns, rows of any kind, and rows of a type.

use accelerate::data::readers::{CsvDataset, CsvOptions, csv_column_names};
use accelerate_fuzz::{Row, check, with_file};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

fuzz_target!(|input: &[u8]| {
    with_file(input, |path| {
        for options in [CsvOptions::default(), CsvOptions::tsv()] {
            let _ = csv_column_names(path, &options);
            check(CsvDataset::<Value>::with_options([path], &options), |rows, index| drop(rows.place(index)));
            check(CsvDataset::<Row>::with_options([path], &options), |rows, index| drop(rows.place(index)));
        }
    });
});
