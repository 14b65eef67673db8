//! `accelerate checkpoint`: what saved runs hold, whether every byte of them is right, in what two of them differ, and the same
//! runs as Python Accelerate has them.
//!
//! [`folder`] finds out what a folder holds and believes nothing of it, [`tensors`] reads numbers, and one file for each
//! subcommand decides and shows. Only [`convert`] writes, into a folder of its own.

mod check;
mod conversions;
mod convert;
mod diff;
mod error;
mod files;
mod folder;
mod ls;
mod numbers;
mod report;
mod tensors;
mod unchanged;
mod values;
mod verify;
mod weights;

#[cfg(test)]
pub(crate) use convert::sample;
pub(crate) use folder::newest_in;
#[cfg(test)]
pub(crate) use unchanged::Changed;
pub(crate) use unchanged::Seen;
pub(crate) use verify::is_as_saved;
pub(crate) use weights::model_weights;

use std::error::Error;
use std::process::ExitCode;

use clap::{Args, Subcommand};

/// Look into checkpoints: list them, verify every byte, compare two of them; convert them from and to Python Accelerate.
///
/// A checkpoint is a folder that `save_state` wrote. It counts once checkpoint.manifest.json is in it, which lists all its
/// files with their sizes and hashes. These commands change no checkpoint: an interrupted save stays as it is until the next
/// load or save finishes it.
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    Which checkpoints are there, and which one would be resumed from:\n    \
      accelerate checkpoint ls runs/bert\n  \
    What is in one of them:\n    \
      accelerate checkpoint ls runs/bert/checkpoints/checkpoint_3 --tensors\n  \
    Whether it survived the copy to another disk:\n    \
      accelerate checkpoint verify /archive/checkpoint_3\n  \
    Whether two runs are equal to the bit, however they divided the model:\n    \
      accelerate checkpoint diff one/checkpoint_3 two/checkpoint_3\n  \
    To go on with Python Accelerate:\n    \
      accelerate checkpoint convert one/checkpoint_3 for_python")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Ls(ls::Arguments),
    Verify(verify::Arguments),
    Diff(diff::Arguments),
    Convert(convert::Arguments),
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Box<dyn Error>> {
    match &arguments.command {
        Command::Ls(arguments) => ls::run(arguments).map(|()| ExitCode::SUCCESS),
        Command::Verify(arguments) => verify::run(arguments),
        Command::Diff(arguments) => diff::run(arguments),
        Command::Convert(arguments) => convert::run(arguments).map(|()| ExitCode::SUCCESS),
    }
}
