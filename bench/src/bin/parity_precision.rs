//! Trains a small model in every precision and writes what is compared with Python: our half of
//! `cargo xtask parity precision`.
//!
//! Reads `cases.json` and writes `outcomes.json`, one entry per case, as `parity/precision.py` does.

use accelerate::data::{DataLoader, TensorDataset};
use accelerate::nn::{
    Dropout, LayerNorm, Linear, Module, ModuleFn, MultiheadAttention, MultiheadAttentionConfig, ParamStore,
};
use accelerate::optim::{AdamW, LinearWithWarmup, Optimizer, Sgd};
use accelerate::tch::{Device, Kind, Reduction, Tensor};
use accelerate::{Accelerator, GradScalerKwargs, MixedPrecision};
use anyhow::{Result, bail};
use bench::{formula, grid};
use serde::{Deserialize, Serialize};

#[derive(Debug, Deserialize)]
struct Case {
    /// `mlp` or `attention`.
    model: String,
    precision: String,
    accumulation: usize,
    optimizer: String,
    clip: bool,
    /// Micro-batches whose loss is infinite.
    planted: Vec<usize>,
}

#[derive(Debug, Default, Serialize)]
struct Outcome {
    /// For every micro-batch the loss of every rank.
    losses: Vec<Vec<f64>>,
    /// After every micro-batch.
    lrs: Vec<f64>,
    skipped: Vec<bool>,
}

// The settings stand in `parity/precision.py` as well.
const MICRO_BATCHES: usize = 100;
const BATCH_SIZE: usize = 16;
const WIDTH: i64 = 48;
/// Of a row, for attention.
const PART: i64 = 8;
const CLASSES: i64 = 10;
const MAX_NORM: f64 = 0.3;

fn main() -> Result<()> {
    grid::run(train)
}

fn train(run: &Accelerator, case: &Case) -> Result<Outcome> {
    let precision: MixedPrecision = case.precision.parse()?;
    let scaling = GradScalerKwargs { init_scale: Some(1024.0), growth_interval: Some(20), ..Default::default() };
    let accelerator = Accelerator::builder()
        .mixed_precision(precision)
        .gradient_accumulation_steps(case.accumulation)
        .kwargs_handler(scaling)
        .build_from(run)?;
    // Dropout draws on both sides alike, on each rank for itself.
    accelerate::set_seed(accelerator.process_index() as u64);
    let store = ParamStore::new(Device::Cpu);
    if case.model == "attention" {
        let config = MultiheadAttentionConfig { dropout: 0.1, batch_first: true, ..Default::default() };
        let attention = MultiheadAttention::new(store.root() / "attention", PART, 2, config)?;
        let dropout = Dropout::new(store.root(), 0.1)?;
        let second = Linear::new(store.root() / "second", WIDTH, CLASSES, Default::default())?;
        let model = ModuleFn::new(&store, move |input: &Tensor| {
            let parts = input.f_reshape([-1, WIDTH / PART, PART])?;
            let attended = attention.forward(&parts, &parts, &parts, Default::default())?;
            second.forward(&dropout.forward(&attended)?.f_flatten(1, -1)?)
        });
        return train_model(&accelerator, case, &store, model);
    }
    let first = Linear::new(store.root() / "first", WIDTH, 2 * WIDTH, Default::default())?;
    let norm = LayerNorm::new(store.root() / "norm", [2 * WIDTH], Default::default())?;
    let second = Linear::new(store.root() / "second", 2 * WIDTH, CLASSES, Default::default())?;
    let model = ModuleFn::new(&store, move |input: &Tensor| {
        let hidden = norm.forward(&first.forward(input)?)?.f_gelu("none")?;
        second.forward(&hidden)
    });
    train_model(&accelerator, case, &store, model)
}

fn train_model<M: Module<Input = Tensor, Output = Tensor>>(
    accelerator: &Accelerator,
    case: &Case,
    store: &ParamStore,
    model: M,
) -> Result<Outcome> {
    for (index, param) in store.trainable_parameters().iter().enumerate() {
        param.copy_(&(formula(&param.shape(), index as f64)? * 0.2))?;
    }
    match case.optimizer.as_str() {
        "sgd" => {
            train_with(accelerator, case, model, Sgd::builder(store).lr(0.05).momentum(0.9).weight_decay(0.01).build()?)
        }
        "adamw" => train_with(accelerator, case, model, AdamW::builder(store).lr(2e-3).weight_decay(0.01).build()?),
        other => bail!("unknown optimizer {other:?}"),
    }
}

fn train_with<M: Module<Input = Tensor, Output = Tensor>>(
    accelerator: &Accelerator,
    case: &Case,
    model: M,
    optimizer: impl Optimizer,
) -> Result<Outcome> {
    let num_rows = (MICRO_BATCHES * BATCH_SIZE * accelerator.num_processes()) as i64;
    let labels = Tensor::f_arange(num_rows, (Kind::Int64, Device::Cpu))?.f_remainder(CLASSES)?;
    let rows = TensorDataset::new((formula(&[num_rows, WIDTH], 0.25)?, labels))?;
    let loader = DataLoader::builder(rows).batch_size(BATCH_SIZE).build()?;
    let total = MICRO_BATCHES * accelerator.num_processes();
    let scheduler = LinearWithWarmup::new(&optimizer, 10, total);
    let (model, mut optimizer, loader, mut scheduler) = accelerator.prepare((model, optimizer, loader, scheduler))?;
    let mut outcome = Outcome::default();
    for (index, batch) in loader.iter()?.enumerate() {
        let (input, labels) = batch?;
        accelerator.accumulate(&model, || {
            let logits = model.forward(&input)?;
            let loss = logits.f_cross_entropy_loss(&labels, None::<Tensor>, Reduction::Mean, -100, 0.0)?;
            let mine = loss.f_detach()?.f_to_kind(Kind::Double)?.f_reshape([1])?;
            outcome.losses.push(Vec::try_from(&accelerator.gather(&mine)?)?);
            let is_planted = case.planted.contains(&index);
            accelerator.backward(&if is_planted { loss.f_mul_scalar(f64::INFINITY)? } else { loss })?;
            if case.clip && accelerator.sync_gradients() {
                accelerator.clip_grad_norm_(&*model, MAX_NORM)?;
            }
            optimizer.step()?;
            scheduler.step()?;
            optimizer.zero_grad()
        })?;
        outcome.skipped.push(accelerator.sync_gradients() && optimizer.step_was_skipped());
        outcome.lrs.push(scheduler.get_last_lr().first().copied().unwrap_or(f64::NAN));
    }
    Ok(outcome)
}
