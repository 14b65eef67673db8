//! Times whole training steps of a tiny model: our half of the races of `cargo xtask bench step`.
//!
//! Prints one line of JSON, as `bench/rival/step.py` does: the median time of a step, and the mean square of the
//! parameters at the end.

use std::time::Instant;

use accelerate::Accelerator;
use accelerate::data::{DataLoader, TensorDataset};
use accelerate::nn::{Linear, Module, ModuleFn, ParamStore};
use accelerate::optim::{AdamW, Optimizer};
use accelerate::tch::{Device, Kind, Reduction, Tensor};
use anyhow::Result;
use bench::{formula, mean_square, median};
use clap::{Parser, ValueEnum};
use serde_json::json;

/// Time whole training steps of a tiny model.
#[derive(Debug, Parser)]
struct Arguments {
    /// What to measure
    #[arg(long)]
    mode: Mode,
    /// Steps, the warm-up included
    #[arg(long)]
    steps: usize,
    /// Steps that are not timed
    #[arg(long)]
    warmup: usize,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Mode {
    /// A step with the same batch again and again
    Step,
    /// What preparing model, optimizer and loader adds to a step with batches of a loader
    Tax,
}

const WIDTH: i64 = 64;
const CLASSES: i64 = 10;
const BATCH_SIZE: usize = 32;

/// Micro-seconds from step to step.
struct Clock {
    warmup: usize,
    last: Instant,
    steps: usize,
    micros: Vec<f64>,
}

impl Clock {
    fn start(warmup: usize) -> Self {
        Self { warmup, last: Instant::now(), steps: 0, micros: Vec::new() }
    }

    fn step(&mut self) {
        let now = Instant::now();
        if self.warmup <= self.steps {
            self.micros.push((now - self.last).as_secs_f64() * 1e6);
        }
        (self.last, self.steps) = (now, self.steps + 1);
    }
}

/// How often bare and prepared training take turns.
const TURNS: usize = 5;

/// The times of one training run, and the mean square of its parameters.
type Run = (Vec<f64>, f64);

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let (micros, answer) = match arguments.mode {
        Mode::Step => {
            let (micros, answer) = same_batch(&arguments)?;
            (median(micros), answer)
        }
        Mode::Tax => {
            let (mut bare, mut prepared, mut answer) = (Vec::new(), Vec::new(), f64::NAN);
            for _ in 0..TURNS {
                bare.extend(with_loader(&arguments)?.0);
                let (micros, last) = with_accelerator(&arguments)?;
                prepared.extend(micros);
                answer = last;
            }
            (median(prepared) - median(bare), answer)
        }
    };
    println!("report={}", json!({"rank": 0, "micros": micros, "answer": answer}));
    Ok(())
}

/// Two linear layers, and AdamW for them.
fn model() -> Result<(ParamStore, impl Module<Input = Tensor, Output = Tensor>, AdamW)> {
    let store = ParamStore::new(Device::Cpu);
    let first = Linear::new(store.root() / "first", WIDTH, WIDTH, Default::default())?;
    let second = Linear::new(store.root() / "second", WIDTH, CLASSES, Default::default())?;
    for (index, param) in store.trainable_parameters().iter().enumerate() {
        param.copy_(&(formula(&param.shape(), index as f64)? * 0.1))?;
    }
    let model = ModuleFn::new(&store, move |input: &Tensor| second.forward(&first.forward(input)?.f_relu()?));
    let optimizer = AdamW::builder(&store).lr(1e-3).weight_decay(0.01).build()?;
    Ok((store, model, optimizer))
}

/// Inputs and labels for `num_batches` batches.
fn rows(num_batches: usize) -> Result<(Tensor, Tensor)> {
    let num_rows = (num_batches * BATCH_SIZE) as i64;
    let labels = Tensor::f_arange(num_rows, (Kind::Int64, Device::Cpu))?.f_remainder(CLASSES)?;
    Ok((formula(&[num_rows, WIDTH], 0.25)?, labels))
}

fn loader(arguments: &Arguments) -> Result<DataLoader<(Tensor, Tensor)>> {
    Ok(DataLoader::builder(TensorDataset::new(rows(arguments.steps)?)?).batch_size(BATCH_SIZE).build()?)
}

fn loss(logits: &Tensor, labels: &Tensor) -> Result<Tensor> {
    Ok(logits.f_cross_entropy_loss(labels, None::<Tensor>, Reduction::Mean, -100, 0.0)?)
}

fn same_batch(arguments: &Arguments) -> Result<Run> {
    let (store, model, mut optimizer) = model()?;
    let (input, labels) = rows(1)?;
    let mut clock = Clock::start(arguments.warmup);
    for _ in 0..arguments.steps {
        loss(&model.forward(&input)?, &labels)?.f_backward()?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        clock.step();
    }
    Ok((clock.micros, mean_square(&store.trainable_parameters())?))
}

fn with_loader(arguments: &Arguments) -> Result<Run> {
    let (store, model, mut optimizer) = model()?;
    let loader = loader(arguments)?;
    let mut clock = Clock::start(arguments.warmup);
    for batch in loader.iter()? {
        let (input, labels) = batch?;
        loss(&model.forward(&input)?, &labels)?.f_backward()?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        clock.step();
    }
    Ok((clock.micros, mean_square(&store.trainable_parameters())?))
}

fn with_accelerator(arguments: &Arguments) -> Result<Run> {
    let (store, model, optimizer) = model()?;
    let accelerator = Accelerator::builder().cpu(true).build()?;
    let (model, mut optimizer, loader) = accelerator.prepare((model, optimizer, loader(arguments)?))?;
    let mut clock = Clock::start(arguments.warmup);
    for batch in loader.iter()? {
        let (input, labels) = batch?;
        accelerator.backward(&loss(&model.forward(&input)?, &labels)?)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        clock.step();
    }
    Ok((clock.micros, mean_square(&store.trainable_parameters())?))
}
