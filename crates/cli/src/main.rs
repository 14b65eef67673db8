//! The `accelerate` command. One file per subcommand; this one only chooses and reports.

mod completions;
mod config;
mod config_file;
mod doctor;
mod env;
mod estimate_memory;
mod flags;
mod launch;
mod man;
mod merge_weights;
mod new;
mod resolve;
mod settings;
mod setup;
mod test;
mod to_fsdp2;
mod tpu_config;

use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::process::ExitCode;

use anstyle::{AnsiColor, Style};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

/// Runs training programs on one process, many processes or many machines, in mixed precision.
#[derive(Debug, Parser)]
#[command(name = "accelerate", version, arg_required_else_help = true)]
#[command(after_help = "Every flag may also be spelled with - instead of _ (--num-processes).\n\
    `accelerate <command> --help` explains a command with examples.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Setup(setup::Arguments),
    New(new::Arguments),
    Doctor(doctor::Arguments),
    Config(config::Arguments),
    Launch(Box<launch::Arguments>),
    Test(test::Arguments),
    Env(env::Arguments),
    EstimateMemory(estimate_memory::Arguments),
    MergeWeights(merge_weights::Arguments),
    #[command(name = "to-fsdp2")]
    ToFsdp2(to_fsdp2::Arguments),
    Completions(completions::Arguments),
    Man(man::Arguments),
    TpuConfig(tpu_config::Arguments),
}

fn main() -> ExitCode {
    // The launcher starts this same executable as its helper; that must cost next to nothing.
    if let Some(code) = accelerate_launch::helper::run_if_asked() {
        return code;
    }
    let words: Vec<_> = std::env::args_os().collect();
    let cli = parsed(&words).unwrap_or_else(|error| flags::explained(error).exit());
    let success = |()| ExitCode::SUCCESS;
    let outcome = match cli.command {
        Command::Config(arguments) => config::run(&arguments),
        Command::Launch(arguments) => return launch::run(*arguments),
        Command::Test(arguments) => return test::run(arguments),
        Command::Setup(arguments) => setup::run(&arguments).map(success),
        Command::New(arguments) => new::run(&arguments).map(success),
        Command::Doctor(arguments) => return doctor::run(&arguments),
        Command::Env(arguments) => env::run(&arguments).map(success).map_err(Into::into),
        Command::EstimateMemory(arguments) => estimate_memory::run(&arguments).map(success),
        Command::MergeWeights(arguments) => merge_weights::run(&arguments).map(success),
        Command::ToFsdp2(arguments) => to_fsdp2::run(&arguments),
        Command::Completions(arguments) => completions::run(&arguments).map(success).map_err(Into::into),
        Command::Man(arguments) => man::run(&arguments).map(success),
        Command::TpuConfig(arguments) => tpu_config::run(&arguments).map(success),
    };
    match outcome {
        Ok(code) => code,
        // `accelerate env | head -1` is no mistake.
        Err(error) if is_broken_pipe(error.as_ref()) => ExitCode::SUCCESS,
        Err(error) => {
            print_error("accelerate", error.as_ref(), &error.to_string());
            ExitCode::FAILURE
        }
    }
}

/// What the words of a command line ask for. A request for help is an error of clap's.
fn parsed(words: &[OsString]) -> Result<Cli, clap::Error> {
    let mut command = launch::help::for_words(Cli::command(), words);
    let matches = command.try_get_matches_from_mut(words)?;
    Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
}

fn is_broken_pipe(error: &(dyn Error + 'static)) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// Prints `text`, which describes `error`, and then the chain of its causes. In colour at a terminal.
fn print_error(speaker: &str, error: &dyn Error, text: &str) {
    let bad: Style = AnsiColor::Red.on_default().bold();
    print_message(&format!("{bad}{speaker}: error:{bad:#} {text}"));
    let mut cause = error.source();
    while let Some(error) = cause {
        print_message(&format!("  caused by: {error}"));
        cause = error.source();
    }
}

/// The words as one line that a shell takes apart again.
fn shell_command<'a>(words: impl Iterator<Item = &'a OsStr>) -> String {
    let quoted = |word: &OsStr| match shlex::try_quote(&word.to_string_lossy()) {
        Ok(quoted) => quoted.into_owned(),
        // Only a zero byte cannot be quoted, and no argument has one.
        Err(_) => word.to_string_lossy().into_owned(),
    };
    words.map(quoted).collect::<Vec<_>>().join(" ")
}

/// Prints a line on standard error. Where nobody reads it, nobody is left to tell.
fn print_message(line: &str) {
    let _ = writeln!(anstream::stderr().lock(), "{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    /// Users of the reference type either spelling, everywhere.
    #[test]
    fn every_flag_has_both_spellings() {
        check_spellings(&Cli::command());
    }

    fn check_spellings(command: &clap::Command) {
        for (argument, long) in
            command.get_arguments().filter_map(|argument| argument.get_long().map(|long| (argument, long)))
        {
            if long.contains('_') {
                let aliases = argument.get_all_aliases().unwrap_or_default();
                assert!(aliases.contains(&long.replace('_', "-").as_str()), "--{long} has no spelling with -");
            }
            assert!(!long.contains('-'), "--{long} is not spelled as in the reference");
        }
        command.get_subcommands().for_each(check_spellings);
    }
}
