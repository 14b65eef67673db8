//! Where things are: the repository, what cargo builds in it, and the user's cache folder.

use std::env;
use std::path::{Path, PathBuf};

pub(crate) use accelerate_setup::cache_folder;

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
