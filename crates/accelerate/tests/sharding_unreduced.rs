//! Gradients of sharded models that ranks have not reduced yet, and passes that end in an unusual way: as without sharding.
#![allow(clippy::unwrap_used, clippy::panic)]

use ShardingStrategy::{FullShard, HybridShard, OptimizerState, OptimizerStateAndGradients, ShardGradOp};
use accelerate::data::{DataLoader, TensorDataset};
use accelerate::nn::{Linear, Module, ModuleFn, ParamStore};
use accelerate::optim::{AdamW, Sgd};
use accelerate::tch::{self, Device, Kind, Tensor};
use accelerate::{
    Accelerator, AcceleratorBuilder, AutoWrapPolicy, FullyShardedDataParallelPlugin, Result, ShardingStrategy, testing,
};
use std::panic::{AssertUnwindSafe, catch_unwind};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn plugin(sharding_strategy: ShardingStrategy) -> FullyShardedDataParallelPlugin {
    FullyShardedDataParallelPlugin {
        sharding_strategy: Some(sharding_strategy),
        auto_wrap_policy: Some(AutoWrapPolicy::TransformerBasedWrap),
        dp_shard_size: (sharding_strategy == HybridShard).then_some(1),
        ..Default::default()
    }
}

/// Two layers; `watch` sees what is between them.
fn model(
    width: i64,
    watch: impl Fn() + Send + Sync + 'static,
) -> Result<(ParamStore, impl Module<Input = Tensor, Output = Tensor>)> {
    let store = ParamStore::new(Device::Cpu);
    let layer = |index: usize| Linear::new(store.root() / "layers" / index, width, width, Default::default());
    let (first, second) = (layer(0)?, layer(1)?);
    for (index, param) in store.parameters().iter().enumerate() {
        let values = Tensor::arange(param.numel() as i64, (Kind::Double, Device::Cpu)) * 0.7 + index as f64;
        param.copy_(&(values.sin() * 0.3).reshape(param.shape()))?;
    }
    let module = ModuleFn::new(&store, move |input: &Tensor| {
        let hidden = first.forward(input)?.f_tanh()?;
        watch();
        second.forward(&hidden)
    });
    Ok((store, module))
}

fn input(accelerator: &Accelerator, number: i64) -> Tensor {
    (Tensor::arange(10, FLOAT) + (3 * number + accelerator.process_index() as i64)).sin().view([2, 5])
}

fn loss(output: &Tensor) -> Result<Tensor> {
    Ok(output.f_square()?.f_mean(None)?)
}

fn values(store: &ParamStore) -> Result<Vec<f64>> {
    let flat = |tensor: &Tensor| Vec::<f64>::try_from(tensor.to_kind(Kind::Double).reshape([-1])).unwrap();
    Ok(store.state_dict()?.iter().flat_map(|(_, tensor)| flat(tensor)).collect())
}

/// `body` gives the same on every number of ranks with each strategy as without sharding.
fn assert_as_without_sharding(
    builder: &AcceleratorBuilder,
    body: impl Fn(&Accelerator, bool) -> Result<Vec<f64>> + Sync,
) {
    for world_size in [1, 2, 3] {
        let run = |strategy: Option<ShardingStrategy>| {
            let builder = strategy.map_or(builder.clone(), |strategy| builder.clone().fsdp_plugin(plugin(strategy)));
            testing::ranks(world_size, builder, |accelerator| body(&accelerator, strategy.is_some())).unwrap()
        };
        let wanted = run(None);
        for strategy in [FullShard, ShardGradOp, OptimizerState, OptimizerStateAndGradients, HybridShard] {
            for (found, wanted) in run(Some(strategy)).iter().zip(&wanted) {
                let far = found.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(far <= 1e-6, "{strategy} on {world_size} ranks is {far} off");
            }
        }
    }
}

#[test]
fn a_window_that_the_data_cut_short_counts_what_it_has() {
    let builder = Accelerator::builder().gradient_accumulation_steps(4);
    assert_as_without_sharding(&builder, |accelerator, _| {
        let (store, module) = model(5, || ())?;
        let rows = (Tensor::arange(6 * 2 * accelerator.num_processes() as i64 * 5, FLOAT) * 0.3).sin().view([-1, 5]);
        let loader = DataLoader::builder(TensorDataset::new(rows)?).batch_size(2).build()?;
        let (model, mut optimizer, loader) = accelerator.prepare((module, Sgd::new(&store, 0.5)?, loader))?;
        // Six batches each time: a window of four, and one of two.
        for _ in 0..2 {
            for batch in loader.iter()? {
                let batch = batch?;
                accelerator.accumulate(&model, || {
                    accelerator.backward(&loss(&model.forward(&batch)?)?)?;
                    optimizer.step()?;
                    optimizer.zero_grad()
                })?;
            }
        }
        values(&store)
    });
}

#[test]
fn what_is_dropped_is_not_reduced() {
    assert_as_without_sharding(&Accelerator::builder(), |accelerator, _| {
        let (store, module) = model(5, || ())?;
        let (model, mut optimizer) = accelerator.prepare((module, Sgd::new(&store, 0.5)?))?;
        for number in 0..3 {
            accelerator.no_sync(&model, || {
                accelerator.backward(&(loss(&model.forward(&input(accelerator, number))?)? * 100.0))
            })?;
            optimizer.zero_grad()?;
            accelerator.backward(&loss(&model.forward(&input(accelerator, number + 10))?)?)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
        }
        values(&store)
    });
}

#[test]
fn clipping_sees_gradients_that_no_backward_pass_has_reduced() {
    for way in ["by norm", "by norm at once", "by value"] {
        assert_as_without_sharding(&Accelerator::builder(), |accelerator, is_sharded| {
            let (store, module) = model(5, || ())?;
            let (model, mut optimizer) = accelerator.prepare((module, Sgd::new(&store, 0.5)?))?;
            let mut norms = Vec::new();
            for number in 0..3 {
                let backward = |part: i64| {
                    let output = model.forward(&input(accelerator, 10 * number + part))?;
                    accelerator.backward(&loss(&output)?)
                };
                accelerator.no_sync(&model, || backward(0))?;
                // Replicas have nobody who reduces later.
                if is_sharded {
                    accelerator.no_sync(&model, || backward(1))?
                } else {
                    backward(1)?
                }
                if way == "by norm at once" {
                    norms.push(optimizer.clip_step_and_zero_grad(0.05)?.unwrap().double_value(&[]));
                    continue;
                }
                match way {
                    "by norm" => norms.push(accelerator.clip_grad_norm_(&model, 0.05)?.double_value(&[])),
                    _ => accelerator.clip_grad_value_(&model, 0.01)?,
                }
                optimizer.step()?;
                optimizer.zero_grad()?;
            }
            assert!(norms.iter().all(|norm| *norm > 0.05), "{norms:?}");
            Ok([norms, values(&store)?].concat())
        });
    }
}

#[test]
fn a_graph_keeps_the_values_that_it_was_made_with() {
    let gradients = |changes: bool| {
        testing::ranks(2, Accelerator::builder().fsdp_plugin(plugin(ShardGradOp)), |accelerator| {
            let (store, module) = model(5, || ())?;
            let (model, mut optimizer) = accelerator.prepare((module, Sgd::new(&store, 0.5)?))?;
            accelerator.backward(&loss(&model.forward(&input(&accelerator, 0))?)?)?;
            let late = loss(&model.forward(&input(&accelerator, 1))?)?;
            if changes {
                optimizer.step()?;
                let _state = store.state_dict()?;
            }
            optimizer.zero_grad()?;
            accelerator.backward(&late)?;
            let own = |grad: Tensor| Vec::<f64>::try_from(grad.to_kind(Kind::Double).reshape([-1])).unwrap();
            Ok(store.parameters().iter().flat_map(|param| own(param.grad().unwrap())).collect::<Vec<_>>())
        })
        .unwrap()
    };
    assert_eq!(gradients(true), gradients(false));
}

#[test]
fn what_was_decided_by_prepare_is_not_frozen_in_silence() {
    testing::ranks(2, Accelerator::builder().fsdp_plugin(plugin(FullShard)), |accelerator| {
        let (store, module) = model(5, || ())?;
        let bias = store.get("layers.1.bias").unwrap();
        bias.set_requires_grad(false)?;
        let _model = accelerator.prepare(module)?;
        let weight = store.get("layers.0.weight").unwrap();
        for (param, requires_grad) in [(&weight, false), (&bias, true)] {
            let error = param.set_requires_grad(requires_grad).unwrap_err().to_string();
            assert!(error.contains(param.name()) && error.contains("before that"), "{error}");
            param.set_requires_grad(!requires_grad)?;
        }
        Ok(())
    })
    .unwrap();
}

/// A penalty on the gradient of the input, as of Gulrajani et al., "Improved Training of Wasserstein GANs", 2017. The weights
/// are so large that their gradients are made in pieces.
#[test]
fn the_gradient_of_an_input_alone_leaves_nothing_behind() {
    const WIDTH: i64 = 1100;
    let run = |builder: AcceleratorBuilder| {
        testing::ranks(2, builder, |accelerator| {
            let (store, module) = model(WIDTH, || ())?;
            let model = accelerator.prepare(module)?;
            let x = (Tensor::arange(2 * WIDTH, FLOAT) + accelerator.process_index() as i64).sin().view([2, WIDTH]);
            let x = x.set_requires_grad(true);
            let output = model.forward(&x)?;
            let first = Tensor::f_run_backward(&[&output.f_sum(None)?], &[&x], true, false)?;
            accelerator.backward(&loss(&output)?)?;
            let weight = store.get("layers.0.weight").unwrap();
            let sum = weight.grad().unwrap().f_to_kind(Kind::Double)?.f_abs()?.f_sum(None)?;
            let sum = accelerator.reduce(&sum, accelerate::ReduceOp::Sum)?.double_value(&[]);
            Ok((sum, first[0].f_sum(Kind::Double)?.double_value(&[])))
        })
        .unwrap()
    };
    let (found, wanted) = (run(Accelerator::builder().fsdp_plugin(plugin(FullShard))), run(Accelerator::builder()));
    for ((sum, first), (whole, wanted_first)) in found.into_iter().zip(wanted) {
        // Replicas have the whole of it each.
        assert!((sum - whole / 2.0).abs() < 1e-5 * sum, "{sum} {whole}");
        assert!((first - wanted_first).abs() < 1e-5 * wanted_first.abs(), "{first} {wanted_first}");
    }
}

#[test]
fn a_panic_in_a_model_leaves_everything_as_it_was() {
    assert_as_without_sharding(&Accelerator::builder(), |accelerator, _| {
        let panics = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let now = panics.clone();
        let order = std::sync::atomic::Ordering::Relaxed;
        let (store, module) = model(5, move || assert!(!now.load(order), "out of memory"))?;
        let (model, mut optimizer) = accelerator.prepare((module, AdamW::new(&store, 0.05)?))?;
        for number in 0..4 {
            panics.store(number == 2, order);
            let step = |panics: bool| -> Result<()> {
                let forward = || model.forward(&input(accelerator, number));
                accelerator.backward(&loss(&if panics { accelerator.no_sync(&model, forward)? } else { forward()? })?)
            };
            // On all ranks alike.
            let caught = catch_unwind(AssertUnwindSafe(|| step(number == 2)));
            assert_eq!(caught.is_err(), number == 2);
            caught.unwrap_or(Ok(()))?;
            if number != 2 {
                optimizer.step()?;
                optimizer.zero_grad()?;
            }
        }
        let _ = tch::no_grad(|| model.forward(&input(accelerator, 0)))?;
        values(&store)
    });
}

/// Parameters of `ignored_modules` may be frozen and unfrozen at any time, on all ranks alike.
#[test]
fn what_ranks_have_whole_may_be_frozen_and_unfrozen() {
    for (begins, then) in [(true, false), (false, true)] {
        let run = |plugin: Option<FullyShardedDataParallelPlugin>| {
            let builder = Accelerator::builder();
            let builder = plugin.map_or(builder.clone(), |plugin| builder.fsdp_plugin(plugin));
            testing::ranks(2, builder, |accelerator| {
                let (store, module) = model(5, || ())?;
                let weight = store.get("layers.1.weight").unwrap();
                weight.set_requires_grad(begins)?;
                // Over all of them, so that it steps whatever has a gradient.
                let group = accelerate::optim::ParamGroup::new(store.parameters());
                let optimizer = AdamW::builder(&store).lr(0.05).weight_decay(0.1).param_groups(vec![group]).build()?;
                let (model, mut optimizer) = accelerator.prepare((module, optimizer))?;
                let mut found = Vec::new();
                for number in 0..4 {
                    if number == 2 {
                        weight.set_requires_grad(then)?;
                    }
                    accelerator.backward(&loss(&model.forward(&input(&accelerator, number))?)?)?;
                    optimizer.step()?;
                    optimizer.zero_grad()?;
                    found.push(weight.get().unwrap().double_value(&[1, 1]));
                }
                Ok((found, values(&store)?))
            })
            .unwrap()
        };
        let ignored_modules = vec!["layers.1".to_owned()];
        let found =
            run(Some(FullyShardedDataParallelPlugin { ignored_modules: Some(ignored_modules), ..plugin(FullShard) }));
        assert_eq!(found[0], found[1], "ranks drift apart");
        let at = &found[0].0;
        // AdamW decays what has a gradient, also one of zeros.
        assert_eq!([at[0] == at[1], at[2] == at[3]], [!begins, !then], "{at:?}");
    }
}

#[test]
fn the_loss_scale_is_taken_from_gradients_that_nobody_has_reduced() {
    let scaler = accelerate::GradScalerKwargs { init_scale: Some(64.0), ..Default::default() };
    let builder = Accelerator::builder().mixed_precision(accelerate::MixedPrecision::Fp16).kwargs_handler(scaler);
    let moved = testing::ranks(2, builder.fsdp_plugin(plugin(FullShard)), |accelerator| {
        let (store, module) = model(5, || ())?;
        let (model, mut optimizer) = accelerator.prepare((module, Sgd::new(&store, 1.0)?))?;
        let before = values(&store)?;
        accelerator
            .no_sync(&model, || accelerator.backward(&(loss(&model.forward(&input(&accelerator, 0))?)? * 0.01)))?;
        accelerator.unscale_gradients()?;
        optimizer.step()?;
        let after = values(&store)?;
        Ok(before.iter().zip(&after).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max))
    });
    for moved in moved.unwrap() {
        assert!(0.0 < moved && moved < 0.02, "{moved}");
    }
}
