//! What can go wrong when rows are read from files.

use super::shown::{Name, Names, Value, shortened};
use std::fmt;
use std::path::{Path, PathBuf};

/// Where a row stands in its file; shown as `reviews.csv, line 3`.
///
/// For checks of your own, which should name the row as the readers do. Readers hand it out by their method `place`.
///
/// ```
/// use accelerate::data::readers::JsonLinesDataset;
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("stars.jsonl");
/// std::fs::write(&path, "3\n\n9\n").unwrap();
/// let stars = JsonLinesDataset::<i64>::from_files([&path])?;
/// assert!(stars.place(1)?.to_string().ends_with("stars.jsonl, line 3"));
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The file.
    pub path: PathBuf,
    /// Where inside of it.
    pub position: Position,
}

/// Where inside of its file a row stands.
///
/// ```
/// use accelerate::data::readers::Position;
///
/// assert_eq!(Position::Line(3).to_string(), "line 3");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Position {
    /// Line of a text file, counted from 1: the row's first one.
    Line(u64),
    /// Row of a Parquet file; both numbers count from 0, as Parquet tools do.
    RowGroup {
        /// Which row group.
        row_group: usize,
        /// Which row inside of it.
        row: usize,
    },
    /// Row of an Arrow file; both numbers count from 0.
    RecordBatch {
        /// Which record batch.
        record_batch: usize,
        /// Which row inside of it.
        row: usize,
    },
    /// First token of a block, counted from 0.
    Token(u64),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.path.display(), self.position)
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(line) => write!(f, "line {line}"),
            Self::RowGroup { row_group, row } => write!(f, "row group {row_group}, row {row}"),
            Self::RecordBatch { record_batch, row } => write!(f, "record batch {record_batch}, row {row}"),
            Self::Token(token) => write!(f, "token {token}"),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ReaderError {
    #[error("cannot {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },
    #[error("{} is {found}, but rows are read from a file; name its files one by one", path.display())]
    NotAFile { path: PathBuf, found: &'static str },
    #[error("no file was given to read rows from; give at least one")]
    NoFiles,
    #[error(
        "{} ends at byte {found_bytes}, but had {wanted_bytes} bytes when it was opened; files must not change while \
         they are read",
        path.display()
    )]
    Shrunk { path: PathBuf, found_bytes: u64, wanted_bytes: u64 },
    #[error("there is no memory for {wanted_bytes} bytes of {} at once", path.display())]
    NoMemory { path: PathBuf, wanted_bytes: u64 },
    #[error("{place}: {problem}")]
    Row { place: Place, problem: RowProblem },
    #[error("{setting} is {}, but {wanted}", Value(found))]
    Setting { setting: &'static str, found: String, wanted: &'static str },
    #[cfg_attr(not(feature = "csv"), allow(dead_code))]
    #[error("{} is empty; wanted a first line with the names of the columns", path.display())]
    NoHeader { path: PathBuf },
    #[cfg_attr(not(any(feature = "arrow", feature = "csv", feature = "parquet")), allow(dead_code))]
    #[error(
        "{} has the columns {}, but {} has {}; column {} is the first that differs, and files of one dataset must have \
         the same columns in the same order",
        path.display(), Names(found), first.display(), Names(wanted), first_difference(found, wanted)
    )]
    OtherColumns { path: PathBuf, found: Vec<String>, first: PathBuf, wanted: Vec<String> },
    #[cfg_attr(not(any(feature = "arrow", feature = "csv", feature = "parquet")), allow(dead_code))]
    #[error(
        "columns {first} and {second} of {} are both named {}; give each column a name of its own",
        path.display(), Name(name)
    )]
    DuplicateColumn { path: PathBuf, name: String, first: usize, second: usize },
    #[cfg_attr(not(any(feature = "arrow", feature = "csv", feature = "parquet")), allow(dead_code))]
    #[error(
        "the name of column {position} of {} has {found} bytes, and at most {most} are read; give it a shorter name",
        path.display()
    )]
    LongName { path: PathBuf, position: usize, found: usize, most: usize },
    #[cfg_attr(not(any(feature = "arrow", feature = "csv", feature = "parquet")), allow(dead_code))]
    #[error(
        "{} has {found} columns, and at most {most} are read; write fewer columns, with lists in them if need be",
        path.display()
    )]
    TooManyColumns { path: PathBuf, found: usize, most: usize },
    #[error(
        "{} holds {found_bytes} bytes of tokens, which is not a multiple of {token_bytes}, the size of one {dtype}; \
         the file was cut off, or TokenFileOptions.dtype or header_bytes is wrong",
        path.display()
    )]
    TornToken { path: PathBuf, found_bytes: u64, token_bytes: u64, dtype: &'static str },
    #[error("{} has {found_bytes} bytes, fewer than TokenFileOptions.header_bytes, which is {wanted_bytes}", path.display())]
    TornHeader { path: PathBuf, found_bytes: u64, wanted_bytes: u64 },
    #[error(
        "{} holds {found} tokens, too few for one block; wanted at least {wanted}, or a smaller block_size",
        path.display()
    )]
    NoBlock { path: PathBuf, found: u64, wanted: u64 },
    #[cfg(any(feature = "arrow", feature = "parquet"))]
    #[error("{} is not a readable {format} file: {reason}; write or download it again", path.display())]
    Unreadable { path: PathBuf, format: &'static str, reason: String },
    #[cfg(any(feature = "arrow", feature = "parquet"))]
    #[error("{} has no columns, so there are no rows in it; write it again with at least one", path.display())]
    NoColumns { path: PathBuf },
    #[cfg(any(feature = "arrow", feature = "parquet"))]
    #[error("{setting} is {}, but must name each column once, and at least one", Names(found))]
    Selection { setting: &'static str, found: Vec<String> },
    #[cfg(any(feature = "arrow", feature = "parquet"))]
    #[error("{} has the columns {}; wanted a column named {}", path.display(), Names(found), Name(wanted))]
    NoSuchColumn { path: PathBuf, found: Vec<String>, wanted: String },
    #[cfg(any(feature = "arrow", feature = "parquet"))]
    #[error(
        "the column {} of {} has the type {}, which this reader does not know; leave it out with {setting}, or write \
         it as numbers, text or lists of them",
        Name(column), path.display(), shortened(found)
    )]
    ColumnType { path: PathBuf, column: String, found: String, setting: &'static str },
    #[allow(dead_code, reason = "with all features on, nothing is disabled")]
    #[error(
        "{wanted} was compiled out, because the cargo feature `{feature}` of accelerate is off; turn it on in \
         Cargo.toml: accelerate = {{ package = \"accelerate-rs\", features = [\"{feature}\"] }}"
    )]
    FeatureDisabled { wanted: &'static str, feature: &'static str },
    #[cfg(feature = "hub")]
    #[error("cannot fetch the dataset {repo:?} from the Hugging Face Hub: {reason}")]
    Fetch { repo: String, reason: String },
    #[cfg(any(feature = "hub", test))]
    #[error(
        "the dataset {repo:?} has the {what}s {found:?}; {}",
        match asked {
            Some(asked) => format!("{asked:?} is none of them"),
            None => format!("choose one of them as {what}"),
        }
    )]
    Choice { repo: String, what: &'static str, asked: Option<String>, found: Vec<String> },
}

impl ReaderError {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }
}

/// What is wrong with one row.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum RowProblem {
    #[cfg_attr(not(feature = "csv"), allow(dead_code))]
    #[error("{found} fields found, {wanted} wanted{hint}")]
    FieldCount { found: usize, wanted: usize, hint: &'static str },
    #[cfg_attr(not(feature = "csv"), allow(dead_code))]
    #[error("a quotation mark that opens in this row is never closed")]
    UnclosedQuote,
    #[error("the row is longer than {limit} bytes, the most that is read as one row; {cure}")]
    TooLong { limit: u64, cure: &'static str },
    #[error("the bytes{} are not UTF-8 text; save the file with UTF-8 encoding", in_column(.column))]
    NotUtf8 { column: Option<String> },
    #[error("not valid JSON: {}; wanted one value on each line", shortened(message))]
    NotJson { message: String },
    #[error(
        "the key {} occurs twice in one object, so one of its values would be lost; write each key once",
        Name(key)
    )]
    DuplicateKey { key: String },
    #[cfg_attr(not(feature = "csv"), allow(dead_code))]
    #[error("column {} holds {}, which does not fit: {}", Name(column), Value(found), shortened(message))]
    Cell { column: String, found: String, message: String },
    #[error("the row does not have the wanted form: {}{}", shortened(message), having(columns))]
    Form { message: String, columns: Vec<String> },
    #[cfg(any(feature = "arrow", feature = "parquet"))]
    #[error("the row cannot be decoded: {}", shortened(message))]
    Undecodable { message: String },
    #[cfg(any(feature = "arrow", feature = "parquet"))]
    #[error(
        "the {what} becomes {found} bytes or more in memory, and {limit} are the limit for what takes so little in the \
         file; if you trust it, set {setting}"
    )]
    TooLarge { what: &'static str, found: u64, limit: u64, setting: &'static str },
}

/// The first column, counted from 1, that is not the same in both.
fn first_difference(found: &[String], wanted: &[String]) -> usize {
    1 + found.iter().zip(wanted).take_while(|(found, wanted)| found == wanted).count()
}

fn in_column(column: &Option<String>) -> String {
    column.as_ref().map(|column| format!(" of column {}", Name(column))).unwrap_or_default()
}

fn having(columns: &[String]) -> String {
    if columns.is_empty() { String::new() } else { format!("; it has the columns {}", Names(columns)) }
}
