//! Datasets whose rows come from files: Arrow, CSV, JSON lines, Parquet, and flat files of token ids.
//!
//! | dataset | reads | cargo feature |
//! |---|---|---|
//! | [`ArrowDataset`] | Arrow's file and streaming formats, some or all columns; what `save_to_disk` writes | `arrow` |
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
//!   per row for text, the footers for Parquet, the positions of the record batches for Arrow, nothing for tokens.
//! - What is wrong is said with file and line (row group or record batch and row, token); nothing is skipped or guessed. `place` gives the
//!   same for checks of your own.
//! - Numbers in files are not believed: a row of text has at most 16 MiB, a file at most 100,000 columns, each of
//!   another name, and a small part of a file that becomes a very large one in memory is refused. Where a limit can be
//!   in the way of a file that is trusted, it is an option, which the error names.
//! - Files must not change while they are read.

mod arrow;
#[cfg(any(feature = "arrow", feature = "parquet"))]
mod cache;
#[cfg(any(feature = "arrow", feature = "csv", feature = "parquet"))]
mod columns;
mod csv;
mod file;
#[cfg(any(feature = "arrow", feature = "parquet"))]
mod guarded;
mod hub;
mod json_lines;
mod keys;
mod limits;
mod parquet;
#[cfg(any(feature = "arrow", feature = "parquet"))]
mod row;
#[cfg(any(feature = "arrow", feature = "parquet"))]
mod table;
mod text;
mod token_file;

pub use self::arrow::{ArrowDataset, ArrowOptions, arrow_column_names};
pub use self::csv::{CsvDataset, CsvOptions, csv_column_names};
pub use self::hub::hub_dataset_files;
pub use self::parquet::{ParquetDataset, ParquetOptions, parquet_column_names};
pub use crate::error::{Place, Position};
pub use json_lines::JsonLinesDataset;
pub use token_file::{LabelledTokenFileDataset, TokenDtype, TokenFileDataset, TokenFileOptions};
