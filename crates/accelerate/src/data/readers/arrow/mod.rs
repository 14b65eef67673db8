//! Rows of Arrow files: behind the cargo feature `arrow`.

#[cfg(feature = "arrow")]
mod cell;
#[cfg(not(feature = "arrow"))]
mod disabled;
#[cfg(feature = "arrow")]
mod enabled;
#[cfg(feature = "arrow")]
mod layout;
#[cfg(feature = "arrow")]
mod source;

#[cfg(not(feature = "arrow"))]
pub use disabled::{ArrowDataset, arrow_column_names};
#[cfg(feature = "arrow")]
pub use enabled::{ArrowDataset, arrow_column_names};

/// How Arrow files are read.
///
/// ```
/// use accelerate::data::readers::ArrowOptions;
///
/// let columns = Some(vec!["sentence".to_owned(), "label".to_owned()]);
/// let options = ArrowOptions { columns, ..ArrowOptions::default() };
/// assert_eq!(options.cache_bytes, 256 << 20);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArrowOptions {
    /// The columns that are read, in the order in which a tuple has them; the bytes of the others are not fetched. `None`:
    /// all columns, in the order of the file. Default: `None`.
    pub columns: Option<Vec<String>>,
    /// About how many bytes of record batches are kept; default: 256 MiB. The record batch that was used last is kept
    /// whatever its size.
    pub cache_bytes: u64,
    /// The most bytes of memory that a record batch may become, of the wanted columns. `None`: a thousand times what it
    /// takes in the file, and 128 MiB in any case, so that a small file cannot fill the memory. Default: `None`.
    pub max_record_batch_bytes: Option<u64>,
}

impl Default for ArrowOptions {
    fn default() -> Self {
        Self { columns: None, cache_bytes: 256 << 20, max_record_batch_bytes: None }
    }
}
