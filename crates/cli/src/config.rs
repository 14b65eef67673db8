//! `accelerate config`: configuration files are written, brought up to date, checked and explained.

mod default;
mod explain;
mod update;
mod validate;

use std::error::Error;
use std::process::ExitCode;

use clap::{Args, CommandFactory, Subcommand};

/// Write, check and explain configuration files.
///
/// `accelerate launch` takes what flags and variables leave open from a configuration file: the one of --config_file, else
/// the default one. Its place is accelerate/default_config.yaml in HF_HOME, else in huggingface of XDG_CACHE_HOME, else in
/// ~/.cache/huggingface. Python Accelerate reads and writes the same files.
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    A default file for this machine:\n    \
      accelerate config default --mixed_precision bf16\n  \
    What is wrong with a file:\n    \
      accelerate config validate run.yaml\n  \
    Which settings hold for a launch, and where each comes from:\n    \
      accelerate config explain --config_file run.yaml --num_processes 4")]
pub(crate) struct Arguments {
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
        None => run_wizard(),
        Some(Command::Default(arguments)) => default::run(arguments),
        Some(Command::Update(arguments)) => update::run(arguments),
        Some(Command::Validate(arguments)) => validate::run(arguments),
        Some(Command::Explain(arguments)) => explain::run(arguments),
    }
}

/// `accelerate config` by itself says which subcommands there are, as the command without a subcommand does.
fn run_wizard() -> Result<ExitCode, Box<dyn Error>> {
    let mut command = crate::Cli::command();
    // What the parent gives its subcommands, such as the name in the line of usage, is there after this.
    command.build();
    if let Some(config) = command.find_subcommand_mut("config") {
        crate::print_message(&config.render_help().to_string());
    }
    Ok(ExitCode::from(2))
}
