//! `cargo xtask book`: the book in `docs`, as pages for a browser.
//!
//! mdbook is not a dependency of this project: what can be wrong in the text (links, chapters, examples) is found by tests
//! without it.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Result, bail};
use clap::Args;

use crate::{paths, process};

/// Build the book of the project into `target/book`.
///
/// Needs mdbook, and says how to install it where it is missing.
#[derive(Debug, Args)]
pub(crate) struct Arguments {}

pub(crate) fn run(_: &Arguments) -> Result<()> {
    let first_page = build("mdbook")?;
    println!("the book begins at {}", first_page.display());
    Ok(())
}

/// Builds the book with this program, and returns its first page.
fn build(mdbook: &str) -> Result<PathBuf> {
    let mut question = Command::new(mdbook);
    question.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
    if !question.status().is_ok_and(|status| status.success()) {
        bail!("`{mdbook}` is not installed; run `cargo install mdbook --locked`, then this again");
    }
    let folder = paths::target_folder().join("book");
    let mut command = Command::new(mdbook);
    command.arg("build").arg(paths::repository_root().join("docs")).arg("--dest-dir").arg(&folder);
    process::run(&mut command)?;
    Ok(folder.join("index.html"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn where_mdbook_is_missing_the_command_that_installs_it_is_named() {
        let message = build("an-mdbook-that-is-not-there").unwrap_err().to_string();
        assert!(message.contains("cargo install mdbook --locked"), "{message}");
    }
}
