//! Trains adapters that PEFT has made, and reads those that it has trained: our half of `cargo xtask parity lora`.
//!
//! Reads `cases.json` and writes `outcomes.json`, one entry per case, as `parity/lora.py` does.

use accelerate::lora::{LoadAdapterOptions, PeftModel};
use accelerate::nn::{
    CheckpointOptions, Embedding, EmbeddingConfig, Linear, LinearConfig, Module, ParamStore, Path, checkpoint,
};
use accelerate::optim::AdamW;
use accelerate::tch::{Device, Kind, Tensor, no_grad};
use accelerate::{Accelerator, AutoWrapPolicy, FullyShardedDataParallelPlugin};
use anyhow::{Context, Result};
use bench::{formula, grid};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

#[derive(Debug, Deserialize)]
struct Case {
    sharded: bool,
    checkpointed: bool,
    initial: PathBuf,
    ours: PathBuf,
    theirs: PathBuf,
}

#[derive(Debug, Default, Serialize)]
struct Outcome {
    /// For every step the loss of every rank.
    losses: Vec<Vec<f64>>,
    /// The trained adapter, by the names of its file.
    adapter: BTreeMap<String, Vec<f64>>,
    /// Of models that have read the adapters of both sides.
    outputs: BTreeMap<String, Vec<f64>>,
}

// The settings stand in `parity/lora.py` as well, the model in `parity/lora/model.py`.
const STEPS: usize = 16;
const ROWS: i64 = 4;
const WORDS: i64 = 5;
const WIDTH: i64 = 6;
const INNER: i64 = 10;
const CLASSES: i64 = 3;
const NUM_IDS: i64 = 11;

#[derive(Clone)]
struct Block {
    q_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl Block {
    fn new(path: Path) -> accelerate::Result<Self> {
        Ok(Self {
            q_proj: Linear::new(&path / "q_proj", WIDTH, WIDTH, Default::default())?,
            up_proj: Linear::new(&path / "up_proj", WIDTH, INNER, Default::default())?,
            down_proj: Linear::new(
                &path / "down_proj",
                INNER,
                WIDTH,
                LinearConfig { bias: false, ..Default::default() },
            )?,
        })
    }

    fn forward(&self, hidden: &Tensor) -> accelerate::Result<Tensor> {
        let up = self.up_proj.forward(&self.q_proj.forward(hidden)?.f_tanh()?)?;
        Ok(hidden.f_add(&self.down_proj.forward(&up.f_tanh()?)?)?)
    }
}

struct Model {
    store: ParamStore,
    embed: Embedding,
    layers: Vec<Block>,
    score: Linear,
    checkpointed: bool,
}

impl Model {
    fn new(checkpointed: bool) -> Result<Self> {
        let store = ParamStore::new(Device::Cpu);
        let root = store.root();
        let config = EmbeddingConfig { padding_idx: Some(0), ..Default::default() };
        let model = Self {
            embed: Embedding::new(&root / "embed", NUM_IDS, WIDTH, config)?,
            layers: (0..2).map(|number| Block::new(&root / "layers" / number)).collect::<accelerate::Result<_>>()?,
            score: Linear::new(&root / "score", WIDTH, CLASSES, Default::default())?,
            checkpointed,
            store,
        };
        for (index, param) in model.store.parameters().iter().enumerate() {
            param.copy_(&formula(&param.shape(), index as f64)?.f_mul_scalar(0.5)?)?;
        }
        Ok(model)
    }
}

impl Module for Model {
    type Input = Tensor;
    type Output = Tensor;

    fn forward(&self, ids: &Tensor) -> accelerate::Result<Tensor> {
        let mut hidden = self.embed.forward(ids)?;
        for block in &self.layers {
            hidden = if self.checkpointed {
                let block = block.clone();
                checkpoint(&[&hidden], CheckpointOptions::default(), move |inputs| block.forward(&inputs[0]))?
            } else {
                block.forward(&hidden)?
            };
        }
        self.score.forward(&hidden.f_mean_dim(1, false, None)?)
    }

    fn params(&self) -> &ParamStore {
        &self.store
    }
}

fn ids(number: usize) -> Result<Tensor> {
    let numbers = Tensor::f_arange(ROWS * WORDS, (Kind::Int64, Device::Cpu))?.f_mul_scalar(7)?;
    Ok(numbers.f_add_scalar(number as i64 * 3)?.f_remainder(NUM_IDS)?.f_reshape([ROWS, WORDS])?)
}

fn labels(number: usize) -> Result<Tensor> {
    Ok(Tensor::f_arange(ROWS, (Kind::Int64, Device::Cpu))?.f_add_scalar(number as i64)?.f_remainder(CLASSES)?)
}

fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    Vec::try_from(&tensor.f_detach()?.f_to_kind(Kind::Double)?.f_reshape([-1])?).context("values of a tensor")
}

fn main() -> Result<()> {
    grid::run(train)
}

fn train(run: &Accelerator, case: &Case) -> Result<Outcome> {
    let builder = Accelerator::builder();
    let builder = match case.sharded {
        true => builder.fsdp_plugin(FullyShardedDataParallelPlugin {
            auto_wrap_policy: Some(AutoWrapPolicy::TransformerBasedWrap),
            ..Default::default()
        }),
        false => builder,
    };
    let accelerator = builder.build_from(run)?;
    let (rank, world_size) = (accelerator.process_index(), accelerator.num_processes());
    let model = Model::new(case.checkpointed)?;
    let options = LoadAdapterOptions { is_trainable: true, ..Default::default() };
    let adapters = PeftModel::from_pretrained(&model.store, &case.initial, options)?;
    let optimizer = AdamW::new(&model.store, 0.02)?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let mut outcome = Outcome::default();
    for step in 0..STEPS {
        let number = step * world_size + rank;
        let loss = model.forward(&ids(number)?)?.f_cross_entropy_loss(
            &labels(number)?,
            None::<&Tensor>,
            accelerate::tch::Reduction::Mean,
            -100,
            0.0,
        )?;
        accelerator.backward(&loss)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        let loss = loss.f_detach()?.f_to_kind(Kind::Double)?.f_reshape([1])?;
        outcome.losses.push(values(&accelerator.gather(&loss)?)?);
    }
    accelerator.save_adapter(&adapters, &case.ours, &Default::default())?;
    for (key, tensor) in adapters.adapter_state_dict("default")?.iter() {
        outcome.adapter.insert(key.to_owned(), values(tensor)?);
    }
    for (side, folder) in [("ours", &case.ours), ("theirs", &case.theirs)] {
        let model = Model::new(false)?;
        PeftModel::from_pretrained(&model.store, folder, Default::default())?;
        model.store.eval();
        let first = ids(0)?;
        outcome.outputs.insert(side.to_owned(), values(&no_grad(|| model.forward(&first))?)?);
    }
    Ok(outcome)
}
