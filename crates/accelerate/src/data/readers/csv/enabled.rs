//! The feature `csv` is on: records are taken apart by the `csv` crate, rows found by an index of byte offsets.

use super::super::columns::{check_columns, check_names};
use super::super::file::{PositionedFile, open_all};
use super::super::text::{RowStarts, TextRows};
use super::CsvOptions;
use super::record::{Parser, Records};
use crate::data::Dataset;
use crate::error::{Place, ReaderError, Result, RowProblem};
use csv::StringRecord;
use serde::de::DeserializeOwned;
use std::fmt;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

/// Rows of comma- and tab-separated files, as values of type `T`: a struct with `#[derive(serde::Deserialize)]`, whose
/// fields are found by the names of the columns, or a tuple or `Vec`, filled in the order of the columns.
///
/// The whole file is looked through once, when it is opened, to find where rows begin (a quoted field may contain line
/// ends) and whether each has as many fields as there are columns; afterwards a row is one read and is parsed
/// when it is fetched. In memory are eight bytes per row. Blank lines do not count. A row is as long as
/// [`CsvOptions::max_row_bytes`] at most, and no two columns have the same name, white space around it aside. Files must
/// not change while they are read. Like `datasets.load_dataset("csv")`, but lazily parsed and typed.
///
/// ```
/// use accelerate::data::{Dataset, readers::CsvDataset};
///
/// #[derive(serde::Deserialize)]
/// struct Review {
///     text: String,
///     stars: Option<i64>,
/// }
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("reviews.csv");
/// std::fs::write(&path, "stars,text\n5,\"a joy,\nreally\"\n,dull\n").unwrap();
/// let reviews = CsvDataset::<Review>::from_files([&path])?;
/// assert_eq!((reviews.len(), reviews.get(0)?.text.as_str()), (2, "a joy,\nreally"));
/// assert_eq!((reviews.get(1)?.stars, reviews.place(1)?.to_string().ends_with("line 4")), (None, true));
/// # Ok::<(), accelerate::Error>(())
/// ```
pub struct CsvDataset<T> {
    rows: TextRows,
    /// Of each file.
    parsers: Vec<Parser>,
    names: Vec<String>,
    /// The names once more, as the `csv` crate wants them.
    columns: StringRecord,
    row: PhantomData<fn() -> T>,
}

/// The fields of the first line of a file, which are the names of its columns if it has such a line. Nothing behind it is
/// read.
///
/// # Errors
///
/// [`is_data`](crate::Error::is_data): the file cannot be read or is empty, or its first line is too long or is not
/// text.
///
/// ```
/// use accelerate::data::readers::{CsvOptions, csv_column_names};
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("reviews.tsv");
/// std::fs::write(&path, "sentence\tlabel\na joy\t1\n").unwrap();
/// assert_eq!(csv_column_names(&path, &CsvOptions::for_path(&path))?, ["sentence", "label"]);
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn csv_column_names(path: impl AsRef<Path>, options: &CsvOptions) -> Result<Vec<String>> {
    let file = PositionedFile::open(path.as_ref())?;
    let parser = Parser::new(options)?;
    Ok(names(&header(&file, &parser, &mut parser.records(&file)?)?))
}

impl<T: DeserializeOwned> CsvDataset<T> {
    /// The rows of all files, in the order in which the files are given, each read with the options that
    /// [`CsvOptions::for_path`] finds for it.
    ///
    /// Every file has a first line with the names of its columns, which must be the same in all files.
    ///
    /// # Errors
    ///
    /// [`is_data`](crate::Error::is_data): no file is given; one cannot be read, is a folder or has no first line; their columns differ, or
    /// two have the same name; a row is too long, has too few or too many fields, or a quotation mark that is never
    /// closed.
    ///
    /// ```
    /// use accelerate::data::readers::CsvDataset;
    ///
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("reviews.csv");
    /// std::fs::write(&path, "text,stars\ndull, really,2\n").unwrap();
    /// let error = CsvDataset::<(String, i64)>::from_files([&path]).unwrap_err();
    /// assert!(error.to_string().contains("reviews.csv, line 2: 3 fields found, 2 wanted"));
    /// ```
    pub fn from_files(paths: impl IntoIterator<Item: AsRef<Path>>) -> Result<Self> {
        Self::open(paths, |path| CsvOptions::for_path(path))
    }

    /// As [`from_files`](Self::from_files), with these options for all files.
    ///
    /// # Errors
    ///
    /// As for [`from_files`](Self::from_files), or when the options contradict each other.
    ///
    /// ```
    /// use accelerate::data::{Dataset, readers::{CsvDataset, CsvOptions}};
    ///
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("reviews.txt");
    /// std::fs::write(&path, "a joy|5\n").unwrap();
    /// let columns = Some(vec!["text".to_owned(), "stars".to_owned()]);
    /// let options = CsvOptions { delimiter: b'|', quote: None, columns, ..Default::default() };
    /// assert_eq!(CsvDataset::<(String, i64)>::with_options([&path], &options)?.get(0)?.1, 5);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn with_options(paths: impl IntoIterator<Item: AsRef<Path>>, options: &CsvOptions) -> Result<Self> {
        Self::open(paths, |_| options.clone())
    }

    fn open(paths: impl IntoIterator<Item: AsRef<Path>>, options_for: impl Fn(&Path) -> CsvOptions) -> Result<Self> {
        let mut parsers = Vec::new();
        let mut first: Option<(PathBuf, StringRecord)> = None;
        let files = open_all(paths, |file| {
            let options = options_for(file.path());
            let parser = Parser::new(&options)?;
            let (columns, rows) = index(&file, &parser, &options)?;
            let (path, wanted) = first.get_or_insert_with(|| (file.path().to_owned(), columns.clone()));
            if columns != *wanted {
                let (path, first) = (file.path().to_owned(), path.clone());
                let (found, wanted) = (names(&columns), names(wanted));
                return Err(ReaderError::OtherColumns { path, found, first, wanted }.into());
            }
            parsers.push(parser);
            Ok((file, rows))
        })?;
        let columns = first.map(|(_, columns)| columns).unwrap_or_default();
        Ok(Self { rows: TextRows::new(files), parsers, names: names(&columns), columns, row: PhantomData })
    }

    /// Names of the columns, in the order in which a tuple has them.
    ///
    /// ```
    /// use accelerate::data::readers::CsvDataset;
    ///
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("reviews.csv");
    /// std::fs::write(&path, "text,stars\n").unwrap();
    /// let reviews = CsvDataset::<(String, i64)>::from_files([&path])?;
    /// assert_eq!(reviews.columns(), ["text", "stars"]);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn columns(&self) -> &[String] {
        &self.names
    }

    /// File and line of row `index`: the first line, if it has several.
    ///
    /// # Errors
    ///
    /// When there is no such row, or the file cannot be read any more.
    ///
    /// ```
    /// use accelerate::data::readers::{CsvDataset, Position};
    ///
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("numbers.csv");
    /// std::fs::write(&path, "number\n1\n\n2\n").unwrap();
    /// assert_eq!(CsvDataset::<(i64,)>::from_files([&path])?.place(1)?.position, Position::Line(4));
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn place(&self, index: usize) -> Result<Place> {
        self.rows.place(index)
    }
}

impl<T: DeserializeOwned> Dataset for CsvDataset<T> {
    type Item = T;
    fn len(&self) -> usize {
        self.rows.len()
    }
    fn get(&self, index: usize) -> Result<T> {
        let (file, bytes) = self.rows.read(index)?;
        parse(&self.parsers[file], &self.columns, &bytes).map_err(|problem| self.rows.wrong(index, problem))
    }
}

impl<T> fmt::Debug for CsvDataset<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CsvDataset").field("num_rows", &self.rows.len()).finish_non_exhaustive()
    }
}

/// Finds columns and rows of a file, and checks that every row has a field for each column.
fn index(
    file: &PositionedFile,
    parser: &Parser,
    options: &CsvOptions,
) -> Result<(StringRecord, RowStarts), ReaderError> {
    let mut records = parser.records(file)?;
    let columns = match &options.columns {
        Some(names) => StringRecord::from_iter(names),
        None => header(file, parser, &mut records)?,
    };
    check_names(file.path(), columns.iter().map(str::trim))?;
    let mut rows = RowStarts::new(file.num_bytes(), options.max_row_bytes);
    while let Some(span) = records.next()? {
        if !span.is_closed {
            return Err(span.wrong(file, RowProblem::UnclosedQuote));
        }
        if span.num_fields != columns.len() {
            let problem = parser.field_count(span.num_fields, columns.len(), span.spans_lines);
            return Err(span.wrong(file, problem));
        }
        rows.push(span.start, span.line);
    }
    Ok((columns, rows))
}

/// The fields of the first record.
fn header(file: &PositionedFile, parser: &Parser, records: &mut Records<'_>) -> Result<StringRecord, ReaderError> {
    let span = records.next()?.ok_or_else(|| ReaderError::NoHeader { path: file.path().to_owned() })?;
    if !span.is_closed {
        return Err(span.wrong(file, RowProblem::UnclosedQuote));
    }
    check_columns(file.path(), span.num_fields)?;
    let bytes = file.read(span.start, records.at())?;
    parser.fields(&bytes, span.num_fields, |_| None).map_err(|problem| span.wrong(file, problem))
}

fn names(columns: &StringRecord) -> Vec<String> {
    columns.iter().map(str::to_owned).collect()
}

fn parse<T: DeserializeOwned>(parser: &Parser, columns: &StringRecord, bytes: &[u8]) -> Result<T, RowProblem> {
    let column = |position: usize| columns.get(position).unwrap_or_default().to_owned();
    let record = parser.fields(bytes, columns.len(), |position| Some(column(position)))?;
    record.deserialize(Some(columns)).map_err(|error| {
        let csv::ErrorKind::Deserialize { err, .. } = error.kind() else {
            return RowProblem::Form { message: error.to_string(), columns: Vec::new() };
        };
        let message = err.kind().to_string();
        match err.field().and_then(|field| Some((field as usize, record.get(field as usize)?))) {
            Some((position, found)) => RowProblem::Cell { column: column(position), found: found.to_owned(), message },
            None => RowProblem::Form { message, columns: names(columns) },
        }
    })
}
