#![no_main]
//! Files of Parquet: names of columns, rows of any kind, and rows of a type.

use accelerate::data::readers::{ParquetDataset, parquet_column_names};
use accelerate_fuzz::{Row, check, with_file};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

fuzz_target!(
    init: {
        // The reader turns panics of the crate that decodes into errors; those that come out of it still end the run.
        std::panic::set_hook(Box::new(|panic| eprintln!("{panic}")));
    },
    |input: &[u8]| {
        with_file(input, |path| {
            let _ = parquet_column_names(path);
            check(ParquetDataset::<Value>::from_files([path]), |rows, index| drop(rows.place(index)));
            check(ParquetDataset::<Row>::from_files([path]), |rows, index| drop(rows.place(index)));
        });
    }
);
