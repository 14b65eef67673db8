//! State of sharded models and their optimizers as values: whole or in shards, between any numbers of ranks.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{Layout, Linear, Module, ModuleFn, ParamStore, ShardedStateDict, StateDict};
use accelerate::optim::{Adagrad, AdamW, AdamW8bit, Lion, Optimizer, OptimizerState, Sgd};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{
    Accelerator, AcceleratorBuilder, AutoWrapPolicy, FullyShardedDataParallelPlugin, Result, ShardingStrategy, testing,
};
use std::sync::Mutex;

/// Odd sizes, a frozen weight, and a scale that is a single number: on four ranks some have nothing of it.
fn model(device: Device) -> Result<(ParamStore, impl Module<Input = Tensor, Output = Tensor>)> {
    let store = ParamStore::new(device);
    let path = |layer: usize| store.root() / "layers" / layer;
    let layers = [Linear::new(path(0), 3, 5, Default::default())?, Linear::new(path(1), 5, 3, Default::default())?];
    let scale = store.root().param("scale", Tensor::from(1f32))?;
    for (index, param) in store.parameters().iter().enumerate() {
        let values = Tensor::arange(param.numel() as i64, (Kind::Double, Device::Cpu)) * 0.7 + index as f64;
        param.copy_(&(values.sin() * 0.5).reshape(param.shape()))?;
    }
    store.get("layers.1.bias").unwrap().set_requires_grad(false)?;
    let module = ModuleFn::new(&store, move |input: &Tensor| {
        let hidden = layers[0].forward(input)?.f_gelu("none")?;
        Ok(layers[1].forward(&hidden)? * scale.get()?)
    });
    Ok((store, module))
}

type Maker = fn(&ParamStore) -> Result<Box<dyn Optimizer>>;

fn adamw(store: &ParamStore) -> Result<Box<dyn Optimizer>> {
    Ok(Box::new(AdamW::builder(store).lr(0.05).amsgrad(true).build()?))
}

fn sgd(store: &ParamStore) -> Result<Box<dyn Optimizer>> {
    Ok(Box::new(Sgd::builder(store).lr(0.05).momentum(0.9).build()?))
}

fn adagrad(store: &ParamStore) -> Result<Box<dyn Optimizer>> {
    Ok(Box::new(Adagrad::new(store, 0.05)?))
}

fn lion(store: &ParamStore) -> Result<Box<dyn Optimizer>> {
    Ok(Box::new(Lion::new(store, 0.01)?))
}

/// What one rank is after some steps.
struct Saved {
    whole: (StateDict, OptimizerState),
    shards: (ShardedStateDict, OptimizerState),
}

/// All ranks' states, for one rank at a time to look at.
type AllSaved = Mutex<Vec<Saved>>;

#[derive(Clone, Copy)]
enum Taken<'a> {
    Nothing,
    Whole(&'a AllSaved),
    Parts(&'a AllSaved),
}

/// Takes over a state and does some steps, on the same rows on all ranks.
fn run(accelerator: &Accelerator, make: Maker, taken: Taken<'_>, steps: std::ops::Range<i64>) -> Result<Saved> {
    let (store, module) = model(accelerator.device())?;
    let optimizer = make(&store)?;
    let (model, mut optimizer) = accelerator.prepare((module, optimizer))?;
    match taken {
        Taken::Nothing => {}
        Taken::Whole(saved) => {
            let ranks = saved.lock().unwrap();
            let (weights, state) = &ranks[ranks.len() - 1].whole;
            store.load_state_dict(weights, Default::default())?;
            optimizer.load_state_dict(state)?;
        }
        Taken::Parts(saved) => {
            let ranks = saved.lock().unwrap();
            let shards: Vec<_> = ranks.iter().map(|saved| copy_of(&saved.shards.0)).collect();
            store.load_sharded_state_dict(&shards)?;
            let shards: Vec<_> = ranks.iter().map(|saved| copy_of_state(&saved.shards.1)).collect();
            optimizer.load_state_dict(&OptimizerState::from_shards(&shards)?)?;
        }
    }
    for step in steps {
        let input = (Tensor::arange(6, (Kind::Float, Device::Cpu)) + step as f64).sin().view([2, 3]);
        accelerator.backward(&(model.forward(&input)? - 0.3).square().f_mean(None)?)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
    }
    Ok(Saved {
        whole: (store.state_dict()?, optimizer.full_state_dict()?),
        shards: (store.sharded_state_dict()?, optimizer.state_dict()?),
    })
}

fn copy_of(state: &ShardedStateDict) -> ShardedStateDict {
    let tensors = state.tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect();
    ShardedStateDict { tensors, layouts: state.layouts.clone() }
}

fn copy_of_state(state: &OptimizerState) -> OptimizerState {
    let tensors = state.tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect();
    OptimizerState { tensors, groups: state.groups.clone(), layouts: state.layouts.clone() }
}

fn sharded(sharding_strategy: ShardingStrategy, dp_shard_size: Option<usize>) -> AcceleratorBuilder {
    Accelerator::builder().fsdp_plugin(FullyShardedDataParallelPlugin {
        sharding_strategy: Some(sharding_strategy),
        dp_shard_size,
        auto_wrap_policy: Some(AutoWrapPolicy::TransformerBasedWrap),
        ..Default::default()
    })
}

fn assert_equal(found: &(StateDict, OptimizerState), wanted: &(StateDict, OptimizerState), context: &str) {
    assert_eq!(found.1.tensors.keys().collect::<Vec<_>>(), wanted.1.tensors.keys().collect::<Vec<_>>(), "{context}");
    assert_eq!(found.1.groups, wanted.1.groups, "{context}");
    let tensors = wanted.1.tensors.iter().map(|(key, tensor)| (key.as_str(), &found.1.tensors[key], tensor));
    let weights = wanted.0.iter().map(|(name, tensor)| (name, found.0.get(name).unwrap(), tensor));
    for (name, found, wanted) in tensors.chain(weights) {
        assert_eq!(found.size(), wanted.size(), "{name}, {context}");
        assert!(found.allclose(wanted, 1e-5, 1e-6, false), "{name}: {found} {wanted} {context}");
    }
}

use ShardingStrategy::{FullShard, HybridShard, NoShard, OptimizerState as ZeroOne, OptimizerStateAndGradients};

#[test]
fn training_goes_on_with_another_number_of_ranks() {
    for (name, make) in [("AdamW", adamw as Maker), ("SGD", sgd), ("Adagrad", adagrad), ("Lion", lion)] {
        goes_on(name, make);
    }
}

fn goes_on(name: &str, make: Maker) {
    let alone = Accelerator::builder().cpu(true).build().unwrap();
    let wanted = run(&alone, make, Taken::Nothing, 0..4).unwrap();
    let halfway = run(&alone, make, Taken::Nothing, 0..2).unwrap();
    for (world_size, builder) in [
        (1, sharded(FullShard, None)),
        (2, sharded(ZeroOne, None)),
        (3, sharded(FullShard, None)),
        (4, sharded(HybridShard, Some(2))),
    ] {
        let saved =
            testing::ranks(world_size, builder, |accelerator| run(&accelerator, make, Taken::Nothing, 0..2)).unwrap();
        for rank in &saved {
            assert_equal(&rank.whole, &halfway.whole, &format!("{name}, saved on {world_size}"));
            assert!(rank.whole.1.layouts.is_empty() && !rank.shards.1.layouts.is_empty());
        }
        let saved = Mutex::new(saved);
        for (readers, builder) in [
            (1, sharded(NoShard, None)),
            (2, sharded(FullShard, None)),
            (3, sharded(OptimizerStateAndGradients, None)),
            (4, sharded(HybridShard, Some(2))),
        ] {
            for taken in [Taken::Whole(&saved), Taken::Parts(&saved)] {
                let go_on = |accelerator: Accelerator| run(&accelerator, make, taken, 2..4);
                let went_on = testing::ranks(readers, builder.clone(), go_on);
                let context = format!("{name}, from {world_size} to {readers}");
                went_on.unwrap().iter().for_each(|rank| assert_equal(&rank.whole, &wanted.whole, &context));
            }
        }
    }
}

/// As ranks of tensor parallelism hold them: columns of one weight and rows of the other, some of them twice.
#[test]
fn slices_of_a_dim_make_up_a_model_on_any_number_of_ranks() {
    let (whole, _) = model(Device::Cpu).unwrap();
    let whole = whole.state_dict().unwrap();
    let slices = [
        ("layers.0.weight", 1, 2..3),
        ("layers.1.weight", 0, 1..3),
        ("layers.0.weight", 1, 0..2),
        ("layers.1.weight", 0, 0..2),
    ];
    let is_sliced = |name: &str| slices.iter().any(|(sliced, ..)| *sliced == name);
    let full = whole.iter().filter(|(name, _)| !is_sliced(name)).map(|(name, full)| (name.to_owned(), full.copy()));
    let mut pieces = vec![ShardedStateDict { tensors: full.collect(), layouts: Default::default() }];
    for (name, dim, indices) in slices {
        let full = whole.get(name).unwrap();
        let shape: Vec<usize> = full.size().iter().map(|&size| size as usize).collect();
        let slice = full.narrow(dim as i64, indices.start as i64, indices.len() as i64).copy();
        let layout = Layout::full(shape).slice(dim, indices).unwrap();
        pieces.push(ShardedStateDict {
            tensors: [(name.to_owned(), slice)].into(),
            layouts: [(name.to_owned(), layout)].into(),
        });
    }
    let pieces = Mutex::new(pieces);
    for world_size in 1..=4 {
        let states = testing::ranks(world_size, sharded(ShardingStrategy::FullShard, None), |accelerator| {
            let (store, module) = model(accelerator.device())?;
            let _model = accelerator.prepare(module)?;
            for param in store.parameters() {
                param.copy_(&Tensor::from(f32::NAN))?;
            }
            store.load_sharded_state_dict(&pieces.lock().unwrap())?;
            store.state_dict()
        });
        for state in states.unwrap() {
            for (name, tensor) in whole.iter() {
                assert_eq!(state.get(name).unwrap(), tensor, "{name} on {world_size} ranks");
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let run_with = |make: Maker| {
        testing::ranks(3, sharded(FullShard, None), |accelerator| run(&accelerator, make, Taken::Nothing, 0..2))
    };
    let mut ranks = run_with(adamw).unwrap();
    let (store, _) = model(Device::Cpu).unwrap();
    let mut optimizer = AdamW::builder(&store).amsgrad(true).build().unwrap();

    // A shard where all is wanted.
    let text = optimizer.load_state_dict(&ranks[1].shards.1).unwrap_err().to_string();
    assert!(text.contains("\"exp_avg.layers.0.weight\" has elements 7..14 of [5, 3], not all"), "{text}");

    // Of three ranks, one is missing.
    ranks.remove(1);
    let states: Vec<_> = ranks.iter().map(|rank| copy_of_state(&rank.shards.1)).collect();
    let text = OptimizerState::from_shards(&states).unwrap_err().to_string();
    assert!(text.contains("\"exp_avg.layers.0.weight\": elements 7..14 are missing"), "{text}");
    let shards: Vec<_> = ranks.iter().map(|rank| copy_of(&rank.shards.0)).collect();
    let before = store.state_dict().unwrap();
    let text = store.load_sharded_state_dict(&shards).unwrap_err().to_string();
    assert!(text.contains("\"layers.0.weight\": elements 7..14 are missing"), "{text}");
    assert!(before.iter().all(|(name, tensor)| store.get(name).unwrap().get().unwrap() == *tensor));

    // Of another model.
    let mut other = copy_of(&ranks[0].shards.0);
    for layout in other.layouts.values_mut() {
        let deeper = Layout::full([layout.shape(), &[1]].concat());
        *layout = deeper.flat(0..layout.numel()).unwrap();
    }
    let text = store.load_sharded_state_dict(&[other]).unwrap_err().to_string();
    assert!(text.contains("its shape is [5, 3, 1], not [5, 3]"), "{text}");

    // Of other settings.
    let mut state = copy_of_state(&ranks[0].shards.1);
    state.groups[0].lr = 1.0;
    let states = [copy_of_state(&ranks[1].shards.1), state];
    let text = OptimizerState::from_shards(&states).unwrap_err().to_string();
    assert!(text.contains("the parameter groups of states 0 and 1 differ"), "{text}");

    // State in blocks becomes numbers.
    let numbers = testing::ranks(2, sharded(FullShard, None), |accelerator| {
        let store = ParamStore::new(Device::Cpu);
        let weight = store.root().param("weight", Tensor::ones([8192], (Kind::Float, Device::Cpu)))?;
        let module = ModuleFn::new(&store, move |input: &Tensor| Ok((weight.get()? * input).f_sum(None)?));
        let (model, mut optimizer) = accelerator.prepare((module, AdamW8bit::new(&store, 0.1)?))?;
        accelerator.backward(&model.forward(&Tensor::from(2f32))?)?;
        optimizer.step()?;
        let full = optimizer.full_state_dict()?.tensors;
        assert_eq!((full["exp_avg.weight"].kind(), full["exp_avg.weight"].size()), (Kind::Float, vec![8192]));
        assert!(!full.contains_key("exp_avg_scale.weight"));
        Ok(())
    });
    numbers.unwrap();
}
