//! The feature `parquet` is off: every wish is answered with an error that says so.

use super::ParquetOptions;
use crate::data::Dataset;
use crate::error::{Place, ReaderError, Result};
use serde::de::DeserializeOwned;
use std::convert::Infallible;
use std::marker::PhantomData;
use std::path::Path;

/// Rows of Parquet files. Compiled out: the cargo feature `parquet` is off, so none can be made.
///
/// ```
/// use accelerate::data::readers::ParquetDataset;
///
/// let error = ParquetDataset::<(String, i64)>::from_files(["train.parquet"]).unwrap_err();
/// assert!(error.to_string().contains("feature `parquet`"));
/// ```
#[derive(Debug)]
pub struct ParquetDataset<T> {
    never: Infallible,
    row: PhantomData<fn() -> T>,
}

fn disabled<T>() -> Result<T> {
    Err(ReaderError::FeatureDisabled { wanted: "ParquetDataset", feature: "parquet" }.into())
}

/// Would read the names of the columns.
///
/// # Errors
///
/// Always: names the cargo feature that is off.
pub fn parquet_column_names(_path: impl AsRef<Path>) -> Result<Vec<String>> {
    disabled()
}

impl<T: DeserializeOwned> ParquetDataset<T> {
    /// Would open files.
    ///
    /// # Errors
    ///
    /// Always: names the cargo feature that is off.
    pub fn from_files(_paths: impl IntoIterator<Item: AsRef<Path>>) -> Result<Self> {
        disabled()
    }

    /// Would open files.
    ///
    /// # Errors
    ///
    /// Always: names the cargo feature that is off.
    pub fn with_options(_paths: impl IntoIterator<Item: AsRef<Path>>, _options: &ParquetOptions) -> Result<Self> {
        disabled()
    }

    /// Cannot be called.
    pub fn columns(&self) -> &[String] {
        match self.never {}
    }

    /// Cannot be called.
    ///
    /// # Errors
    ///
    /// None.
    pub fn place(&self, _index: usize) -> Result<Place> {
        match self.never {}
    }
}

impl<T: DeserializeOwned> Dataset for ParquetDataset<T> {
    type Item = T;
    fn len(&self) -> usize {
        match self.never {}
    }
    fn get(&self, _index: usize) -> Result<T> {
        match self.never {}
    }
}
