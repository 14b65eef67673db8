//! The accelerator on 1 to 4 ranks over real Gloo.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::data::{DataLoader, VecDataset};
use accelerate::nn::{Init, Linear, Module, ModuleFn, ParamStore};
use accelerate::optim::{AdamW, Sgd};
use accelerate::testing::ranks;
use accelerate::{
    Accelerator, AcceleratorBuilder, DataLoaderConfiguration, DistributedDataParallelKwargs, Error, PadOptions,
    ReduceOp, Result, SplitOptions,
};
use accelerate::{GradientAccumulationPlugin, PartialWindow};
use std::cell::RefCell;
use std::collections::BTreeMap;
use tch::{Device, Kind, Tensor};

fn floats(values: &[f32]) -> Tensor {
    Tensor::from_slice(values)
}

fn to_vec(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.detach().to_kind(Kind::Float).reshape([-1])).unwrap()
}

#[test]
fn gather_joins_trees_in_rank_order() {
    for world_size in 1..=4_usize {
        let got = ranks(world_size, Default::default(), |accelerator| {
            let rank = accelerator.process_index() as f32;
            let tree = (floats(&[rank, rank]), vec![Tensor::from(rank)], floats(&[rank]).gt(0.5));
            let (rows, scalars, flags) = accelerator.gather(&tree)?;
            Ok((to_vec(&rows), to_vec(&scalars[0]), Vec::<bool>::try_from(&flags)?))
        })
        .unwrap();
        let expected = (
            (0..world_size).flat_map(|rank| [rank as f32; 2]).collect(),
            (0..world_size).map(|rank| rank as f32).collect(),
            (0..world_size).map(|rank| rank > 0).collect(),
        );
        assert_eq!(got, vec![expected; world_size]);
    }
}

#[test]
fn unequal_shapes_are_shown_for_every_rank_with_the_cure() {
    let errors = ranks(3, Default::default(), |accelerator| {
        let rows = accelerator.process_index() as i64 + 1;
        Ok(accelerator.gather(&Tensor::zeros([rows, 2], (Kind::Float, Device::Cpu))).unwrap_err().to_string())
    })
    .unwrap();
    for error in errors {
        for words in ["rank 0: gather of [1, 2] Float", "rank 2: gather of [3, 2] Float", "pad_across_processes"] {
            assert!(error.contains(words), "{error}");
        }
    }
}

#[test]
fn different_calls_are_shown_for_every_rank() {
    let errors = ranks(2, Default::default(), |accelerator| {
        let tensor = floats(&[1.0]);
        let error = if accelerator.is_main_process() {
            accelerator.gather(&tensor).unwrap_err()
        } else {
            accelerator.reduce(&tensor, ReduceOp::Sum).unwrap_err()
        };
        Ok(error.to_string())
    })
    .unwrap();
    for error in errors {
        assert!(error.contains("rank 0: gather of") && error.contains("rank 1: reduce of"), "{error}");
    }
}

#[test]
fn reduce_knows_every_reduction() {
    // The numbers of the reference's test_ops.py: ranks hold [1, 2] and [3, 4].
    for (reduction, expected) in [
        (ReduceOp::Sum, [4.0, 6.0]),
        (ReduceOp::Mean, [2.0, 3.0]),
        (ReduceOp::Max, [3.0, 4.0]),
        (ReduceOp::Min, [1.0, 2.0]),
    ] {
        let got = ranks(2, Default::default(), |accelerator| {
            let first = 2.0 * accelerator.process_index() as f32 + 1.0;
            let mine = floats(&[first, first + 1.0]);
            let reduced = accelerator.reduce(&mine, reduction)?;
            assert_eq!(to_vec(&mine), [first, first + 1.0], "the input stays as it is");
            Ok(to_vec(&reduced))
        })
        .unwrap();
        assert_eq!(got, [expected, expected], "{reduction:?}");
    }
}

#[test]
fn padding_makes_lengths_equal() {
    let got = ranks(3, Default::default(), |accelerator| {
        let length = accelerator.process_index() + 1;
        let mine = floats(&vec![1.0; length]);
        let back = accelerator.pad_across_processes(&mine, PadOptions::default())?;
        let front = accelerator
            .pad_across_processes(&mine, PadOptions { pad_index: -1.0, pad_first: true, ..Default::default() })?;
        let other_dim = accelerator.pad_across_processes(&mine, PadOptions { dim: 1, ..Default::default() })?;
        assert_eq!(other_dim.size(), [length as i64]);
        Ok((to_vec(&back), to_vec(&front)))
    })
    .unwrap();
    assert_eq!(got[0], (vec![1.0, 0.0, 0.0], vec![-1.0, -1.0, 1.0]));
    assert_eq!(got[2], (vec![1.0; 3], vec![1.0; 3]));
}

#[test]
fn objects_travel() {
    let got = ranks(3, Default::default(), |accelerator| {
        let rank = accelerator.process_index();
        let gathered = accelerator.gather_object(&vec![format!("rank {rank}"); rank])?;
        let mut list = vec![f64::NAN.min(rank as f64), rank as f64];
        accelerator.broadcast_object_list(&mut list, 2)?;
        Ok((gathered, list))
    })
    .unwrap();
    let words: Vec<String> = ["rank 1", "rank 2", "rank 2"].map(str::to_owned).to_vec();
    assert_eq!(got, vec![(words, vec![2.0, 2.0]); 3]);
}

#[test]
fn broadcast_takes_any_dtype() {
    let got = ranks(2, Default::default(), |accelerator| {
        let mine = floats(&[accelerator.process_index() as f32]).to_kind(Kind::Bool);
        Ok(Vec::<bool>::try_from(&accelerator.broadcast(&mine, 1)?)?)
    })
    .unwrap();
    assert_eq!(got, [[true], [true]]);
}

#[test]
fn inputs_are_split_over_ranks() {
    for (num_items, padding, expected) in
        [(5, false, vec![3, 2]), (5, true, vec![3, 3]), (1, false, vec![1, 0]), (1, true, vec![1, 1])]
    {
        let got = ranks(2, Default::default(), |accelerator| {
            let items: Vec<usize> = (0..num_items).collect();
            let nested = BTreeMap::from([("a", items.clone()), ("b", items.clone())]);
            let tensor = Tensor::arange(num_items as i64, (Kind::Int64, Device::Cpu));
            let mine = accelerator.split_between_processes(&items, SplitOptions { apply_padding: padding })?;
            assert_eq!(
                accelerator.split_between_processes(&nested, SplitOptions { apply_padding: padding })?["b"],
                mine
            );
            let rows = accelerator.split_between_processes(&tensor, SplitOptions { apply_padding: padding })?;
            assert_eq!(rows.size(), [mine.len() as i64]);
            Ok(mine.len())
        })
        .unwrap();
        assert_eq!(got, expected);
    }
}

/// A loader over the numbers `0..rows` as floats.
fn numbers(rows: usize, batch_size: usize) -> Result<DataLoader<Tensor>> {
    DataLoader::builder(VecDataset::new((0..rows).map(|row| row as f32).collect())).batch_size(batch_size).build()
}

#[test]
fn metrics_see_every_row_once() {
    for world_size in 1..=4 {
        for (rows, batch_size, split) in [(22, 4, false), (7, 2, false), (1, 4, false), (21, 12, true), (82, 16, false)]
        {
            let config = DataLoaderConfiguration { split_batches: Some(split), ..Default::default() };
            let builder = Accelerator::builder().dataloader_config(config);
            if split && batch_size % world_size != 0 {
                continue;
            }
            let got = ranks(world_size, builder, |accelerator| {
                let loader = accelerator.prepare(numbers(rows, batch_size)?)?;
                let (mut seen, mut objects) = (Vec::new(), Vec::new());
                for batch in loader.iter()? {
                    let batch = batch?;
                    seen.extend(to_vec(&accelerator.gather_for_metrics(&batch)?));
                    objects.extend(accelerator.gather_object_for_metrics(&to_vec(&batch))?);
                }
                assert_eq!(seen, objects);
                Ok(seen)
            })
            .unwrap();
            let expected: Vec<f32> = (0..rows).map(|row| row as f32).collect();
            assert_eq!(got, vec![expected; world_size], "{rows} rows, batches of {batch_size}, split {split}");
        }
    }
}

#[test]
fn metrics_of_something_else_are_refused() {
    let error = ranks(2, Default::default(), |accelerator| {
        let loader = accelerator.prepare(numbers(8, 2)?)?;
        for batch in loader.iter()? {
            let _ = batch?;
            let _ = accelerator.gather_for_metrics(&floats(&[1.0, 2.0, 3.0]))?;
        }
        Ok(())
    })
    .unwrap_err();
    assert!(error.to_string().contains("the batch has 2 rows"), "{error}");
}

#[test]
fn metrics_of_unequal_shapes_name_the_cure_and_objects_have_none() {
    let errors = ranks(2, Default::default(), |accelerator| {
        let loader = accelerator.prepare(numbers(3, 2)?)?;
        let mut error = String::new();
        let mut texts = Vec::new();
        for batch in loader.iter()? {
            // As many words for a row as its number and the rank say.
            let rows = to_vec(&batch?);
            let words = 1 + accelerator.process_index();
            let tensor = Tensor::zeros([2, words as i64], (Kind::Float, Device::Cpu));
            error = accelerator.gather_for_metrics(&tensor).unwrap_err().to_string();
            let lists: Vec<Vec<usize>> = rows.iter().map(|row| vec![*row as usize; words]).collect();
            texts.extend(accelerator.gather_object_for_metrics(&lists)?);
        }
        assert_eq!(texts, [vec![0], vec![1], vec![2, 2]]);
        Ok(error)
    })
    .unwrap();
    for error in errors {
        for words in ["rank 1: gather_for_metrics of [2, 2] Float", "pad_across_processes", "gather_object_for_metrics"]
        {
            assert!(error.contains(words), "{error}");
        }
    }
}

/// y = 2x + 3 without noise, learnt by a line; returns weight and bias after `epochs`.
fn train_line(accelerator: &Accelerator, rows: usize, batch_size: usize, epochs: usize) -> Result<[f32; 2]> {
    let store = ParamStore::new(accelerator.device());
    let linear = Linear::new(store.root(), 1, 1, Default::default())?;
    for param in store.parameters() {
        // Only rank 0's values may count.
        param.copy_(&Tensor::full(param.shape(), accelerator.process_index() as f64, (Kind::Float, Device::Cpu)))?;
    }
    let optimizer = Sgd::new(&store, 0.1)?;
    let model = ModuleFn::new(&store, move |x: &Tensor| linear.forward(&x.f_unsqueeze(1)?));
    let (loader, mut optimizer, model) = accelerator.prepare((numbers(rows, batch_size)?, optimizer, model))?;
    for _ in 0..epochs {
        for batch in loader.iter()? {
            let x = batch? / rows as f64;
            accelerator.accumulate(&model, || {
                let error = model.forward(&x)?.squeeze_dim(1) - (&x * 2.0 + 3.0);
                accelerator.backward(&(&error * &error).mean(Kind::Float))?;
                optimizer.step()?;
                optimizer.zero_grad()
            })?;
        }
    }
    let values: Vec<f32> = store.parameters().iter().flat_map(|param| to_vec(&param.get().unwrap())).collect();
    Ok([values[0], values[1]])
}

fn close(a: [f32; 2], b: [f32; 2]) -> bool {
    a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5)
}

#[test]
fn many_ranks_learn_what_one_learns() {
    // 24 rows in global batches of 12, whatever the number of ranks.
    let expected = ranks(1, Default::default(), |accelerator| train_line(&accelerator, 24, 12, 3)).unwrap()[0];
    for world_size in 2..=4_usize {
        let got = ranks(world_size, Default::default(), |accelerator| train_line(&accelerator, 24, 12 / world_size, 3))
            .unwrap();
        assert!(got.iter().all(|values| close(*values, expected)), "{world_size}: {got:?} instead of {expected:?}");
        let config = DataLoaderConfiguration { split_batches: Some(true), ..Default::default() };
        let builder = Accelerator::builder().dataloader_config(config);
        let got = ranks(world_size, builder, |accelerator| train_line(&accelerator, 24, 12, 3)).unwrap();
        assert!(got.iter().all(|values| close(*values, expected)), "split, {world_size}: {got:?}");
    }
}

#[test]
fn accumulated_micro_batches_learn_what_large_batches_learn() {
    // One window of 3 x 4 rows equals one batch of 12; 20 rows leave a window of 2 x 4 rows, a batch of 8.
    for rows in [24, 20] {
        let expected = ranks(1, Default::default(), |accelerator| train_line(&accelerator, rows, 12, 3)).unwrap()[0];
        for sync_each_batch in [false, true] {
            let plugin = GradientAccumulationPlugin {
                num_steps: Some(3),
                sync_each_batch: Some(sync_each_batch),
                ..Default::default()
            };
            for world_size in [1, 2, 4_usize] {
                let builder = Accelerator::builder().gradient_accumulation_plugin(plugin.clone());
                let got = ranks(world_size, builder, |accelerator| train_line(&accelerator, rows, 4 / world_size, 3))
                    .unwrap();
                assert!(got.iter().all(|values| close(*values, expected)), "{world_size}: {got:?}, not {expected:?}");
            }
        }
        let builder = Accelerator::builder().gradient_accumulation_steps(3).partial_window(PartialWindow::Reference);
        let reference = ranks(1, builder, |accelerator| train_line(&accelerator, rows, 4, 3)).unwrap()[0];
        assert_eq!(close(reference, expected), rows == 24, "the reference under-scales short windows");
    }
}

#[test]
fn buffers_of_rank_0_are_copied_before_the_first_pass_after_one_that_reduced() {
    // What a rank finds in its buffer before each forward pass: training in windows of two, evaluation after each window.
    for (broadcast_buffers, expected) in [(true, [0.0, 1.0, 0.0, 1.0]), (false, [1.0; 4])] {
        let kwargs = DistributedDataParallelKwargs { broadcast_buffers: Some(broadcast_buffers), ..Default::default() };
        let builder = Accelerator::builder().kwargs_handler(kwargs).gradient_accumulation_steps(2);
        let found = ranks(2, builder, |accelerator| {
            let store = ParamStore::new(accelerator.device());
            let weight = store.root().param("weight", ([1], Init::Ones))?;
            let buffer = store.root().buffer("seen", ([1], Init::Zeros), Default::default())?;
            let (mine, seen) = (Tensor::from_slice(&[accelerator.process_index() as f32]), RefCell::new(Vec::new()));
            let model = ModuleFn::new(&store, |x: &Tensor| {
                seen.borrow_mut().push(to_vec(&buffer.get()?)[0]);
                buffer.copy_(&mine)?;
                Ok(weight.get()?.f_mul(x)?)
            });
            let (model, input) = (accelerator.prepare(model)?, Tensor::from_slice(&[1f32]));
            buffer.copy_(&mine)?;
            for _ in 0..2 {
                accelerator.accumulate(&model, || accelerator.backward(&model.forward(&input)?.sum(None)))?;
            }
            for _ in 0..2 {
                let _ = tch::no_grad(|| model.forward(&input))?;
            }
            drop(model);
            Ok(seen.into_inner())
        })
        .unwrap();
        assert_eq!(found[0], [0.0; 4]);
        assert_eq!(found[1], expected, "broadcast_buffers: {broadcast_buffers}");
    }
}

#[test]
fn a_rank_that_evaluates_alone_is_told_what_it_waits_for() {
    let errors = ranks(2, Default::default(), |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let weight = store.root().param("weight", ([1], Init::Ones))?;
        store.root().buffer("seen", ([1], Init::Zeros), Default::default())?;
        let model = accelerator.prepare(ModuleFn::new(&store, |x: &Tensor| Ok(weight.get()?.f_mul(x)?)))?;
        let input = Tensor::from_slice(&[1f32]);
        accelerator.backward(&model.forward(&input)?.sum(None))?;
        if !accelerator.is_main_process() {
            return Ok(None);
        }
        assert_eq!(to_vec(&tch::no_grad(|| (*model).forward(&input))?), [1.0]);
        Ok(Some(tch::no_grad(|| model.forward(&input)).unwrap_err().to_string()))
    })
    .unwrap();
    let error = errors[0].as_ref().unwrap();
    assert!(error.contains("calls the model within") && error.contains("broadcast_coalesced"), "{error}");
}

/// With `static_graph`, c10d's reducer counts in its first backward pass what gradients to wait for in the later ones.
#[test]
fn every_ddp_setting_averages_accumulated_gradients() {
    type Kwargs = DistributedDataParallelKwargs;
    let settings = [
        Kwargs { static_graph: Some(true), ..Default::default() },
        Kwargs { static_graph: Some(true), gradient_as_bucket_view: Some(true), ..Default::default() },
        Kwargs { find_unused_parameters: Some(true), ..Default::default() },
        Kwargs { gradient_as_bucket_view: Some(true), ..Default::default() },
        Kwargs { bucket_cap_mb: Some(0.001), ..Default::default() },
        Kwargs { broadcast_buffers: Some(false), ..Default::default() },
    ];
    for (world_size, steps) in [(2, 2), (3, 3)] {
        let accumulating = |kwargs| Accelerator::builder().kwargs_handler(kwargs).gradient_accumulation_steps(steps);
        let run = |kwargs: Kwargs| {
            ranks(world_size, accumulating(kwargs), |accelerator| train_line(&accelerator, 72, 2, 2)).unwrap()
        };
        let expected = run(Kwargs::default());
        for kwargs in &settings {
            assert_eq!(run(kwargs.clone()), expected, "{world_size} ranks, {steps} micro-batches, {kwargs:?}");
        }
    }
}

#[test]
fn every_ddp_setting_trains() {
    let expected = ranks(1, Default::default(), |accelerator| train_line(&accelerator, 24, 12, 3)).unwrap()[0];
    let defaults = DistributedDataParallelKwargs::default;
    for (kwargs, tolerance) in [
        (DistributedDataParallelKwargs { bucket_cap_mb: Some(0.001), ..defaults() }, 1e-5),
        (DistributedDataParallelKwargs { find_unused_parameters: Some(true), ..defaults() }, 1e-5),
        (DistributedDataParallelKwargs { gradient_as_bucket_view: Some(true), ..defaults() }, 1e-5),
        (DistributedDataParallelKwargs { static_graph: Some(true), ..defaults() }, 1e-5),
        (DistributedDataParallelKwargs { broadcast_buffers: Some(false), ..defaults() }, 1e-5),
        (
            DistributedDataParallelKwargs {
                comm_hook: Some(accelerate::DDPCommunicationHookType::Fp16.into()),
                ..defaults()
            },
            1e-2,
        ),
        (
            DistributedDataParallelKwargs {
                comm_hook: Some(accelerate::DDPCommunicationHookType::Bf16.into()),
                ..defaults()
            },
            3e-2,
        ),
    ] {
        let builder = Accelerator::builder().kwargs_handler(kwargs.clone());
        let got = ranks(2, builder, |accelerator| train_line(&accelerator, 24, 6, 3)).unwrap();
        assert_eq!(got[0], got[1], "ranks differ under {kwargs:?}");
        let difference = got[0].iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(difference <= tolerance, "{difference} under {kwargs:?}");
    }
}

/// Two lines of which only one is used.
fn half_used_model(accelerator: &Accelerator, builder: impl Fn(&ParamStore) -> Result<()>) -> Result<()> {
    let store = ParamStore::new(accelerator.device());
    let used = Linear::new(store.root() / "used", 1, 1, Default::default())?;
    let _unused = Linear::new(store.root() / "unused", 1, 1, Default::default())?;
    builder(&store)?;
    let optimizer = AdamW::new(&store, 0.1)?;
    let model = ModuleFn::new(&store, move |x: &Tensor| used.forward(x));
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    accelerator.backward(&model.forward(&Tensor::ones([1, 1], (Kind::Float, Device::Cpu)))?.sum(None))?;
    optimizer.step()
}

#[test]
fn unused_parameters_are_named_before_the_optimizer_steps() {
    let errors =
        ranks(2, Default::default(), |accelerator| Ok(half_used_model(&accelerator, |_| Ok(())).unwrap_err())).unwrap();
    for error in errors {
        let text = error.to_string();
        assert!(text.contains("unused.weight, unused.bias") && text.contains("find_unused_parameters"), "{text}");
        assert!(!text.contains(" used.weight"), "{text}");
    }
    let kwargs = DistributedDataParallelKwargs { find_unused_parameters: Some(true), ..Default::default() };
    let builder = Accelerator::builder().kwargs_handler(kwargs);
    ranks(2, builder, |accelerator| half_used_model(&accelerator, |_| Ok(()))).unwrap();
}

#[test]
fn different_models_are_named() {
    let errors = ranks(2, Default::default(), |accelerator| {
        let extra = |store: &ParamStore| {
            if !accelerator.is_main_process() {
                Linear::new(store.root() / "extra", 2, 2, Default::default())?;
            }
            Ok(())
        };
        Ok(half_used_model(&accelerator, extra).unwrap_err().to_string())
    })
    .unwrap();
    for error in errors {
        assert!(error.contains("rank 1 has extra.weight [2, 2] Float where rank 0 has nothing"), "{error}");
    }
}

#[test]
fn no_sync_keeps_gradients_on_their_rank() {
    let got = ranks(2, Default::default(), |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let linear = Linear::new(store.root(), 1, 1, Default::default())?;
        let weight = linear.weight.clone();
        let model = accelerator.prepare(ModuleFn::new(&store, move |x: &Tensor| linear.forward(x)))?;
        let x = Tensor::full([1, 1], accelerator.process_index() as f64 + 1.0, (Kind::Float, Device::Cpu));
        accelerator.no_sync(&model, || accelerator.backward(&model.forward(&x)?.sum(None)))?;
        let local = to_vec(&weight.grad().unwrap())[0];
        accelerator.backward(&model.forward(&x)?.sum(None))?;
        Ok((local, to_vec(&weight.grad().unwrap())[0]))
    })
    .unwrap();
    // Locally 1 and 2; then the means of 1 + 1 and 2 + 2.
    assert_eq!(got, [(1.0, 3.0), (2.0, 3.0)]);
}

#[test]
fn sync_can_be_triggered_after_a_forward_without_it() {
    let got = ranks(2, Default::default(), |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let linear = Linear::new(store.root(), 1, 1, Default::default())?;
        let weight = linear.weight.clone();
        let model = accelerator.prepare(ModuleFn::new(&store, move |x: &Tensor| linear.forward(x)))?;
        let x = Tensor::full([1, 1], accelerator.process_index() as f64 + 1.0, (Kind::Float, Device::Cpu));
        let loss = accelerator.no_sync(&model, || Ok(model.forward(&x)?.sum(None)))?;
        accelerator.trigger_sync_in_backward(&model)?;
        accelerator.backward(&loss)?;
        Ok(to_vec(&weight.grad().unwrap())[0])
    })
    .unwrap();
    assert_eq!(got, [1.5, 1.5]);
}

#[test]
fn a_rank_that_goes_away_is_named() {
    let errors = ranks(3, Default::default(), |accelerator| {
        // Who leaves while others still connect is missed by those in another way.
        accelerator.wait_for_everyone()?;
        if accelerator.process_index() == 1 {
            return Ok(None);
        }
        Ok(accelerator.wait_for_everyone().err())
    })
    .unwrap();
    for (rank, error) in errors.into_iter().enumerate().filter(|(rank, _)| *rank != 1) {
        let error: Error = error.unwrap_or_else(|| panic!("rank {rank} passed a barrier that rank 1 never reached"));
        assert!(error.is_peer_failure() || error.is_timeout(), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("barrier (collective 2)") && text.contains("rank 1 has not made this call"), "{text}");
    }
}

#[test]
fn bf16_computes_in_bf16_and_answers_in_float() {
    let run = |builder: AcceleratorBuilder| {
        ranks(1, builder, |accelerator| {
            let store = ParamStore::new(accelerator.device());
            let linear = Linear::new(store.root(), 4, 4, Default::default())?;
            let model = ModuleFn::new(&store, move |x: &Tensor| {
                let y = linear.forward(x)?;
                Ok((Tensor::from(y.kind() == Kind::BFloat16), y))
            });
            let model = accelerator.prepare(model)?;
            let (was_bf16, y) = model.forward(&Tensor::ones([2, 4], (Kind::Float, Device::Cpu)))?;
            accelerator.backward(&y.sum(None))?;
            Ok((bool::try_from(&was_bf16)?, y.kind(), store.parameters()[0].grad().unwrap().kind()))
        })
        .unwrap()[0]
    };
    let bf16 = || Accelerator::builder().mixed_precision(accelerate::MixedPrecision::Bf16);
    assert_eq!(run(bf16()), (true, Kind::Float, Kind::Float));
    assert_eq!(run(bf16().outputs_to_fp32(false)), (true, Kind::BFloat16, Kind::Float));
    assert_eq!(run(Accelerator::builder()), (false, Kind::Float, Kind::Float));
}

#[test]
fn fp16_skips_overflowing_steps_and_trains_on() {
    let builder = Accelerator::builder().mixed_precision(accelerate::MixedPrecision::Fp16);
    ranks(2, builder, |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let linear = Linear::new(store.root(), 2, 1, Default::default())?;
        let weight = linear.weight.clone();
        let optimizer = Sgd::new(&store, 0.1)?;
        let model = ModuleFn::new(&store, move |x: &Tensor| linear.forward(x));
        let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
        let before = weight.get().unwrap().detach().copy();
        for (scale, skipped) in [(f64::INFINITY, true), (1.0, false)] {
            let x = Tensor::ones([1, 2], (Kind::Float, Device::Cpu));
            accelerator.backward(&(model.forward(&x)?.sum(None) * scale))?;
            optimizer.step()?;
            assert_eq!(accelerator.optimizer_step_was_skipped(), skipped);
            assert_eq!(to_vec(&weight.get().unwrap()) == to_vec(&before), skipped);
            optimizer.zero_grad()?;
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn clipping_sees_true_gradients() {
    for precision in [accelerate::MixedPrecision::No, accelerate::MixedPrecision::Fp16] {
        // A gradient of 4 times the usual scale of 65536 would overflow in half precision.
        let scaler = accelerate::GradScalerKwargs { init_scale: Some(128.0), ..Default::default() };
        let builder = Accelerator::builder().mixed_precision(precision).kwargs_handler(scaler);
        let got = ranks(2, builder, |accelerator| {
            let store = ParamStore::new(accelerator.device());
            let linear = Linear::new(store.root(), 2, 1, Default::default())?;
            let optimizer = Sgd::new(&store, 0.0)?;
            let model = ModuleFn::new(&store, move |x: &Tensor| linear.forward(x));
            let (model, _optimizer) = accelerator.prepare((model, optimizer))?;
            let x = Tensor::from_slice2(&[[3f32, 4.0]]);
            accelerator.backward(&model.forward(&x)?.sum(None))?;
            let norm = accelerator.clip_grad_norm_(&model, 1.0)?.double_value(&[]);
            let after = accelerator.clip_grad_norm_(&model, 100.0)?.double_value(&[]);
            Ok((norm, after))
        })
        .unwrap();
        // The gradient is (3, 4) of the weight and 1 of the bias.
        for (norm, after) in got {
            assert!((norm - 26f64.sqrt()).abs() < 1e-2 && (after - 1.0).abs() < 1e-3, "{precision}: {norm} {after}");
        }
    }
}
