//! Trains a small model in FP8 and writes what is compared with torchao and TransformerEngine: our half of
//! `cargo xtask parity fp8`.
//!
//! Reads `cases.json` and writes `outcomes.json`, one entry per case, as `parity/fp8.py` does.

use accelerate::data::{DataLoader, TensorDataset};
use accelerate::nn::{AnyLayer, Linear, Module, ModuleFn, ParamStore};
use accelerate::optim::{AdamW, Optimizer, Sgd};
use accelerate::tch::{Device, Kind, Reduction, Tensor};
use accelerate::{Accelerator, FP8BackendType, FP8RecipeKwargs, MixedPrecision};
use accelerate_core::config::Float8LinearRecipeName;
use accelerate_core::fp8::{Float8, dynamic_scale};
use anyhow::{Context, Result, bail};
use bench::{formula, grid};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

#[derive(Debug, Deserialize)]
struct Case {
    /// Of torchao.
    recipe: Option<Float8LinearRecipeName>,
    /// Settings of TransformerEngine's.
    delayed: Option<FP8RecipeKwargs>,
    autocast: bool,
    optimizer: String,
}

#[derive(Debug, Default, Serialize)]
struct Outcome {
    /// For every step the loss of every rank.
    losses: Vec<Vec<f64>>,
    /// By number of the layer and tensor: the largest values, and the scales.
    scales: BTreeMap<String, Vec<f64>>,
}

// The settings stand in `parity/fp8.py` as well.
const STEPS: usize = 50;
const BATCH_SIZE: usize = 16;
const SIZES: [i64; 7] = [24, 64, 96, 40, 64, 64, 10];

fn main() -> Result<()> {
    grid::run(train)
}

fn train(run: &Accelerator, case: &Case) -> Result<Outcome> {
    let backend = if case.delayed.is_some() { FP8BackendType::TE } else { FP8BackendType::AO };
    let kwargs = FP8RecipeKwargs {
        backend: Some(backend),
        recipe_name: case.recipe,
        use_autocast: Some(case.autocast),
        ..case.delayed.clone().unwrap_or_default()
    };
    let accelerator =
        Accelerator::builder().mixed_precision(MixedPrecision::Fp8).kwargs_handler(kwargs).build_from(run)?;
    let store = ParamStore::new(Device::Cpu);
    let layer = |(number, sizes): (usize, &[i64])| {
        Linear::new(store.root() / "layers" / number, sizes[0], sizes[1], Default::default())
    };
    let layers: Vec<Linear> = SIZES.windows(2).enumerate().map(layer).collect::<accelerate::Result<_>>()?;
    for (index, param) in store.trainable_parameters().iter().enumerate() {
        param.copy_(&(formula(&param.shape(), index as f64)? * 0.2))?;
    }
    let model = ModuleFn::new(&store, move |input: &Tensor| {
        let mut hidden = input.shallow_clone();
        for (number, layer) in layers.iter().enumerate() {
            hidden = layer.forward(&hidden)?;
            if number + 1 < layers.len() {
                hidden = hidden.f_tanh()?;
            }
        }
        Ok(hidden)
    });
    let outcome = match case.optimizer.as_str() {
        "sgd" => {
            let optimizer = Sgd::builder(&store).lr(0.05).momentum(0.9).weight_decay(0.01).build()?;
            train_with(&accelerator, model, optimizer)?
        }
        "adamw" => train_with(&accelerator, model, AdamW::builder(&store).lr(2e-3).weight_decay(0.01).build()?)?,
        other => bail!("unknown optimizer {other:?}"),
    };
    let (losses, state) = outcome;
    let scales = match state {
        Value::Object(_) => delayed_scales(&state)?,
        _ => dynamic_scales(&store, case.recipe.unwrap_or(Float8LinearRecipeName::Tensorwise))?,
    };
    Ok(Outcome { losses, scales })
}

/// The losses, and what delayed scaling remembers afterwards.
fn train_with<M: Module<Input = Tensor, Output = Tensor>>(
    accelerator: &Accelerator,
    model: M,
    optimizer: impl Optimizer,
) -> Result<(Vec<Vec<f64>>, Value)> {
    let num_rows = (STEPS * BATCH_SIZE * accelerator.num_processes()) as i64;
    let labels = Tensor::f_arange(num_rows, (Kind::Int64, Device::Cpu))?.f_remainder(SIZES[6])?;
    let rows = TensorDataset::new((formula(&[num_rows, SIZES[0]], 0.25)?, labels))?;
    let loader = DataLoader::builder(rows).batch_size(BATCH_SIZE).build()?;
    let (model, mut optimizer, loader) = accelerator.prepare((model, optimizer, loader))?;
    let mut losses = Vec::new();
    for batch in loader.iter()? {
        let (input, labels) = batch?;
        let logits = model.forward(&input)?;
        let loss = logits.f_cross_entropy_loss(&labels, None::<Tensor>, Reduction::Mean, -100, 0.0)?;
        let mine = loss.f_detach()?.f_to_kind(Kind::Double)?.f_reshape([1])?;
        losses.push(Vec::try_from(&accelerator.gather(&mine)?)?);
        accelerator.backward(&loss)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
    }
    let states = accelerator.state_dict()?;
    let values = states.get("model").context("no model was prepared")?.values.get("fp8").cloned();
    Ok((losses, values.unwrap_or_default()))
}

/// Of `layers.1`: the number of the layer.
fn number_of(path: &str) -> Result<&str> {
    path.strip_prefix("layers.").with_context(|| format!("{path} is no layer"))
}

fn delayed_scales(state: &Value) -> Result<BTreeMap<String, Vec<f64>>> {
    let mut scales = BTreeMap::new();
    for (path, tensors) in state.as_object().context("the state is no object")? {
        for (name, tensor) in tensors.as_object().context("the state of a layer is no object")? {
            let history = tensor["amax_history"].as_array().context("there is no history")?;
            let numbers = history.iter().chain([&tensor["scale"]]).map(|number| number.as_f64().context("no number"));
            scales.insert(format!("{}.{name}", number_of(path)?), numbers.collect::<Result<_>>()?);
        }
    }
    Ok(scales)
}

/// Of the trained weights of layers that compute in FP8.
fn dynamic_scales(store: &ParamStore, recipe: Float8LinearRecipeName) -> Result<BTreeMap<String, Vec<f64>>> {
    let is_rowwise = recipe != Float8LinearRecipeName::Tensorwise;
    let mut scales = BTreeMap::new();
    for (path, layer) in store.named_layers() {
        let AnyLayer::Linear(linear) = layer else { continue };
        if format!("{:?}", linear.kernel()).starts_with("DenseKernel") {
            continue;
        }
        let absolute = linear.weight.get()?.f_detach()?.f_abs()?;
        let amaxes =
            if is_rowwise { absolute.f_amax([1].as_slice(), false)? } else { absolute.f_max()?.f_reshape([1])? };
        let amaxes = Vec::<f32>::try_from(&amaxes)?;
        let of_amax = |amax: &f32| f64::from(dynamic_scale(*amax, Float8::E4M3, is_rowwise));
        let numbers = amaxes.iter().map(|amax| f64::from(*amax)).chain(amaxes.iter().map(of_amax));
        scales.insert(format!("{}.weight", number_of(&path)?), numbers.collect());
    }
    Ok(scales)
}
