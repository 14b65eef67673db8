//! `cargo xtask soak`: what takes longer than a test suite may.

mod engines;
mod fuzz;
mod notebook;
mod packages;
mod properties;
mod slurm;

use anyhow::Result;
use clap::{Args, Subcommand};
use std::process::Command;

use crate::{libtorch, paths, process};

/// Find faults that need many tries.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Kill and stop ranks and launchers of runs that train and save, let strangers connect, and take the network away:
    /// everything has to be
    /// over in time, nobody may be left, the right rank is named, and what was saved is whole
    Attack {
        /// How many runs to attack
        #[arg(long, default_value_t = 500)]
        tries: u64,
        /// Where the random numbers begin
        #[arg(long, default_value_t = 0)]
        seed: u64,
    },
    /// Kill runs that save a checkpoint at every step, at random moments: one rank, all ranks, or the launcher. Each goes on
    /// from its newest checkpoint, and every loss has to be that of a run which nobody disturbed
    Checkpoint {
        /// How often to kill
        #[arg(long, default_value_t = 300)]
        kills: u64,
        /// Where the random numbers begin
        #[arg(long, default_value_t = 0)]
        seed: u64,
    },
    /// Strike runs that are started again after a failure: signals to ranks, launchers, agents and whole machines, machines that are
    /// lost for good, links that are cut, slow or away for a moment, and strangers who connect. Nobody may be left, nothing may
    /// take too long, who was struck has to be named, and every loss has to be that of a run which nobody disturbed. Machines are
    /// network namespaces, which root may make; slow links need `tc`
    Launch(LaunchArguments),
    /// Feed every reader of files and messages from outside with inputs that are made up from what they reach in its
    /// code: any of them has to be read or refused. Needs a nightly toolchain
    Fuzz(fuzz::Arguments),
    /// Run the tests of properties with inputs that the suite, which makes up the same ones each time, does not have. What fails
    /// is shown with the seed that makes it fail again
    Properties(properties::Arguments),
    /// Launch through a Slurm of two nodes on this machine. Its Debian packages are downloaded and unpacked into the cache folder,
    /// and not installed. Needs root, for names that its nodes have
    Slurm(engines::Arguments),
    /// Train with one program under Open MPI, MPICH and torchrun: all have to come to the result of `accelerate launch`. What cannot
    /// be had here is skipped, with the reason
    Engines(engines::Arguments),
    /// Run the notebook of examples/notebook in evcxr, Rust's kernel for Jupyter. The kernel is compiled into the cache folder, which
    /// takes minutes the first time, as does the first cell
    Notebook,
}

#[derive(Debug, Args)]
struct LaunchArguments {
    /// How many runs to strike
    #[arg(long, default_value_t = 300)]
    kills: u64,
    /// Where the random numbers begin
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Make only this one of them, counted from 0
    #[arg(long, value_name = "NUMBER")]
    only: Option<u64>,
    /// Do this in all of them, such as slow-link, lose-machine or strangers; another word shows them all
    #[arg(long)]
    event: Option<String>,
    /// How many seconds later than it has to be everything may be over: more on a busy machine
    #[arg(long, default_value_t = 5)]
    slack: u64,
}

impl LaunchArguments {
    fn flags(&self) -> Vec<String> {
        let only = self.only.map(|number| format!("--only={number}"));
        let event = self.event.as_ref().map(|event| format!("--event={event}"));
        let all = [("launches", self.kills), ("seed", self.seed), ("slack", self.slack)];
        all.map(|(name, value)| format!("--{name}={value}")).into_iter().chain(only).chain(event).collect()
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    match &arguments.what {
        What::Attack { tries, seed } => attack(&[format!("--tries={tries}"), format!("--seed={seed}")]),
        What::Checkpoint { kills, seed } => attack(&[format!("--checkpoints={kills}"), format!("--seed={seed}")]),
        What::Launch(arguments) => attack(&arguments.flags()),
        What::Fuzz(arguments) => fuzz::run(arguments),
        What::Properties(arguments) => properties::run(arguments),
        What::Slurm(arguments) => slurm::run(arguments),
        What::Engines(arguments) => engines::run(arguments),
        What::Notebook => notebook::run(),
    }
}

fn attack(flags: &[String]) -> Result<()> {
    libtorch::ensure()?;
    process::run(&mut process::cargo(&["build", "--release", "--package", "conformance", "--bins"]))?;
    let mut attack = Command::new(paths::release_binary("attack"));
    attack.arg("--program").arg(paths::release_binary("conformance"));
    process::run(attack.args(flags))
}
