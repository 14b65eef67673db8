//! The feature `hub` is on: files come through the `hf-hub` crate and stay in its cache, which it shares with
//! Python's `huggingface_hub`.

use super::{DatasetFiles, HubError, select};
use hf_hub::{HFClientSync, HFError, split_id};
use std::path::PathBuf;

/// The branch where the Hub keeps every public data set as Parquet.
const PARQUET_BRANCH: &str = "refs/convert/parquet";

/// Downloads the training and the development split of a data set.
///
/// # Errors
/// When the Hub cannot be reached, or the data set has no such configuration or splits.
pub fn dataset_files(name: &str, configuration: Option<&str>) -> Result<DatasetFiles, HubError> {
    let fetch = |error: HFError| failed(name, &error);
    let (owner, dataset) = split_id(name);
    let repository = HFClientSync::new().map_err(fetch)?.dataset(owner, dataset);
    let info = repository.info().revision(PARQUET_BRANCH).send().map_err(fetch)?;
    let siblings = info.siblings.unwrap_or_default();
    let paths: Vec<String> = siblings.into_iter().map(|file| file.rfilename).collect();
    let files = select(name, configuration, &paths)?;
    let download = |paths: Vec<String>| -> Result<Vec<PathBuf>, HubError> {
        let one = |path| repository.download_file().filename(path).revision(PARQUET_BRANCH).send().map_err(fetch);
        paths.into_iter().map(one).collect()
    };
    Ok(DatasetFiles { train: download(files.train)?, dev: download(files.dev)? })
}

fn failed(name: &str, error: &HFError) -> HubError {
    HubError::Fetch { wanted: name.to_owned(), message: error.to_string() }
}
