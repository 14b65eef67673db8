//! Trains the case and writes what is compared with Python: our half of `cargo xtask parity ddp`.
//!
//! Writes `losses.json`, one list of per-rank losses for every step, and `final.safetensors`, the
//! parameters after the last step, as `parity/ddp_train.py` does.

use std::fs;
use std::path::PathBuf;

use accelerate::Accelerator;
use accelerate::tch::Tensor;
use anyhow::{Context, Result, ensure};
use bench::{Settings, train, write_parameters};
use clap::Parser;

/// Train the case and write the losses of every step and the final parameters.
#[derive(Debug, Parser)]
struct Arguments {
    /// The folder that `parity/make_case.py` wrote
    #[arg(long)]
    case: PathBuf,
    /// `sgd` or `adamw`
    #[arg(long)]
    optimizer: String,
    /// Steps to train
    #[arg(long, default_value_t = 50)]
    steps: usize,
    /// Rows per rank and step
    #[arg(long = "batch_size", default_value_t = 8)]
    batch_size: usize,
    /// How many ranks must take part
    #[arg(long = "world_size")]
    world_size: usize,
    /// The folder to write to
    #[arg(long)]
    output: PathBuf,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let accelerator = Accelerator::builder().cpu(true).build()?;
    let num_processes = accelerator.num_processes();
    let wanted = arguments.world_size;
    ensure!(num_processes == wanted, "{num_processes} processes take part; {wanted} were asked for");
    let settings = Settings {
        case: &arguments.case,
        optimizer: &arguments.optimizer,
        num_steps: arguments.steps,
        batch_size: arguments.batch_size,
    };
    let trained = train(&accelerator, &settings)?;

    // `[1, steps]` from each rank becomes `[ranks, steps]`; the file has steps first.
    let mine = Tensor::f_from_slice(&trained.losses)?.f_unsqueeze(0)?;
    let all = accelerator.gather(&mine)?.f_t_copy()?.f_contiguous()?;
    if accelerator.is_main_process() {
        fs::create_dir_all(&arguments.output)
            .with_context(|| format!("could not create {}", arguments.output.display()))?;
        let losses = Vec::<Vec<f64>>::try_from(&all)?;
        fs::write(arguments.output.join("losses.json"), serde_json::to_string(&losses)?)?;
        write_parameters(&*trained.model, &arguments.output.join("final.safetensors"))?;
    }
    accelerator.wait_for_everyone()?;
    Ok(())
}
