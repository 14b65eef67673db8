//! Where things are: the repository, what cargo builds in it, and the user's cache folder.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The root of the repository.
///
/// Taken from cargo at run time and not from `env!`, so that a moved clone does not point at its
/// old place.
pub(crate) fn repository_root() -> PathBuf {
    let package =
        env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    package.parent().map_or_else(|| package.clone(), Path::to_path_buf)
}

/// The folder that cargo builds into.
pub(crate) fn target_folder() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository_root().join("target"), PathBuf::from)
}

/// A program of this workspace, built with `--release`.
pub(crate) fn release_binary(name: &str) -> PathBuf {
    target_folder().join("release").join(format!("{name}{}", env::consts::EXE_SUFFIX))
}

/// The folder in which this project keeps what it downloads: `$XDG_CACHE_HOME/accelerate-rs`, or
/// `~/.cache/accelerate-rs`.
pub(crate) fn cache_folder() -> Result<PathBuf> {
    let base = match env::var_os("XDG_CACHE_HOME").filter(|value| !value.is_empty()) {
        Some(folder) => PathBuf::from(folder),
        None => env::home_dir()
            .context("no home folder is known; set HOME or XDG_CACHE_HOME to a folder that you can write to")?
            .join(".cache"),
    };
    Ok(base.join("accelerate-rs"))
}
