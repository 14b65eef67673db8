//! The feature `hub` is off.

use super::HubError;
use std::path::PathBuf;

pub(super) fn download(name: &str, revision: Option<&str>, cache: PathBuf) -> Result<PathBuf, HubError> {
    Err(HubError::FeatureDisabled { wanted: name.to_owned(), revision: revision.map(str::to_owned), cache })
}
