//! `cargo xtask bench`: races against Python Accelerate.
//!
//! Both sides run in one call, in turns, on the same libtorch with one thread per rank. Every run's
//! answer is checked before its time counts.

mod big_model;
mod checkpoint;
mod collectives;
mod ddp;
mod fsdp;
mod generate;
mod launch;
mod loader;
mod offload;
mod qlora;
mod quant;
mod record;
mod sequences;
mod step;
mod tiled_loss;
mod tp;
mod train;

use anyhow::{Result, bail};
use clap::{Args, Subcommand};

use crate::python::Environment;
use crate::race::{Pair, Race, Races, median};
use crate::{libtorch, ranks};

/// Race against Python Accelerate.
///
/// Prints one line for each race as it ends: `race=<name> ours=<v> rival=<v> ratio=<median> min=<v> max=<v> goal=<v>`. The ratio is
/// ours divided by theirs, so smaller is better. See bench/README.md.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    what: What,
    /// Write the run to `bench/runs/<date>-<machine>`
    #[arg(long, global = true)]
    record: bool,
    /// How many times each side runs
    #[arg(long, global = true, default_value_t = 5)]
    rounds: usize,
    /// Fail when the median ratio of a race is worse than this many times its goal
    #[arg(long = "fail_above", global = true)]
    fail_above: Option<f64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Subcommand)]
enum What {
    /// Help, a launch by a configuration file, starting two ranks, that up to their first all-reduce, and from the death of one
    /// until both are in their loops again (seconds); size of the command (MiB)
    Launch,
    /// Sums over two ranks of one machine (microseconds)
    Collectives,
    /// One training step of two ranks (milliseconds), and their peak memory (MiB per rank)
    Ddp(ddp::Settings),
    /// One training step of a model that two ranks share (milliseconds)
    Fsdp,
    /// One training step of a model whose layers two ranks compute together (milliseconds)
    #[command(name = "tp_step")]
    TpStep,
    /// Attention whose heads and tokens two ranks exchange (milliseconds)
    #[command(name = "sp_step")]
    SpStep,
    /// Memory of each of two ranks that divide a text of 16384 tokens, beside that of one (MiB)
    #[command(name = "cp_memory")]
    CpMemory,
    /// Memory for the loss of a text of 16384 tokens and its gradients, in tiles (MiB)
    #[command(name = "tiled_loss")]
    TiledLoss,
    /// Peak memory of a model that two ranks share, over what it should be (MiB)
    Memory,
    /// Peak memory of two ranks that fine-tune a model of 1.1 billion parameters in 4 bits, over 3 GiB (MiB)
    Qlora,
    /// A step of an optimizer whose state is on a disk, over what the disk takes to move it (milliseconds)
    Offload,
    /// A forward pass of a model whose weights are on a disk, in the page cache and not (milliseconds; drops the page cache, as root)
    #[command(name = "big_model")]
    BigModel,
    /// Checkpoints of two ranks, saved and loaded (milliseconds), the memory that takes (MiB), and the metadata of a model in 300
    /// files (microseconds)
    Checkpoint,
    /// Data loading (microseconds): from memory, with work per row, behind skipped batches, dispatched by rank 0
    Loader,
    /// Whole steps of a tiny model, and what preparing adds to them (microseconds)
    Step,
    /// Whole steps of a small model that `accelerate export-model` has compiled (microseconds)
    Compiled,
    /// A token that GPT-2 adds to a text, beside Transformers (microseconds)
    Generate,
    /// The optimizer alone: many small tensors, 32 million parameters, and with scaler and clipping (microseconds)
    Optimizer,
    /// Layers with weights of 4 and 8 bits, codes of a weight, and a model from a file (microseconds)
    Quant,
    /// A whole job, from the launch command to the printed accuracy: BERT that learns to classify texts, on two ranks (seconds)
    Train(train::Settings),
    /// Everything but `train`, which needs files
    All,
}

/// How far a race's goal is.
#[derive(Debug, Clone, Copy)]
enum Goal {
    /// Ours divided by theirs.
    Ratio(f64),
    /// Ours, in microseconds.
    Micros(f64),
}

impl Goal {
    /// As a ratio of ours to theirs: a limit in time is divided by what the rival took.
    fn ratio(self, pairs: &[Pair]) -> f64 {
        match self {
            Goal::Ratio(ratio) => ratio,
            Goal::Micros(limit) => limit / median(pairs.iter().map(|pair| pair.rival).collect()),
        }
    }
}

/// Races against a number.
fn without_rival(wants: impl Fn(What) -> bool, rounds: usize, races: &mut Races) -> Result<()> {
    if wants(What::Memory) {
        fsdp::memory(rounds, races)?;
    }
    if wants(What::Qlora) {
        qlora::memory(rounds, races)?;
    }
    if wants(What::CpMemory) {
        sequences::memory(rounds, races)?;
    }
    if wants(What::Offload) {
        offload::races(rounds, races)?;
    }
    Ok(())
}

/// Races of whole steps, and of the optimizer alone.
fn steps(wants: impl Fn(What) -> bool, environment: &Environment, rounds: usize, races: &mut Races) -> Result<()> {
    if wants(What::Step) {
        step::races(environment, rounds, &step::STEPS, races)?;
    }
    if wants(What::Compiled) {
        step::compiled(environment, rounds, races)?;
    }
    if wants(What::Optimizer) {
        step::races(environment, rounds, &step::OPTIMIZERS, races)?;
    }
    Ok(())
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    libtorch::ensure()?;
    let environment = Environment::ensure()?;
    ranks::build()?;
    println!("rival: {}", environment.versions);
    let mut races = Races::default();
    let (rounds, is_all) = (arguments.rounds, arguments.what == What::All);
    let wants = |what: What| is_all || arguments.what == what;
    if wants(What::Launch) {
        launch::races(&environment, rounds, &mut races)?;
    }
    if wants(What::Collectives) {
        collectives::races(&environment, rounds, &mut races)?;
    }
    match &arguments.what {
        What::Ddp(settings) => ddp::races(&environment, rounds, settings, &mut races)?,
        What::All => ddp::races(&environment, rounds, &ddp::Settings::default(), &mut races)?,
        What::Train(settings) => train::races(rounds, settings, &mut races)?,
        _ => {}
    }
    if wants(What::Fsdp) {
        fsdp::races(&environment, rounds, &mut races)?;
    }
    if wants(What::TpStep) {
        tp::races(&environment, rounds, &mut races)?;
    }
    if wants(What::SpStep) {
        sequences::attention(&environment, rounds, &mut races)?;
    }
    if wants(What::TiledLoss) {
        tiled_loss::races(&environment, rounds, &mut races)?;
    }
    without_rival(wants, rounds, &mut races)?;
    if wants(What::BigModel) {
        big_model::races(&environment, rounds, &mut races)?;
    }
    if wants(What::Checkpoint) {
        checkpoint::races(&environment, rounds, &mut races)?;
    }
    if wants(What::Loader) {
        loader::races(&environment, rounds, &mut races)?;
    }
    steps(wants, &environment, rounds, &mut races)?;
    if wants(What::Generate) {
        generate::races(rounds, &mut races)?;
    }
    if wants(What::Quant) {
        quant::races(&environment, rounds, &mut races)?;
    }
    let races = races.all();
    if arguments.record {
        let folder = record::write(&environment, races)?;
        println!("recorded in {}", folder.display());
    }
    fail_if_lost(races, arguments.fail_above)
}

/// Races are for people to read; only a gross loss fails a run that asks for it.
fn fail_if_lost(races: &[Race], fail_above: Option<f64>) -> Result<()> {
    let Some(factor) = fail_above else {
        return Ok(());
    };
    let lost: Vec<&str> = races.iter().filter(|race| !race.is_within(factor)).map(|race| race.name).collect();
    if !lost.is_empty() {
        bail!("worse than {factor} times the goal: {}", lost.join(", "));
    }
    Ok(())
}
