//! `cargo xtask ci`: what continuous integration runs, in the order in which it fails fastest.

use anyhow::{Context, Result};
use clap::Args;

use crate::{libtorch, process, test};

/// Run what continuous integration runs: formatting, lints with warnings denied, tests.
#[derive(Debug, Args)]
pub(crate) struct Arguments {}

pub(crate) fn run(_: &Arguments) -> Result<()> {
    process::run(&mut process::cargo(&["fmt", "--all", "--check"]))
        .context("run `cargo fmt --all` (if cargo has no `fmt`: `rustup component add rustfmt`)")?;
    libtorch::ensure()?;
    let lints = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
    process::run(&mut process::cargo(&lints))
        .context("the lints must be quiet (if cargo has no `clippy`: `rustup component add clippy`)")?;
    test::run(&test::Arguments::default())
}
