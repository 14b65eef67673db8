//! Files with one JSON value on each line.

use super::file::{PositionedFile, open_all};
use super::keys::duplicate_key;
use super::limits::MAX_ROW_BYTES;
use super::text::{RowStarts, TextRows};
use crate::data::Dataset;
use crate::error::{Place, Position, ReaderError, Result, RowProblem};
use serde::de::DeserializeOwned;
use serde_json::error::Category;
use std::fmt;
use std::marker::PhantomData;
use std::path::Path;

/// Rows of files with one JSON value on each line (JSON lines, `.jsonl`, `.ndjson`), as values of type `T`: a struct
/// with `#[derive(serde::Deserialize)]`, a map, a tuple.
///
/// The whole file is looked through once, when it is opened, to find where lines begin; afterwards a row is one read
/// and costs nothing until it is fetched. In memory are eight bytes per row. Blank lines do not count. A line has at most
/// 16 MiB, and no object in it has a key twice. Files must not change while they are read. Like `datasets.load_dataset("json")`, but lazily parsed and typed.
///
/// ```
/// use accelerate::data::{Dataset, readers::JsonLinesDataset};
///
/// #[derive(serde::Deserialize)]
/// struct Review {
///     text: String,
///     stars: i64,
/// }
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("reviews.jsonl");
/// std::fs::write(&path, "{\"text\": \"a joy\", \"stars\": 5}\n{\"text\": \"dull\", \"stars\": 2}\n").unwrap();
/// let reviews = JsonLinesDataset::<Review>::from_files([&path])?;
/// let review = reviews.get(1)?;
/// assert_eq!((reviews.len(), review.text.as_str(), review.stars), (2, "dull", 2));
/// # Ok::<(), accelerate::Error>(())
/// ```
pub struct JsonLinesDataset<T> {
    rows: TextRows,
    row: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned> JsonLinesDataset<T> {
    /// The rows of all files, in the order in which the files are given.
    ///
    /// A file without lines has no rows, which is no error.
    ///
    /// # Errors
    ///
    /// [`is_data`](crate::Error::is_data): no file is given, or one cannot be read, is a folder or has a line that is
    /// too long. Whether lines are valid JSON is not looked at until they are fetched.
    ///
    /// ```
    /// let files = ["absent.jsonl"];
    /// let error = accelerate::data::readers::JsonLinesDataset::<i64>::from_files(files).unwrap_err();
    /// assert!(error.is_data() && error.to_string().contains("absent.jsonl"));
    /// ```
    pub fn from_files(paths: impl IntoIterator<Item: AsRef<Path>>) -> Result<Self> {
        let files = open_all(paths, |file| {
            let rows = index(&file)?;
            Ok((file, rows))
        })?;
        Ok(Self { rows: TextRows::new(files), row: PhantomData })
    }

    /// File and line of row `index`.
    ///
    /// # Errors
    ///
    /// When there is no such row, or the file cannot be read any more.
    ///
    /// ```
    /// use accelerate::data::readers::{JsonLinesDataset, Position};
    ///
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("numbers.jsonl");
    /// std::fs::write(&path, "\n1\n2\n").unwrap();
    /// assert_eq!(JsonLinesDataset::<i64>::from_files([&path])?.place(1)?.position, Position::Line(3));
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn place(&self, index: usize) -> Result<Place> {
        self.rows.place(index)
    }
}

impl<T: DeserializeOwned> Dataset for JsonLinesDataset<T> {
    type Item = T;
    fn len(&self) -> usize {
        self.rows.len()
    }
    fn get(&self, index: usize) -> Result<T> {
        let (_, bytes) = self.rows.read(index)?;
        parse(&bytes).map_err(|problem| self.rows.wrong(index, problem))
    }
}

impl<T> fmt::Debug for JsonLinesDataset<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JsonLinesDataset").field("num_rows", &self.rows.len()).finish_non_exhaustive()
    }
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, RowProblem> {
    // Without the line end, which the parser would take for a part of a text that was cut off.
    let text = std::str::from_utf8(bytes.trim_ascii_end()).map_err(|_| RowProblem::NotUtf8 { column: None })?;
    // What is no JSON at all is said below, in the words of the wanted type.
    if let Some(key) = duplicate_key(text) {
        return Err(RowProblem::DuplicateKey { key });
    }
    serde_json::from_str(text).map_err(|error| {
        // The parser's own position says "line 1" for every line of the file.
        let message = error.to_string();
        let message = message.rsplit_once(" at line ").map_or(message.as_str(), |(message, _)| message);
        let message = match error.column() {
            0 => message.to_owned(),
            column => format!("{message} at character {column}"),
        };
        match error.classify() {
            Category::Data => RowProblem::Form { message, columns: Vec::new() },
            Category::Syntax | Category::Eof | Category::Io => RowProblem::NotJson { message },
        }
    })
}

/// Finds the lines that are not blank.
fn index(file: &PositionedFile) -> Result<RowStarts, ReaderError> {
    let mut scan = file.scan(file.text_start()?, file.num_bytes());
    let mut rows = RowStarts::new(file.num_bytes(), MAX_ROW_BYTES);
    // The first byte of the row that the scan is in.
    let (mut line, mut row) = (1, None);
    loop {
        let mut at = scan.at();
        let buffer = scan.fill()?;
        if buffer.is_empty() {
            return Ok(rows);
        }
        for part in buffer.split_inclusive(|&byte| byte == b'\n') {
            if row.is_none() {
                row = part.iter().position(|byte| !byte.is_ascii_whitespace()).map(|blank| at + blank as u64);
                row.into_iter().for_each(|start| rows.push(start, line));
            }
            let is_whole = part.ends_with(b"\n");
            at += part.len() as u64;
            if row.is_some_and(|start| MAX_ROW_BYTES < at - u64::from(is_whole) - start) {
                let place = Place { path: file.path().to_owned(), position: Position::Line(line) };
                return Err(ReaderError::Row { place, problem: too_long() });
            }
            if is_whole {
                (line, row) = (line + 1, None);
            }
        }
        let num_read = buffer.len();
        scan.consume(num_read);
    }
}

fn too_long() -> RowProblem {
    let cure = "end each row with a line end, and keep larger values in Parquet or Arrow files";
    RowProblem::TooLong { limit: MAX_ROW_BYTES, cure }
}
