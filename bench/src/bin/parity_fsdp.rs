//! Trains a small sharded model and writes what is compared with Python: our half of `cargo xtask parity fsdp`.
//!
//! Reads `cases.json` and writes `outcomes.json`, one entry per case, as `parity/fsdp.py` does.

use std::collections::BTreeMap;

use accelerate::data::{DataLoader, TensorDataset};
use accelerate::nn::{Embedding, Init, LayerNorm, Linear, Module, ModuleFn, ParamStore, Path};
use accelerate::optim::{AdamW, Optimizer, Sgd};
use accelerate::tch::{Device, Kind, Reduction, Tensor};
use accelerate::{
    Accelerator, AutoWrapPolicy, FullyShardedDataParallelPlugin, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy,
};
use anyhow::{Context, Result, bail};
use bench::{formula, grid};
use serde::{Deserialize, Serialize};

#[derive(Debug, Deserialize)]
struct Case {
    sharding_strategy: ShardingStrategy,
    policy: MixedPrecisionPolicy,
    optimizer: String,
    accumulation: usize,
    clip: bool,
}

#[derive(Debug, Default, Serialize)]
struct Outcome {
    /// For every micro-batch the loss of every rank.
    losses: Vec<Vec<f64>>,
    /// After the last step, whole.
    parameters: BTreeMap<String, Vec<f64>>,
}

// The settings stand in `parity/fsdp.py` as well.
const MICRO_BATCHES: usize = 32;
const BATCH_SIZE: usize = 6;
const LENGTH: i64 = 3;
const VOCABULARY: i64 = 37;
const WIDTH: i64 = 13;
const HIDDEN: i64 = 29;
const NUM_LAYERS: usize = 3;
const MAX_NORM: f64 = 0.3;

fn main() -> Result<()> {
    grid::run(train)
}

fn train(run: &Accelerator, case: &Case) -> Result<Outcome> {
    let plugin = FullyShardedDataParallelPlugin {
        sharding_strategy: Some(case.sharding_strategy),
        auto_wrap_policy: Some(AutoWrapPolicy::TransformerBasedWrap),
        mixed_precision_policy: Some(case.policy),
        ..Default::default()
    };
    let precision = if case.policy.param_dtype.is_some() { MixedPrecision::Bf16 } else { MixedPrecision::No };
    let accelerator = Accelerator::builder()
        .mixed_precision(precision)
        .gradient_accumulation_steps(case.accumulation)
        .fsdp_plugin(plugin)
        .build_from(run)?;
    let store = ParamStore::new(Device::Cpu);
    let model = model(&store)?;
    match case.optimizer.as_str() {
        "sgd" => train_with(
            &accelerator,
            case,
            model,
            Sgd::builder(&store).lr(0.005).momentum(0.9).weight_decay(0.01).build()?,
        ),
        "adamw" => train_with(&accelerator, case, model, AdamW::builder(&store).lr(5e-3).weight_decay(0.01).build()?),
        other => bail!("unknown optimizer {other:?}"),
    }
}

fn train_with(
    accelerator: &Accelerator,
    case: &Case,
    model: impl Module<Input = Tensor, Output = Tensor>,
    optimizer: impl Optimizer,
) -> Result<Outcome> {
    let (model, mut optimizer, loader) = accelerator.prepare((model, optimizer, loader(accelerator)?))?;
    let mut losses = Vec::new();
    for batch in loader.iter()? {
        let (tokens, target) = batch?;
        accelerator.accumulate(&model, || {
            let logits = model.forward(&tokens)?.f_flatten(0, 1)?;
            let target = target.f_flatten(0, 1)?;
            let loss = logits.f_cross_entropy_loss(&target, None::<Tensor>, Reduction::Mean, -100, 0.0)?;
            losses.push(loss.f_double_value(&[])?);
            accelerator.backward(&loss)?;
            if case.clip && accelerator.sync_gradients() {
                accelerator.clip_grad_norm_(&*model, MAX_NORM)?;
            }
            optimizer.step()?;
            optimizer.zero_grad()
        })?;
    }
    // `[1, steps]` from each rank becomes `[ranks, steps]`; the outcome has steps first.
    let of_ranks = accelerator.gather(&Tensor::f_from_slice(&losses)?.f_unsqueeze(0)?)?;
    let losses = Vec::try_from(&of_ranks.f_t_copy()?.f_contiguous()?)?;
    let values =
        |tensor: &Tensor| -> Result<Vec<f64>> { Ok(Vec::try_from(&tensor.f_to_kind(Kind::Double)?.f_reshape([-1])?)?) };
    let state = model.params().state_dict()?;
    let parameters = state.iter().map(|(name, tensor)| Ok((name.to_owned(), values(tensor)?)));
    Ok(Outcome { losses, parameters: parameters.collect::<Result<_>>()? })
}

/// Tokens of a sentence, and what each is to be answered with.
fn loader(accelerator: &Accelerator) -> Result<DataLoader<(Tensor, Tensor)>> {
    let num_rows = (MICRO_BATCHES * BATCH_SIZE * accelerator.num_processes()) as i64;
    let numbers = Tensor::f_arange(num_rows * LENGTH, (Kind::Int64, Device::Cpu))?;
    let tokens = (&numbers * 7 + numbers.f_floor_divide_scalar(5)?).f_remainder(VOCABULARY)?.f_reshape([-1, LENGTH])?;
    let target = (&tokens * 5 + 1).f_remainder(VOCABULARY)?;
    let rows = TensorDataset::new((tokens, target))?;
    Ok(DataLoader::builder(rows).batch_size(BATCH_SIZE).build()?)
}

/// Sizes that no number of ranks divides, a frozen weight, an output layer tied to the embedding, and fewer positions than
/// there may be ranks.
fn model(store: &ParamStore) -> Result<impl Module<Input = Tensor, Output = Tensor> + use<>> {
    let root = store.root();
    let scale = root.param("scale", ([1], Init::Ones))?;
    let tokens = Embedding::new(&root / "tokens", VOCABULARY, WIDTH, Default::default())?;
    let positions = Embedding::new(&root / "positions", LENGTH, WIDTH, Default::default())?;
    let layers =
        (0..NUM_LAYERS).map(|layer| Block::new(&(&root / "layers" / layer))).collect::<accelerate::Result<Vec<_>>>()?;
    let norm = LayerNorm::new(&root / "norm", [WIDTH], Default::default())?;
    let head = Linear::from_params(&root / "head", (&root / "head").alias("weight", &tokens.weight)?, None);
    for (index, param) in store.parameters().iter().enumerate() {
        let around = if param.name() == "scale" || param.name().ends_with("norm.weight") { 1.0 } else { 0.0 };
        // A token and a position of equal size may cancel, and the norm of what is left magnify its rounding.
        let size = if param.name() == "positions.weight" { 0.2 } else { 0.5 };
        param.copy_(&(formula(&param.shape(), index as f64)? * size + around))?;
    }
    store.get("layers.1.up.weight").context("there is no layer 1")?.set_requires_grad(false)?;
    Ok(ModuleFn::new(store, move |input: &Tensor| {
        let places = Tensor::f_arange(LENGTH, (Kind::Int64, Device::Cpu))?;
        let mut x = tokens.forward(input)?.f_add(&positions.forward(&places)?)?;
        for layer in &layers {
            x = layer.forward(&x)?;
        }
        head.forward(&norm.forward(&x)?.f_mul(&scale.get()?)?)
    }))
}

struct Block {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(path: &Path) -> accelerate::Result<Self> {
        Ok(Self {
            norm: LayerNorm::new(path / "norm", [WIDTH], Default::default())?,
            up: Linear::new(path / "up", WIDTH, HIDDEN, Default::default())?,
            down: Linear::new(path / "down", HIDDEN, WIDTH, Default::default())?,
        })
    }

    fn forward(&self, x: &Tensor) -> accelerate::Result<Tensor> {
        let hidden = self.up.forward(&self.norm.forward(x)?)?.f_gelu("none")?;
        Ok(x.f_add(&self.down.forward(&hidden)?)?)
    }
}
