//! The `accelerate` command. One file per subcommand; this one only chooses and reports.

mod checkpoint;
mod completions;
mod config;
mod config_file;
mod doctor;
mod env;
mod estimate_memory;
mod examples;
mod export_model;
mod flags;
mod launch;
mod man;
mod merge_weights;
mod new;
mod output;
mod paths;
mod progress;
mod resolve;
mod settings;
mod setup;
mod status;
mod table;
mod test;
mod to_fsdp2;
mod tpu_config;
mod versions;
mod weights;

use std::error::Error;
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use output::{print_coloured, print_error, print_last_error, print_message, print_result, print_styled, shell_command};

/// Runs training programs on one process, many processes or many machines, in mixed precision.
#[derive(Debug, Parser)]
#[command(name = "accelerate", version, arg_required_else_help = true)]
#[command(after_help = "Every flag may also be spelled with - instead of _ (--num-processes).\n\
    `accelerate <command> --help` explains a command with examples; `accelerate --help` lists exit codes.")]
#[command(after_long_help = "Every flag may also be spelled with - instead of _ (--num-processes).\n\
    `accelerate <command> --help` explains a command with examples.\n\n\
    Exit codes:\n  \
      0         done; of a launch: every process ended with 0\n  \
      1         not done, for the reason that is told; a check failed; the result could not be written\n  \
      2         wrong flags; of launch and test also settings with which nothing can be started\n  \
      126, 127  the program of a launch cannot be run, or does not exist\n  \
      128 + N   signal N ended it: 130 after Ctrl-C, 143 after SIGTERM\n  \
      others    of a launch: that of the first process that failed")]
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
    Status(status::Arguments),
    Test(test::Arguments),
    Env(env::Arguments),
    EstimateMemory(estimate_memory::Arguments),
    ExportModel(export_model::Arguments),
    MergeWeights(merge_weights::Arguments),
    #[command(name = "to-fsdp2")]
    ToFsdp2(to_fsdp2::Arguments),
    Checkpoint(checkpoint::Arguments),
    Completions(completions::Arguments),
    Man(man::Arguments),
    TpuConfig(tpu_config::Arguments),
}

fn main() -> ExitCode {
    // The launcher starts this same executable as its helper; that must cost next to nothing.
    if let Some(code) = accelerate_launch::helper::run_if_asked() {
        return code;
    }
    let words = with_command(std::env::args_os().collect());
    let outcome = match parsed(&words) {
        Ok(cli) => run(cli.command, &words),
        Err(error) => answered(error, &words),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            print_error(&speaker(&words), error.as_ref(), &error.to_string());
            ExitCode::FAILURE
        }
    }
}

/// The words of a command line, with the command that the program is called after: Python Accelerate installs `accelerate-launch`
/// and others beside `accelerate`, for which there may be links.
fn with_command(mut words: Vec<OsString>) -> Vec<OsString> {
    let called =
        words.first().and_then(|program| Path::new(program).file_name()?.to_str()?.strip_prefix("accelerate-"));
    if let Some(command) = called.filter(|name| Cli::command().find_subcommand(name).is_some()).map(OsString::from) {
        words.splice(..1, ["accelerate".into(), command]);
    }
    words
}

fn run(command: Command, words: &[OsString]) -> Result<ExitCode, Box<dyn Error>> {
    let success = |()| ExitCode::SUCCESS;
    match command {
        Command::Config(arguments) => config::run(&arguments),
        Command::Launch(arguments) => launch::run(*arguments, words),
        Command::Status(arguments) => status::run(&arguments),
        Command::Test(arguments) => Ok(test::run(arguments)),
        Command::Setup(arguments) => setup::run(&arguments).map(success),
        Command::New(arguments) => new::run(&arguments).map(success),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Env(arguments) => env::run(&arguments).map(success),
        Command::EstimateMemory(arguments) => estimate_memory::run(&arguments).map(success),
        Command::ExportModel(arguments) => export_model::run(&arguments),
        Command::MergeWeights(arguments) => merge_weights::run(&arguments).map(success),
        Command::ToFsdp2(arguments) => to_fsdp2::run(&arguments),
        Command::Checkpoint(arguments) => checkpoint::run(&arguments),
        Command::Completions(arguments) => completions::run(&arguments).map(success),
        Command::Man(arguments) => man::run(&arguments).map(success),
        Command::TpuConfig(arguments) => tpu_config::run(&arguments).map(success),
    }
}

/// What the words of a command line ask for. A request for help is an error of clap's.
fn parsed(words: &[OsString]) -> Result<Cli, clap::Error> {
    let error = match parsed_once(words) {
        Err(error) if flags::is_of_other_launcher(&error) => error,
        parsed => return parsed,
    };
    // Whoever asks for help beside flags that are refused gets it, as from the reference.
    let mut words = words.to_vec();
    let mut next = flags::position_of(&error, &words);
    while let Some(position) = next {
        words.remove(position);
        next = match parsed_once(&words) {
            Err(help) if help.kind() == ErrorKind::DisplayHelp => return Err(help),
            Err(other) if flags::is_of_other_launcher(&other) => flags::position_of(&other, &words),
            _ => None,
        };
    }
    Err(error)
}

fn parsed_once(words: &[OsString]) -> Result<Cli, clap::Error> {
    let mut command = launch::help::for_words(flags::with_negative_numbers(examples::unwrapped(Cli::command())), words);
    let matches = command.try_get_matches_from_mut(words)?;
    Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
}

/// Prints what clap says instead of an outcome: help and version, which are results, or what is wrong with the words.
fn answered(error: clap::Error, words: &[OsString]) -> Result<ExitCode, Box<dyn Error>> {
    let error = flags::shown(flags::explained(error));
    let text = error.render().ansi().to_string();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            print_coloured(&examples::as_typed(&text))?;
            return Ok(ExitCode::SUCCESS);
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => print_styled(examples::as_typed(&text).trim_end()),
        _ => print_styled(text.replacen("error:", &format!("{}: error:", speaker(words)), 1).trim_end()),
    }
    Ok(ExitCode::from(2))
}

/// Who speaks in a message: the command, with its subcommand.
fn speaker(words: &[OsString]) -> String {
    let command = Cli::command();
    let subcommand = words.get(1).and_then(|word| command.find_subcommand(word));
    subcommand.map_or_else(|| "accelerate".to_owned(), |found| format!("accelerate {}", found.get_name()))
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
