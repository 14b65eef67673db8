//! Ranks with unequal numbers of batches train what one process would, and nobody hangs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::data::{DataLoader, VecDataset};
use accelerate::nn::{BatchNorm1d, Init, Linear, ModuleFn, Param, ParamStore};
use accelerate::optim::{Optimizer, Sgd};
use accelerate::testing::ranks;
use accelerate::{
    Accelerator, AcceleratorBuilder, CommHook, DDPCommunicationHookType, DataLoaderConfiguration,
    DistributedDataParallelKwargs, Error, GradScalerKwargs, GradientAccumulationPlugin, Group, JoinOptions,
    MixedPrecision, ReduceOp, Result,
};
use tch::{Device, Kind, Tensor};

const RATE: f64 = 0.1;
/// Entries of a parameter that is larger than a first bucket.
const BALLAST: i64 = 300_000;
/// The width of nets with ballast.
const HEAVY: i64 = 5;

fn uneven() -> AcceleratorBuilder {
    let config = DataLoaderConfiguration { even_batches: Some(false), ..Default::default() };
    Accelerator::builder().dataloader_config(config)
}

fn numbers(rows: usize, batch_size: usize) -> Result<DataLoader<Tensor>> {
    let values = (0..rows).map(|row| row as f32 / rows as f32 - 0.3).collect();
    DataLoader::builder(VecDataset::new(values)).batch_size(batch_size).build()
}

/// One to `width` to one, with the same weights everywhere.
struct Net {
    store: ParamStore,
    layers: Layers,
}

struct Layers {
    linear: [Linear; 2],
    /// Parameters that fill buckets, of which one entry is used.
    ballast: Vec<Param>,
}

impl Net {
    fn new(width: i64) -> Result<Self> {
        let store = ParamStore::new(Device::Cpu);
        let first = Linear::new(store.root() / "first", 1, width, Default::default())?;
        let second = Linear::new(store.root() / "second", width, 1, Default::default())?;
        let heavy = |index: usize| store.root().param(&format!("ballast{index}"), ([BALLAST], Init::Zeros));
        let ballast = if width == HEAVY { (0..3).map(heavy).collect::<Result<_>>()? } else { Vec::new() };
        for (salt, param) in store.parameters().iter().enumerate() {
            let values: Vec<f32> =
                (0..param.numel()).map(|i| ((i * 37 + salt * 11) % 101) as f32 / 101.0 - 0.5).collect();
            param.copy_(&Tensor::from_slice(&values).view(&param.shape()[..]))?;
        }
        Ok(Self { store, layers: Layers { linear: [first, second], ballast } })
    }

    fn forward(layers: &Layers, x: &Tensor) -> Result<Tensor> {
        let mut y = layers.linear[1].forward(&layers.linear[0].forward(&x.f_unsqueeze(1)?)?.f_tanh()?)?;
        for ballast in &layers.ballast {
            y = (y + ballast.get()?.f_narrow(0, 0, 1)?).f_tanh()?;
        }
        Ok(y)
    }

    fn weights(store: &ParamStore) -> Vec<f32> {
        store
            .parameters()
            .iter()
            .flat_map(|param| Vec::<f32>::try_from(param.get().unwrap().detach().reshape(-1)).unwrap())
            .collect()
    }
}

fn loss(prediction: &Tensor, x: &Tensor) -> Tensor {
    (prediction.squeeze_dim(1) - x * 2.0).square().mean(Kind::Float)
}

/// How rows and windows are laid out.
#[derive(Clone, Copy, Debug)]
struct Plan {
    rows: usize,
    batch_size: usize,
    steps: usize,
    width: i64,
}

const EPOCHS: usize = 3;

fn train(accelerator: &Accelerator, plan: Plan) -> Result<Vec<f32>> {
    let net = Net::new(plan.width)?;
    let store = net.store.clone();
    let optimizer = Sgd::new(&store, RATE)?;
    let layers = net.layers;
    let model = ModuleFn::new(&store, move |x: &Tensor| Net::forward(&layers, x));
    let loader = numbers(plan.rows, plan.batch_size)?;
    let (model, mut optimizer, loader) = accelerator.prepare((model, optimizer, loader))?;
    for _ in 0..EPOCHS {
        accelerator.join_uneven_inputs(&model, JoinOptions::default(), || {
            for batch in loader.iter()? {
                let x = batch?;
                accelerator.accumulate(&model, || {
                    accelerator.backward(&loss(&model.forward(&x)?, &x))?;
                    optimizer.step()?;
                    optimizer.zero_grad()
                })?;
            }
            Ok(())
        })?;
    }
    Ok(Net::weights(&store))
}

/// The same on one process, without `accelerate`: each window's losses of all ranks, over its rounds and all ranks.
fn expected(world_size: usize, plan: Plan) -> Vec<f32> {
    let net = Net::new(plan.width).unwrap();
    let mut optimizer = Sgd::new(&net.store, RATE).unwrap();
    let values: Vec<f32> = (0..plan.rows).map(|row| row as f32 / plan.rows as f32 - 0.3).collect();
    let batches: Vec<Tensor> = values.chunks(plan.batch_size).map(Tensor::from_slice).collect();
    let rounds: Vec<&[Tensor]> = batches.chunks(world_size).collect();
    for _ in 0..EPOCHS {
        for window in rounds.chunks(plan.steps) {
            for x in window.iter().copied().flatten() {
                let share = loss(&Net::forward(&net.layers, x).unwrap(), x) / (window.len() * world_size) as f64;
                share.backward();
            }
            optimizer.step().unwrap();
            optimizer.zero_grad().unwrap();
        }
    }
    Net::weights(&net.store)
}

fn check(world_size: usize, builder: AcceleratorBuilder, plan: Plan, tolerance: f32) {
    let got = ranks(world_size, builder, |accelerator| train(&accelerator, plan)).unwrap();
    let expected = expected(world_size, plan);
    for weights in &got {
        assert_eq!(*weights, got[0], "ranks differ: {world_size} ranks, {plan:?}");
        let far = weights.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(far <= tolerance, "{far} off: {world_size} ranks, {plan:?}");
    }
    let untrained = Net::weights(&Net::new(plan.width).unwrap().store);
    let moved = untrained.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(moved > 10.0 * tolerance, "the test shows nothing");
}

#[test]
fn ranks_without_batches_add_zeros() {
    for world_size in 1..=4 {
        // With one row all ranks but the first have no batch at all, from the first step on.
        for rows in [1, 3, 5, 10] {
            check(world_size, uneven(), Plan { rows, batch_size: 1, steps: 1, width: 3 }, 1e-5);
        }
        check(world_size, uneven(), Plan { rows: 11, batch_size: 2, steps: 1, width: 3 }, 1e-5);
    }
}

#[test]
fn what_a_rank_has_accumulated_is_not_lost() {
    for world_size in [2, 3] {
        // Whole windows, and last ones of one round and of several.
        for (rows, steps) in [(3, 2), (5, 2), (7, 3), (8, 3), (9, 4), (3, 3), (9, 3), (11, 4)] {
            for sync_each_batch in [false, true] {
                let plugin = GradientAccumulationPlugin {
                    num_steps: Some(steps),
                    sync_each_batch: Some(sync_each_batch),
                    ..Default::default()
                };
                let builder = uneven().gradient_accumulation_plugin(plugin);
                check(world_size, builder, Plan { rows, batch_size: 1, steps, width: 3 }, 1e-5);
            }
        }
    }
}

#[test]
fn a_rank_far_behind_follows_through_a_whole_window() {
    for sync_each_batch in [false, true] {
        let plugin = GradientAccumulationPlugin {
            num_steps: Some(4),
            sync_each_batch: Some(sync_each_batch),
            ..Default::default()
        };
        let got = ranks(2, uneven().gradient_accumulation_plugin(plugin), |accelerator| {
            let store = ParamStore::new(accelerator.device());
            let linear = Linear::new(store.root(), 1, 1, Default::default())?;
            let weight = linear.weight.clone();
            let model = accelerator.prepare(ModuleFn::new(&store, move |x: &Tensor| linear.forward(x)))?;
            let rank = accelerator.process_index();
            let x = Tensor::full([1, 1], rank as f64 + 1.0, (Kind::Float, Device::Cpu));
            accelerator.join_uneven_inputs(&model, JoinOptions::default(), || {
                for _ in 0..[4, 1][rank] {
                    accelerator.accumulate(&model, || accelerator.backward(&model.forward(&x)?.sum(None)))?;
                }
                Ok(())
            })?;
            // The place in the window is common: the next four micro-batches are one on both ranks.
            let mut syncs = Vec::new();
            for _ in 0..4 {
                accelerator.accumulate(&model, || {
                    syncs.push(accelerator.sync_gradients());
                    Ok(())
                })?;
            }
            assert_eq!(syncs, [false, false, false, true]);
            Ok(weight.grad().map(|grad| grad.double_value(&[0, 0])))
        })
        .unwrap();
        // The gradients are 1 and 2: four quarters of the one and a quarter of the other, over two ranks.
        assert_eq!(got, [Some(0.75), None], "sync_each_batch {sync_each_batch}");
    }
}

#[test]
fn every_ddp_setting_joins() {
    let own = CommHook::new(|bucket| {
        bucket.group.all_reduce(bucket.buffer, ReduceOp::Mean)?;
        Ok(Some(bucket.buffer.shallow_clone()))
    });
    let defaults = DistributedDataParallelKwargs::default;
    for (kwargs, width, tolerance) in [
        (DistributedDataParallelKwargs { find_unused_parameters: Some(true), ..defaults() }, 3, 1e-5),
        (DistributedDataParallelKwargs { gradient_as_bucket_view: Some(true), ..defaults() }, 3, 1e-5),
        (
            DistributedDataParallelKwargs { comm_hook: Some(DDPCommunicationHookType::Bf16.into()), ..defaults() },
            3,
            3e-3,
        ),
        (DistributedDataParallelKwargs { comm_hook: Some(own.into()), ..defaults() }, 3, 1e-5),
        (DistributedDataParallelKwargs { bucket_cap_mb: Some(0.001), ..defaults() }, HEAVY, 1e-5),
    ] {
        for (rows, steps) in [(1, 1), (5, 1), (5, 2)] {
            let builder = uneven().kwargs_handler(kwargs.clone()).gradient_accumulation_steps(steps);
            let plan = Plan { rows, batch_size: 1, steps, width };
            check(2, builder, plan, tolerance);
        }
    }
}

#[test]
fn power_sgd_joins() {
    let kwargs: DistributedDataParallelKwargs = serde_json::from_str(
        r#"{"comm_hook": "power_sgd", "comm_state_option": {"start_powerSGD_iter": 2, "min_compression_rate": 0.1}}"#,
    )
    .unwrap();
    let plan = Plan { rows: 5, batch_size: 1, steps: 1, width: 8 };
    let got = ranks(2, uneven().kwargs_handler(kwargs), |accelerator| train(&accelerator, plan)).unwrap();
    assert_eq!(got[0], got[1]);
}

#[test]
fn a_static_graph_is_refused() {
    let kwargs = DistributedDataParallelKwargs { static_graph: Some(true), ..Default::default() };
    let plan = Plan { rows: 3, batch_size: 1, steps: 1, width: 3 };
    let error = ranks(2, uneven().kwargs_handler(kwargs), |accelerator| train(&accelerator, plan)).unwrap_err();
    assert!(error.is_config() && error.to_string().contains("static_graph"), "{error}");
}

#[test]
fn buffers_come_from_a_rank_that_has_a_batch() {
    // How many batches each rank has; rank 0, whose buffers count otherwise, runs out first or last.
    for batches in [vec![0, 2], vec![2, 1], vec![1, 3, 3], vec![0, 0, 2]] {
        let got = ranks(batches.len(), uneven(), |accelerator| {
            let store = ParamStore::new(accelerator.device());
            let norm = BatchNorm1d::new(store.root() / "norm", 1, Default::default())?;
            let model = accelerator.prepare(ModuleFn::new(&store, move |x: &Tensor| norm.forward(x)))?;
            let rank = accelerator.process_index();
            let counted = || -> f64 {
                let tracked = store.buffers().into_iter().find(|buffer| buffer.name().ends_with("tracked"));
                tracked.unwrap().get().unwrap().to_kind(Kind::Double).double_value(&[])
            };
            let mut seen = Vec::new();
            accelerator.join_uneven_inputs(&model, JoinOptions::default(), || {
                for _ in 0..batches[rank] {
                    let x = Tensor::from_slice(&[1f32, rank as f32]).unsqueeze(1);
                    accelerator.backward(&model.forward(&x)?.square().sum(Kind::Float))?;
                    seen.push(counted());
                }
                Ok(())
            })?;
            assert!(seen.iter().zip(1..).all(|(seen, wanted)| *seen == f64::from(wanted)), "rank {rank}: {seen:?}");
            let value = |buffer: Param| buffer.get().unwrap().to_kind(Kind::Double).sum(None).double_value(&[]);
            Ok((counted(), store.buffers().into_iter().map(value).collect::<Vec<_>>()))
        })
        .unwrap();
        assert!(got.iter().all(|buffers| *buffers == got[0]), "{batches:?}: {got:?}");
        assert_eq!(got[0].0, f64::from(*batches.iter().max().unwrap()), "{batches:?}: {got:?}");
    }
}

#[test]
fn the_rank_that_had_most_batches_is_copied() {
    let got = ranks(3, uneven(), |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let linear = Linear::new(store.root(), 1, 1, Default::default())?;
        let weight = linear.weight.clone();
        let model = accelerator.prepare(ModuleFn::new(&store, move |x: &Tensor| linear.forward(x)))?;
        let rank = accelerator.process_index();
        // The last rank has most, contrary to what loaders do.
        accelerator.join_uneven_inputs(&model, JoinOptions::default(), || {
            for _ in 0..[1, 0, 3][rank] {
                accelerator.backward(&model.forward(&Tensor::ones([1, 1], (Kind::Float, Device::Cpu)))?.sum(None))?;
            }
            weight.copy_(&Tensor::full([1, 1], rank as f64, (Kind::Float, Device::Cpu)))
        })?;
        Ok(weight.get()?.double_value(&[0, 0]))
    })
    .unwrap();
    assert_eq!(got, [2.0; 3]);
}

#[test]
fn metrics_see_every_row_once_although_ranks_are_out_of_batches() {
    for world_size in 2..=4 {
        for (rows, batch_size) in [(1, 1), (3, 1), (5, 2), (13, 3), (8, 2)] {
            let got = ranks(world_size, uneven(), |accelerator| {
                let net = Net::new(3)?;
                let (store, layers) = (net.store.clone(), net.layers);
                let model = ModuleFn::new(&store, move |x: &Tensor| Net::forward(&layers, x));
                let (model, loader) = accelerator.prepare((model, numbers(rows, batch_size)?))?;
                let (mut seen, mut objects, mut means) = (Vec::new(), Vec::new(), 0);
                accelerator.join_uneven_inputs(&model, JoinOptions::default(), || {
                    for batch in loader.iter()? {
                        let x = batch?;
                        let error = loss(&model.forward(&x)?, &x);
                        accelerator.backward(&error)?;
                        let pairs = Tensor::stack(&[&x, &(&x * 2.0)], 1);
                        let gathered = (x.shallow_clone(), pairs, x.gt(0.0), error.detach());
                        let (x_all, pairs, positive, mean) = accelerator.gather_for_metrics(&gathered)?;
                        assert_eq!(pairs.size(), [x_all.size()[0], 2]);
                        assert_eq!(positive, x_all.gt(0.0));
                        assert_eq!(pairs.select(1, 1), &x_all * 2.0);
                        means += mean.size()[0];
                        seen.extend(Vec::<f32>::try_from(x_all)?);
                        let own = Vec::<f32>::try_from(x)?;
                        objects.extend(accelerator.gather_object_for_metrics(&own)?);
                    }
                    Ok(())
                })?;
                assert_eq!(seen, objects);
                Ok((seen, means))
            })
            .unwrap();
            let expected: Vec<f32> = (0..rows).map(|row| row as f32 / rows as f32 - 0.3).collect();
            let what = format!("{world_size} ranks, {rows} rows in batches of {batch_size}");
            assert_eq!(got[0], (expected, rows.div_ceil(batch_size) as i64), "{what}");
        }
    }
}

#[test]
fn without_a_join_ranks_without_batches_are_named_with_the_cure() {
    let errors = ranks(2, uneven(), |accelerator| {
        let loader = accelerator.prepare(numbers(1, 1)?)?;
        let mut error = String::new();
        for batch in loader.iter()? {
            error = accelerator.gather_for_metrics(&batch?).unwrap_err().to_string();
        }
        Ok(error)
    })
    .unwrap();
    assert!(errors[0].contains("without a batch of rank 1 ") && errors[0].contains("join_uneven_inputs"), "{errors:?}");
}

#[test]
fn another_collective_is_an_error_on_all_ranks() {
    let errors = ranks(3, uneven(), |accelerator| {
        let net = Net::new(3)?;
        let (store, layers) = (net.store.clone(), net.layers);
        let model = ModuleFn::new(&store, move |x: &Tensor| Net::forward(&layers, x));
        let (model, loader) = accelerator.prepare((model, numbers(4, 1)?))?;
        let result = accelerator.join_uneven_inputs(&model, JoinOptions::default(), || {
            for batch in loader.iter()? {
                let x = batch?;
                accelerator.backward(&loss(&model.forward(&x)?, &x))?;
                let _ = accelerator.reduce(&x.mean(None), ReduceOp::Mean)?;
            }
            Ok(())
        });
        // Reduces make no sense in the round in which ranks 1 and 2 are out of batches; before it they work.
        Ok(result.unwrap_err().to_string())
    })
    .unwrap();
    assert!(
        errors.iter().all(|error| error.contains("reduce of") && error.contains("rank 1: out of batches")),
        "{errors:?}"
    );
}

#[test]
fn ranks_that_stray_are_shown() {
    let errors = ranks(2, uneven(), |accelerator| {
        let models = [Net::new(3)?, Net::new(3)?].map(|net| {
            let layers = net.layers;
            accelerator.prepare(ModuleFn::new(&net.store, move |x: &Tensor| Net::forward(&layers, x))).unwrap()
        });
        let result = accelerator.join_uneven_inputs(&(&models[0], &models[1]), JoinOptions::default(), || {
            models[accelerator.process_index()].forward(&Tensor::from_slice(&[1f32]))
        });
        Ok(result.unwrap_err().to_string())
    })
    .unwrap();
    let words = "rank 0: the forward pass of model 0; rank 1: the forward pass of model 1";
    assert!(errors.iter().all(|error| error.contains(words)), "{errors:?}");
}

#[test]
fn several_models_take_turns() {
    let got = ranks(3, uneven(), |accelerator| {
        let nets = [Net::new(3)?, Net::new(4)?];
        let stores = [nets[0].store.clone(), nets[1].store.clone()];
        let models = nets.map(|net| {
            let layers = net.layers;
            accelerator.prepare(ModuleFn::new(&net.store, move |x: &Tensor| Net::forward(&layers, x))).unwrap()
        });
        let loader = accelerator.prepare(numbers(7, 1)?)?;
        accelerator.join_uneven_inputs(&(&models[0], &models[1]), JoinOptions::default(), || {
            for (index, batch) in loader.iter()?.enumerate() {
                let x = batch?;
                // The second model is trained in every other round only, and twice then.
                for model in [&models[0], &models[1], &models[1]].iter().take(if index % 2 == 0 { 3 } else { 1 }) {
                    accelerator.backward(&loss(&model.forward(&x)?, &x))?;
                }
            }
            Ok(())
        })?;
        let gradients =
            |store: &ParamStore| store.parameters().iter().map(|p| p.grad().map(|g| g.size())).collect::<Vec<_>>();
        Ok(stores.iter().map(gradients).collect::<Vec<_>>())
    })
    .unwrap();
    assert_eq!(got.len(), 3);
}

#[test]
fn a_triggered_reduction_is_followed() {
    let got = ranks(2, uneven(), |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let linear = Linear::new(store.root(), 1, 1, Default::default())?;
        let weight = linear.weight.clone();
        let model = accelerator.prepare(ModuleFn::new(&store, move |x: &Tensor| linear.forward(x)))?;
        accelerator.join_uneven_inputs(&model, JoinOptions::default(), || {
            let x = Tensor::full([1, 1], 1.0 + accelerator.process_index() as f64, (Kind::Float, Device::Cpu));
            let loss = accelerator.no_sync(&model, || Ok(model.forward(&x)?.sum(None)))?;
            if accelerator.is_main_process() {
                accelerator.trigger_sync_in_backward(&model)?;
            }
            accelerator.backward(&loss)
        })?;
        Ok(weight.grad().map(|grad| grad.double_value(&[0, 0])))
    })
    .unwrap();
    // Rank 1 ran out with a gradient of 2 that waits; it is part of rank 0's mean, and then gone.
    assert_eq!(got, [Some(1.5), None]);
}

/// How many calls a group has made.
fn calls(group: &Group) -> u64 {
    let shown = format!("{group:?}");
    let number = shown.split("sequence: ").nth(1).and_then(|rest| rest.split([',', ' ']).next());
    number.unwrap().parse().unwrap()
}

#[test]
fn even_batches_are_overridden_for_the_time_of_the_join() {
    let got = ranks(2, Default::default(), |accelerator| {
        let model = Net::new(3)?;
        let layers = model.layers;
        let model = accelerator.prepare(ModuleFn::new(&model.store, move |x: &Tensor| Net::forward(&layers, x)))?;
        let loader = accelerator.prepare(numbers(3, 1)?)?;
        let calls_of_backward = || -> Result<u64> {
            let x = Tensor::from_slice(&[1f32]);
            let before = calls(accelerator.group());
            accelerator.backward(&loss(&model.forward(&x)?, &x))?;
            Ok(calls(accelerator.group()) - before)
        };
        // The first pass learns the order of gradients.
        calls_of_backward()?;
        let unannounced = calls_of_backward()?;
        let mut lengths = vec![loader.len()];
        for even_batches in [Some(false), Some(true), None] {
            accelerator.join_uneven_inputs(&model, JoinOptions { even_batches }, || {
                lengths.push(loader.iter()?.count());
                assert_eq!(loader.len(), lengths[lengths.len() - 1]);
                Ok(())
            })?;
        }
        let failed =
            accelerator.join_uneven_inputs(&model, JoinOptions { even_batches: Some(false) }, || -> Result<()> {
                Err(Error::other("enough"))
            });
        assert_eq!(failed.unwrap_err().to_string(), "enough");
        lengths.push(loader.len());
        // After an error too, reductions are no longer announced.
        assert_eq!(calls_of_backward()?, unannounced);
        Ok(lengths)
    })
    .unwrap();
    assert_eq!(got, [[2, 2, 2, 2, 2], [2, 1, 2, 2, 2]]);
}

#[test]
fn joins_are_not_nested_and_begin_alike() {
    let errors = ranks(2, uneven(), |accelerator| {
        let net = Net::new(3)?;
        let layers = net.layers;
        let model = accelerator.prepare(ModuleFn::new(&net.store, move |x: &Tensor| Net::forward(&layers, x)))?;
        let inner = || accelerator.join_uneven_inputs(&model, JoinOptions::default(), || Ok(()));
        let nested = accelerator.join_uneven_inputs(&model, JoinOptions::default(), inner).unwrap_err();
        let even = Some(accelerator.is_main_process());
        let different =
            accelerator.join_uneven_inputs(&model, JoinOptions { even_batches: even }, || Ok(())).unwrap_err();
        Ok([nested.to_string(), different.to_string()])
    })
    .unwrap();
    for [nested, different] in errors {
        assert!(nested.contains("inside of join_uneven_inputs"), "{nested}");
        assert!(different.contains("even_batches true; 1 models, even_batches false"), "{different}");
    }
}

#[test]
fn the_loss_scale_stays_common() {
    let scaler = GradScalerKwargs { init_scale: Some(4.0), growth_interval: Some(2), ..Default::default() };
    let builder = uneven().mixed_precision(MixedPrecision::Fp16).kwargs_handler(scaler);
    // Three rounds on rank 0, two on rank 1: one more step makes the scale grow on rank 0 at another time.
    let plan = Plan { rows: 5, batch_size: 1, steps: 1, width: 3 };
    check(2, builder, plan, 5e-3);
}
