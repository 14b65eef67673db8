//! Trains packages of `accelerate export-model` and writes what is compared with Python: our half of
//! `cargo xtask parity exported`.
//!
//! Reads `cases.json` and writes `outcomes.json`, one entry per case, as `parity/exported.py` does.

use accelerate::nn::{ExportedModule, Module};
use accelerate::optim::Sgd;
use accelerate::tch::{Device, Kind, Tensor, no_grad};
use accelerate::{Accelerator, DynamoBackend, FullyShardedDataParallelPlugin};
use anyhow::{Context, Result};
use bench::{formula, grid};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;

#[derive(Debug, Deserialize)]
struct Case {
    package: PathBuf,
    accumulation: usize,
    sharded: bool,
}

#[derive(Debug, Default, Serialize)]
struct Outcome {
    /// For every micro-batch the loss of every rank.
    losses: Vec<Vec<f64>>,
    /// The same in evaluation mode, after the step.
    evaluations: Vec<Vec<f64>>,
    /// Parameters and buffers of all ranks, one after the other.
    state: BTreeMap<String, Vec<f64>>,
}

// The settings stand in `parity/exported.py` as well.
const MICRO_BATCHES: usize = 12;
const BATCH_SIZE: i64 = 8;
const WIDTH: i64 = 12;
const CLASSES: i64 = 5;

fn main() -> Result<()> {
    grid::run(train)
}

fn train(run: &Accelerator, case: &Case) -> Result<Outcome> {
    let builder = Accelerator::builder()
        .gradient_accumulation_steps(case.accumulation)
        .dynamo_backend(DynamoBackend::AotInductor);
    let builder = match case.sharded {
        true => builder.fsdp_plugin(FullyShardedDataParallelPlugin::default()),
        false => builder,
    };
    let accelerator = builder.build_from(run)?;
    let (rank, world_size) = (accelerator.process_index(), accelerator.num_processes());
    let model: ExportedModule<(Tensor, Tensor), Vec<Tensor>> = ExportedModule::load(&case.package, Device::Cpu)?;
    let store = model.params().clone();
    let optimizer = Sgd::builder(&store).lr(0.05).momentum(0.9).build()?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let of_all_ranks =
        |value: f64| -> Result<Vec<f64>> { Ok(Vec::try_from(&accelerator.gather(&Tensor::f_from_slice(&[value])?)?)?) };
    let loss_of = |batch: &(Tensor, Tensor)| -> accelerate::Result<Tensor> {
        model.forward(batch)?.into_iter().next().ok_or_else(|| accelerate::Error::other("a model without outputs"))
    };
    let mut outcome = Outcome::default();
    for step in 0..MICRO_BATCHES {
        let rows = formula(&[BATCH_SIZE, WIDTH], 0.25 + (step * world_size + rank) as f64)?;
        let labels = Tensor::f_arange(BATCH_SIZE, (Kind::Int64, Device::Cpu))?;
        let batch = (rows, labels.f_add_scalar((step + rank) as i64)?.f_remainder(CLASSES)?);
        store.train();
        let loss = accelerator.accumulate(&model, || {
            let loss = loss_of(&batch)?;
            accelerator.backward(&loss)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
            Ok(loss)
        })?;
        outcome.losses.push(of_all_ranks(loss.f_double_value(&[])?)?);
        store.eval();
        outcome.evaluations.push(of_all_ranks(no_grad(|| loss_of(&batch))?.f_double_value(&[])?)?);
    }
    // Whole, also where parameters are sharded. Other names of a parameter are left out, as in Python.
    let stored = store.parameters().into_iter().chain(store.buffers());
    let names: HashSet<String> = stored.map(|param| param.name().to_owned()).collect();
    for (name, tensor) in store.state_dict()?.iter().filter(|(name, _)| names.contains(*name)) {
        let mine = tensor.f_detach()?.f_to_kind(Kind::Double)?.f_reshape([1, -1])?;
        let values = accelerator.gather(&mine)?.f_reshape([-1])?;
        outcome.state.insert(name.to_owned(), Vec::try_from(&values).context("values of a parameter")?);
    }
    Ok(outcome)
}
