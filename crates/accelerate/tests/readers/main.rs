//! Rows of files: what is read, and what a person is told when a file is malformed.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[cfg(feature = "arrow")]
mod arrow;
#[cfg(feature = "csv")]
mod csv;
#[path = "../hostile/mod.rs"]
#[allow(unreachable_pub, reason = "it is shared by several test programs")]
mod hostile;
#[cfg(feature = "arrow")]
mod hostile_arrow;
#[cfg(feature = "csv")]
mod hostile_csv;
mod hostile_json;
#[cfg(feature = "parquet")]
mod hostile_parquet;
mod hostile_places;
mod hostile_tokens;
mod json_lines;
#[cfg(feature = "parquet")]
mod parquet;
mod token_file;

use accelerate::Result;
use accelerate::data::Dataset;
use std::path::PathBuf;
use tempfile::TempDir;

/// A file with this content, in a folder of its own.
fn file(name: &str, content: impl AsRef<[u8]>) -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, content).unwrap();
    (folder, path)
}

fn rows<D: Dataset>(dataset: &D) -> Vec<D::Item> {
    (0..dataset.len()).map(|index| dataset.get(index).unwrap_or_else(|error| panic!("{error}"))).collect()
}

/// The call failed, said all of `parts`, and blames the data.
#[track_caller]
fn check_refused<T>(result: Result<T>, parts: &[&str]) {
    let error = result.map(|_| ()).unwrap_err();
    assert!(error.is_data(), "{error}");
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{text:?} lacks {part:?}");
    }
}

/// A reader is shared by the threads of a loader.
fn assert_shareable<D: Dataset + Send + Sync>(_: &D) {}
