//! `cargo xtask demo`: the main example, trained by two processes on its built-in corpus.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
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
    let no_settings = paths::target_folder().join("no-settings.yaml");
    fs::write(&no_settings, "").with_context(|| format!("write {}", no_settings.display()))?;
    process::run(&mut launch(arguments, &no_settings))
}

/// The launch, with a configuration file in the place of the user's default one, which must not change what is shown.
fn launch(arguments: &Arguments, settings: &Path) -> Command {
    let mut launch = Command::new(paths::release_binary("accelerate"));
    launch
        .args(["launch", "--cpu", "--num_processes", &arguments.num_processes.to_string(), "--config_file"])
        .arg(settings)
        .arg(paths::release_binary("nlp_example"))
        .args(&arguments.example);
    launch
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_configuration_file_of_the_user_is_left_out() {
        let arguments = Arguments { num_processes: 2, example: vec!["--num_epochs".to_owned(), "5".to_owned()] };
        let command = launch(&arguments, Path::new("empty.yaml"));
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
        let program = words.iter().position(|word| word.ends_with("nlp_example"));
        let file = words.windows(2).position(|pair| pair == ["--config_file", "empty.yaml"]);
        assert!(file.is_some() && file < program, "{words:?}");
        assert_eq!(words.last().map(AsRef::as_ref), Some("5"));
    }
}
