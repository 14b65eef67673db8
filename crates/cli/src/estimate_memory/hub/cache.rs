//! The folder in which huggingface_hub keeps what it has fetched: `models--owner--name/snapshots/<commit>/`, and in
//! `models--owner--name/refs/main` the commit of the main branch.

use std::io::Read;
use std::path::{Path, PathBuf};

use super::HubId;
use crate::estimate_memory::local::open_file;

/// Longer than any commit.
const MAX_COMMIT_BYTES: u64 = 100;

/// The cache in this folder.
#[derive(Clone, Debug)]
pub(in crate::estimate_memory) struct Cache(pub(in crate::estimate_memory) PathBuf);

impl Cache {
    /// The folder of the main branch of this model, if some of it has been fetched.
    pub(in crate::estimate_memory) fn snapshot(&self, id: &HubId) -> Option<PathBuf> {
        let model = self.0.join(format!("models--{}", id.0.replace('/', "--")));
        let commit = read_small(&model.join("refs").join("main"), MAX_COMMIT_BYTES)?;
        let commit = commit.trim();
        let is_name = !commit.is_empty() && commit.bytes().all(|byte| byte.is_ascii_alphanumeric());
        Some(model.join("snapshots").join(commit)).filter(|folder| is_name && folder.is_dir())
    }
}

/// A file of a few bytes; nothing where there is none, or where it is something else.
pub(super) fn read_small(path: &Path, most_bytes: u64) -> Option<String> {
    let (file, found_bytes) = open_file(path).ok()?;
    let mut text = String::new();
    file.take(most_bytes).read_to_string(&mut text).ok()?;
    (found_bytes <= most_bytes).then_some(text)
}
