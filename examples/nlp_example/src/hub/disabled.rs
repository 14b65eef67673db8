//! The feature `hub` is off: every wish is answered with an error that says so.

use super::{DatasetFiles, HubError};

/// Would fetch a data set.
///
/// # Errors
/// Always: names the cargo feature that is off.
pub fn dataset_files(name: &str, _configuration: Option<&str>) -> Result<DatasetFiles, HubError> {
    Err(HubError::FeatureDisabled { wanted: name.to_owned() })
}
