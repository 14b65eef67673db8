//! Whole states of models that ranks have parts of: in checkpoints, and as values.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::checkpoint::{LoadOptions, load_checkpoint_in_model, load_file};
use accelerate::nn::{BatchNorm1d, Linear, LinearConfig, Module, ModuleFn, ParamStore, StateDict};
use accelerate::optim::{AcceleratedOptimizer, AdamW, AdamW8bit};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{
    Accelerator, AcceleratorBuilder, DeepSpeedPlugin, FullyShardedDataParallelPlugin, PreparedModel, Result,
    ShardingStrategy, StateDictType, testing,
};
use rstest::rstest;
use std::collections::BTreeMap;
use std::path::Path;

fn fsdp(strategy: ShardingStrategy) -> FullyShardedDataParallelPlugin {
    FullyShardedDataParallelPlugin {
        sharding_strategy: Some(strategy),
        state_dict_type: Some(StateDictType::Full),
        dp_shard_size: (strategy == ShardingStrategy::HybridShard).then_some(2),
        ..Default::default()
    }
}

fn by(plugin: FullyShardedDataParallelPlugin) -> AcceleratorBuilder {
    Accelerator::builder().fsdp_plugin(plugin)
}

struct Training<M> {
    model: PreparedModel<M>,
    optimizer: AcceleratedOptimizer<AdamW>,
}

/// Its parameters do not divide evenly among three ranks, and it has buffers.
fn model(accelerator: &Accelerator) -> Result<(ParamStore, impl Module<Input = Tensor, Output = Tensor>)> {
    let store = ParamStore::new(accelerator.device());
    let hidden = Linear::new(store.root() / "hidden", 3, 5, Default::default())?;
    let norm = BatchNorm1d::new(store.root() / "norm", 5, Default::default())?;
    let head = Linear::new(store.root() / "head", 5, 1, Default::default())?;
    hidden.weight.copy_(&(Tensor::arange(15, (Kind::Float, Device::Cpu)) * 0.7).sin().view([5, 3]))?;
    head.weight.copy_(&(Tensor::arange(5, (Kind::Float, Device::Cpu)) * 0.3).cos().view([1, 5]))?;
    for bias in [&hidden.bias, &head.bias].into_iter().flatten() {
        bias.copy_(&Tensor::zeros(bias.shape(), (Kind::Float, Device::Cpu)))?;
    }
    let module =
        ModuleFn::new(&store, move |rows: &Tensor| head.forward(&norm.forward(&hidden.forward(rows)?)?.f_tanh()?));
    Ok((store, module))
}

fn training(accelerator: &Accelerator) -> Result<Training<impl Module<Input = Tensor, Output = Tensor>>> {
    let (store, module) = model(accelerator)?;
    let (model, optimizer) = accelerator.prepare((module, AdamW::new(&store, 0.05)?))?;
    Ok(Training { model, optimizer })
}

/// By name, of the model and of the optimizer.
type State = BTreeMap<String, (Vec<i64>, Vec<f64>)>;

impl<M: Module<Input = Tensor, Output = Tensor>> Training<M> {
    fn train(&mut self, accelerator: &Accelerator, steps: std::ops::Range<i64>) -> Result<()> {
        for step in steps {
            let rows = (Tensor::arange(12, (Kind::Float, accelerator.device())) * 0.1 + step).sin().view([4, 3]);
            accelerator.backward(&self.model.forward(&rows)?.square().mean(None))?;
            self.optimizer.step()?;
            self.optimizer.zero_grad()?;
        }
        Ok(())
    }

    fn full_state(&self) -> Result<State> {
        let mut state = values(&self.model.params().state_dict()?);
        let optimizer = self.optimizer.full_state_dict()?;
        state.extend(optimizer.tensors.iter().map(|(name, tensor)| (name.clone(), numbers(tensor))));
        Ok(state)
    }
}

fn numbers(tensor: &Tensor) -> (Vec<i64>, Vec<f64>) {
    (tensor.size(), Vec::try_from(tensor.detach().to_kind(Kind::Double).reshape([-1])).unwrap())
}

fn values(state: &StateDict) -> State {
    state.iter().map(|(name, tensor)| (name.to_owned(), numbers(tensor))).collect()
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name.starts_with("model") || name.starts_with("optimizer"));
    names.sort();
    names
}

#[rstest]
#[case::by_all_ranks(Some(StateDictType::Full), "", "", &[
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
    "optimizer-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors",
])]
#[case::by_rank_0(Some(StateDictType::Full), r#"{"rank0_only": true}"#, r#"{"rank0_only": true, "offload_to_cpu": true}"#, &[
    "model.safetensors", "optimizer.safetensors",
])]
#[case::the_model_by_rank_0(Some(StateDictType::Full), r#"{"rank0_only": true}"#, "", &[
    "model.safetensors", "optimizer-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors",
])]
#[case::parts(Some(StateDictType::Sharded), "", "", &[
    "model.rank-00000-of-00002.safetensors", "model.rank-00001-of-00002.safetensors",
    "optimizer.rank-00000-of-00002.safetensors", "optimizer.rank-00001-of-00002.safetensors",
])]
#[case::nothing_said(None, "", "", &[
    "model.rank-00000-of-00002.safetensors", "model.rank-00001-of-00002.safetensors",
    "optimizer.rank-00000-of-00002.safetensors", "optimizer.rank-00001-of-00002.safetensors",
])]
fn the_type_of_state_dict_decides_which_files_there_are(
    #[case] state_dict_type: Option<StateDictType>,
    #[case] model: &str,
    #[case] optimizer: &str,
    #[case] wanted: &[&str],
) {
    let folder = tempfile::tempdir().unwrap();
    let plugin = FullyShardedDataParallelPlugin {
        state_dict_type,
        state_dict_config: serde_json::from_str(model).ok(),
        optim_state_dict_config: serde_json::from_str(optimizer).ok(),
        ..fsdp(ShardingStrategy::FullShard)
    };
    let saved = testing::ranks(2, by(plugin), |accelerator| {
        let mut training = training(&accelerator)?;
        training.train(&accelerator, 0..2)?;
        accelerator.save_state(folder.path())?;
        training.full_state()
    })
    .unwrap();
    assert_eq!(names(folder.path()), wanted);
    let loaded = testing::ranks(3, by(fsdp(ShardingStrategy::ShardGradOp)), |accelerator| {
        let training = training(&accelerator)?;
        accelerator.load_state(folder.path())?;
        training.full_state()
    })
    .unwrap();
    assert!(loaded.iter().all(|state| *state == saved[0]));
}

/// Whoever wrote them, and however many go on.
#[rstest]
fn whole_tensors_go_on_to_the_bit_and_are_those_of_the_run(
    #[values(1, 2, 3, 4)] world_size: usize,
    #[values(
        ShardingStrategy::FullShard,
        ShardingStrategy::OptimizerStateAndGradients,
        ShardingStrategy::HybridShard,
        ShardingStrategy::NoShard
    )]
    strategy: ShardingStrategy,
) {
    if strategy == ShardingStrategy::HybridShard && world_size % 2 == 1 {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let saved = testing::ranks(world_size, by(fsdp(strategy)), |accelerator| {
        let mut training = training(&accelerator)?;
        training.train(&accelerator, 0..2)?;
        accelerator.save_state(folder.path())?;
        let then = training.full_state()?;
        training.train(&accelerator, 2..4)?;
        Ok((then, training.full_state()?))
    })
    .unwrap();
    let resumed = testing::ranks(world_size, by(fsdp(strategy)), |accelerator| {
        let mut training = training(&accelerator)?;
        accelerator.load_state(folder.path())?;
        let then = training.full_state()?;
        training.train(&accelerator, 2..4)?;
        Ok((then, training.full_state()?))
    })
    .unwrap();
    assert_eq!(resumed, saved);
    // Without a run, as other programs read them.
    let alone = Accelerator::builder().cpu(true).build().unwrap();
    let (store, _module) = model(&alone).unwrap();
    load_checkpoint_in_model(&store, folder.path(), &LoadOptions::default()).unwrap();
    let found = values(&store.state_dict().unwrap());
    assert!(found.iter().all(|(name, numbers)| saved[0].0[name] == *numbers), "{found:?}");
}

#[test]
fn state_in_blocks_is_numbers_in_whole_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let save = |state_dict_type| {
        let plugin = FullyShardedDataParallelPlugin {
            state_dict_type: Some(state_dict_type),
            ..fsdp(ShardingStrategy::FullShard)
        };
        testing::ranks(2, by(plugin), |accelerator| {
            let store = ParamStore::new(accelerator.device());
            // The share of a rank is a multiple of a block.
            let linear = Linear::new(store.root(), 128, 128, LinearConfig { bias: false, ..Default::default() })?;
            let model = ModuleFn::new(&store, move |rows: &Tensor| linear.forward(rows));
            let (model, mut optimizer) = accelerator.prepare((model, AdamW8bit::new(&store, 0.1)?))?;
            let rows = Tensor::ones([2, 128], (Kind::Float, accelerator.device()));
            accelerator.backward(&model.forward(&rows)?.sum(None))?;
            optimizer.step()?;
            accelerator.save_state(folder.path().join(state_dict_type.to_string()))
        })
        .unwrap()
        .remove(0)
    };
    let kinds = |folder: std::path::PathBuf| {
        let mut kinds = std::collections::BTreeMap::new();
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if name.starts_with("optimizer") && name.ends_with(".safetensors") {
                let state = accelerate::checkpoint::load_file(&path).unwrap();
                kinds.extend(state.iter().map(|(name, tensor)| (name.to_owned(), (tensor.kind(), tensor.size()))));
            }
        }
        kinds
    };
    let parts = kinds(save(StateDictType::Sharded));
    assert_eq!(parts["exp_avg.weight"], (Kind::Uint8, vec![64 * 128]));
    assert_eq!(parts["exp_avg_scale.weight"], (Kind::Float, vec![32]));
    let whole = kinds(save(StateDictType::Full));
    assert_eq!(whole["exp_avg.weight"], (Kind::Float, vec![128, 128]));
    assert!(!whole.contains_key("exp_avg_scale.weight"));
}

fn zero_3(saves_16bit: bool) -> AcceleratorBuilder {
    let config = format!(
        r#"{{"zero_optimization": {{"stage": 3, "stage3_gather_16bit_weights_on_model_save": {saves_16bit}}},
            "bf16": {{"enabled": true}}, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}}"#
    );
    let plugin = DeepSpeedPlugin { hf_ds_config: Some(config.parse().unwrap()), ..Default::default() };
    Accelerator::builder().deepspeed_plugin(plugin)
}

#[rstest]
#[case::ddp(Accelerator::builder(), true, Kind::Float)]
#[case::full_shard(by(fsdp(ShardingStrategy::FullShard)), false, Kind::Float)]
#[case::shard_grad_op(by(fsdp(ShardingStrategy::ShardGradOp)), false, Kind::Float)]
#[case::no_shard(by(fsdp(ShardingStrategy::NoShard)), true, Kind::Float)]
#[case::zero_3(zero_3(false), false, Kind::Float)]
#[case::zero_3_in_16_bits(zero_3(true), false, Kind::BFloat16)]
fn the_state_dict_of_a_model_is_whole_where_it_is_said_to_be(
    #[case] builder: AcceleratorBuilder,
    #[case] is_on_all_ranks: bool,
    #[case] kind: Kind,
    #[values(1, 2, 4)] world_size: usize,
) {
    let path = tempfile::tempdir().unwrap();
    let path = path.path().join("model.safetensors");
    let states = testing::ranks(world_size, builder, |accelerator| {
        let (store, module) = model(&accelerator)?;
        let expected = values(&store.state_dict()?);
        let model = accelerator.prepare(module)?;
        let state = accelerator.get_state_dict(&model)?;
        accelerator.save(&state, &path)?;
        let kinds: Vec<Kind> = state.iter().map(|(_, tensor)| tensor.kind()).collect();
        Ok((expected, values(&state), kinds))
    })
    .unwrap();
    for (rank, (expected, state, kinds)) in states.iter().enumerate() {
        if rank > 0 && !is_on_all_ranks {
            assert!(state.is_empty(), "rank {rank}: {state:?}");
            continue;
        }
        assert_eq!(state.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
        let tolerance = if kind == Kind::BFloat16 { 1e-2 } else { 0.0 };
        for (name, (shape, numbers)) in expected {
            assert_eq!(state[name].0, *shape, "{name}");
            let differences = numbers.iter().zip(&state[name].1).map(|(one, other)| (one - other).abs());
            assert!(differences.fold(0.0, f64::max) <= tolerance, "{name}");
        }
        assert!(kinds.iter().all(|found| *found == kind || *found == Kind::Int64), "{kinds:?}");
    }
    assert_eq!(values(&load_file(&path).unwrap()), states[0].1);
}
