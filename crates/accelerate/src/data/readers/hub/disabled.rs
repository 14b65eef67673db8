//! The feature `hub` is off: every wish is answered with an error that says so.

use crate::error::{ReaderError, Result};
use std::path::PathBuf;

/// Would fetch the files of a dataset. Compiled out: the cargo feature `hub` is off.
///
/// # Errors
///
/// Always: names the cargo feature that is off.
///
/// ```
/// let error = accelerate::data::readers::hub_dataset_files("stanfordnlp/sst2", None, "train").unwrap_err();
/// assert!(error.to_string().contains("feature `hub`"));
/// ```
pub fn hub_dataset_files(_repo: &str, _config: Option<&str>, _split: &str) -> Result<Vec<PathBuf>> {
    Err(ReaderError::FeatureDisabled { wanted: "hub_dataset_files", feature: "hub" }.into())
}
