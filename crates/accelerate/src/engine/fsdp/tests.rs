//! How often parameters travel, and what stays in memory.

mod batch_norm;
mod failures;
mod orders;

use super::issued::Counts;
use super::{FullyShard, Start};
use crate::nn::{Linear, Module, ModuleFn, ParamStore};
use crate::session::{DeviceMesh, PreparedParameters};
use crate::{
    Accelerator, AutoWrapPolicy, BackwardPrefetch, FloatType, FullyShardedDataParallelPlugin, MixedPrecision,
    MixedPrecisionPolicy, PreparedModel, Result, ShardingStrategy, testing,
};
use accelerate_core::config::FullyShardedSettings;
use accelerate_core::plan::{Collective, Content, Operation, Plan};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tch::{Kind, Tensor};

const NUM_BLOCKS: usize = 3;

/// The engine that `prepare` would begin for a model that is trained.
fn start(accelerator: &Accelerator, store: &ParamStore, plugin: &FullyShardedDataParallelPlugin) -> Result<FullyShard> {
    let group = accelerator.group();
    let settings = FullyShardedSettings::from(plugin.clone());
    let shape = settings.mesh(group.world_size(), group.world_size())?;
    let model = Start {
        mesh: &DeviceMesh::new(group.clone(), shape),
        store,
        kwargs: &Default::default(),
        sharding: None,
        tensor_parallel: None,
        evaluation_mode: false,
    };
    FullyShard::start(&model, &settings, accelerator.mixed_precision())
}

/// A prepared model that the session does not know of.
fn with_engine<M: Module>(module: M, engine: &FullyShard, accelerator: &Accelerator) -> PreparedModel<M> {
    let parameters = PreparedParameters::new(module.params().clone(), Arc::new(engine.clone()), true);
    PreparedModel::new(module, Arc::new(parameters), None, accelerator.precision())
}

/// What passes see of their engine after each block: it is made before the engine is.
#[derive(Clone, Default)]
struct Watched(Arc<Mutex<Seen>>);

#[derive(Default)]
struct Seen {
    engine: Option<FullyShard>,
    /// Most units gathered at once.
    most_gathered: usize,
    /// Most units on their way at once in forward passes, and in backward passes.
    most_arriving: [usize; 2],
}

impl Watched {
    fn look(&self, is_backward: bool) {
        let mut seen = self.0.lock().unwrap();
        let Some(engine) = &seen.engine else { return };
        let (gathered, arriving) = { engine.0.units.num_unsharded_and_arriving() };
        seen.most_gathered = seen.most_gathered.max(gathered);
        let most_arriving = &mut seen.most_arriving[usize::from(is_backward)];
        *most_arriving = arriving.max(*most_arriving);
    }

    /// Looks now, and when the gradient of `x` comes back.
    fn look_both_ways(&self, x: &Tensor) -> Result<Tensor> {
        self.look(false);
        let watched = self.clone();
        let same = torch_ext::apply_function(
            "Watched",
            &[x],
            |_| Ok(vec![x.f_mul_scalar(1.0)?]),
            move |_, gradients| {
                watched.look(true);
                Ok(gradients)
            },
        )?;
        Ok(same[0].shallow_clone())
    }
}

/// Blocks of two layers each, and a head that belongs to the root.
fn prepared(
    accelerator: &Accelerator,
    frees: bool,
) -> Result<(PreparedModel<impl crate::nn::Module<Input = Tensor, Output = Tensor>>, FullyShard, Watched)> {
    prepared_with(
        accelerator,
        FullyShardedDataParallelPlugin { reshard_after_forward: Some(frees.into()), ..Default::default() },
    )
}

/// The same, with other settings.
fn prepared_with(
    accelerator: &Accelerator,
    plugin: FullyShardedDataParallelPlugin,
) -> Result<(PreparedModel<impl crate::nn::Module<Input = Tensor, Output = Tensor>>, FullyShard, Watched)> {
    let store = ParamStore::new(accelerator.device());
    let mut blocks = Vec::new();
    for block in 0..NUM_BLOCKS {
        let path = store.root() / "blocks" / block;
        let up = Linear::new(&path / "up", 5, 7, Default::default())?;
        blocks.push((up, Linear::new(&path / "down", 7, 5, Default::default())?));
    }
    let head = Linear::new(store.root() / "head", 5, 1, Default::default())?;
    let watched = Watched::default();
    let inside = watched.clone();
    let model = ModuleFn::new(&store, move |input: &Tensor| {
        let mut x = input.shallow_clone();
        for (up, down) in &blocks {
            x = inside.look_both_ways(&down.forward(&up.forward(&x)?.f_gelu("none")?)?)?;
        }
        head.forward(&x)
    });
    let plugin =
        FullyShardedDataParallelPlugin { auto_wrap_policy: Some(AutoWrapPolicy::TransformerBasedWrap), ..plugin };
    let engine = start(accelerator, &store, &plugin)?;
    watched.0.lock().unwrap().engine = Some(engine.clone());
    Ok((with_engine(model, &engine, accelerator), engine, watched))
}

/// How often each unit was gathered, and its gradients were reduced.
fn counts(engine: &FullyShard) -> Vec<Counts> {
    engine.0.issued.counts(engine.0.units.len())
}

fn is_anything_gathered(engine: &FullyShard) -> bool {
    let units = &engine.0.units;
    units.num_unsharded_and_arriving().0 > 0 || units.has_full() || units.num_tokens().iter().any(|&count| count > 0)
}

#[test]
fn two_gathers_and_one_reduce_scatter_per_unit_and_step() {
    const STEPS: usize = 12;
    for (frees, gathers) in [(true, 2), (false, 1)] {
        let counts = testing::ranks(2, Default::default(), |accelerator| {
            let (model, engine, _watched) = prepared(&accelerator, frees)?;
            for step in 1..=STEPS {
                let loss =
                    model.forward(&Tensor::ones([4, 5], (Kind::Float, tch::Device::Cpu)))?.f_square()?.f_sum(None)?;
                assert_eq!(engine.0.units.has_full(), !frees, "after the forward pass");
                torch_ext::autograd::backward(&[&loss], None, Default::default())?;
                super::Engine::after_backward(&engine)?;
                assert!(!is_anything_gathered(&engine), "after step {step}");
            }
            // A block, the root, gradients before and after their exchange; of all units those of this rank, for two steps.
            // Gloo may hold another for a moment.
            let most = if frees { 20 } else { 30 };
            assert!(engine.0.units.buffers.len() <= most, "{} buffers", engine.0.units.buffers.len());
            Ok(counts(&engine))
        })
        .unwrap();
        let wanted = Counts { gathers: STEPS * gathers, reduce_scatters: STEPS };
        assert_eq!(counts, vec![vec![wanted; NUM_BLOCKS + 1]; 2], "frees after the forward pass: {frees}");
    }
}

#[test]
fn memory_of_a_block_goes_when_the_next_one_is_used() {
    for (frees, most) in [(true, 1), (false, NUM_BLOCKS)] {
        let seen = testing::ranks(2, Default::default(), |accelerator| {
            let (model, engine, watched) = prepared(&accelerator, frees)?;
            let output = model.forward(&Tensor::ones([4, 5], (Kind::Float, tch::Device::Cpu)))?;
            let most_gathered = watched.0.lock().unwrap().most_gathered;
            // Gloo's thread lets go of what it gathered a moment after it has said so.
            let is_in_use = || engine.0.units.buffers.num_in_use() > 0;
            let started = Instant::now();
            while frees && is_in_use() && started.elapsed() < Duration::from_secs(20) {
                std::thread::yield_now();
            }
            let is_in_use = is_in_use();
            drop(output);
            Ok((most_gathered, is_in_use))
        })
        .unwrap();
        assert_eq!(seen, [(most, !frees); 2], "frees after the forward pass: {frees}");
    }
}

/// Also where autocast would copy parameters that are not in the type that it computes in.
#[test]
fn graphs_keep_no_parameters_in_any_precision() {
    let output_dtype = Some(FloatType::BFloat16);
    for policy in [None, Some(MixedPrecisionPolicy { output_dtype, ..Default::default() })] {
        for mixed_precision in [MixedPrecision::No, MixedPrecision::Bf16, MixedPrecision::Fp16] {
            let plugin = FullyShardedDataParallelPlugin { mixed_precision_policy: policy, ..Default::default() };
            testing::ranks(2, Accelerator::builder().mixed_precision(mixed_precision), |accelerator| {
                let (model, engine, _watched) = prepared_with(&accelerator, plugin.clone())?;
                let _output = model.forward(&Tensor::ones([4, 5], (Kind::Float, tch::Device::Cpu)))?;
                let tokens: Vec<usize> = engine.0.units.num_tokens();
                assert!(tokens.iter().all(|&tokens| tokens > 0), "{mixed_precision}, {policy:?}: {tokens:?}");
                Ok(())
            })
            .unwrap();
        }
    }
}

#[test]
fn evaluation_gathers_once_and_keeps_nothing() {
    for frees in [true, false] {
        let counts = testing::ranks(2, Default::default(), |accelerator| {
            let (model, engine, _watched) = prepared(&accelerator, frees)?;
            let _ = tch::no_grad(|| model.forward(&Tensor::ones([4, 5], (Kind::Float, tch::Device::Cpu))))?;
            assert!(!is_anything_gathered(&engine));
            Ok(counts(&engine))
        })
        .unwrap();
        assert_eq!(counts[0], [Counts { gathers: 1, reduce_scatters: 0 }; NUM_BLOCKS + 1]);
    }
}

#[test]
fn a_parameter_outside_of_a_forward_pass_is_whole_for_once() {
    testing::ranks(3, Default::default(), |accelerator| {
        let (model, engine, _watched) = prepared(&accelerator, true)?;
        let weight = crate::nn::Module::params(&*model).get("blocks.1.up.weight").unwrap();
        assert_eq!((weight.get()?.size(), weight.shape()), (vec![7, 5], vec![7, 5]));
        assert!(weight.numel() == 35 && weight.local().numel() < 35);
        let penalty = weight.get()?.f_square()?.f_sum(None)?;
        torch_ext::autograd::backward(&[&penalty], None, Default::default())?;
        let gradient = weight.grad().unwrap();
        assert!((gradient - weight.local() * 2.0).abs().sum(None).double_value(&[]) < 1e-5);
        assert!(!is_anything_gathered(&engine));
        Ok(())
    })
    .unwrap();
}

/// Trains some steps of `accumulation` micro-batches; all but the last of each without synchronisation. Returns how many units
/// were gathered at once, and how many on their way, in forward and in backward passes.
fn train(
    accelerator: &Accelerator,
    plugin: FullyShardedDataParallelPlugin,
    (steps, accumulation): (usize, usize),
) -> Result<(FullyShard, [usize; 3])> {
    let (model, engine, watched) = prepared_with(accelerator, plugin)?;
    let input = Tensor::ones([4, 5], (Kind::Float, tch::Device::Cpu));
    for _ in 0..steps {
        for micro_batch in 0..accumulation {
            let sync = super::Engine::set_gradient_sync(&engine, micro_batch + 1 == accumulation);
            let loss = model.forward(&input)?.f_square()?.f_sum(None)?;
            torch_ext::autograd::backward(&[&loss], None, Default::default())?;
            super::Engine::after_backward(&engine)?;
            super::Engine::set_gradient_sync(&engine, sync);
        }
        super::Engine::before_step(&engine)?;
    }
    let Seen { most_gathered, most_arriving, .. } = *watched.0.lock().unwrap();
    Ok((engine, [most_gathered, most_arriving[0], most_arriving[1]]))
}

/// What a plan says of three steps.
fn three_steps_of(plan: &Plan) -> Vec<Counts> {
    let collectives = plan.collectives();
    let count = |unit: usize, operation: Operation| {
        let is_such = |own: &&Collective| (own.operation, own.content) == (operation, Content::Unit(unit));
        3 * collectives.iter().filter(is_such).count()
    };
    let counts = |unit: usize| Counts {
        gathers: count(unit, Operation::AllGather),
        reduce_scatters: count(unit, Operation::ReduceScatter),
    };
    (0..plan.units.len()).map(counts).collect()
}

#[test]
fn strategies_differ_in_how_often_units_travel() {
    use crate::ShardingStrategy::{FullShard, OptimizerState, OptimizerStateAndGradients, ShardGradOp};
    // Gathers and reduce-scatters of three steps, without and with four micro-batches.
    let cases = [
        (FullShard, (6, 3), (24, 3)),
        (ShardGradOp, (3, 3), (12, 3)),
        (OptimizerState, (3, 3), (3, 3)),
        (OptimizerStateAndGradients, (3, 3), (3, 12)),
    ];
    for (sharding_strategy, once, accumulated) in cases {
        for (accumulation, (gathers, reduce_scatters)) in [(1, once), (4, accumulated)] {
            let plugin =
                FullyShardedDataParallelPlugin { sharding_strategy: Some(sharding_strategy), ..Default::default() };
            let wanted = vec![Counts { gathers, reduce_scatters }; NUM_BLOCKS + 1];
            testing::ranks(2, Default::default(), |accelerator| {
                let (engine, _) = train(&accelerator, plugin.clone(), (3, accumulation))?;
                assert_eq!(counts(&engine), wanted, "{sharding_strategy}, {accumulation} micro-batches");
                if accumulation == 1 {
                    assert_eq!(three_steps_of(&engine.0.units.plan), wanted, "{sharding_strategy}");
                }
                Ok(())
            })
            .unwrap();
        }
    }
}

#[test]
fn what_is_fetched_ahead_is_not_fetched_again() {
    use crate::BackwardPrefetch::{BackwardPost, BackwardPre, NoPrefetch};
    // With how many units on their way at most in a forward and in a backward pass: blocks are of equal size.
    for (forward_prefetch, backward_prefetch, limit_all_gathers, most_arriving) in [
        (true, NoPrefetch, true, [1, 0]),
        (false, BackwardPre, true, [0, 1]),
        (false, BackwardPost, true, [0, 1]),
        (true, BackwardPre, false, [NUM_BLOCKS, NUM_BLOCKS]),
        (false, BackwardPost, false, [0, NUM_BLOCKS]),
    ] {
        let settings = (forward_prefetch, backward_prefetch, limit_all_gathers);
        let plugin = FullyShardedDataParallelPlugin {
            forward_prefetch: Some(forward_prefetch),
            backward_prefetch: Some(backward_prefetch),
            limit_all_gathers: Some(limit_all_gathers),
            // What is read out of memory is not asked for ahead.
            direct_all_gather: Some(false),
            ..Default::default()
        };
        let counts = testing::ranks(2, Default::default(), |accelerator| {
            let (engine, most) = train(&accelerator, plugin.clone(), (4, 1))?;
            assert_eq!(
                most,
                [1, most_arriving[0], most_arriving[1]],
                "what is on its way is not gathered yet: {settings:?}"
            );
            assert!(!is_anything_gathered(&engine));
            assert_eq!(engine.0.prefetcher.num_known(), [NUM_BLOCKS + 1; 2]);
            assert_eq!(engine.0.units.num_unsharded_and_arriving().1, 0);
            Ok(counts(&engine))
        });
        let wanted = vec![vec![Counts { gathers: 8, reduce_scatters: 4 }; NUM_BLOCKS + 1]; 2];
        assert_eq!(counts.unwrap(), wanted, "{settings:?}");
    }
}

#[test]
fn saving_gathers_each_unit_once_and_lets_it_go() {
    const NUM_LAYERS: usize = 12;
    let folder = tempfile::tempdir().unwrap();
    let plugin = FullyShardedDataParallelPlugin {
        auto_wrap_policy: Some(AutoWrapPolicy::TransformerBasedWrap),
        ..Default::default()
    };
    testing::ranks(2, Default::default(), |accelerator| {
        let store = ParamStore::new(accelerator.device());
        for layer in 0..NUM_LAYERS {
            Linear::new(store.root() / "layers" / layer, 5, 7, Default::default())?;
        }
        let engine = start(&accelerator, &store, &plugin)?;
        accelerator.save_model(&store, folder.path(), &Default::default())?;
        assert!(counts(&engine).iter().all(|counts| counts.gathers == 1), "{:?}", counts(&engine));
        assert!(!is_anything_gathered(&engine));
        // Gloo may hold one more for a moment.
        let num_buffers = engine.0.units.buffers.len();
        assert!(num_buffers <= 3, "{num_buffers} of {NUM_LAYERS} units were unsharded at once");
        Ok(())
    })
    .unwrap();
}

/// A model of two layers that uses them in the order that `reversed` tells at each pass, and fails on demand when
/// gradients come back to between them.
fn steered(
    accelerator: &Accelerator,
    plugin: &FullyShardedDataParallelPlugin,
    reversed: Arc<Mutex<bool>>,
    fails: Arc<Mutex<bool>>,
) -> Result<(ParamStore, FullyShard, PreparedModel<impl crate::nn::Module<Input = Tensor, Output = Tensor> + use<>>)> {
    let store = ParamStore::new(accelerator.device());
    let path = |layer: usize| store.root() / "layers" / layer;
    let layers = [Linear::new(path(0), 3, 3, Default::default())?, Linear::new(path(1), 3, 3, Default::default())?];
    // Whole numbers: sums are the same in any order.
    for layer in &layers {
        if let Some(bias) = &layer.bias {
            bias.copy_(&Tensor::ones([3], (Kind::Float, tch::Device::Cpu)))?;
        }
        layer.weight.copy_(&Tensor::eye(3, (Kind::Float, tch::Device::Cpu)))?;
    }
    let module = ModuleFn::new(&store, move |input: &Tensor| {
        let [first, second] =
            if *reversed.lock().unwrap() { [&layers[1], &layers[0]] } else { [&layers[0], &layers[1]] };
        let between = first.forward(input)?;
        let fails = Arc::clone(&fails);
        let between = torch_ext::apply_function(
            "Steered",
            &[&between],
            |_| Ok(vec![between.f_mul_scalar(1.0)?]),
            move |_, gradients| if *fails.lock().unwrap() { Err("steered".into()) } else { Ok(gradients) },
        )?;
        second.forward(&between[0])
    });
    let plugin = FullyShardedDataParallelPlugin {
        auto_wrap_policy: Some(AutoWrapPolicy::TransformerBasedWrap),
        ..plugin.clone()
    };
    let engine = start(accelerator, &store, &plugin)?;
    let model = with_engine(module, &engine, accelerator);
    Ok((store, engine, model))
}

#[test]
fn a_backward_pass_that_fails_leaves_nothing_behind() {
    testing::ranks(2, Default::default(), |accelerator| {
        let fails = Arc::new(Mutex::new(false));
        let (store, _shard, model) = steered(&accelerator, &Default::default(), Arc::default(), Arc::clone(&fails))?;
        let input = Tensor::ones([1, 3], (Kind::Float, tch::Device::Cpu));
        let backward = || -> Result<()> {
            Ok(torch_ext::autograd::backward(&[&model.forward(&input)?.f_sum(None)?], None, Default::default())?)
        };
        *fails.lock().unwrap() = true;
        assert!(backward().is_err());
        *fails.lock().unwrap() = false;
        backward()?;
        for bias in ["layers.0.bias", "layers.1.bias"] {
            let gradient = store.get(bias).unwrap().grad().unwrap();
            assert_eq!(gradient, gradient.ones_like(), "{bias}: of one pass, not of two");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn gradients_that_nobody_has_reduced_are_reduced_before_the_step() {
    testing::ranks(3, Default::default(), |accelerator| {
        let (store, engine, model) = steered(&accelerator, &Default::default(), Arc::default(), Arc::default())?;
        let input = Tensor::full([1, 3], accelerator.process_index() as i64, (Kind::Float, tch::Device::Cpu));
        super::Engine::set_gradient_sync(&engine, false);
        for _ in 0..2 {
            torch_ext::autograd::backward(&[&model.forward(&input)?.f_sum(None)?], None, Default::default())?;
        }
        let weight = store.get("layers.0.weight").unwrap();
        assert!(weight.grad().is_none());
        super::Engine::before_step(&engine)?;
        let gradient = weight.grad().unwrap();
        // Twice the mean of 0, 1 and 2.
        assert!(gradient.numel() == 0 || gradient.allclose(&gradient.full_like(2), 1e-6, 1e-6, false), "{gradient}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_parameter_without_a_gradient_gets_zeros() {
    testing::ranks(2, Default::default(), |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let layer = Linear::new(store.root() / "layer", 3, 3, Default::default())?;
        let engine = start(&accelerator, &store, &Default::default())?;
        let uses_bias = Arc::new(Mutex::new(true));
        let has_bias = Arc::clone(&uses_bias);
        let module = ModuleFn::new(&store, move |input: &Tensor| {
            let weight = layer.weight.get()?;
            let bias =
                layer.bias.as_ref().filter(|_| *has_bias.lock().unwrap()).map(crate::nn::Param::get).transpose()?;
            Ok(input.f_linear(&weight, bias)?)
        });
        let model = with_engine(module, &engine, &accelerator);
        let bias = store.get("layer.bias").unwrap();
        for (is_used, wanted) in [(true, 1.0), (false, 0.0)] {
            *uses_bias.lock().unwrap() = is_used;
            torch_ext::autograd::set_gradient(&bias.local(), None)?;
            let input = Tensor::ones([1, 3], (Kind::Float, tch::Device::Cpu));
            torch_ext::autograd::backward(&[&model.forward(&input)?.f_sum(None)?], None, Default::default())?;
            let gradient = bias.grad().unwrap();
            assert_eq!(gradient, gradient.full_like(wanted), "used: {is_used}");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn gradients_add_up_in_the_type_in_which_they_are_reduced() {
    let plugin = FullyShardedDataParallelPlugin {
        mixed_precision_policy: Some(MixedPrecisionPolicy {
            param_dtype: Some(FloatType::BFloat16),
            reduce_dtype: Some(FloatType::Float32),
            ..Default::default()
        }),
        ..Default::default()
    };
    testing::ranks(2, Default::default(), |accelerator| {
        let (store, engine, model) = steered(&accelerator, &plugin, Arc::default(), Arc::default())?;
        // 257 is no bfloat16.
        for (factor, syncs) in [(256, false), (1, true)] {
            super::Engine::set_gradient_sync(&engine, syncs);
            let input = Tensor::ones([1, 3], (Kind::BFloat16, tch::Device::Cpu));
            let loss = model.forward(&input)?.f_sum(None)? * factor;
            torch_ext::autograd::backward(&[&loss], None, Default::default())?;
        }
        let gradient = store.get("layers.1.bias").unwrap().grad().unwrap();
        assert_eq!(gradient, gradient.full_like(257));
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_plan_that_does_not_fit_one_rank_is_an_error_on_all_of_them() {
    for limits in [[Some(200), Some(200)], [None, Some(200)]] {
        let texts = testing::ranks(2, Default::default(), |accelerator| {
            let max_memory = limits[accelerator.process_index()];
            let plugin = FullyShardedDataParallelPlugin { max_memory, ..Default::default() };
            Ok(steered(&accelerator, &plugin, Arc::default(), Arc::default()).map(drop).unwrap_err().to_string())
        });
        let [first, second] = texts.unwrap().try_into().unwrap();
        assert!(second.contains("FULL_SHARD on 2 ranks") && second.contains("the largest unit is"), "{second}");
        let of_other = format!("keeping a shard of the model failed on rank 1, and ends on this rank too: {second}");
        assert_eq!(first, if limits[0].is_some() { second } else { of_other });
    }
}

#[test]
fn checkpointed_blocks_travel_no_more_often() {
    use crate::nn::Checkpointed;
    use ShardingStrategy::{FullShard, OptimizerState, ShardGradOp};
    // The first layer is used before the second one and after it.
    for (sharding_strategy, gathers) in [(FullShard, [4, 2]), (ShardGradOp, [1, 1]), (OptimizerState, [1, 1])] {
        for backward_prefetch in [BackwardPrefetch::NoPrefetch, BackwardPrefetch::BackwardPre] {
            let plugin = FullyShardedDataParallelPlugin {
                sharding_strategy: Some(sharding_strategy),
                backward_prefetch: Some(backward_prefetch),
                auto_wrap_policy: Some(AutoWrapPolicy::TransformerBasedWrap),
                activation_checkpointing: Some(true),
                ..Default::default()
            };
            testing::ranks(2, Default::default(), |accelerator| {
                let store = ParamStore::new(accelerator.device());
                let path = |layer: usize| store.root() / "layers" / layer;
                let layer = |index| Checkpointed::new(path(index), |path| Linear::new(path, 3, 3, Default::default()));
                let layers = [layer(0)?, layer(1)?];
                store.gradient_checkpointing_enable(Default::default())?;
                let module = ModuleFn::new(&store, move |input: &Tensor| {
                    let hidden = layers[1].forward(&layers[0].forward(input)?.f_tanh()?)?;
                    layers[0].forward(&hidden)
                });
                let engine = start(&accelerator, &store, &plugin)?;
                let model = with_engine(module, &engine, &accelerator);
                for _ in 0..2 {
                    let before = counts(&engine);
                    super::Engine::before_step(&engine)?;
                    let loss = model.forward(&Tensor::ones([1, 3], (Kind::Float, tch::Device::Cpu)))?.f_sum(None)?;
                    torch_ext::autograd::backward(&[&loss], None, Default::default())?;
                    assert!(
                        engine.0.units.num_unsharded_and_arriving().0 == 0 || gathers == [1, 1],
                        "all that was gathered has gone"
                    );
                    super::Engine::after_backward(&engine)?;
                    for ((after, before), gathers) in counts(&engine).iter().zip(before).zip(gathers) {
                        assert_eq!(after.gathers - before.gathers, gathers, "{sharding_strategy}");
                        let wanted = gathers.div_ceil(2);
                        assert_eq!(after.reduce_scatters - before.reduce_scatters, wanted, "{sharding_strategy}");
                    }
                }
                Ok(())
            })
            .unwrap();
        }
    }
}

#[test]
fn parts_are_read_out_of_memory_between_a_forward_pass_and_the_comparison_after_its_backward_pass() {
    testing::ranks(3, Default::default(), |accelerator| {
        let (model, engine, _) = prepared(&accelerator, true)?;
        assert!(engine.0.transport.has_peers(), "ranks of one process can read each other's memory");
        let input = Tensor::ones([2, 5], (Kind::Float, tch::Device::Cpu));
        for _ in 0..2 {
            let loss = model.forward(&input)?.f_sum(None)?;
            assert!(engine.0.transport.reads());
            accelerator.backward(&loss)?;
            // The accelerator of the test has not prepared the model.
            crate::session::Engine::after_backward(&engine)?;
            assert!(!engine.0.transport.reads());
            let _ = tch::no_grad(|| model.forward(&input))?;
            assert!(!engine.0.transport.reads(), "nobody will read after a pass without gradients");
        }
        let sent = FullyShardedDataParallelPlugin { direct_all_gather: Some(false), ..Default::default() };
        let (model, engine, _) = prepared_with(&accelerator, sent)?;
        let _loss = model.forward(&input)?;
        assert!(!engine.0.transport.has_peers() && !engine.0.transport.reads());
        Ok(())
    })
    .unwrap();
}
