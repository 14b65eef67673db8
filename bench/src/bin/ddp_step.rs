//! Trains the case and reports time and memory: our half of the races `ddp_step` and `ddp_memory`.
//!
//! Each rank prints one line of JSON, as `bench/rival/ddp_step.py` does.

use std::path::PathBuf;

use accelerate::Accelerator;
use anyhow::Result;
use bench::{Settings, peak_resident_bytes, train};
use clap::Parser;
use serde_json::json;

/// Train the case and report milliseconds per step, peak memory and losses.
#[derive(Debug, Parser)]
struct Arguments {
    /// The folder that `parity/make_case.py` wrote
    #[arg(long)]
    case: PathBuf,
    /// `sgd` or `adamw`
    #[arg(long, default_value = "adamw")]
    optimizer: String,
    /// Steps, the warm-up included
    #[arg(long, default_value_t = 50)]
    steps: usize,
    /// Steps that are not timed
    #[arg(long, default_value_t = 10)]
    warmup: usize,
    /// Rows per rank and step
    #[arg(long = "batch_size", default_value_t = 8)]
    batch_size: usize,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let accelerator = Accelerator::builder().cpu(true).build()?;
    let settings = Settings {
        case: &arguments.case,
        optimizer: &arguments.optimizer,
        num_steps: arguments.steps,
        batch_size: arguments.batch_size,
    };
    let trained = train(&accelerator, &settings)?;
    let report = json!({
        "rank": accelerator.process_index(),
        "world_size": accelerator.num_processes(),
        "step_ms": trained.step_ms.get(arguments.warmup..).unwrap_or_default(),
        "peak_resident_bytes": peak_resident_bytes()?,
        "losses": trained.losses,
    });
    println!("report={report}");
    accelerator.wait_for_everyone()?;
    Ok(())
}
