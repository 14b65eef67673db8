//! `cargo xtask demo`: the main example, trained by two processes on its built-in corpus.

use std::process::Command;

use anyhow::Result;
use clap::Args;

use crate::{libtorch, paths, process};

/// Train a small BERT in two processes on the built-in corpus.
///
/// Arguments after `--` go to the example: `cargo xtask demo -- --num_epochs 5`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// How many processes train together
    #[arg(long, default_value_t = 2)]
    num_processes: usize,
    /// Arguments of `nlp_example`
    #[arg(last = true)]
    example: Vec<String>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    libtorch::ensure()?;
    let build = ["build", "--release", "--package", "accelerate-cli", "--package", "nlp_example"];
    process::run(&mut process::cargo(&build))?;
    // A configuration file of the user's own must not change what is shown.
    let settings = tempfile::Builder::new().suffix(".yaml").tempfile()?;
    let mut launch = Command::new(paths::release_binary("accelerate"));
    launch
        .args(["launch", "--cpu", "--num_processes", &arguments.num_processes.to_string()])
        .arg("--config_file")
        .arg(settings.path())
        .arg(paths::release_binary("nlp_example"))
        .args(&arguments.example);
    process::run(&mut launch)
}
