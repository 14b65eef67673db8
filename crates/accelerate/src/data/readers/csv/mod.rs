//! Rows of comma- and tab-separated files: behind the cargo feature `csv`.

#[cfg(not(feature = "csv"))]
mod disabled;
#[cfg(feature = "csv")]
mod enabled;
#[cfg(feature = "csv")]
mod record;

#[cfg(not(feature = "csv"))]
pub use disabled::{CsvDataset, csv_column_names};
#[cfg(feature = "csv")]
pub use enabled::{CsvDataset, csv_column_names};

use super::limits::MAX_ROW_BYTES;
use std::path::Path;

/// How separated values are written.
///
/// ```
/// use accelerate::data::readers::CsvOptions;
///
/// let columns = Some(vec!["text".to_owned(), "label".to_owned()]);
/// let options = CsvOptions { delimiter: b';', columns, ..CsvOptions::default() };
/// assert_eq!(options.quote, Some(b'"'));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CsvOptions {
    /// The byte between two fields; default: a comma.
    pub delimiter: u8,
    /// The byte around fields that contain delimiters or line ends; two of them inside of such a field stand for one.
    /// `None`: no byte is special. Default: `"`.
    pub quote: Option<u8>,
    /// Names of the columns, for files whose first line is a row already; `None`: the first line of every file names
    /// them. Default: `None`.
    pub columns: Option<Vec<String>>,
    /// The most bytes that a row may have; default: 16 MiB. A mark that opens a quotation and does not close it makes the
    /// rest of a file one row.
    pub max_row_bytes: u64,
}

impl Default for CsvOptions {
    fn default() -> Self {
        Self { delimiter: b',', quote: Some(b'"'), columns: None, max_row_bytes: MAX_ROW_BYTES }
    }
}

impl CsvOptions {
    /// Tab-separated values. Quotation marks are ordinary characters: files of sentences are usually written so, and a
    /// stray mark would otherwise swallow the lines up to the next one.
    ///
    /// ```
    /// let options = accelerate::data::readers::CsvOptions::tsv();
    /// assert_eq!((options.delimiter, options.quote), (b'\t', None));
    /// ```
    pub fn tsv() -> Self {
        Self { delimiter: b'\t', quote: None, ..Self::default() }
    }

    /// [`tsv`](Self::tsv) for names that end in `.tsv` or `.tab`, the default for all others.
    ///
    /// ```
    /// use accelerate::data::readers::CsvOptions;
    ///
    /// assert_eq!(CsvOptions::for_path("train.TSV"), CsvOptions::tsv());
    /// assert_eq!(CsvOptions::for_path("train.csv"), CsvOptions::default());
    /// ```
    pub fn for_path(path: impl AsRef<Path>) -> Self {
        let extension = path.as_ref().extension().map(|extension| extension.to_ascii_lowercase());
        let is_tsv = extension.is_some_and(|extension| extension == "tsv" || extension == "tab");
        if is_tsv { Self::tsv() } else { Self::default() }
    }
}
