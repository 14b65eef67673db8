//! Adapters beside weights of 4 and 8 bits (QLoRA, arXiv 2305.14314): the same losses however the model is kept, codes that stay
//! to the bit, and checkpoints without them.

use super::model::formula;
use super::ranks::{Kept, apart, losses};
use accelerate::checkpoint::{LoadOptions, checkpoint_shapes, save_model_weights};
use accelerate::lora::{InitLoraWeights, LoraConfig, PeftModel, get_peft_model};
use accelerate::nn::{
    Checkpointed, Embedding, Layer, LayerNorm, Linear, LinearConfig, Module, ParamStore, Path, StateDict,
};
use accelerate::optim::{AcceleratedOptimizer, AdamW};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{
    Accelerator, AcceleratorBuilder, BnbQuantizationConfig, FloatType, PreparedModel, ProjectConfiguration, QuantType,
    Result, ShardingStrategy, load_and_quantize_model, testing,
};
use std::path::Path as FilePath;

const WIDTH: i64 = 64;
const INNER: i64 = 96;
const NUM_BLOCKS: usize = 2;
const STEPS: i64 = 4;

#[derive(Debug)]
struct Block {
    norm: LayerNorm,
    up_proj: Linear,
    down_proj: Linear,
}

impl Block {
    fn new(path: &Path) -> Result<Self> {
        Ok(Self {
            norm: LayerNorm::new(path / "norm", [WIDTH], Default::default())?,
            up_proj: Linear::new(path / "up_proj", WIDTH, INNER, LinearConfig { bias: false, ..Default::default() })?,
            down_proj: Linear::new(path / "down_proj", INNER, WIDTH, Default::default())?,
        })
    }
}

impl Layer for Block {
    fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        let up = self.up_proj.forward(&self.norm.forward(hidden)?)?.tanh();
        Ok(hidden + self.down_proj.forward(&up)?)
    }
}

/// Its gradients begin at the adapters: what is before them is frozen.
struct Model {
    store: ParamStore,
    embed: Embedding,
    layers: Vec<Checkpointed<Block>>,
    score: Linear,
}

impl Model {
    fn new(store: ParamStore) -> Result<Self> {
        let root = store.root();
        let block = |number: usize| Checkpointed::new(&root / "layers" / number, Block::new);
        Ok(Self {
            embed: Embedding::new(&root / "embed", 11, WIDTH, Default::default())?,
            layers: (0..NUM_BLOCKS).map(block).collect::<Result<_>>()?,
            score: Linear::new(&root / "score", WIDTH, 3, Default::default())?,
            store,
        })
    }

    /// The weights of all tests.
    fn save(folder: &FilePath) {
        let model = Self::new(ParamStore::new(Device::Cpu)).unwrap();
        for (index, param) in model.store.parameters().iter().enumerate() {
            param.copy_(&(formula(&param.shape(), index as f64) * 0.2)).unwrap();
        }
        save_model_weights(&model.store, folder, &Default::default()).unwrap();
    }
}

impl Module for Model {
    type Input = Tensor;
    type Output = Tensor;

    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let hidden = self.embed.forward(ids)?;
        let hidden = self.layers.iter().try_fold(hidden, |hidden, block| block.forward(&hidden))?;
        self.score.forward(&hidden.mean_dim(1, false, None))
    }

    fn params(&self) -> &ParamStore {
        &self.store
    }
}

fn four_bit(double: bool) -> BnbQuantizationConfig {
    BnbQuantizationConfig {
        load_in_4bit: Some(true),
        bnb_4bit_quant_type: Some(QuantType::Nf4),
        bnb_4bit_use_double_quant: Some(double),
        ..Default::default()
    }
}

fn eight_bit() -> BnbQuantizationConfig {
    BnbQuantizationConfig { load_in_8bit: Some(true), torch_dtype: Some(FloatType::Float32), ..Default::default() }
}

fn adapters() -> LoraConfig {
    LoraConfig {
        r: 4,
        lora_alpha: 8.0,
        target_modules: Some(["up_proj", "down_proj"].into()),
        // Known numbers take their place.
        init_lora_weights: InitLoraWeights::Random,
        ..Default::default()
    }
}

fn copied(state: StateDict) -> StateDict {
    state.into_iter().map(|(name, tensor)| (name, tensor.copy())).collect()
}

struct Training {
    accelerator: Accelerator,
    store: ParamStore,
    peft: PeftModel,
    model: PreparedModel<Model>,
    optimizer: AcceleratedOptimizer<AdamW>,
    /// All tensors of the model that are none of the adapter's.
    base: StateDict,
}

impl Training {
    /// `scale` is that of the adapter's first numbers.
    fn new(
        accelerator: Accelerator,
        config: &BnbQuantizationConfig,
        weights: &FilePath,
        checkpointed: bool,
        scale: f64,
    ) -> Result<Self> {
        let model = Model::new(ParamStore::init_empty_weights(accelerator.device()))?;
        let store = model.store.clone();
        load_and_quantize_model(&store, config, Some(weights), &LoadOptions::default())?;
        let base = copied(store.state_dict()?);
        let peft = get_peft_model(&store, adapters())?;
        for (index, param) in store.trainable_parameters().iter().enumerate() {
            param.copy_(&(formula(&param.shape(), index as f64) * scale))?;
        }
        if checkpointed {
            store.gradient_checkpointing_enable(Default::default())?;
        }
        let optimizer = AdamW::new(&store, 2e-3)?;
        let (model, optimizer) = accelerator.prepare((model, optimizer))?;
        Ok(Self { accelerator, store, peft, model, optimizer, base })
    }

    fn train(&mut self, steps: std::ops::Range<i64>) -> Result<Vec<f64>> {
        losses(&self.accelerator, &self.model, &mut self.optimizer, steps.map(|_| 0))
    }

    /// Names of tensors of the base that are not to the bit what they were.
    fn changed(&self) -> Result<Vec<String>> {
        let now = self.store.state_dict()?;
        let is_changed = |name: &str, tensor: &Tensor| now.get(name).is_none_or(|now| now != tensor);
        Ok(self
            .base
            .iter()
            .filter(|(name, tensor)| is_changed(name, tensor))
            .map(|(name, _)| name.to_owned())
            .collect())
    }
}

fn mean(losses: &[Vec<f64>]) -> Vec<f64> {
    let steps = losses.first().map_or(0, Vec::len);
    (0..steps).map(|step| losses.iter().map(|own| own[step]).sum::<f64>() / losses.len() as f64).collect()
}

/// The mean losses of all ranks, and the adapter of the first.
fn run(
    (builder, world_size): (AcceleratorBuilder, usize),
    config: &BnbQuantizationConfig,
    weights: &FilePath,
    checkpointed: bool,
) -> (Vec<f64>, StateDict) {
    let mut found = testing::ranks(world_size, builder, |accelerator| {
        let mut training = Training::new(accelerator, config, weights, checkpointed, 0.1)?;
        let codes = training.store.get("layers.0.up_proj.weight").unwrap();
        assert!(!codes.requires_grad() && codes.local().kind() != Kind::Float);
        let losses = training.train(0..STEPS)?;
        assert_eq!(training.changed()?, [""; 0]);
        // What the optimizer has state for is the adapter, two matrices on each of four layers.
        let state = training.accelerator.state_dict()?;
        let moments = state["optimizer"].tensors.keys().filter(|name| name.starts_with("exp_avg."));
        assert_eq!(moments.count(), 4 * NUM_BLOCKS);
        assert!(state["optimizer"].tensors.keys().all(|name| name.contains("lora_")));
        Ok((losses, copied(training.peft.adapter_state_dict("default")?)))
    })
    .unwrap();
    let losses: Vec<_> = found.iter().map(|(losses, _)| losses.clone()).collect();
    (mean(&losses), found.swap_remove(0).1)
}

#[test]
fn losses_are_the_same_however_quantised_models_are_kept() {
    use ShardingStrategy::{FullShard, ShardGradOp};
    let (weights, disk) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    Model::save(weights.path());
    let all = [
        Kept::Replicated,
        Kept::Sharded(FullShard),
        Kept::Sharded(ShardGradOp),
        Kept::OnDisk(FullShard, disk.path().to_owned()),
        Kept::OnHost,
    ];
    for config in [four_bit(true), four_bit(false), eight_bit()] {
        let (wanted, adapter) = run((Accelerator::builder(), 1), &config, weights.path(), false);
        assert!(wanted[0] - wanted[STEPS as usize - 1] > 0.01, "it learns: {wanted:?}");
        // The first configuration goes everywhere, the others where their tensors are kept in other ways.
        let num_kept = if config.bnb_4bit_use_double_quant == Some(true) { all.len() } else { 2 };
        for kept in &all[..num_kept] {
            for world_size in 1..=3 {
                for checkpointed in [false, true] {
                    let context = format!("{config:?}: {kept:?} on {world_size}, checkpointed: {checkpointed}");
                    let (losses, found) = run((kept.builder(), world_size), &config, weights.path(), checkpointed);
                    assert!(apart(&losses, &wanted) < 1e-5, "{context}: {losses:?} and not {wanted:?}");
                    assert_eq!(found.len(), 4 * NUM_BLOCKS, "{context}");
                    for (name, tensor) in adapter.iter() {
                        let found = found.get(name).unwrap();
                        assert!(found.allclose(tensor, 1e-4, 1e-4, false), "{context}: {name}");
                    }
                }
            }
        }
    }
}

#[test]
fn checkpoints_without_codes_go_on_on_any_number_of_ranks() {
    let weights = tempfile::tempdir().unwrap();
    Model::save(weights.path());
    let (config, sharded) = (four_bit(true), Kept::Sharded(ShardingStrategy::FullShard));
    for ((saved, from), (loaded, to)) in [
        ((Kept::Replicated, 2), (Kept::Replicated, 2)),
        ((sharded.clone(), 3), (sharded.clone(), 3)),
        ((sharded.clone(), 3), (sharded.clone(), 2)),
        ((Kept::Replicated, 1), (sharded.clone(), 3)),
        ((sharded.clone(), 2), (Kept::Replicated, 1)),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let project = ProjectConfiguration { adapter_only: Some(true), ..Default::default() };
        let wanted = testing::ranks(from, saved.builder().project_config(project), |accelerator| {
            let mut training = Training::new(accelerator, &config, weights.path(), true, 0.1)?;
            training.train(0..3)?;
            training.accelerator.save_state(folder.path())?;
            training.train(3..6)
        });
        let files = std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path());
        let is_weights =
            |path: &std::path::PathBuf| path.extension().is_some_and(|extension| extension == "safetensors");
        let names = files.filter(is_weights).flat_map(|path| checkpoint_shapes(path).unwrap());
        let names: Vec<String> = names.map(|(name, _)| name).collect();
        assert!(names.iter().any(|name| name.contains("lora_A")), "{names:?}");
        assert!(!names.iter().any(|name| name.contains("quant_state") || name.contains("absmax")), "{names:?}");
        let found = testing::ranks(to, loaded.builder(), |accelerator| {
            let mut training = Training::new(accelerator, &config, weights.path(), true, 0.2)?;
            training.train(0..1)?;
            training.accelerator.load_state(folder.path())?;
            let losses = training.train(3..6)?;
            assert_eq!(training.changed()?, [""; 0]);
            Ok(losses)
        });
        let (wanted, found) = (wanted.unwrap(), found.unwrap());
        if from == to {
            assert_eq!(found, wanted, "{saved:?} on {from}");
        }
        assert!(apart(&mean(&found), &mean(&wanted)) < 1e-5, "{saved:?} on {from} to {loaded:?} on {to}");
    }
}

#[test]
fn codes_have_to_be_those_that_were_left_out() {
    let (weights, others) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    Model::save(weights.path());
    // Twice as large, weights have the same codes and other scales.
    let model = Model::new(ParamStore::new(Device::Cpu)).unwrap();
    accelerate::checkpoint::load_checkpoint_in_model(&model.store, weights.path(), &LoadOptions::default()).unwrap();
    let changed = model.store.get("layers.1.up_proj.weight").unwrap();
    changed.copy_(&(changed.get().unwrap().detach() * 2.0)).unwrap();
    save_model_weights(&model.store, others.path(), &Default::default()).unwrap();
    for kept in [Kept::Replicated, Kept::Sharded(ShardingStrategy::FullShard)] {
        let folder = tempfile::tempdir().unwrap();
        let project = ProjectConfiguration { adapter_only: Some(true), ..Default::default() };
        testing::ranks(2, kept.builder().project_config(project), |accelerator| {
            let training = Training::new(accelerator, &four_bit(false), weights.path(), false, 0.3)?;
            training.accelerator.save_state(folder.path()).map(drop)
        })
        .unwrap();
        for (config, weights, wanted) in [
            (four_bit(false), others.path(), "layers.1.up_proj.weight.absmax has other numbers"),
            (four_bit(true), weights.path(), "layers.1.up_proj.weight.absmax is Uint8"),
            (eight_bit(), weights.path(), "layers.1.up_proj.weight.absmax is not in the model"),
        ] {
            let refused = testing::ranks(2, kept.builder(), |accelerator| {
                let training = Training::new(accelerator, &config, weights, false, 0.3)?;
                let error = training.accelerator.load_state(folder.path()).unwrap_err();
                Ok((error.is_checkpoint(), error.to_string()))
            });
            for (is_checkpoint, text) in refused.unwrap() {
                assert!(is_checkpoint && text.contains(wanted), "{kept:?}: {wanted}: {text}");
            }
        }
    }
}
