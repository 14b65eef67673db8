//! The model of `parity/lora/model.py`, and the cases that it was run with.

use accelerate::Result;
use accelerate::lora::{InitLoraWeights, LoraBias, LoraConfig};
use accelerate::nn::{
    CheckpointOptions, Embedding, EmbeddingConfig, Linear, LinearConfig, Module, ParamStore, Path, checkpoint,
};
use accelerate::tch::{Device, Kind, Tensor};

const ROWS: i64 = 4;
const WORDS: i64 = 5;
const WIDTH: i64 = 6;
const INNER: i64 = 10;
const CLASSES: i64 = 3;
const NUM_IDS: i64 = 11;

/// Numbers that both sides compute alike.
pub(crate) fn formula(shape: &[i64], shift: f64) -> Tensor {
    let count = shape.iter().product::<i64>();
    let steps = Tensor::arange(count, (Kind::Double, Device::Cpu)) * 0.7;
    (steps + shift).sin().reshape(shape).to_kind(Kind::Float)
}

#[derive(Clone)]
struct Block {
    q_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl Block {
    fn new(path: Path) -> Result<Self> {
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

    fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        let up = self.up_proj.forward(&self.q_proj.forward(hidden)?.tanh())?;
        Ok(hidden + self.down_proj.forward(&up.tanh())?)
    }
}

pub(crate) struct Model {
    pub(crate) store: ParamStore,
    embed: Embedding,
    layers: Vec<Block>,
    score: Linear,
    pub(crate) checkpointed: bool,
}

impl Model {
    pub(crate) fn new(device: Device) -> Result<Self> {
        let store = ParamStore::new(device);
        let root = store.root();
        let config = EmbeddingConfig { padding_idx: Some(0), ..Default::default() };
        let model = Self {
            embed: Embedding::new(&root / "embed", NUM_IDS, WIDTH, config)?,
            layers: (0..2).map(|number| Block::new(&root / "layers" / number)).collect::<Result<_>>()?,
            score: Linear::new(&root / "score", WIDTH, CLASSES, Default::default())?,
            checkpointed: false,
            store,
        };
        for (index, param) in model.store.parameters().iter().enumerate() {
            param.copy_(&(formula(&param.shape(), index as f64) * 0.5))?;
        }
        Ok(model)
    }
}

impl Module for Model {
    type Input = Tensor;
    type Output = Tensor;

    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let mut hidden = self.embed.forward(ids)?;
        for block in &self.layers {
            hidden = if self.checkpointed {
                let block = block.clone();
                checkpoint(&[&hidden], CheckpointOptions::default(), move |inputs| block.forward(&inputs[0]))?
            } else {
                block.forward(&hidden)?
            };
        }
        self.score.forward(&hidden.mean_dim(1, false, None))
    }

    fn params(&self) -> &ParamStore {
        &self.store
    }
}

pub(crate) fn ids(step: i64) -> Tensor {
    let numbers = Tensor::arange(ROWS * WORDS, (Kind::Int64, Device::Cpu)) * 7 + step * 3;
    numbers.remainder(NUM_IDS).reshape([ROWS, WORDS])
}

pub(crate) fn labels(step: i64) -> Tensor {
    (Tensor::arange(ROWS, (Kind::Int64, Device::Cpu)) + step).remainder(CLASSES)
}

/// `CASES` of `parity/lora/model.py`.
pub(crate) fn cases() -> Vec<(&'static str, LoraConfig)> {
    let of = |targets: &[&str], r| LoraConfig {
        target_modules: Some(targets.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>().into()),
        r,
        ..Default::default()
    };
    let list = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    vec![
        ("list", LoraConfig { lora_alpha: 4.0, ..of(&["q_proj", "down_proj"], 2) }),
        (
            "pattern",
            LoraConfig {
                target_modules: Some(r"^(?!.*layers\.1).*_proj$".into()),
                r: 3,
                lora_alpha: 6.0,
                use_rslora: true,
                ..Default::default()
            },
        ),
        ("embedding", of(&["embed", "up_proj"], 2)),
        ("bias_all", LoraConfig { bias: LoraBias::All, ..of(&["q_proj"], 2) }),
        ("bias_lora_only", LoraConfig { bias: LoraBias::LoraOnly, ..of(&["up_proj", "down_proj"], 2) }),
        (
            "modules_to_save",
            LoraConfig {
                exclude_modules: Some(["layers.0.q_proj"].into()),
                modules_to_save: list(&["score"]),
                ..of(&["q_proj", "up_proj"], 2)
            },
        ),
        (
            "rank_pattern",
            LoraConfig {
                rank_pattern: [("layers.1.q_proj".to_owned(), 2), (r"^layers\.0\..*".to_owned(), 3)].into(),
                alpha_pattern: [("up_proj".to_owned(), 16.0)].into(),
                ..of(&["q_proj", "up_proj"], 4)
            },
        ),
        (
            "layers_to_transform",
            LoraConfig {
                layers_to_transform: vec![1],
                layers_pattern: list(&["layers"]),
                ..of(&["q_proj", "up_proj"], 2)
            },
        ),
        ("all_linear", LoraConfig { target_modules: Some("all-linear".into()), r: 2, ..Default::default() }),
        ("lora_bias", LoraConfig { lora_bias: true, ..of(&["q_proj", "up_proj"], 2) }),
        ("dropout", LoraConfig { lora_dropout: 0.25, ..of(&["q_proj", "down_proj"], 2) }),
        ("gaussian", LoraConfig { init_lora_weights: InitLoraWeights::Gaussian, ..of(&["q_proj", "embed"], 2) }),
        (
            "random",
            LoraConfig { init_lora_weights: InitLoraWeights::Random, lora_alpha: 1.5, ..of(&["q_proj", "embed"], 2) },
        ),
    ]
}

/// One of the cases.
pub(crate) fn case(name: &str) -> LoraConfig {
    cases().into_iter().find(|(found, _)| *found == name).unwrap().1
}
