//! What can be wrong with a file of labelled text.

use super::MAX_TEXT_BYTES;
use super::shown::list;
use accelerate::data::readers::Place;
use std::path::{Path, PathBuf};

/// Labelled text that cannot be used, and why.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The file cannot be read as what its extension says; the message names file and row.
    #[error(transparent)]
    Reader(#[from] accelerate::Error),
    /// The extension names no known format.
    #[error(
        "{path}: {found}; wanted .tsv, .csv, .jsonl or .parquet, because the extension decides how a file is read",
        path = .path.display()
    )]
    UnknownFormat {
        /// The file.
        path: PathBuf,
        /// The extension in words.
        found: String,
    },
    /// There is not a single row.
    #[error("{path} holds no rows; wanted at least one text with its label", path = .path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// One row is malformed.
    #[error("{place}: {problem}")]
    Row {
        /// Where it stands.
        place: Place,
        /// What is wrong with it.
        problem: RowProblem,
    },
    /// A file with named columns lacks one that is needed.
    #[error(
        "{path} has the columns {found}; wanted a column named {wanted}",
        path = .path.display(),
        found = list(.found),
        wanted = either(.wanted)
    )]
    MissingColumn {
        /// The file.
        path: PathBuf,
        /// The columns it has.
        found: Vec<String>,
        /// Names that would do.
        wanted: &'static [&'static str],
    },
    /// Two columns with the name of one that is needed.
    #[error(
        "{path} has more than one column named {name:?}, small and capital letters taken as the same; give each a name \
         of its own",
        path = .path.display()
    )]
    DuplicateColumn {
        /// The file.
        path: PathBuf,
        /// Their name.
        name: &'static str,
    },
    /// The labels do not count 0, 1, 2, ... without a gap.
    #[error(
        "{path}: labels go up to {largest}, but no row has label {missing}; wanted every whole number from 0 on, \
         because each becomes one output of the model",
        path = .path.display()
    )]
    LabelGap {
        /// The file.
        path: PathBuf,
        /// The smallest label that no row has.
        missing: usize,
        /// The largest label there is.
        largest: usize,
    },
    /// All rows have the same label.
    #[error(
        "{path}: all {num_rows} rows have label 0; wanted at least two different labels to tell apart",
        path = .path.display()
    )]
    OneLabel {
        /// The file.
        path: PathBuf,
        /// Number of rows.
        num_rows: usize,
    },
}

impl DataError {
    pub(super) fn unknown_format(path: &Path, extension: &str) -> Self {
        let found = match extension {
            "" => "the file name has no extension".to_owned(),
            other => format!("the extension .{other} is not known"),
        };
        Self::UnknownFormat { path: path.to_owned(), found }
    }

    pub(super) fn missing_column(path: &Path, found: &[String], wanted: &'static [&'static str]) -> Self {
        Self::MissingColumn { path: path.to_owned(), found: found.to_vec(), wanted }
    }
}

/// What is wrong with one row.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RowProblem {
    /// The bytes are not UTF-8.
    #[error("the bytes are not UTF-8 text; save the file with UTF-8 encoding")]
    NotUtf8,
    /// The label is something else than a whole number.
    #[error("the label is {found}; wanted a whole number counted from 0")]
    LabelNotInteger {
        /// What stands there.
        found: String,
    },
    /// The label is below zero.
    #[error(
        "the label is {found}; wanted a whole number counted from 0 (test splits of public data sets often hide \
         their labels behind -1 and cannot be used here)"
    )]
    LabelNegative {
        /// What stands there.
        found: i64,
    },
    /// The label names no class of the model.
    #[error("the label is {found}; wanted one of 0 to {last}, the labels that the model knows", last = .num_labels - 1)]
    LabelOutOfRange {
        /// What stands there.
        found: usize,
        /// Number of classes, at least one.
        num_labels: usize,
    },
    /// The text is missing or only white space.
    #[error("the text is empty; wanted at least one word")]
    EmptyText,
    /// The text is longer than anything that a person wrote as one text.
    #[error(
        "the text has {found_bytes} bytes; wanted at most {MAX_TEXT_BYTES}, and the model reads only the first few \
         hundred words of a text"
    )]
    TextTooLong {
        /// Its length.
        found_bytes: usize,
    },
    /// The text is not text.
    #[error("the text is {found}; wanted a string")]
    TextNotString {
        /// What stands there.
        found: String,
    },
    /// A JSON object lacks a key.
    #[error("the keys are {found}; wanted a key named {wanted}", found = list(.found), wanted = either(.wanted))]
    MissingKey {
        /// The keys it has.
        found: Vec<String>,
        /// Names that would do.
        wanted: &'static [&'static str],
    },
    /// The line is JSON, but not an object.
    #[error("found {found}; wanted an object such as {{\"sentence\": \"...\", \"label\": 0}} on each line")]
    NotAnObject {
        /// Which kind of JSON value it is.
        found: String,
    },
}

fn either(names: &[&str]) -> String {
    names.join(" or ")
}
