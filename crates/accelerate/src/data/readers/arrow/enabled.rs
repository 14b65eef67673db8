//! The feature `arrow` is on: messages are decoded by the `arrow-ipc` crate.

use super::super::file::PositionedFile;
use super::super::table::Table;
use super::ArrowOptions;
use super::layout::Layout;
use super::source::Source;
use crate::data::Dataset;
use crate::error::{Place, Result};
use serde::de::DeserializeOwned;
use std::fmt;
use std::marker::PhantomData;
use std::path::Path;

/// Rows of Arrow files, as values of type `T`: a struct with `#[derive(serde::Deserialize)]`, whose fields are found by
/// the names of the columns, a map, or a tuple in the order of the columns.
///
/// Both of Arrow's formats are read, and told apart by the first bytes: the file format (also called Feather), and the
/// streaming format, in which Hugging Face `datasets` keeps its cache and what its `save_to_disk` writes
/// (`data-00000-of-00001.arrow` and so on; give them in this order). Buffers may be compressed with LZ4 or Zstandard.
///
/// | column | value |
/// |---|---|
/// | integers, floats, truth values, text | themselves |
/// | bytes | `Vec<u8>`, or a `String` if they are UTF-8 |
/// | list, struct, map | `Vec`, struct or map, map |
/// | dictionary-encoded | what the dictionary has |
/// | null | `None` of an `Option` |
/// | dates, times, durations | whole numbers as the file has them, such as days or microseconds |
/// | decimal | `f64`, or a `String` with all digits |
///
/// Opening reads the headers of all record batches, not what they hold. A record batch is read and checked whole, the
/// wanted columns of it; the lately used ones are kept, see [`ArrowOptions::cache_bytes`]. Reading in order reads each once.
/// Reading in random order reads each once if all fit into the cache, and else about once per row: then name the columns
/// that are needed, give the cache more room, or write smaller record batches (those of `datasets` have 1000 rows). Threads
/// that want the same record batch wait for one of them to read it, and no lock is held while rows are made. Files must not
/// change while they are read.
///
/// ```
/// use accelerate::data::{Dataset, readers::ArrowDataset};
///
/// #[derive(serde::Deserialize)]
/// struct Review {
///     sentence: String,
///     label: i64,
/// }
/// # let path = "tests/readers/reviews.arrow";
/// let reviews = ArrowDataset::<Review>::from_files([path])?;
/// let review = reviews.get(0)?;
/// assert_eq!((reviews.len(), review.sentence.as_str(), review.label), (2, "a joy to watch", 1));
/// # Ok::<(), accelerate::Error>(())
/// ```
pub struct ArrowDataset<T> {
    table: Table<Source>,
    row: PhantomData<fn() -> T>,
}

/// Names of the columns of an Arrow file of either format, in its order.
///
/// # Errors
///
/// [`is_data`](crate::Error::is_data): the file cannot be read, is no Arrow file, or was cut off.
///
/// ```
/// # let path = "tests/readers/reviews.arrow";
/// assert_eq!(accelerate::data::readers::arrow_column_names(path)?, ["sentence", "label"]);
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn arrow_column_names(path: impl AsRef<Path>) -> Result<Vec<String>> {
    Ok(Layout::read(&PositionedFile::open(path.as_ref())?)?.column_names())
}

impl<T: DeserializeOwned> ArrowDataset<T> {
    /// All columns of all files, the rows in the order in which the files are given.
    ///
    /// # Errors
    ///
    /// [`is_data`](crate::Error::is_data): no file is given; one cannot be read, is a folder, no Arrow file or cut off, which
    /// a stream is that lacks the mark at its end; their columns differ, or one is of a type that is not known here
    /// (unions, run-end encoding, list views, intervals).
    ///
    /// ```
    /// use accelerate::data::readers::ArrowDataset;
    ///
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("cut.arrow");
    /// std::fs::write(&path, "ARROW1").unwrap();
    /// let error = ArrowDataset::<(String, i64)>::from_files([&path]).unwrap_err();
    /// assert!(error.to_string().contains("cut.arrow is not a readable Arrow file"));
    /// ```
    pub fn from_files(paths: impl IntoIterator<Item: AsRef<Path>>) -> Result<Self> {
        Self::with_options(paths, &ArrowOptions::default())
    }

    /// As [`from_files`](Self::from_files), with some columns only or another size of the cache.
    ///
    /// # Errors
    ///
    /// As for [`from_files`](Self::from_files), or when a file has no column of a wanted name; columns that are not
    /// wanted may differ between files.
    ///
    /// ```
    /// use accelerate::data::{Dataset, readers::{ArrowDataset, ArrowOptions}};
    ///
    /// let columns = Some(vec!["label".to_owned(), "sentence".to_owned()]);
    /// let options = ArrowOptions { columns, ..ArrowOptions::default() };
    /// # let path = "tests/readers/reviews.arrow";
    /// let reviews = ArrowDataset::<(i64, String)>::with_options([path], &options)?;
    /// assert_eq!(reviews.get(1)?, (0, "two lost hours".to_owned()));
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn with_options(paths: impl IntoIterator<Item: AsRef<Path>>, options: &ArrowOptions) -> Result<Self> {
        let open = |file| Source::open(file, options);
        Ok(Self { table: Table::open(paths, open, options.cache_bytes)?, row: PhantomData })
    }

    /// Names of the columns, in the order in which a tuple has them.
    ///
    /// ```
    /// use accelerate::data::readers::ArrowDataset;
    ///
    /// # let path = "tests/readers/reviews.arrow";
    /// let reviews = ArrowDataset::<(String, i64)>::from_files([path])?;
    /// assert_eq!(reviews.columns(), ["sentence", "label"]);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn columns(&self) -> &[String] {
        self.table.columns()
    }

    /// File, record batch and row of row `index`.
    ///
    /// # Errors
    ///
    /// When there is no such row.
    ///
    /// ```
    /// use accelerate::data::readers::ArrowDataset;
    ///
    /// # let path = "tests/readers/reviews.arrow";
    /// let reviews = ArrowDataset::<(String, i64)>::from_files([path])?;
    /// assert!(reviews.place(1)?.to_string().ends_with("reviews.arrow, record batch 0, row 1"));
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn place(&self, index: usize) -> Result<Place> {
        self.table.place(index)
    }
}

impl<T: DeserializeOwned> Dataset for ArrowDataset<T> {
    type Item = T;
    fn len(&self) -> usize {
        self.table.len()
    }
    fn get(&self, index: usize) -> Result<T> {
        self.table.get(index)
    }
}

impl<T> fmt::Debug for ArrowDataset<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ArrowDataset").field("num_rows", &self.table.len()).finish_non_exhaustive()
    }
}
