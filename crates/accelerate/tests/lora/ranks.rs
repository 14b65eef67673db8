//! Adapters on several ranks: the same losses however the model is kept, and base weights that stay to the bit.

use super::model::{Model, case};
use accelerate::lora::{LoadAdapterOptions, LoraConfig, PeftModel, get_peft_model};
use accelerate::nn::{Module, StateDict};
use accelerate::optim::{AcceleratedOptimizer, AdamW};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{
    Accelerator, AcceleratorBuilder, AutoWrapPolicy, FullyShardedDataParallelPlugin, MixedPrecision, OffloadTarget,
    PreparedModel, Result, ShardingStrategy, testing,
};
use std::path::Path;

const ROWS: i64 = 12;
const STEPS: i64 = 4;

/// How ranks keep the model.
#[derive(Clone, Debug)]
pub(crate) enum Kept {
    Replicated,
    Sharded(ShardingStrategy),
    /// Shards of all parameters on a disk between uses.
    OnDisk(ShardingStrategy, std::path::PathBuf),
    /// In the memory of the host, with the state of the optimizer.
    OnHost,
}

impl Kept {
    pub(crate) fn builder(&self) -> AcceleratorBuilder {
        let plugin = |strategy: ShardingStrategy| FullyShardedDataParallelPlugin {
            sharding_strategy: Some(strategy),
            auto_wrap_policy: Some(AutoWrapPolicy::TransformerBasedWrap),
            ..Default::default()
        };
        let plugin = match self {
            Self::Replicated => return Accelerator::builder(),
            Self::Sharded(strategy) => plugin(*strategy),
            Self::OnDisk(strategy, folder) => {
                let target = Some(OffloadTarget::Nvme(folder.clone()));
                FullyShardedDataParallelPlugin {
                    offload_optimizer: target.clone(),
                    offload_params: target,
                    ..plugin(*strategy)
                }
            }
            Self::OnHost => FullyShardedDataParallelPlugin {
                offload_optimizer: Some(OffloadTarget::Cpu),
                offload_params: Some(OffloadTarget::Cpu),
                ..plugin(ShardingStrategy::FullShard)
            },
        };
        Accelerator::builder().fsdp_plugin(plugin)
    }
}

/// This rank's rows of a batch of all ranks.
pub(crate) fn batch(accelerator: &Accelerator, step: i64) -> (Tensor, Tensor) {
    let own = ROWS / accelerator.num_processes() as i64;
    let first = own * accelerator.process_index() as i64;
    let ids = (Tensor::arange(ROWS * 5, (Kind::Int64, Device::Cpu)) * 7 + step * 3).remainder(11).reshape([ROWS, 5]);
    let labels = (Tensor::arange(ROWS, (Kind::Int64, Device::Cpu)) + step).remainder(3);
    (ids.narrow(0, first, own), labels.narrow(0, first, own))
}

/// Losses of steps with batch after batch, which `batch` numbers.
pub(crate) fn losses<M: Module<Input = Tensor, Output = Tensor>>(
    accelerator: &Accelerator,
    model: &PreparedModel<M>,
    optimizer: &mut AcceleratedOptimizer<AdamW>,
    numbers: impl Iterator<Item = i64>,
) -> Result<Vec<f64>> {
    let mut losses = Vec::new();
    for number in numbers {
        let (ids, labels) = batch(accelerator, number);
        let loss = model.forward(&ids)?.cross_entropy_for_logits(&labels);
        losses.push(loss.double_value(&[]));
        accelerator.backward(&loss)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
    }
    Ok(losses)
}

/// What a run gave.
struct Outcome {
    losses: Vec<f64>,
    adapter: StateDict,
    /// Parameters of the model that have changed.
    changed: Vec<String>,
    /// Names of the state of the optimizer.
    state: Vec<String>,
}

fn train(accelerator: &Accelerator, config: LoraConfig, checkpointed: bool, save: Option<&Path>) -> Result<Outcome> {
    let mut model = Model::new(accelerator.device())?;
    model.checkpointed = checkpointed;
    let store = model.store.clone();
    let before: Vec<(String, Tensor)> =
        store.named_parameters().iter().map(|(name, param)| (name.clone(), param.local().copy())).collect();
    let peft = get_peft_model(&store, config)?;
    // All numbers of the adapter are known, whatever the seed.
    for (index, (_, param)) in store.named_parameters().iter().enumerate() {
        if param.name().contains("lora_") {
            param.copy_(&(super::model::formula(&param.shape(), index as f64) * 0.3))?;
        }
    }
    let optimizer = AdamW::new(&store, 0.05)?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let (ids, labels) = batch(accelerator, step);
        let loss = model.forward(&ids)?.cross_entropy_for_logits(&labels);
        losses.push(loss.double_value(&[]));
        accelerator.backward(&loss)?;
        for param in store.parameters().iter().filter(|param| !param.requires_grad()) {
            assert!(param.grad().is_none(), "{}", param.name());
        }
        optimizer.step()?;
        optimizer.zero_grad()?;
    }
    if let Some(folder) = save {
        accelerator.save_adapter(&peft, folder, &Default::default())?;
    }
    let after = store.state_dict()?;
    let changed = before.iter().filter(|(name, values)| after.get(name).unwrap() != values);
    let changed = changed.map(|(name, _)| name.clone()).collect();
    let adapter = peft.adapter_state_dict("default")?;
    let adapter = adapter.into_iter().map(|(name, tensor)| (name, tensor.copy())).collect();
    let state = accelerator.state_dict()?["optimizer"].tensors.keys().cloned().collect();
    Ok(Outcome { losses, adapter, changed, state })
}

/// The mean losses of all ranks, and what the first one found.
fn run(kept: &Kept, world_size: usize, config: &LoraConfig, checkpointed: bool) -> (Vec<f64>, Outcome) {
    run_with(kept.builder(), world_size, config, checkpointed, None)
}

fn run_with(
    builder: AcceleratorBuilder,
    world_size: usize,
    config: &LoraConfig,
    checkpointed: bool,
    save: Option<&Path>,
) -> (Vec<f64>, Outcome) {
    let mut outcomes =
        testing::ranks(world_size, builder, |accelerator| train(&accelerator, config.clone(), checkpointed, save))
            .unwrap();
    let mean = |step: usize| outcomes.iter().map(|own| own.losses[step]).sum::<f64>() / world_size as f64;
    let losses = (0..STEPS as usize).map(mean).collect();
    (losses, outcomes.swap_remove(0))
}

pub(crate) fn apart(found: &[f64], wanted: &[f64]) -> f64 {
    found.iter().zip(wanted).map(|(found, wanted)| (found - wanted).abs()).fold(0.0, f64::max)
}

#[test]
fn losses_are_the_same_however_the_model_is_kept() {
    use ShardingStrategy::{FullShard, ShardGradOp};
    let folder = tempfile::tempdir().unwrap();
    let on_disk = |strategy| Kept::OnDisk(strategy, folder.path().to_owned());
    for name in ["list", "embedding", "modules_to_save", "bias_all"] {
        let config = case(name);
        let (wanted, first) = run(&Kept::Replicated, 1, &config, false);
        assert!(wanted[0] - wanted[STEPS as usize - 1] > 0.05, "{name}: it learns: {wanted:?}");
        for kept in
            [Kept::Replicated, Kept::Sharded(FullShard), Kept::Sharded(ShardGradOp), on_disk(FullShard), Kept::OnHost]
        {
            for world_size in 1..=3 {
                for &checkpointed in if name == "list" { &[false, true][..] } else { &[false] } {
                    let (losses, outcome) = run(&kept, world_size, &config, checkpointed);
                    let context = format!("{name}: {kept:?} on {world_size}, checkpointed: {checkpointed}");
                    assert!(apart(&losses, &wanted) < 1e-5, "{context}: {losses:?} and not {wanted:?}");
                    assert_eq!(outcome.changed, first.changed, "{context}");
                    let is_bias = |name: &String| name.ends_with("bias");
                    assert!(name == "bias_all" && outcome.changed.iter().all(is_bias) || outcome.changed.is_empty());
                    assert_eq!(outcome.adapter.len(), first.adapter.len(), "{context}");
                    for (key, tensor) in first.adapter.iter() {
                        let found = outcome.adapter.get(key).unwrap();
                        assert!(found.allclose(tensor, 1e-4, 1e-4, false), "{context}: {key}");
                    }
                    let is_trained = |name: &String| {
                        name.contains("lora_")
                            || name.contains("modules_to_save")
                            || first.changed.iter().any(|own| name.ends_with(own.as_str()))
                    };
                    assert!(!outcome.state.is_empty() && outcome.state.iter().all(is_trained), "{:?}", outcome.state);
                }
            }
        }
    }
}

#[test]
fn frozen_and_trained_parameters_are_in_units_of_their_own() {
    let units = testing::ranks(2, Kept::Sharded(ShardingStrategy::FullShard).builder(), |accelerator| {
        let model = Model::new(accelerator.device())?;
        get_peft_model(&model.store, case("list"))?;
        let _model = accelerator.prepare(model)?;
        let plan = accelerator.plan();
        let unit = |unit: &accelerate_core::plan::Unit| (unit.path.clone(), unit.requires_grad, unit.parameters.len());
        let mut units: Vec<_> = plan[0].units.iter().map(unit).collect();
        units.sort();
        Ok(units)
    });
    let of_layer = |number: usize| {
        let path = format!("layers.{number}");
        [(path.clone(), false, 5), (path, true, 4)]
    };
    let wanted: Vec<_> = [(String::new(), false, 3)].into_iter().chain(of_layer(0)).chain(of_layer(1)).collect();
    for units in units.unwrap() {
        assert_eq!(units, wanted);
    }
}

#[test]
fn in_mixed_precision_the_base_stays_as_well() {
    for kept in [Kept::Replicated, Kept::Sharded(ShardingStrategy::FullShard)] {
        let builder = || kept.builder().mixed_precision(MixedPrecision::Bf16);
        let (wanted, _) = run_with(builder(), 1, &case("list"), false, None);
        for checkpointed in [false, true] {
            let (losses, outcome) = run_with(builder(), 2, &case("list"), checkpointed, None);
            assert!(apart(&losses, &wanted) < 2e-2, "{kept:?}: {losses:?} and not {wanted:?}");
            assert_eq!(outcome.changed, [""; 0]);
        }
    }
}

#[test]
fn adapters_of_sharded_models_are_saved_whole_and_loaded_into_shards() {
    let folder = tempfile::tempdir().unwrap();
    let kept = Kept::Sharded(ShardingStrategy::FullShard);
    let (_, trained) = run_with(kept.builder(), 3, &case("list"), false, Some(folder.path()));
    let loaded = testing::ranks(2, kept.builder(), |accelerator| {
        let model = Model::new(accelerator.device())?;
        let peft = get_peft_model(&model.store, case("list"))?;
        let _model = accelerator.prepare(model)?;
        peft.load_adapter(folder.path(), "default", LoadAdapterOptions { is_trainable: true, ..Default::default() })?;
        assert!(peft.merge_adapter(None).unwrap_err().to_string().contains("sharded over ranks"));
        let state = peft.adapter_state_dict("default")?;
        Ok(state.into_iter().map(|(name, tensor)| (name, tensor.copy())).collect::<StateDict>())
    });
    let alone = Model::new(Device::Cpu).unwrap();
    let alone = PeftModel::from_pretrained(&alone.store, folder.path(), Default::default()).unwrap();
    let alone = alone.adapter_state_dict("default").unwrap();
    for found in loaded.unwrap().iter().chain([&alone]) {
        assert_eq!(found.len(), 8);
        for (key, tensor) in trained.adapter.iter() {
            assert_eq!(found.get(key), Some(tensor), "{key}");
        }
    }
}
