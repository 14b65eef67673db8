//! Sharded models whose state or parameters are on a disk between uses: the same numbers to the bit.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{Embedding, Init, Linear, Module, ModuleFn, ParamStore, StateDict};
use accelerate::optim::{AdamW, DummyOptim, Lion, Optimizer, OptimizerState, Sgd};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{
    Accelerator, AcceleratorBuilder, AutoWrapPolicy, DeepSpeedPlugin, DeepSpeedSource, FullyShardedDataParallelPlugin,
    MixedPrecision, OffloadTarget, Result, ShardingStrategy, testing,
};
use accelerate_core::config::FullyShardedSettings;
use std::path::Path;
use tempfile::TempDir;

/// Odd sizes, a tied table, a frozen weight, and a scale that is a single number: on four ranks some have nothing of it.
fn model(store: &ParamStore) -> Result<impl Module<Input = Tensor, Output = Tensor> + use<>> {
    let root = store.root();
    let embed = Embedding::new(&root / "embed", 11, 5, Default::default())?;
    let layer = |index: usize| Linear::new(&root / "blocks" / index, 5, 5, Default::default());
    let blocks = [layer(0)?, layer(1)?, layer(2)?];
    let scale = root.param("scale", ([], Init::Ones))?;
    let head = (&root / "head").alias("weight", &embed.weight)?;
    for (index, param) in store.parameters().iter().enumerate() {
        let values = Tensor::arange(param.numel() as i64, (Kind::Double, Device::Cpu)) * 0.7 + index as f64;
        param.copy_(&(values.sin() * 0.5).reshape(param.shape()))?;
    }
    store.get("blocks.1.weight").unwrap().set_requires_grad(false)?;
    Ok(ModuleFn::new(store, move |tokens: &Tensor| {
        let mut x = embed.forward(tokens)?;
        for block in &blocks {
            x = block.forward(&x)?.f_gelu("none")? + x * scale.get()?;
        }
        Ok(x.f_linear(&head.get()?, None::<&Tensor>)?)
    }))
}

/// What a run gave.
struct Outcome {
    losses: Vec<f64>,
    weights: StateDict,
    state: OptimizerState,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    world_size: usize,
    accumulation: usize,
    max_norm: Option<f64>,
    precision: MixedPrecision,
}

const CASE: Case = Case { world_size: 2, accumulation: 1, max_norm: None, precision: MixedPrecision::No };

fn train(accelerator: &Accelerator, case: Case) -> Result<Outcome> {
    let store = ParamStore::new(accelerator.device());
    let module = model(&store)?;
    let optimizer = AdamW::new(&store, 0.02)?;
    let (model, mut optimizer) = accelerator.prepare((module, optimizer))?;
    let mut losses = Vec::new();
    let rank = accelerator.process_index() as i64;
    for index in 0..3 * case.accumulation as i64 {
        accelerator.accumulate(&model, || {
            let tokens = (Tensor::arange(6, (Kind::Int64, Device::Cpu)) * 3 + 2 * rank + index).remainder(11);
            let loss = model.forward(&tokens)?.cross_entropy_for_logits(&((tokens + 1).remainder(11)));
            losses.push(loss.double_value(&[]));
            accelerator.backward(&loss)?;
            if let Some(max_norm) = case.max_norm {
                optimizer.clip_step_and_zero_grad(max_norm).map(drop)
            } else {
                optimizer.step()?;
                optimizer.zero_grad()
            }
        })?;
    }
    Ok(Outcome { losses, weights: store.state_dict()?, state: optimizer.full_state_dict()? })
}

fn run(case: Case, plugin: FullyShardedDataParallelPlugin) -> Vec<Outcome> {
    let builder = Accelerator::builder()
        .gradient_accumulation_steps(case.accumulation)
        .mixed_precision(case.precision)
        .fsdp_plugin(plugin);
    testing::ranks(case.world_size, builder, |accelerator| train(&accelerator, case)).unwrap()
}

fn sharded(sharding_strategy: ShardingStrategy) -> FullyShardedDataParallelPlugin {
    let auto_wrap_policy = AutoWrapPolicy::TransformerBasedWrap;
    FullyShardedDataParallelPlugin {
        sharding_strategy: Some(sharding_strategy),
        auto_wrap_policy: Some(auto_wrap_policy),
        ..Default::default()
    }
}

fn nvme(folder: &TempDir) -> Option<OffloadTarget> {
    Some(OffloadTarget::Nvme(folder.path().to_owned()))
}

fn assert_same(found: &[Outcome], wanted: &[Outcome], context: &str) {
    for (found, wanted) in found.iter().zip(wanted) {
        assert_eq!(found.losses, wanted.losses, "{context}");
        for ((name, found), (_, wanted)) in found.weights.iter().zip(wanted.weights.iter()) {
            assert!(found.equal(wanted), "{name}: {context}");
        }
        assert_eq!(found.state.tensors.len(), wanted.state.tensors.len(), "{context}");
        for (name, found) in &found.state.tensors {
            assert!(found.equal(&wanted.state.tensors[name]), "{name}: {context}");
        }
    }
}

#[test]
fn training_over_a_disk_is_training_in_memory() {
    use ShardingStrategy::{FullShard, OptimizerState, OptimizerStateAndGradients, ShardGradOp};
    let folder = tempfile::tempdir().unwrap();
    for world_size in 1..=4 {
        for strategy in [FullShard, ShardGradOp, OptimizerStateAndGradients, OptimizerState] {
            let case = Case { world_size, ..CASE };
            let plugin = sharded(strategy);
            let wanted = run(case, plugin.clone());
            let plugin = FullyShardedDataParallelPlugin { offload_optimizer: nvme(&folder), ..plugin };
            assert_same(&run(case, plugin.clone()), &wanted, &format!("state of {strategy} on {world_size}"));
            if !FullyShardedSettings::from(plugin.clone()).keeps_full_parameters() {
                let plugin = FullyShardedDataParallelPlugin { offload_params: nvme(&folder), ..plugin };
                assert_same(&run(case, plugin), &wanted, &format!("parameters of {strategy} on {world_size}"));
            }
        }
    }
    assert_eq!(folder.path().read_dir().unwrap().count(), 0, "nothing is left on the disk");
}

#[test]
fn with_accumulation_clipping_precision_and_replicas() {
    let folder = tempfile::tempdir().unwrap();
    let cases = [
        (Case { accumulation: 2, ..CASE }, sharded(ShardingStrategy::FullShard)),
        (Case { max_norm: Some(0.3), world_size: 3, ..CASE }, sharded(ShardingStrategy::FullShard)),
        (Case { max_norm: Some(0.3), world_size: 1, ..CASE }, sharded(ShardingStrategy::FullShard)),
        (Case { precision: MixedPrecision::Bf16, ..CASE }, sharded(ShardingStrategy::FullShard)),
        (Case { precision: MixedPrecision::Fp16, ..CASE }, sharded(ShardingStrategy::ShardGradOp)),
        (
            Case { world_size: 4, ..CASE },
            FullyShardedDataParallelPlugin { dp_shard_size: Some(2), ..sharded(ShardingStrategy::HybridShard) },
        ),
        (
            Case { world_size: 2, ..CASE },
            FullyShardedDataParallelPlugin { dp_shard_size: Some(1), ..sharded(ShardingStrategy::HybridShard) },
        ),
        (CASE, FullyShardedDataParallelPlugin { forward_prefetch: Some(true), ..sharded(ShardingStrategy::FullShard) }),
        (
            CASE,
            FullyShardedDataParallelPlugin {
                ignored_modules: Some(vec!["blocks.2".into()]),
                ..sharded(ShardingStrategy::FullShard)
            },
        ),
    ];
    for (case, plugin) in cases {
        let wanted = run(case, plugin.clone());
        let (offload_optimizer, offload_params) = (nvme(&folder), nvme(&folder));
        let offloaded = FullyShardedDataParallelPlugin { offload_optimizer, offload_params, ..plugin.clone() };
        assert_same(&run(case, offloaded), &wanted, &format!("{case:?}, {plugin:?}"));
        // On a CPU the host's memory is where everything is.
        let on_host = FullyShardedDataParallelPlugin { cpu_offload: Some(true), ..plugin.clone() };
        assert_same(&run(case, on_host), &wanted, &format!("{case:?}, {plugin:?}"));
    }
}

fn offloading(folder: &TempDir) -> AcceleratorBuilder {
    let (offload_optimizer, offload_params) = (nvme(folder), nvme(folder));
    let plugin = sharded(ShardingStrategy::FullShard);
    Accelerator::builder().fsdp_plugin(FullyShardedDataParallelPlugin { offload_optimizer, offload_params, ..plugin })
}

#[test]
fn parts_on_a_disk_take_no_memory_and_say_so() {
    let folder = tempfile::tempdir().unwrap();
    testing::ranks(2, offloading(&folder), |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let model = accelerator.prepare(model(&store)?)?;
        let weight = store.get("blocks.0.weight").unwrap();
        let has_memory = |weight: &accelerate::nn::Param| weight.local().f_neg().is_ok();
        assert!(!has_memory(&weight) && weight.kind() == Kind::Float && weight.requires_grad());
        let tokens = Tensor::from_slice(&[1i64, 2, 3]);
        accelerator.backward(&model.forward(&tokens)?.sum(None))?;
        assert!(!has_memory(&weight) && weight.grad().is_some());
        // What reads and writes parts brings them in for as long.
        let parts = store.sharded_state_dict()?;
        weight.copy_(&Tensor::ones([5, 5], (Kind::Float, Device::Cpu)))?;
        assert_eq!(store.sharded_state_dict()?.tensors["blocks.0.weight"].double_value(&[0]), 1.0);
        assert!(!parts.tensors["blocks.0.weight"].equal(&store.sharded_state_dict()?.tensors["blocks.0.weight"]));
        assert!(!has_memory(&weight));
        Ok(())
    })
    .unwrap();
}

#[test]
fn what_was_read_ahead_is_not_used_once_it_is_old() {
    let folder = tempfile::tempdir().unwrap();
    testing::ranks(2, offloading(&folder), |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let blocks = store.root() / "blocks";
        let params = [0, 1, 2].map(|index| (&blocks / index).param("weight", ([3], Init::Ones)));
        let [first, second, third] = params;
        let params = [first?, second?, third?];
        let module = ModuleFn::new(&store, {
            let params = params.clone();
            move |stops: &bool| {
                let product = params[0].get().unwrap();
                match stops {
                    true => Err(accelerate::Error::other("half way")),
                    false => Ok(product * params[1].get()? * params[2].get()?),
                }
            }
        });
        let model = accelerator.prepare(module)?;
        for _ in 0..2 {
            accelerator.backward(&model.forward(&false)?.sum(None))?;
        }
        assert!(model.forward(&true).is_err(), "the second part is being read now");
        params[1].copy_(&Tensor::from(5f32))?;
        assert_eq!(model.forward(&false)?.double_value(&[0]), 5.0);
        Ok(())
    })
    .unwrap();
}

#[test]
fn files_are_those_of_a_model_in_memory() {
    let (disk, saved, other) =
        (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let save = |builder: AcceleratorBuilder, folder: &Path| {
        testing::ranks(3, builder, |accelerator| {
            let store = ParamStore::new(accelerator.device());
            let model = accelerator.prepare(model(&store)?)?;
            accelerator.save_model(&model, folder, &Default::default())
        })
        .unwrap();
    };
    save(offloading(&disk), saved.path());
    let plugin = sharded(ShardingStrategy::FullShard);
    save(Accelerator::builder().fsdp_plugin(plugin), other.path());
    let names = |folder: &TempDir| {
        let mut names: Vec<_> = folder.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&saved), names(&other));
    for name in names(&saved) {
        assert_eq!(std::fs::read(saved.path().join(&name)).unwrap(), std::fs::read(other.path().join(&name)).unwrap());
    }
    // And back into parts on a disk, on another number of ranks.
    testing::ranks(2, offloading(&disk), |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let _model = accelerator.prepare(model(&store)?)?;
        let wanted = store.state_dict()?;
        for param in store.parameters() {
            param.copy_(&param.get()?.f_zeros_like()?)?;
        }
        accelerator.load_checkpoint_in_model(&store, saved.path())?;
        for ((name, found), (_, wanted)) in store.state_dict()?.iter().zip(wanted.iter()) {
            assert!(found.equal(wanted), "{name}");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn models_without_memory_go_to_the_disk_part_by_part() {
    let folder = tempfile::tempdir().unwrap();
    testing::ranks(3, offloading(&folder), |accelerator| {
        let store = ParamStore::init_empty_weights(accelerator.device());
        let blocks = store.root() / "blocks";
        let param = |index: usize, value| (&blocks / index).param("weight", ([5, 4], Init::Constant(value)));
        let params = [param(0, 0.5)?, param(1, -2.0)?];
        let module = ModuleFn::new(&store, move |x: &Tensor| Ok(x.f_matmul(&params[0].get()?)? * params[1].get()?));
        let _model = accelerator.prepare(module)?;
        for (tensor, value) in store.state_dict()?.iter().map(|(_, tensor)| tensor).zip([0.5, -2.0]) {
            assert_eq!(tensor, &Tensor::full([5, 4], value, (Kind::Float, Device::Cpu)));
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_configuration_of_deep_speed_trains_over_a_disk() {
    let folder = tempfile::tempdir().unwrap();
    let losses = |device: &str| {
        let nvme_path = folder.path().to_str().unwrap();
        let section = serde_json::json!({"device": device, "nvme_path": nvme_path});
        let config = serde_json::json!({
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
            "zero_optimization": {"stage": 3, "offload_optimizer": section, "offload_param": section},
        });
        let plugin = DeepSpeedPlugin {
            hf_ds_config: Some(config.to_string().parse::<DeepSpeedSource>().unwrap()),
            ..Default::default()
        };
        testing::ranks(2, Accelerator::builder().deepspeed_plugin(plugin), |accelerator| {
            let store = ParamStore::new(accelerator.device());
            let (model, mut optimizer) = accelerator.prepare((model(&store)?, DummyOptim::new(&store)))?;
            assert_eq!(optimizer.is_state_offloaded(), device == "nvme");
            let mut losses = Vec::new();
            for _ in 0..3 {
                let loss = model.forward(&Tensor::from_slice(&[1i64, 2, 3]))?.f_square()?.mean(None);
                losses.push(loss.double_value(&[]));
                accelerator.backward(&loss)?;
                optimizer.step()?;
                optimizer.zero_grad()?;
            }
            Ok(losses)
        })
        .unwrap()
    };
    assert_eq!(losses("nvme"), losses("none"));
}

#[test]
fn one_rank_without_its_disk_stops_all_of_them() {
    let folder = tempfile::tempdir().unwrap();
    let builder = Accelerator::builder().fsdp_plugin(sharded(ShardingStrategy::FullShard));
    let outcomes = testing::ranks(3, builder, |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let module = model(&store)?;
        let mut optimizer = Lion::new(&store, 0.02)?;
        let is_without = accelerator.process_index() == 1;
        let own = if is_without { folder.path().join("not-mounted") } else { folder.path().to_owned() };
        optimizer.offload_state(&OffloadTarget::Nvme(own))?;
        let (model, mut optimizer) = accelerator.prepare((module, optimizer))?;
        accelerator.backward(&model.forward(&Tensor::from_slice(&[1i64, 2, 3]))?.sum(None))?;
        Ok(optimizer.step().unwrap_err().to_string())
    })
    .unwrap();
    for (rank, text) in outcomes.iter().enumerate() {
        assert!(text.contains("not-mounted"), "rank {rank}: {text}");
        assert_eq!(text.contains("failed on rank 1"), rank != 1, "rank {rank}: {text}");
    }
}

#[test]
fn what_cannot_be_offloaded_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    testing::ranks(1, offloading(&folder), |accelerator| {
        let store = ParamStore::new(accelerator.device());
        store.root().param("weight", ([2], Init::Ones))?;
        let error = accelerator.prepare(Sgd::new(&store, 0.1)?).unwrap_err().to_string();
        assert!(error.contains("Sgd") && error.contains("AdamW"), "{error}");
        Ok(())
    })
    .unwrap();
    let missing = OffloadTarget::Nvme(folder.path().join("not-mounted"));
    let (offload_optimizer, offload_params) = (Some(missing.clone()), Some(missing));
    let plugin =
        FullyShardedDataParallelPlugin { offload_optimizer, offload_params, ..sharded(ShardingStrategy::FullShard) };
    let texts = testing::ranks(2, Accelerator::builder().fsdp_plugin(plugin), |accelerator| {
        let store = ParamStore::new(accelerator.device());
        Ok(accelerator.prepare(model(&store)?).err().unwrap().to_string())
    })
    .unwrap();
    assert!(texts.iter().all(|text| text.contains("not-mounted")), "{texts:?}");
}
