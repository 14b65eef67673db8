//! `cargo xtask ci`: what continuous integration runs, in the order in which it fails fastest.

use anyhow::{Context, Result};
use clap::Args;

use crate::{first_hour, libtorch, process, test};

/// Run what continuous integration runs: formatting, lints with warnings denied, a user's first hour, tests.
#[derive(Debug, Args)]
pub(crate) struct Arguments {}

pub(crate) fn run(_: &Arguments) -> Result<()> {
    process::run(&mut process::cargo(&["fmt", "--all", "--check"]))
        .context("run `cargo fmt --all` (if cargo has no `fmt`: `rustup component add rustfmt`)")?;
    libtorch::ensure()?;
    let lints = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
    process::run(&mut process::cargo(&lints))
        .context("the lints must be quiet (if cargo has no `clippy`: `rustup component add clippy`)")?;
    // A project of a user's own is built, tested and launched outside of this clone, by the commands of the README.
    first_hour::run(&first_hour::Arguments::default())
        .context("the first hour of a user (`cargo xtask first-hour`)")?;
    test::run(&test::Arguments::default())
}
