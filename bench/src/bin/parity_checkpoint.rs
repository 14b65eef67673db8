//! Trains a small model from a checkpoint, and saves one: our half of `cargo xtask parity checkpoint`.
//!
//! `parity/checkpoint.py` does the same with Python Accelerate. Losses are written as the digits of their float32 bits, because a
//! difference of one bit counts.

use std::fs;
use std::path::PathBuf;

use accelerate::nn::{LayerNorm, Linear, Module, ModuleFn, ParamStore};
use accelerate::optim::{AdamW, LambdaLr, Optimizer, Sgd, no_decay};
use accelerate::tch::{Device, Kind, Reduction, Tensor};
use accelerate::{Accelerator, set_seed};
use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use serde::{Deserialize, Serialize};

const WIDTH: i64 = 8;
const ROWS: i64 = 8;

/// Train a few steps, from a checkpoint or from the beginning.
#[derive(Debug, Parser)]
struct Arguments {
    /// `adamw` or `sgd`
    #[arg(long)]
    optimizer: String,
    /// The checkpoint to go on from
    #[arg(long)]
    load: Option<PathBuf>,
    /// Where to save one after the last step
    #[arg(long)]
    save: Option<PathBuf>,
    /// Steps that were made before
    #[arg(long)]
    first: usize,
    /// Steps to make
    #[arg(long)]
    steps: usize,
    /// The file for the losses
    #[arg(long)]
    losses: PathBuf,
}

/// What a program registers.
#[derive(Debug, Deserialize, Serialize)]
struct Progress {
    step: usize,
    best: f64,
    name: String,
}

fn batch(step: usize) -> accelerate::Result<(Tensor, Tensor)> {
    let (start, end) = (step as i64 * ROWS * WIDTH, (step as i64 + 1) * ROWS * WIDTH);
    let numbers = Tensor::f_arange_start(start, end, (Kind::Float, Device::Cpu))?;
    let rows = numbers.f_reshape([ROWS, WIDTH])?.f_mul_scalar(0.1)?.f_sin()?;
    let targets = rows.f_sum_dim_intlist(1, true, None)?;
    Ok((rows, targets))
}

fn model(store: &ParamStore) -> accelerate::Result<impl Module<Input = Tensor, Output = Tensor> + use<>> {
    let hidden = Linear::new(store.root() / "hidden", WIDTH, WIDTH, Default::default())?;
    let norm = LayerNorm::new(store.root() / "norm", [WIDTH], Default::default())?;
    let head = Linear::new(store.root() / "head", WIDTH, 1, Default::default())?;
    Ok(ModuleFn::new(store, move |rows: &Tensor| head.forward(&norm.forward(&hidden.forward(rows)?)?.f_gelu("none")?)))
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let accelerator = Accelerator::builder().cpu(true).build()?;
    set_seed(7);
    let store = ParamStore::new(accelerator.device());
    let model = model(&store)?;
    let groups = no_decay(&store, &["bias"]);
    match arguments.optimizer.as_str() {
        "adamw" => {
            let optimizer = AdamW::builder(&store).lr(1e-2).weight_decay(0.1).param_groups(groups).build()?;
            train(&accelerator, model, optimizer, &arguments)
        }
        "sgd" => {
            let optimizer = Sgd::builder(&store).lr(1e-2).momentum(0.9).weight_decay(0.1).param_groups(groups);
            train(&accelerator, model, optimizer.build()?, &arguments)
        }
        other => bail!("unknown optimizer {other}; known: adamw, sgd"),
    }
}

fn train<M, O>(accelerator: &Accelerator, model: M, optimizer: O, arguments: &Arguments) -> Result<()>
where
    M: Module<Input = Tensor, Output = Tensor>,
    O: Optimizer,
{
    let scheduler = LambdaLr::new(&optimizer, |step| 1.0 / (step + 1) as f64);
    let (model, mut optimizer, mut scheduler) = accelerator.prepare((model, optimizer, scheduler))?;
    let progress = accelerator.register_for_checkpointing(Progress { step: 0, best: 1.5, name: "first".to_owned() });
    if let Some(folder) = &arguments.load {
        accelerator.load_state(folder)?;
        let progress = progress.lock();
        ensure!(progress.step == arguments.first, "the checkpoint is of step {}", progress.step);
        ensure!(progress.best == 1.5 && progress.name == "first", "other values were loaded: {progress:?}");
    }
    let mut losses = Vec::new();
    for step in arguments.first..arguments.first + arguments.steps {
        let (rows, targets) = batch(step)?;
        // Random numbers go on, too.
        let noise = rows.f_rand_like()?.f_mul_scalar(1e-3)?;
        let loss = model.forward(&rows.f_add(&noise)?)?.f_mse_loss(&targets, Reduction::Mean)?;
        accelerator.backward(&loss)?;
        optimizer.step()?;
        scheduler.step()?;
        optimizer.zero_grad()?;
        let loss = loss.f_double_value(&[])? as f32;
        losses.push(format!("{:08x}", loss.to_bits()));
        progress.lock().step = step + 1;
    }
    fs::write(&arguments.losses, serde_json::to_string(&losses)?)
        .with_context(|| format!("could not write {}", arguments.losses.display()))?;
    if let Some(folder) = &arguments.save {
        accelerator.save_state(folder)?;
    }
    Ok(())
}
