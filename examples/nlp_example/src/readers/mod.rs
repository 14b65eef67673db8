//! Labelled text from files: TSV, CSV, JSON lines and Parquet, told apart by their extension.
//!
//! Every row needs a text (column `sentence` or `text`) and a label (column `label` or `labels`, a whole number
//! counted from 0). Nothing is skipped or guessed: the first row that is not like that ends the reading
//! with an error that names the file and the line.

mod cell;
mod delimited;
mod error;
mod json_lines;
mod labels;
mod parquet;
mod shown;

pub use accelerate::data::readers::Position;
pub use error::{DataError, RowProblem};

use accelerate::data::readers::Place;
use std::path::{Path, PathBuf};

/// Names that the column of texts may have, best first.
pub const TEXT_COLUMNS: [&str; 2] = ["sentence", "text"];

/// Names that the column of labels may have, best first.
pub const LABEL_COLUMNS: [&str; 2] = ["label", "labels"];

/// The longest text of a row, in bytes: to cut it into words takes many times its size in memory.
pub const MAX_TEXT_BYTES: usize = 1 << 20;

/// One labelled text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The text, without white space around it; never empty.
    pub text: String,
    /// Which class it belongs to, counted from 0.
    pub label: usize,
    /// Where in its file it stands, for error messages.
    pub position: Position,
}

/// The rows of one file, in its order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// The file, or a name for data that does not come from one.
    pub source: PathBuf,
    /// At least one row.
    pub rows: Vec<Row>,
}

/// Reads all rows of `path`, whose extension decides the format: `tsv`, `csv`, `jsonl` (also `json` and
/// `ndjson`, one object per line) or `parquet`.
///
/// In TSV files quotes are ordinary characters, in CSV files they enclose fields. A first line with the names of
/// the columns may be there or not.
///
/// # Errors
/// A [`DataError`] when the file cannot be opened, has another extension, holds no row, or one of its
/// rows is malformed.
///
/// ```
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("reviews.tsv");
/// std::fs::write(&path, "a joy to watch\t1\ntwo lost hours\t0\n")?;
/// let table = nlp_example::readers::read(&path)?;
/// assert_eq!((table.rows[0].text.as_str(), table.rows[0].label), ("a joy to watch", 1));
/// assert_eq!(table.num_labels()?, 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn read(path: &Path) -> Result<Table, DataError> {
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    let rows = match extension.to_ascii_lowercase().as_str() {
        "tsv" | "csv" => delimited::parse(path)?,
        "jsonl" | "ndjson" | "json" => json_lines::parse(path)?,
        "parquet" => parquet::parse(path)?,
        _ => return Err(DataError::unknown_format(path, extension)),
    };
    if rows.is_empty() {
        return Err(DataError::Empty { path: path.to_owned() });
    }
    Ok(Table { source: path.to_owned(), rows })
}

/// What makes the whole error out of what is wrong with a row.
fn at(place: &Place) -> impl FnOnce(RowProblem) -> DataError {
    let place = place.clone();
    |problem| DataError::Row { place, problem }
}

fn checked_row(text: &str, label: i64, place: &Place) -> Result<Row, RowProblem> {
    let text = text.trim();
    if text.is_empty() {
        return Err(RowProblem::EmptyText);
    }
    if MAX_TEXT_BYTES < text.len() {
        return Err(RowProblem::TextTooLong { found_bytes: text.len() });
    }
    let label = usize::try_from(label).map_err(|_| RowProblem::LabelNegative { found: label })?;
    Ok(Row { text: text.to_owned(), label, position: place.position })
}
