//! Trains a model with batch norm and writes what is compared with Python: our half of that part of
//! `cargo xtask parity ddp`.
//!
//! Reads `cases.json` and writes `outcomes.json`, one entry per case, as `parity/batch_norm.py` does.

use accelerate::data::{DataLoader, TensorDataset};
use accelerate::nn::{BatchNorm1d, Linear, ModuleFn, ParamStore};
use accelerate::optim::{Plateau, ReduceLrOnPlateau, Sgd};
use accelerate::tch::{Device, Kind, Reduction, Tensor, no_grad};
use accelerate::{Accelerator, DistributedDataParallelKwargs};
use anyhow::{Context, Result};
use bench::{formula, grid};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

#[derive(Debug, Deserialize)]
struct Case {
    accumulation: usize,
    broadcast_buffers: bool,
    /// After each micro-batch.
    evaluations: usize,
    /// The last evaluation after each micro-batch decides on the learning rate.
    plateau: bool,
}

#[derive(Debug, Default, Serialize)]
struct Outcome {
    /// For every micro-batch the loss of every rank.
    losses: Vec<Vec<f64>>,
    /// For every evaluation the loss of every rank.
    evaluations: Vec<Vec<f64>>,
    /// After every micro-batch the learning rate of every rank.
    lrs: Vec<Vec<f64>>,
    /// Parameters and buffers of all ranks, one after the other.
    state: BTreeMap<String, Vec<f64>>,
}

// The settings stand in `parity/batch_norm.py` as well.
const MICRO_BATCHES: usize = 24;
const BATCH_SIZE: usize = 8;
const WIDTH: i64 = 12;
const CLASSES: i64 = 5;

fn main() -> Result<()> {
    grid::run(train)
}

fn labelled(count: usize, phase: f64) -> Result<(Tensor, Tensor)> {
    let count = count as i64;
    let labels = Tensor::f_arange(count, (Kind::Int64, Device::Cpu))?.f_remainder(CLASSES)?;
    Ok((formula(&[count, WIDTH], phase)?, labels))
}

fn cross_entropy(logits: &Tensor, labels: &Tensor) -> Result<Tensor> {
    Ok(logits.f_cross_entropy_loss(labels, None::<Tensor>, Reduction::Mean, -100, 0.0)?)
}

fn train(run: &Accelerator, case: &Case) -> Result<Outcome> {
    let kwargs =
        DistributedDataParallelKwargs { broadcast_buffers: Some(case.broadcast_buffers), ..Default::default() };
    let accelerator =
        Accelerator::builder().gradient_accumulation_steps(case.accumulation).kwargs_handler(kwargs).build_from(run)?;
    let store = ParamStore::new(Device::Cpu);
    let first = Linear::new(store.root() / "first", WIDTH, 2 * WIDTH, Default::default())?;
    let norm = BatchNorm1d::new(store.root() / "norm", 2 * WIDTH, Default::default())?;
    let second = Linear::new(store.root() / "second", 2 * WIDTH, CLASSES, Default::default())?;
    for (index, param) in store.trainable_parameters().iter().enumerate() {
        param.copy_(&(formula(&param.shape(), index as f64)? * 0.2))?;
    }
    let model =
        ModuleFn::new(&store, move |input: &Tensor| second.forward(&norm.forward(&first.forward(input)?)?.f_relu()?));
    let optimizer = Sgd::builder(&store).lr(0.05).momentum(0.9).build()?;
    let settings = Plateau { factor: 0.7, patience: 1, ..Default::default() };
    let mut scheduler = ReduceLrOnPlateau::with_settings(&optimizer, settings)?;
    let rows = TensorDataset::new(labelled(MICRO_BATCHES * BATCH_SIZE * accelerator.num_processes(), 0.25)?)?;
    let loader = DataLoader::builder(rows).batch_size(BATCH_SIZE).build()?;
    let (model, mut optimizer, loader) = accelerator.prepare((model, optimizer, loader))?;
    // Every rank evaluates other rows.
    let (held_out, held_out_labels) = labelled(BATCH_SIZE, 1.0 + accelerator.process_index() as f64)?;
    let of_all_ranks =
        |value: f64| -> Result<Vec<f64>> { Ok(Vec::try_from(&accelerator.gather(&Tensor::f_from_slice(&[value])?)?)?) };

    let mut outcome = Outcome::default();
    for batch in loader.iter()? {
        let (input, labels) = batch?;
        store.train();
        let loss = accelerator.accumulate(&model, || {
            let loss = cross_entropy(&model.forward(&input)?, &labels).map_err(accelerate::Error::other)?;
            accelerator.backward(&loss)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
            Ok(loss)
        })?;
        outcome.losses.push(of_all_ranks(loss.f_double_value(&[])?)?);
        store.eval();
        let mut evaluated = f64::NAN;
        for _ in 0..case.evaluations {
            evaluated = no_grad(|| cross_entropy(&model.forward(&held_out)?, &held_out_labels))?.f_double_value(&[])?;
            outcome.evaluations.push(of_all_ranks(evaluated)?);
        }
        if case.plateau {
            scheduler.step(evaluated);
        }
        let rate = scheduler.get_last_lr().first().copied().context("there is a group of parameters")?;
        outcome.lrs.push(of_all_ranks(rate)?);
    }
    for param in store.parameters().iter().chain(&store.buffers()) {
        let mine = param.get()?.f_detach()?.f_to_kind(Kind::Double)?.f_reshape([1, -1])?;
        let values = accelerator.gather(&mine)?.f_reshape([-1])?;
        outcome.state.insert(param.name().to_owned(), Vec::try_from(&values)?);
    }
    Ok(outcome)
}
