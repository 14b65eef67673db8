//! What the programs share that train a grid of cases, as `parity/grid.py` does for Python.

use std::fs;
use std::path::PathBuf;

use accelerate::Accelerator;
use anyhow::{Context, Result, ensure};
use clap::Parser;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Train every case of a grid and write what came of it.
#[derive(Debug, Parser)]
struct Arguments {
    /// The cases to train
    #[arg(long)]
    cases: PathBuf,
    /// How many ranks must take part
    #[arg(long = "world_size")]
    world_size: usize,
    /// The folder to write to
    #[arg(long)]
    output: PathBuf,
}

/// Calls `train` for every case of the file that the command line names and writes what it returns to `outcomes.json`.
/// Collective.
///
/// # Errors
/// Another number of ranks than was asked for, files that cannot be read or written, and those of `train`.
pub fn run<C: DeserializeOwned, O: Serialize>(train: impl Fn(&Accelerator, &C) -> Result<O>) -> Result<()> {
    let arguments = Arguments::parse();
    let accelerator = Accelerator::builder().cpu(true).build()?;
    let (found, wanted) = (accelerator.num_processes(), arguments.world_size);
    ensure!(found == wanted, "{found} processes take part; {wanted} were asked for");
    let text = fs::read_to_string(&arguments.cases)
        .with_context(|| format!("could not read {}", arguments.cases.display()))?;
    let cases: Vec<C> = serde_json::from_str(&text)?;
    let outcomes: Vec<O> = cases.iter().map(|case| train(&accelerator, case)).collect::<Result<_>>()?;
    if accelerator.is_main_process() {
        fs::create_dir_all(&arguments.output)?;
        fs::write(arguments.output.join("outcomes.json"), serde_json::to_string(&outcomes)?)?;
    }
    accelerator.wait_for_everyone()?;
    Ok(())
}
