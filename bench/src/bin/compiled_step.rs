//! Times whole training steps of a small model that returns its loss, as it is and as a package of `accelerate export-model`:
//! our half of the races `compiled_step` of `cargo xtask bench compiled`.
//!
//! Prints one line of JSON, as `bench/rival/compiled_step.py` does: the median time of a step, and the mean square of the
//! parameters at the end.

use std::path::PathBuf;
use std::time::Instant;

use accelerate::nn::{ExportedModule, Linear, Module, ModuleFn, ParamStore};
use accelerate::optim::AdamW;
use accelerate::tch::{Device, Kind, Reduction, Tensor};
use accelerate::{Accelerator, DynamoBackend};
use anyhow::Result;
use bench::{formula, mean_square, median};
use clap::Parser;
use serde_json::json;

/// Time whole training steps of a small model, compiled or not.
#[derive(Debug, Parser)]
struct Arguments {
    /// The package; without it the model is not compiled
    #[arg(long)]
    package: Option<PathBuf>,
    /// Steps, the warm-up included
    #[arg(long)]
    steps: usize,
    /// Steps that are not timed
    #[arg(long)]
    warmup: usize,
}

// The sizes stand in `bench/rival/compiled_step.py` as well.
const WIDTH: i64 = 64;
const CLASSES: i64 = 10;
const BATCH_SIZE: i64 = 32;

type Batch = (Tensor, Tensor);

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    match &arguments.package {
        Some(package) => {
            let accelerator = Accelerator::builder().cpu(true).dynamo_backend(DynamoBackend::AotInductor).build()?;
            let model: ExportedModule<Batch> = ExportedModule::load(package, Device::Cpu)?;
            train(&accelerator, model, &arguments)
        }
        None => {
            let store = ParamStore::new(Device::Cpu);
            let first = Linear::new(store.root() / "first", WIDTH, WIDTH, Default::default())?;
            let second = Linear::new(store.root() / "second", WIDTH, CLASSES, Default::default())?;
            let model = ModuleFn::new(&store, move |(rows, labels): &Batch| {
                let logits = second.forward(&first.forward(rows)?.f_relu()?)?;
                Ok(logits.f_cross_entropy_loss(labels, None::<Tensor>, Reduction::Mean, -100, 0.0)?)
            });
            train(&Accelerator::builder().cpu(true).build()?, model, &arguments)
        }
    }
}

fn train<M: Module<Input = Batch, Output = Tensor>>(
    accelerator: &Accelerator,
    model: M,
    arguments: &Arguments,
) -> Result<()> {
    let store = model.params().clone();
    for (index, param) in store.trainable_parameters().iter().enumerate() {
        param.copy_(&(formula(&param.shape(), index as f64)? * 0.1))?;
    }
    let optimizer = AdamW::builder(&store).lr(1e-3).weight_decay(0.01).build()?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let labels = Tensor::f_arange(BATCH_SIZE, (Kind::Int64, Device::Cpu))?.f_remainder(CLASSES)?;
    let batch = (formula(&[BATCH_SIZE, WIDTH], 0.25)?, labels);
    let mut micros = Vec::new();
    for step in 0..arguments.steps {
        let started = Instant::now();
        let loss = model.forward(&batch)?;
        accelerator.backward(&loss)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        if step >= arguments.warmup {
            micros.push(started.elapsed().as_secs_f64() * 1e6);
        }
    }
    let answer = mean_square(&store.trainable_parameters())?;
    println!("report={}", json!({"rank": 0, "micros": median(micros), "answer": answer}));
    Ok(())
}
