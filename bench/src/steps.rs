//! What the programs share that take timed steps with a model of noise: `fsdp_step` and `tp_step`. For Python it stands in
//! `bench/rival/fsdp_step.py`.

use std::time::Instant;

use accelerate::Accelerator;
use accelerate::nn::ParamStore;
use accelerate::optim::{AcceleratedOptimizer, Optimizer};
use accelerate::tch::{self, Device, Kind, Tensor};
use anyhow::Result;
use clap::Args;
use serde_json::{Value, json};

use crate::peak_resident_bytes;

// Sizes of the transformers.
/// Layers.
pub const NUM_LAYERS: usize = 12;
/// Numbers of a token's activation.
pub const WIDTH: i64 = 256;
/// Heads of attention of a layer.
pub const NUM_HEADS: i64 = 4;
/// Tokens that there are.
pub const VOCABULARY: i64 = 1000;
/// Tokens of a text.
pub const LENGTH: i64 = 64;

/// How long a program trains.
#[derive(Debug, Clone, Copy, Args)]
pub struct Steps {
    /// Steps, the warm-up included
    #[arg(long)]
    steps: usize,
    /// Steps that are not timed
    #[arg(long)]
    warmup: usize,
}

/// What a run leaves behind.
#[derive(Debug)]
pub struct Timed {
    /// This rank's loss at every step.
    losses: Vec<f64>,
    /// Milliseconds of each timed step.
    step_ms: Vec<f64>,
}

impl Steps {
    /// Trains with prepared objects. Collective.
    ///
    /// # Errors
    /// Those of training.
    pub fn train<O: Optimizer>(
        self,
        accelerator: &Accelerator,
        optimizer: &mut AcceleratedOptimizer<O>,
        compute_loss: impl Fn() -> Result<Tensor>,
    ) -> Result<Timed> {
        let (mut losses, mut step_ms) = (Vec::new(), Vec::new());
        let mut started = Instant::now();
        for step in 0..self.steps {
            let loss = compute_loss()?;
            accelerator.backward(&loss)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
            losses.push(loss.f_double_value(&[])?);
            if self.warmup <= step {
                step_ms.push(started.elapsed().as_secs_f64() * 1e3);
            }
            started = Instant::now();
        }
        Ok(Timed { losses, step_ms })
    }
}

impl Timed {
    /// What this rank reports, with its peak memory up to now.
    ///
    /// # Errors
    /// Those of [`peak_resident_bytes`].
    pub fn report(&self, accelerator: &Accelerator) -> Result<Value> {
        Ok(json!({
            "rank": accelerator.process_index(),
            "world_size": accelerator.num_processes(),
            "step_ms": self.step_ms,
            "losses": self.losses,
            "peak_resident_bytes": peak_resident_bytes()?,
        }))
    }
}

/// The same numbers in both programs: one libtorch, one generator.
///
/// # Errors
/// libtorch's own.
pub fn noise(shape: &[i64], seed: i64) -> Result<Tensor> {
    tch::manual_seed(seed);
    Ok(Tensor::f_randn(shape, (Kind::Float, Device::Cpu))?)
}

/// Matrices of noise, biases of zeros; scales stay ones.
///
/// # Errors
/// libtorch's own.
pub fn fill(store: &ParamStore) -> Result<()> {
    for (index, param) in store.parameters().iter().enumerate() {
        let shape = param.shape();
        if let [_, columns] = shape[..] {
            param.copy_(&(noise(&shape, index as i64)? * (2.0 / columns as f64).sqrt()))?;
        } else if param.name().ends_with("bias") {
            param.copy_(&Tensor::f_zeros(&shape[..], (Kind::Float, Device::Cpu))?)?;
        }
    }
    Ok(())
}

/// Texts `[batch_size, LENGTH]` of the transformers, other ones for each `number`.
///
/// # Errors
/// libtorch's own.
pub fn texts(batch_size: i64, number: i64) -> Result<Tensor> {
    let tokens = Tensor::f_arange(batch_size * LENGTH, (Kind::Int64, Device::Cpu))?;
    Ok((tokens * 7 + number).f_remainder(VOCABULARY)?.f_view([batch_size, LENGTH])?)
}
