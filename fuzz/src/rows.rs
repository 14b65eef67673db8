//! Files in a temporary folder, and the rows of datasets over them.

use accelerate::Result;
use accelerate::data::Dataset;
use serde::Deserialize;
use std::io::Write;
use std::path::Path;

/// The most rows of a file that are fetched from its beginning, and from its end.
const MOST_ROWS: usize = 32;

/// What a program may want of a row, for readers that convert values.
#[derive(Debug, Deserialize)]
pub struct Row {
    /// Text.
    pub sentence: String,
    /// A number, or nothing.
    pub label: Option<i64>,
}

/// Calls `read` with the path of a file that has these bytes.
pub fn with_file(bytes: &[u8], read: impl FnOnce(&Path)) {
    let mut file = tempfile::NamedTempFile::new().expect("there is a folder for temporary files");
    file.write_all(bytes).expect("there is room for a small file");
    read(file.path());
}

/// Fetches rows of the dataset, if it could be opened, and asks for their places: one after the other, and one that is
/// not there.
pub fn check<D: Dataset>(dataset: Result<D>, place: impl Fn(&D, usize)) {
    let Ok(dataset) = dataset else { return };
    let num_rows = dataset.len();
    let last = num_rows.saturating_sub(MOST_ROWS).max(MOST_ROWS);
    for index in (0..num_rows.min(MOST_ROWS)).chain(last..num_rows) {
        let _ = dataset.get(index);
        place(&dataset, index);
    }
    assert!(dataset.get(num_rows).is_err());
}
