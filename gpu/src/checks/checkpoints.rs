//! What is saved and loaded again.

use accelerate::nn::Module as _;
use accelerate::optim::AdamW;
use accelerate::tch::{Kind, Tensor};
use accelerate::{Accelerator, MixedPrecision, SaveModelOptions, set_seed};
use anyhow::Result;
use std::path::Path;

use crate::check::{Context, Found};
use crate::models::{Classifier, ROWS, Trained, loss_of, on_cpu, tokens, wave};

const NUM_STEPS: usize = 8;
const MIDDLE: usize = 4;

/// Trains with random numbers of the device in each step; what the steps from the middle on were.
fn run(accelerator: &Accelerator, save: Option<&Path>, load: Option<&Path>) -> Result<Trained> {
    let model = Classifier::new(accelerator.device())?;
    let store = model.params().clone();
    let optimizer = AdamW::new(&store, 2e-3)?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    if let Some(folder) = load {
        accelerator.load_state(folder)?;
    }
    let mut losses = Vec::new();
    for step in if load.is_some() { MIDDLE } else { 0 }..NUM_STEPS {
        if let Some(folder) = save.filter(|_| step == MIDDLE) {
            accelerator.save_state(folder)?;
        }
        let (tokens, labels) = tokens(step, 0, ROWS, accelerator.device())?;
        let logits = model.forward(&tokens)?;
        let noise = Tensor::f_rand(logits.size(), (Kind::Float, accelerator.device()))?;
        let loss = loss_of(&logits.f_add(&noise)?, &labels)?;
        accelerator.backward(&loss)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        if step >= MIDDLE {
            losses.push(loss.f_double_value(&[])?);
        }
    }
    Ok(Trained { losses, norms: Vec::new(), parameters: on_cpu(&store)?, num_units: 0, share: 1.0 })
}

/// The same kernels on the same numbers: to the bit, also on a GPU. Only the embedding's backward pass may add up in any order
/// there, so that its table is asked for deterministic algorithms.
pub(crate) fn state(context: &Context<'_>) -> Result<Found> {
    torch_ext::use_deterministic_algorithms(true, torch_ext::DeterministicOptions { warn_only: true })?;
    for precision in [MixedPrecision::No, MixedPrecision::Fp16] {
        let folder = context.folder.join(precision.to_string());
        let new = || context.builder().mixed_precision(precision).build();
        set_seed(11);
        let undisturbed = run(&new()?, Some(&folder), None)?;
        set_seed(99);
        let resumed = run(&new()?, None, Some(&folder))?;
        context.all_close(&format!("{precision}: loss"), &resumed.losses, &undisturbed.losses, 0.0)?;
        for ((name, found), (_, wanted)) in resumed.parameters.iter().zip(&undisturbed.parameters) {
            context.same(&format!("{precision}: {name}"), found, wanted)?;
        }
    }
    Found::figure("float32 and fp16 to the bit")
}

pub(crate) fn model(context: &Context<'_>) -> Result<Found> {
    let accelerator = context.accelerator()?;
    let model = Classifier::new(accelerator.device())?;
    let store = model.params().clone();
    let model = accelerator.prepare(model)?;
    let wanted = on_cpu(&store)?;
    let mut bytes = 0;
    for safe_serialization in [true, false] {
        let folder = context.folder.join(format!("safe_{safe_serialization}"));
        let options = SaveModelOptions { safe_serialization, max_shard_size: "40KB".into(), ..Default::default() };
        accelerator.save_model(&model, &folder, &options)?;
        for param in store.parameters() {
            param.copy_(&wave(&param.shape(), 0.123)?)?;
        }
        accelerator.load_checkpoint_in_model(&model, &folder)?;
        for ((name, found), (_, wanted)) in on_cpu(&store)?.iter().zip(&wanted) {
            context.same(name, found, wanted)?;
        }
        for entry in std::fs::read_dir(&folder)? {
            bytes += entry?.metadata()?.len();
        }
    }
    Found::figure(format!("{} tensors in 2 formats, {} KB", wanted.len(), bytes / 1000))
}
