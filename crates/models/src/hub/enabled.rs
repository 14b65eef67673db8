//! The feature `hub` is on: files come through the `hf-hub` crate and stay in its cache.

use super::HubError;
use crate::config::CONFIG_FILE;
use hf_hub::{HFClientSync, HFError, split_id};
use std::path::{Path, PathBuf};

/// Files that say what a model is.
const DESCRIPTION: [&str; 5] =
    [CONFIG_FILE, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"];
/// Its weights, with what an index and its shards are called: the form that is looked for first stands first.
const WEIGHTS: [(&str, [&str; 2]); 2] = [
    ("model*.safetensors*", ["model.safetensors", "model.safetensors.index.json"]),
    ("pytorch_model*.bin*", ["pytorch_model.bin", "pytorch_model.bin.index.json"]),
];

pub(super) fn download(name: &str, revision: Option<&str>, _cache: &Path) -> Result<PathBuf, HubError> {
    let failed = |error: HFError| HubError::Fetch { wanted: name.to_owned(), message: error.to_string() };
    let (owner, model) = split_id(name);
    let repository = HFClientSync::new().map_err(failed)?.model(owner, model);
    let fetch = |patterns: &[&str]| {
        let patterns = patterns.iter().map(|&pattern| pattern.to_owned()).collect::<Vec<_>>();
        let snapshot = repository.snapshot_download().allow_patterns(patterns);
        snapshot.maybe_revision(revision.map(str::to_owned)).send().map_err(failed)
    };
    let folder = fetch(&DESCRIPTION)?;
    let missing = |missing| HubError::MissingFile { wanted: name.to_owned(), missing, found: names_in(&folder) };
    if !folder.join(CONFIG_FILE).exists() {
        return Err(missing(CONFIG_FILE));
    }
    for (pattern, files) in WEIGHTS {
        let folder = fetch(&[pattern])?;
        if files.iter().any(|file| folder.join(file).exists()) {
            return Ok(folder);
        }
    }
    Err(missing("model.safetensors or pytorch_model.bin"))
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}
