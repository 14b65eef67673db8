//! Settings of sharded models that do not change what is computed, or change it in one way only.
#![allow(clippy::unwrap_used, clippy::panic)]

use ShardingStrategy::{FullShard, HybridShard, NoShard, OptimizerState, OptimizerStateAndGradients};
use accelerate::nn::{Linear, Module, ModuleFn, ParamStore};
use accelerate::optim::AdamW;
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{
    Accelerator, AcceleratorBuilder, AutoWrapPolicy, FullyShardedDataParallelPlugin, GradientAccumulationPlugin,
    MixedPrecision, OffloadTarget, PrepareModelOptions, Result, ShardingStrategy, testing,
};

const FROZEN: &str = "layers.2.bias";

fn plugin(sharding_strategy: ShardingStrategy) -> FullyShardedDataParallelPlugin {
    let auto_wrap_policy = AutoWrapPolicy::TransformerBasedWrap;
    FullyShardedDataParallelPlugin {
        sharding_strategy: Some(sharding_strategy),
        auto_wrap_policy: Some(auto_wrap_policy),
        ..Default::default()
    }
}

/// Three layers with weights of `kind` that all of its types can hold, moved by `offset`; a bias is frozen.
fn model(kind: Kind, offset: f64) -> Result<(ParamStore, impl Module<Input = Tensor, Output = Tensor>)> {
    let store = ParamStore::with_kind(Device::Cpu, kind);
    let layer = |index: usize| Linear::new(store.root() / "layers" / index, 5, 5, Default::default());
    let layers = [layer(0)?, layer(1)?, layer(2)?];
    for (index, param) in store.parameters().iter().enumerate() {
        let values = Tensor::arange(param.numel() as i64, (Kind::Double, Device::Cpu)) * 0.7 + index as f64;
        let values = (values.sin() * 0.5).to_kind(Kind::BFloat16).to_kind(Kind::Double) + offset;
        param.copy_(&values.reshape(param.shape()))?;
    }
    store.get(FROZEN).unwrap().set_requires_grad(false)?;
    let module = ModuleFn::new(&store, move |input: &Tensor| {
        layers.iter().try_fold(input.shallow_clone(), |x, layer| Ok(layer.forward(&x)?.f_tanh()?))
    });
    Ok((store, module))
}

/// Losses, and each parameter's type and values.
#[derive(Clone, Debug, PartialEq)]
struct Outcome {
    losses: Vec<f64>,
    parameters: Vec<(String, Kind, Vec<f64>)>,
}

/// Some steps on two ranks, on each with weights that are moved by so much.
fn train(builder: AcceleratorBuilder, kind: Kind, offsets: [f64; 2]) -> Vec<Outcome> {
    let runs = testing::ranks(2, builder, |accelerator| {
        let rank = accelerator.process_index();
        let (store, module) = model(kind, offsets[rank])?;
        let (model, mut optimizer) = accelerator.prepare((module, AdamW::new(&store, 1e-3)?))?;
        let mut losses = Vec::new();
        for step in 0..8 {
            let input = (Tensor::arange(10, (Kind::Float, Device::Cpu)) + (rank + 2 * step) as i64).sin();
            let input = input.view([2, 5]).to_kind(kind);
            accelerator.accumulate(&model, || {
                let loss = model.forward(&input)?.f_to_kind(Kind::Float)?.f_square()?.f_mean(None)?;
                losses.push(loss.double_value(&[]));
                accelerator.backward(&loss)?;
                optimizer.step()?;
                optimizer.zero_grad()
            })?;
        }
        let values = |tensor: &Tensor| Vec::<f64>::try_from(tensor.to_kind(Kind::Double).reshape([-1])).unwrap();
        let state = store.state_dict()?;
        let parameters = state.iter().map(|(name, tensor)| (name.to_owned(), tensor.kind(), values(tensor)));
        Ok(Outcome { losses, parameters: parameters.collect() })
    });
    runs.unwrap()
}

/// Steps are smaller than what bfloat16 can tell apart, so that they would be lost in it.
#[test]
fn mixed_precision_trains_weights_of_16_bits_in_float32() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let disk = Some(OffloadTarget::Nvme(folder.path().to_owned()));
    for (strategy, target) in [(FullShard, None), (OptimizerState, None), (HybridShard, None), (FullShard, disk)] {
        for ignored in [&[][..], &["layers.1".to_owned()]] {
            let plugin = FullyShardedDataParallelPlugin {
                ignored_modules: Some(ignored.to_vec()),
                dp_shard_size: (strategy == HybridShard).then_some(1),
                offload_optimizer: target.clone(),
                offload_params: target.clone(),
                ..plugin(strategy)
            };
            let builder = |mixed| Accelerator::builder().mixed_precision(mixed).fsdp_plugin(plugin.clone());
            let wanted = train(builder(MixedPrecision::Bf16), Kind::Float, [0.0; 2]);
            let found = train(builder(MixedPrecision::Bf16), Kind::BFloat16, [0.0; 2]);
            for (found, wanted) in found.iter().zip(&wanted) {
                assert!(!ignored.is_empty() || found.losses == wanted.losses, "{strategy}: {found:?} {wanted:?}");
                for ((name, kind, values), (_, _, wanted)) in found.parameters.iter().zip(&wanted.parameters) {
                    // What is ignored trains in the type that it has.
                    assert!(!ignored.is_empty() || values == wanted, "{name}, {strategy}");
                    let is_kept = name == FROZEN || ignored.iter().any(|module| name.starts_with(module));
                    let expected = if is_kept { Kind::BFloat16 } else { Kind::Float };
                    assert_eq!(*kind, expected, "{name}, {strategy}, {ignored:?}");
                }
            }
            let plain = train(builder(MixedPrecision::No), Kind::BFloat16, [0.0; 2]);
            assert!(plain[0].parameters.iter().all(|(_, kind, _)| *kind == Kind::BFloat16), "as the program made them");
        }
    }
}

#[test]
fn what_is_only_evaluated_stays_in_16_bits() {
    let builder = Accelerator::builder().mixed_precision(MixedPrecision::Bf16).fsdp_plugin(plugin(FullShard));
    let kinds = testing::ranks(2, builder, |accelerator| {
        let (store, module) = model(Kind::BFloat16, 0.0)?;
        let model =
            accelerator.prepare_model(module, PrepareModelOptions { evaluation_mode: true, ..Default::default() })?;
        let input = Tensor::ones([2, 5], (Kind::Float, Device::Cpu));
        let _output = accelerate::tch::no_grad(|| model.forward(&input))?;
        Ok(store.parameters().iter().map(|param| param.local().kind()).collect::<Vec<_>>())
    });
    assert_eq!(kinds.unwrap(), [[Kind::BFloat16; 6]; 2]);
}

#[test]
fn ranks_begin_with_the_weights_of_the_first_unless_they_are_to_keep_their_own() {
    for strategy in [FullShard, OptimizerState] {
        let builder = |sync_module_states| {
            let plugin = FullyShardedDataParallelPlugin { sync_module_states, ..plugin(strategy) };
            Accelerator::builder().fsdp_plugin(plugin)
        };
        let wanted = train(builder(Some(true)), Kind::Float, [0.0, 0.0]);
        assert_eq!(train(builder(Some(true)), Kind::Float, [0.0, 0.25]), wanted, "{strategy}");
        // The model is then made of both.
        let own = train(builder(Some(false)), Kind::Float, [0.0, 0.25]);
        assert_ne!(own, wanted, "{strategy}");
        assert_eq!(own[0].parameters, own[1].parameters, "{strategy}");
    }
}

#[test]
fn synchronising_in_each_micro_batch_gives_the_same_steps() {
    for strategy in [FullShard, OptimizerState, OptimizerStateAndGradients] {
        let run = |sync_each_batch| {
            let accumulation = GradientAccumulationPlugin { num_steps: Some(4), sync_each_batch, ..Default::default() };
            let builder = Accelerator::builder().gradient_accumulation_plugin(accumulation);
            train(builder.fsdp_plugin(plugin(strategy)), Kind::Float, [0.0; 2])
        };
        let (found, wanted) = (run(Some(true)), run(Some(false)));
        for (found, wanted) in found.iter().zip(&wanted) {
            for ((name, _, found), (_, _, wanted)) in found.parameters.iter().zip(&wanted.parameters) {
                let far = found.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(far <= 1e-6, "{name} differs by {far} with {strategy}");
            }
        }
        let start =
            model(Kind::Float, 0.0).unwrap().0.get("layers.0.weight").unwrap().get().unwrap().double_value(&[0, 0]);
        let end = wanted[0].parameters.iter().find(|(name, ..)| name == "layers.0.weight").unwrap().2[0];
        assert!((start - end).abs() > 1e-4, "it has trained: {start} {end}");
    }
}

#[test]
fn every_prepared_model_has_a_plan() {
    for strategy in [None, Some(NoShard), Some(FullShard)] {
        let builder = Accelerator::builder();
        let builder = strategy.map_or(builder.clone(), |strategy| builder.fsdp_plugin(plugin(strategy)));
        let plans = testing::ranks(2, builder, |accelerator| {
            assert!(accelerator.plan().is_empty());
            let _models = accelerator.prepare((model(Kind::Float, 0.0)?.1, model(Kind::Double, 0.0)?.1))?;
            Ok(accelerator.plan())
        });
        for plans in plans.unwrap() {
            let [first, second] = &*plans else { panic!("{plans}") };
            let printed = plans.to_string();
            assert!(
                printed.contains(&format!("model 1: {second}")) && printed.starts_with("model 0: plan"),
                "{printed}"
            );
            assert_eq!((first.world_size, first.inventory.parameters.len()), (2, 6), "{strategy:?}");
            let is_sharded = strategy == Some(FullShard);
            assert_eq!((first.units.is_empty(), first.buckets.is_empty()), (!is_sharded, is_sharded), "{strategy:?}");
            assert_eq!(second.inventory.parameters[5].dtype, "float64");
            assert_eq!(second.inventory.total_bytes(), 2 * first.inventory.total_bytes());
        }
    }
}
