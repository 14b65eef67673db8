//! Times the optimizer alone: our half of the races of `cargo xtask bench optimizer`.
//!
//! Prints one line of JSON, as `bench/rival/optimizer.py` does: the median time of a step, and the mean square of the
//! parameters at the end.

use std::time::Instant;

use accelerate::nn::{Init, Param, ParamStore};
use accelerate::optim::{AdamW, Optimizer};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Accelerator, GradScalerKwargs, MixedPrecision};
use anyhow::Result;
use bench::{formula, mean_square, median};
use clap::{Parser, ValueEnum};
use serde_json::json;

/// Time the optimizer alone.
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
    /// 148 tensors of a transformer with 12 layers of width 80
    Small,
    /// 32 million parameters in 8 tensors
    Large,
    /// The same 32 million: unscale, clip, step and zero
    Sweep,
}

impl Mode {
    fn shapes(self) -> Vec<Vec<i64>> {
        if !matches!(self, Mode::Small) {
            return vec![vec![2000, 2000]; 8];
        }
        let layer = [
            vec![240, 80],
            vec![240],
            vec![80, 80],
            vec![80],
            vec![320, 80],
            vec![320],
            vec![80, 320],
            vec![80],
            vec![80],
            vec![80],
            vec![80],
            vec![80],
        ];
        let mut shapes = vec![vec![100, 80], vec![64, 80], vec![80], vec![80]];
        (0..12).for_each(|_| shapes.extend(layer.clone()));
        shapes
    }
}

const MAX_NORM: f64 = 1.0;

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let store = ParamStore::new(Device::Cpu);
    let params = arguments
        .mode
        .shapes()
        .iter()
        .enumerate()
        .map(|(index, shape)| {
            let param = store.root().param(&format!("p{index}"), (shape.as_slice(), Init::Zeros))?;
            param.copy_(&formula(shape, index as f64)?)?;
            Ok(param)
        })
        .collect::<Result<Vec<Param>>>()?;
    let gradients: Vec<Tensor> = (params.iter().enumerate())
        .map(|(index, param)| Ok(formula(&param.shape(), index as f64 + 0.5)? * 0.01))
        .collect::<Result<_>>()?;
    let optimizer = AdamW::builder(&store).lr(1e-3).weight_decay(0.01).build()?;
    let micros = match arguments.mode {
        Mode::Sweep => sweep(&arguments, &params, &gradients, optimizer)?,
        Mode::Small | Mode::Large => steps(&arguments, &params, &gradients, optimizer)?,
    };
    println!("report={}", json!({"rank": 0, "micros": micros, "answer": mean_square(&params)?}));
    Ok(())
}

/// Gives every parameter a gradient that requires nothing of autograd: `d(p * g)/dp = g`.
fn set_gradients(params: &[Param], gradients: &[Tensor], factor: f64) -> Result<()> {
    for (param, gradient) in params.iter().zip(gradients) {
        (param.get()? * (gradient * factor)).sum(Kind::Float).f_backward()?;
    }
    Ok(())
}

fn steps(arguments: &Arguments, params: &[Param], gradients: &[Tensor], mut optimizer: AdamW) -> Result<f64> {
    set_gradients(params, gradients, 1.0)?;
    let mut micros = Vec::new();
    for step in 0..arguments.steps {
        let start = Instant::now();
        optimizer.step()?;
        if arguments.warmup <= step {
            micros.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    Ok(median(micros))
}

fn sweep(arguments: &Arguments, params: &[Param], gradients: &[Tensor], optimizer: AdamW) -> Result<f64> {
    let scaling = GradScalerKwargs { init_scale: Some(1024.0), growth_interval: Some(1_000_000), ..Default::default() };
    let accelerator =
        Accelerator::builder().cpu(true).mixed_precision(MixedPrecision::Fp16).kwargs_handler(scaling).build()?;
    let mut optimizer = accelerator.prepare(optimizer)?;
    let mut micros = Vec::new();
    for step in 0..arguments.steps {
        // The scaler multiplies the loss; the factor of the gradients is part of the backward pass, not of the sweep.
        for (param, gradient) in params.iter().zip(gradients) {
            let product = param.get()? * gradient;
            accelerator.backward(&product.sum(Kind::Float))?;
        }
        let start = Instant::now();
        optimizer.clip_step_and_zero_grad(MAX_NORM)?;
        if arguments.warmup <= step {
            micros.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    Ok(median(micros))
}
