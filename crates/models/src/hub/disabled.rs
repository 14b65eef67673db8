//! The feature `hub` is off.

use super::HubError;
use std::path::{Path, PathBuf};

pub(super) fn download(name: &str, revision: Option<&str>, cache: &Path) -> Result<PathBuf, HubError> {
    let (revision, cache) = (revision.map(str::to_owned), cache.to_owned());
    Err(HubError::FeatureDisabled { wanted: name.to_owned(), revision, cache })
}
