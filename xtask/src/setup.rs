//! `cargo xtask setup`: libtorch, found or installed, and linked for cargo.

use anyhow::Result;
use clap::Args;

use crate::libtorch;

/// Find or install libtorch, and link it as `.libtorch` at the root of the repository.
///
/// Looks at LIBTORCH, then at the active Python's torch, then installs into the user's cache folder with pip.
/// After this, plain `cargo build`, `cargo run` and `cargo test` work. A second run does nothing.
#[derive(Debug, Args)]
pub(crate) struct Arguments {}

pub(crate) fn run(_: &Arguments) -> Result<()> {
    let found = libtorch::ensure()?;
    println!("libtorch {} in {} ({})", libtorch::VERSION, found.folder.display(), found.origin);
    Ok(())
}
