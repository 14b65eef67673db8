//! The feature `hub` is on: files come through the `hf-hub` crate and stay in its cache, which it shares with
//! Python's `huggingface_hub`.

use super::select;
use crate::error::{ReaderError, Result};
use hf_hub::{HFClientSync, HFError, split_id};
use std::path::PathBuf;

/// The branch where the Hub keeps every public dataset as Parquet.
const PARQUET_BRANCH: &str = "refs/convert/parquet";

/// Downloads one split of a dataset of the Hugging Face Hub and returns its Parquet files, in the order of their rows,
/// for [`ParquetDataset`](super::super::ParquetDataset). Files that are in the cache already are not fetched again.
///
/// `config` may be left out when the dataset has only one, or one named `default`. The Hub converts every public
/// dataset, whatever it was written in; of very large ones it has the first part only, as a split such as
/// `partial-train`, which must be asked for by that name.
///
/// Not collective: on several processes of one machine, let one fetch first
/// (`accelerator.local_main_process_first`), so that the others find the files in the cache.
///
/// # Errors
///
/// [`is_data`](crate::Error::is_data): the Hub cannot be reached, has no such dataset, or the dataset has no such config
/// or split; the message lists those it has.
///
/// ```no_run
/// use accelerate::data::readers::{ParquetDataset, hub_dataset_files};
///
/// let files = hub_dataset_files("nyu-mll/glue", Some("sst2"), "train")?;
/// let dataset = ParquetDataset::<(String, i64, i32)>::from_files(files)?;
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn hub_dataset_files(repo: &str, config: Option<&str>, split: &str) -> Result<Vec<PathBuf>> {
    let failed = |error: HFError| ReaderError::Fetch { repo: repo.to_owned(), reason: error.to_string() };
    let (owner, name) = split_id(repo);
    let repository = HFClientSync::new().map_err(failed)?.dataset(owner, name);
    let info = repository.info().revision(PARQUET_BRANCH).send().map_err(failed)?;
    let paths: Vec<String> = info.siblings.unwrap_or_default().into_iter().map(|file| file.rfilename).collect();
    let download = |path: String| -> Result<PathBuf> {
        let file = repository.download_file().filename(path).revision(PARQUET_BRANCH).send();
        Ok(file.map_err(failed)?)
    };
    select(repo, config, split, &paths)?.into_iter().map(download).collect()
}
