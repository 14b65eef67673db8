//! Datasets whose rows come from files: CSV, JSON lines, Parquet, and flat files of token ids.
//!
//! | dataset | reads | cargo feature |
//! |---|---|---|
//! | [`CsvDataset`] | comma- and tab-separated values | `csv` |
//! | [`JsonLinesDataset`] | one JSON value on each line | none |
//! | [`ParquetDataset`] | Parquet, some or all columns | `parquet` |
//! | [`TokenFileDataset`] | flat arrays of token ids, in blocks | none |
//!
//! [`hub_dataset_files`] (feature `hub`) fetches the Parquet files of a public dataset. Without its feature a
//! reader is there and answers with an error that names the feature.
//!
//! What they have in common:
//!
//! - They are map-style [`Dataset`](crate::data::Dataset)s: rows are fetched by number, in any order, by any number of
//!   threads, so they shuffle, shard over processes and resume as any other.
//! - Several files are one dataset, in the order in which they are given.
//! - A row is parsed when it is fetched, into a type of your own by `serde`. Opening keeps little in memory: eight bytes
//!   per row for text, the footers for Parquet, nothing for tokens.
//! - What is wrong is said with file and line (row group and row, token); nothing is skipped or guessed. `place` gives the
//!   same for checks of your own.
//! - Files must not change while they are read.

mod csv;
mod file;
mod hub;
mod json_lines;
mod parquet;
mod text;
mod token_file;

pub use self::csv::{CsvDataset, CsvOptions};
pub use self::hub::hub_dataset_files;
pub use self::parquet::{ParquetDataset, ParquetOptions, parquet_column_names};
pub use crate::error::{Place, Position};
pub use json_lines::JsonLinesDataset;
pub use token_file::{LabelledTokenFileDataset, TokenDtype, TokenFileDataset, TokenFileOptions};
