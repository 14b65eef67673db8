//! The feature `parquet` is on: row groups are decoded by the `parquet` crate's record reader, which needs no Arrow.

use super::super::file::PositionedFile;
use super::super::table::Table;
use super::ParquetOptions;
use super::source::Source;
use crate::data::Dataset;
use crate::error::{Place, Result};
use serde::de::DeserializeOwned;
use std::fmt;
use std::marker::PhantomData;
use std::path::Path;

/// Rows of Parquet files, as values of type `T`: a struct with `#[derive(serde::Deserialize)]`, whose fields are found
/// by the names of the columns, a map, or a tuple in the order of the columns.
///
/// | column | value |
/// |---|---|
/// | integers, floats, truth values, text | themselves |
/// | bytes | `Vec<u8>`, or a `String` if they are UTF-8 |
/// | list, struct, map | `Vec`, struct or map, map |
/// | null | `None` of an `Option` |
/// | dates and times | whole numbers as the file has them, such as days or milliseconds; 96-bit times in milliseconds |
/// | decimal | `f64`, or a `String` with all digits |
///
/// Opening reads the footers only. A file is made of row groups, which can only be decoded whole; the lately used
/// ones are kept, see [`ParquetOptions::cache_bytes`]. Reading in order decodes each once. Reading in random order decodes
/// each once if all fit into the cache, and else about once per row: then name the columns that are needed, give the cache
/// more room, or write smaller row groups (those of the Hugging Face Hub have about 1000 rows). Threads that want the
/// same row group wait for one of them to decode it, and no lock is held while rows are made. A row group that becomes far
/// larger than it is in the file is refused, see [`ParquetOptions::max_row_group_bytes`]. Files must not change while they
/// are read.
///
/// ```
/// use accelerate::data::{Dataset, readers::ParquetDataset};
///
/// #[derive(serde::Deserialize)]
/// struct Review {
///     sentence: String,
///     label: i64,
/// }
/// # let path = "tests/readers/reviews.parquet";
/// let reviews = ParquetDataset::<Review>::from_files([path])?;
/// let review = reviews.get(0)?;
/// assert_eq!((reviews.len(), review.sentence.as_str(), review.label), (2, "a joy to watch", 1));
/// # Ok::<(), accelerate::Error>(())
/// ```
pub struct ParquetDataset<T> {
    table: Table<Source>,
    row: PhantomData<fn() -> T>,
}

/// Names of the columns of a Parquet file, in its order; reads the footer only.
///
/// # Errors
///
/// [`is_data`](crate::Error::is_data): the file cannot be read or is no Parquet file.
///
/// ```
/// # let path = "tests/readers/reviews.parquet";
/// assert_eq!(accelerate::data::readers::parquet_column_names(path)?, ["sentence", "label"]);
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn parquet_column_names(path: impl AsRef<Path>) -> Result<Vec<String>> {
    Ok(Source::column_names(PositionedFile::open(path.as_ref())?)?)
}

impl<T: DeserializeOwned> ParquetDataset<T> {
    /// All columns of all files, the rows in the order in which the files are given.
    ///
    /// # Errors
    ///
    /// [`is_data`](crate::Error::is_data): no file is given; one cannot be read, is a folder or no Parquet file; their
    /// columns differ, or two have the same name, or one is of a type that is not known here (`INTERVAL`); a row group
    /// is said to become too large.
    ///
    /// ```
    /// use accelerate::data::readers::ParquetDataset;
    ///
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("cut.parquet");
    /// std::fs::write(&path, "PAR1").unwrap();
    /// let error = ParquetDataset::<(String, i64)>::from_files([&path]).unwrap_err();
    /// assert!(error.to_string().contains("cut.parquet is not a readable Parquet file"));
    /// ```
    pub fn from_files(paths: impl IntoIterator<Item: AsRef<Path>>) -> Result<Self> {
        Self::with_options(paths, &ParquetOptions::default())
    }

    /// As [`from_files`](Self::from_files), with some columns only or another size of the cache.
    ///
    /// # Errors
    ///
    /// As for [`from_files`](Self::from_files), or when a file has no column of a wanted name; columns that are not
    /// wanted may differ between files.
    ///
    /// ```
    /// use accelerate::data::{Dataset, readers::{ParquetDataset, ParquetOptions}};
    ///
    /// let columns = Some(vec!["label".to_owned(), "sentence".to_owned()]);
    /// let options = ParquetOptions { columns, ..ParquetOptions::default() };
    /// # let path = "tests/readers/reviews.parquet";
    /// let reviews = ParquetDataset::<(i64, String)>::with_options([path], &options)?;
    /// assert_eq!(reviews.get(1)?, (0, "two lost hours".to_owned()));
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn with_options(paths: impl IntoIterator<Item: AsRef<Path>>, options: &ParquetOptions) -> Result<Self> {
        let open = |file| Source::open(file, options);
        Ok(Self { table: Table::open(paths, open, options.cache_bytes)?, row: PhantomData })
    }

    /// Names of the columns, in the order in which a tuple has them.
    ///
    /// ```
    /// use accelerate::data::readers::ParquetDataset;
    ///
    /// # let path = "tests/readers/reviews.parquet";
    /// let reviews = ParquetDataset::<(String, i64)>::from_files([path])?;
    /// assert_eq!(reviews.columns(), ["sentence", "label"]);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn columns(&self) -> &[String] {
        self.table.columns()
    }

    /// File, row group and row of row `index`.
    ///
    /// # Errors
    ///
    /// When there is no such row.
    ///
    /// ```
    /// use accelerate::data::readers::ParquetDataset;
    ///
    /// # let path = "tests/readers/reviews.parquet";
    /// let reviews = ParquetDataset::<(String, i64)>::from_files([path])?;
    /// assert!(reviews.place(1)?.to_string().ends_with("reviews.parquet, row group 0, row 1"));
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn place(&self, index: usize) -> Result<Place> {
        self.table.place(index)
    }
}

impl<T: DeserializeOwned> Dataset for ParquetDataset<T> {
    type Item = T;
    fn len(&self) -> usize {
        self.table.len()
    }
    fn get(&self, index: usize) -> Result<T> {
        self.table.get(index)
    }
}

impl<T> fmt::Debug for ParquetDataset<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ParquetDataset").field("num_rows", &self.table.len()).finish_non_exhaustive()
    }
}
