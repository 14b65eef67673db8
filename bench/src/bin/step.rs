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

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Mode {
    /// The same batch again and again
    Step,
    /// Batches of a loader
    Bare,
    /// Batches of a loader; model, optimizer and loader prepared
    Prepared,
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

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let store = ParamStore::new(Device::Cpu);
    let first = Linear::new(store.root() / "first", WIDTH, WIDTH, Default::default())?;
    let second = Linear::new(store.root() / "second", WIDTH, CLASSES, Default::default())?;
    for (index, param) in store.trainable_parameters().iter().enumerate() {
        param.copy_(&(formula(&param.shape(), index as f64)? * 0.1))?;
    }
    let model = ModuleFn::new(&store, move |input: &Tensor| second.forward(&first.forward(input)?.f_relu()?));
    let num_rows = (arguments.steps * BATCH_SIZE) as i64;
    let inputs = formula(&[num_rows, WIDTH], 0.25)?;
    let labels = Tensor::arange(num_rows, (Kind::Int64, Device::Cpu)).f_remainder(CLASSES)?;
    let mut optimizer = AdamW::builder(&store).lr(1e-3).weight_decay(0.01).build()?;
    let loss = |logits: Tensor, labels: &Tensor| -> Result<Tensor> {
        Ok(logits.f_cross_entropy_loss(labels, None::<Tensor>, Reduction::Mean, -100, 0.0)?)
    };
    let mut clock = Clock::start(arguments.warmup);
    match arguments.mode {
        Mode::Step => {
            let (input, labels) = (inputs.narrow(0, 0, BATCH_SIZE as i64), labels.narrow(0, 0, BATCH_SIZE as i64));
            for _ in 0..arguments.steps {
                loss(model.forward(&input)?, &labels)?.f_backward()?;
                optimizer.step()?;
                optimizer.zero_grad()?;
                clock.step();
            }
        }
        Mode::Bare => {
            let loader = DataLoader::builder(TensorDataset::new((inputs, labels))?).batch_size(BATCH_SIZE).build()?;
            for batch in loader.iter()? {
                let (input, labels) = batch?;
                loss(model.forward(&input)?, &labels)?.f_backward()?;
                optimizer.step()?;
                optimizer.zero_grad()?;
                clock.step();
            }
        }
        Mode::Prepared => {
            let accelerator = Accelerator::builder().cpu(true).build()?;
            let loader = DataLoader::builder(TensorDataset::new((inputs, labels))?).batch_size(BATCH_SIZE).build()?;
            let (model, mut optimizer, loader) = accelerator.prepare((model, optimizer, loader))?;
            for batch in loader.iter()? {
                let (input, labels) = batch?;
                let loss = loss(model.forward(&input)?, &labels)?;
                accelerator.backward(&loss)?;
                optimizer.step()?;
                optimizer.zero_grad()?;
                clock.step();
            }
        }
    }
    let answer = mean_square(&store.trainable_parameters())?;
    println!("report={}", json!({"rank": 0, "micros": median(clock.micros), "answer": answer}));
    Ok(())
}
