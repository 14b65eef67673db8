//! Sharded weights that are gathered as FP8 codes: codes are those of the whole weight, to the bit.

use super::ranks::Deep;
use super::transcription::{E4M3, dynamic};
use super::{builder, wave};
use accelerate::nn::{CheckpointOptions, ModuleFn, checkpoint};
use accelerate::optim::Sgd;
use accelerate::tch::{Kind, Tensor};
use accelerate::testing::ranks;
use accelerate::{
    AORecipeKwargs, Accelerator, AcceleratorBuilder, Float8LinearRecipeName, FloatType, FullyShardedDataParallelPlugin,
    MixedPrecisionPolicy, Result, ShardingStrategy,
};
use rstest::rstest;
use std::sync::{Arc, Mutex};

/// Gradients are added up in 32 bits, as those of one process are.
fn sharded(sharding_strategy: ShardingStrategy, recipe: AORecipeKwargs) -> AcceleratorBuilder {
    let policy = MixedPrecisionPolicy { reduce_dtype: Some(FloatType::Float32), ..Default::default() };
    let plugin = FullyShardedDataParallelPlugin {
        mixed_precision_policy: Some(policy),
        sharding_strategy: Some(sharding_strategy),
        ..Default::default()
    };
    builder(recipe).fsdp_plugin(plugin)
}

fn gathering() -> AORecipeKwargs {
    AORecipeKwargs { enable_fsdp_float8_all_gather: Some(true), ..Default::default() }
}

/// Losses of a training with two micro-batches in each step, what an evaluation after it gives, and the weights. All ranks have the same
/// rows.
fn trained(accelerator: &Accelerator, is_checkpointed: bool) -> Result<(Vec<f64>, Vec<Vec<f32>>)> {
    let Deep { store, layers } = Deep::new();
    let optimizer = Sgd::new(&store, 0.1)?;
    let layers = Arc::new(layers);
    let model = ModuleFn::new(&store, move |x: &Tensor| {
        let own = Arc::clone(&layers);
        let run = move |x: &Tensor| own.iter().try_fold(x.shallow_clone(), |x, layer| Ok(layer.forward(&x)?.tanh()));
        match is_checkpointed {
            true => checkpoint(&[x], CheckpointOptions::default(), move |inputs| run(&inputs[0])),
            false => run(x),
        }
    });
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let mut found = Vec::new();
    for step in 0..6 {
        let (x, target) = (wave(&[8, 16], f64::from(step)), wave(&[8, 16], f64::from(step) + 0.5));
        accelerator.accumulate(&model, || {
            let loss = (model.forward(&x)? - target).square().mean(Kind::Float);
            found.push(loss.double_value(&[]));
            accelerator.backward(&loss)?;
            optimizer.step()?;
            optimizer.zero_grad()
        })?;
    }
    let evaluated = accelerate::tch::no_grad(|| model.forward(&wave(&[8, 16], 9.0)))?;
    found.push(evaluated.sum(Kind::Double).double_value(&[]));
    let weights = store.state_dict()?;
    let weights = weights.iter().map(|(_, tensor)| Vec::try_from(tensor.flatten(0, -1)).unwrap()).collect();
    Ok((found, weights))
}

#[rstest]
fn ranks_compute_what_one_process_computes(
    #[values(1, 2, 4)] world_size: usize,
    #[values(ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp, ShardingStrategy::OptimizerStateAndGradients)]
    strategy: ShardingStrategy,
    #[values(false, true)] is_checkpointed: bool,
) {
    let alone = builder(gathering()).gradient_accumulation_steps(2);
    let alone = ranks(1, alone, |accelerator| trained(&accelerator, false)).unwrap().swap_remove(0);
    assert!(alone.0.iter().all(|loss| loss.is_finite()) && alone.0[5] < alone.0[0], "{alone:?}");
    let together = sharded(strategy, gathering()).gradient_accumulation_steps(2);
    for found in ranks(world_size, together, |accelerator| trained(&accelerator, is_checkpointed)).unwrap() {
        assert_eq!(found, alone);
    }
}

/// Of five layers the first and the last do not compute in FP8, and rows have scales of their own in another recipe.
#[test]
fn the_plan_says_what_is_gathered_as_codes() {
    let plan = |recipe: AORecipeKwargs| {
        let plans = ranks(2, sharded(ShardingStrategy::FullShard, recipe), |accelerator| {
            let model = Deep::new();
            let _model = accelerator.prepare(model)?;
            Ok(accelerator.plan().to_string())
        });
        plans.unwrap().swap_remove(0)
    };
    let rowwise = Some(Float8LinearRecipeName::Rowwise);
    let text = plan(gathering());
    for part in ["3 parameter tensors of float32 gathered as FP8 codes, 4096 elements", "all-gather unit 1, 4.1 KB"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    for without in [AORecipeKwargs::default(), AORecipeKwargs { recipe_name: rowwise, ..gathering() }] {
        let text = plan(without);
        assert!(!text.contains("FP8 codes"), "{text}");
    }
}

/// Who computes with such a weight otherwise gets the numbers that its codes stand for, and gives it a gradient.
#[test]
fn a_weight_that_is_used_in_another_way_is_its_codes_as_numbers() {
    let results = ranks(2, sharded(ShardingStrategy::FullShard, gathering()), |accelerator| {
        let Deep { store, layers } = Deep::new();
        let (weight, seen) = (layers[2].weight.clone(), Arc::new(Mutex::new(None)));
        let before = weight.get()?.detach().copy();
        let keeps = Arc::clone(&seen);
        let model = ModuleFn::new(&store, move |x: &Tensor| {
            let numbers = weight.get()?;
            *keeps.lock().unwrap() = Some(numbers.detach().to_kind(Kind::Float));
            Ok(x.f_matmul(&numbers.tr())?)
        });
        let optimizer = Sgd::new(&store, 1.0)?;
        let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
        let x = wave(&[4, 48], 0.3);
        accelerator.backward(&model.forward(&x)?.sum(Kind::Float))?;
        optimizer.step()?;
        let after = store.state_dict()?.get("layers.2.weight").unwrap().shallow_clone();
        let seen = seen.lock().unwrap().take().unwrap();
        Ok((seen, &before - after, x, before))
    });
    for (seen, step, x, before) in results.unwrap() {
        let codes = dynamic(&before, E4M3, None, false);
        assert_eq!(seen, codes.to_kind(Kind::BFloat16).to_kind(Kind::Float));
        // Each row of the gradient of a sum is the sum of the rows of the input.
        let wanted = x.sum_dim_intlist(0, false, Kind::Float).expand_as(&step);
        assert!(step.allclose(&wanted, 1e-2, 1e-2, false), "{step} {wanted}");
    }
}
