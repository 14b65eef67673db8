//! `accelerate config`: configuration files are written, brought up to date, checked and explained.

mod default;
mod explain;
mod update;
mod validate;
mod wizard;

use std::error::Error;
use std::process::ExitCode;

use clap::{Args, Subcommand};

/// Write, check and explain configuration files. Without a subcommand it asks questions and writes the answers.
///
/// At a terminal the questions are menus. Over a pipe each line of the input answers one question, and an empty line takes the
/// default. Which questions come depends on the answers before and on what this machine has; the file is shown before it is
/// written, and Ctrl-C leaves everything as it was.
///
/// `accelerate launch` takes what flags and variables leave open from a configuration file: the one of --config_file, else
/// the default one. Its place is accelerate/default_config.yaml in HF_HOME, else in huggingface of XDG_CACHE_HOME, else in
/// ~/.cache/huggingface. Python Accelerate reads and writes the same files.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_long_help = "Examples:\n  \
    Questions, and the answers as the default file:\n    \
      accelerate config\n  \
    The same without asking, for another file:\n    \
      accelerate config --yes --config_file run.yaml\n  \
    A default file for this machine:\n    \
      accelerate config default --mixed_precision bf16\n  \
    What is wrong with a file:\n    \
      accelerate config validate run.yaml\n  \
    Which settings hold for a launch, and where each comes from:\n    \
      accelerate config explain --config_file run.yaml --num_processes 4")]
pub(crate) struct Arguments {
    #[command(flatten)]
    wizard: wizard::WizardArguments,

    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    Default(default::Arguments),
    Update(update::Arguments),
    Validate(validate::Arguments),
    Explain(Box<explain::Arguments>),
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Box<dyn Error>> {
    match &arguments.command {
        None => wizard::run(&arguments.wizard),
        Some(Command::Default(arguments)) => default::run(arguments),
        Some(Command::Update(arguments)) => update::run(arguments),
        Some(Command::Validate(arguments)) => validate::run(arguments),
        Some(Command::Explain(arguments)) => explain::run(arguments),
    }
}
