//! Rows of Parquet files: behind the cargo feature `parquet`.

#[cfg(not(feature = "parquet"))]
mod disabled;
#[cfg(feature = "parquet")]
mod enabled;
#[cfg(feature = "parquet")]
mod field;
#[cfg(feature = "parquet")]
mod footer;
#[cfg(feature = "parquet")]
mod promises;
#[cfg(feature = "parquet")]
mod source;
#[cfg(feature = "parquet")]
mod thrift;

#[cfg(not(feature = "parquet"))]
pub use disabled::{ParquetDataset, parquet_column_names};
#[cfg(feature = "parquet")]
pub use enabled::{ParquetDataset, parquet_column_names};

/// How Parquet files are read.
///
/// ```
/// use accelerate::data::readers::ParquetOptions;
///
/// let columns = Some(vec!["sentence".to_owned(), "label".to_owned()]);
/// let options = ParquetOptions { columns, ..ParquetOptions::default() };
/// assert_eq!(options.cache_bytes, 256 << 20);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParquetOptions {
    /// The columns that are read, in the order in which a tuple has them; the others are not decoded. `None`: all
    /// columns, in the order of the file. Default: `None`.
    pub columns: Option<Vec<String>>,
    /// About how many bytes of decoded rows are kept; default: 256 MiB. The row group that was used last is kept whatever
    /// its size.
    pub cache_bytes: u64,
    /// The most bytes of memory that a row group may become, of the wanted columns. `None`: a thousand times what they
    /// take in the file, and 128 MiB in any case, so that a small file cannot fill the memory. Default: `None`.
    pub max_row_group_bytes: Option<u64>,
}

impl Default for ParquetOptions {
    fn default() -> Self {
        Self { columns: None, cache_bytes: 256 << 20, max_row_group_bytes: None }
    }
}
