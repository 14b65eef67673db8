//! Sharded training computes what replicated training computes, on any number of ranks.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{
    Embedding, EmbeddingConfig, Init, Linear, LinearConfig, Module, ModuleFn, Param, ParamStore, ScriptModule,
};
use accelerate::optim::{Adafactor, AdamW, AdamW8bit, ClipGradNorm, Optimizer, Sgd};
use accelerate::tch::{self, Device, Kind, Tensor};
use accelerate::{
    Accelerator, AutoWrapPolicy, Error, FloatType, FullyShardedDataParallelPlugin, JoinOptions, LocalSGD,
    MixedPrecision, MixedPrecisionPolicy, Result, ShardingStrategy, testing,
};

/// What a run gave: losses, norms before clipping, and the parameters by name.
type Outcome = (Vec<f64>, Vec<f64>, Vec<(String, Vec<f64>)>);

#[derive(Clone, Copy, Debug)]
struct Case {
    world_size: usize,
    accumulation: usize,
    max_norm: Option<f64>,
    norm_type: f64,
    momentum_only: bool,
}

const CASE: Case = Case { world_size: 2, accumulation: 1, max_norm: None, norm_type: 2.0, momentum_only: false };

/// Odd shapes, an embedding tied to the head, a frozen weight, and a scale that is a single number.
fn model(accelerator: &Accelerator) -> Result<(ParamStore, impl Module<Input = Tensor, Output = Tensor>)> {
    let store = ParamStore::new(accelerator.device());
    let root = store.root();
    let embed = Embedding::new(&root / "embed", 11, 5, Default::default())?;
    let mut blocks = Vec::new();
    for block in 0..3 {
        let path = &root / "blocks" / block;
        let up = Linear::new(&path / "up", 5, 7, Default::default())?;
        let down = Linear::new(&path / "down", 7, 5, LinearConfig { bias: block != 1, ..Default::default() })?;
        blocks.push((up, down));
    }
    let scale = root.param("scale", ([], Init::Ones))?;
    let head = (&root / "head").alias("weight", &embed.weight)?;
    for (index, param) in store.parameters().iter().enumerate() {
        let numel = param.numel() as i64;
        let values = Tensor::arange(numel, (Kind::Double, Device::Cpu)) * 0.7 + index as f64;
        param.copy_(&(values.sin() * 0.5).reshape(param.shape()))?;
    }
    store.get("blocks.2.up.weight").unwrap().set_requires_grad(false)?;
    let module = ModuleFn::new(&store, move |tokens: &Tensor| {
        let mut x = embed.forward(tokens)?;
        for (up, down) in &blocks {
            x = (down.forward(&up.forward(&x)?.f_gelu("none")?)? + x) * scale.get()?;
        }
        Ok(x.f_linear(&head.get()?, None::<&Tensor>)?)
    });
    Ok((store, module))
}

fn train(accelerator: &Accelerator, case: Case) -> Result<Outcome> {
    let (store, module) = model(accelerator)?;
    let adamw = AdamW::new(&store, 0.02)?;
    let sgd = Sgd::builder(&store).lr(0.05).momentum(0.9).build()?;
    let model = accelerator.prepare(module)?;
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    let rank = accelerator.process_index() as i64;
    let mut run = |step: &mut dyn FnMut() -> Result<()>| -> Result<()> {
        for index in 0..4 * case.accumulation as i64 {
            accelerator.accumulate(&model, || {
                let tokens = (Tensor::arange(6, (Kind::Int64, Device::Cpu)) * 3 + 2 * rank + index).remainder(11);
                let logits = model.forward(&tokens)?;
                let loss = logits.f_cross_entropy_loss::<Tensor>(
                    &((tokens + 1).remainder(11)),
                    None,
                    tch_mean(),
                    -100,
                    0.0,
                )?;
                losses.push(loss.double_value(&[]));
                accelerator.backward(&loss)?;
                if let Some(max_norm) = case.max_norm
                    && accelerator.sync_gradients()
                {
                    let clipping = ClipGradNorm { max_norm, norm_type: case.norm_type, ..Default::default() };
                    norms.push(accelerator.clip_grad_norm_(&model, clipping)?.double_value(&[]));
                }
                step()
            })?;
        }
        Ok(())
    };
    if case.momentum_only {
        let mut optimizer = accelerator.prepare(sgd)?;
        run(&mut || optimizer.step().and_then(|()| optimizer.zero_grad()))?;
    } else {
        let mut optimizer = accelerator.prepare(adamw)?;
        run(&mut || optimizer.step().and_then(|()| optimizer.zero_grad()))?;
    }
    let state = store.state_dict()?;
    let values = |tensor: &Tensor| Vec::<f64>::try_from(tensor.to_kind(Kind::Double).reshape([-1])).unwrap();
    Ok((losses, norms, state.iter().map(|(name, tensor)| (name.to_owned(), values(tensor))).collect()))
}

fn tch_mean() -> accelerate::tch::Reduction {
    accelerate::tch::Reduction::Mean
}

fn run(case: Case, plugin: Option<FullyShardedDataParallelPlugin>) -> Vec<Outcome> {
    let mut builder = Accelerator::builder().gradient_accumulation_steps(case.accumulation);
    if let Some(plugin) = plugin {
        builder = builder.fsdp_plugin(plugin);
    }
    testing::ranks(case.world_size, builder, |accelerator| train(&accelerator, case)).unwrap()
}

fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

fn assert_equal(case: Case, plugin: FullyShardedDataParallelPlugin) {
    let (replicated, sharded) = (run(case, None), run(case, Some(plugin.clone())));
    // Whether parts are read out of memory, as here, or sent changes nothing.
    let sent = FullyShardedDataParallelPlugin { direct_all_gather: Some(false), ..plugin.clone() };
    assert!(run(case, Some(sent)) == sharded, "sent and read: {case:?}, {plugin:?}");
    for (rank, (wanted, found)) in replicated.iter().zip(&sharded).enumerate() {
        let context = format!("rank {rank} of {case:?}, {plugin:?}");
        assert!(largest_difference(&wanted.0, &found.0) <= 1e-6, "losses {:?} {:?}: {context}", wanted.0, found.0);
        assert!(largest_difference(&wanted.1, &found.1) <= 1e-5, "norms {:?} {:?}: {context}", wanted.1, found.1);
        for ((name, wanted), (other, found)) in wanted.2.iter().zip(&found.2) {
            assert_eq!(name, other);
            let difference = largest_difference(wanted, found);
            assert!(difference <= 1e-6, "{name} differs by {difference}: {context}");
            // Parts of gradients are added in another order than whole ones. AdamW's kernel, as libtorch's, rounds the
            // elements at the end of a tensor otherwise than the others, and a part ends elsewhere than the whole.
            let adds_parts = case.accumulation > 1 && plugin.sharding_strategy == Some(OptimizerStateAndGradients);
            if case.momentum_only && case.world_size <= 2 && !adds_parts && case.max_norm.is_none() {
                assert_eq!(difference, 0.0, "a sum of two has one order: {name}, {context}");
            }
        }
    }
}

fn plugin(strategy: ShardingStrategy, policy: AutoWrapPolicy) -> FullyShardedDataParallelPlugin {
    FullyShardedDataParallelPlugin {
        sharding_strategy: Some(strategy),
        auto_wrap_policy: Some(policy),
        min_num_params: (policy == AutoWrapPolicy::SizeBasedWrap).then_some(30),
        ..Default::default()
    }
}

use AutoWrapPolicy::{NoWrap, SizeBasedWrap, TransformerBasedWrap};
use ShardingStrategy::{
    FullShard, HybridShard, HybridShardZero2, NoShard, OptimizerState, OptimizerStateAndGradients, ShardGradOp,
};

#[test]
fn every_strategy_on_every_number_of_ranks() {
    for world_size in 1..=4 {
        for strategy in [FullShard, ShardGradOp, NoShard, OptimizerState, OptimizerStateAndGradients] {
            for (accumulation, max_norm) in [(1, None), (4, None), (1, Some(0.1)), (4, Some(0.05))] {
                let case = Case { world_size, accumulation, max_norm, momentum_only: max_norm.is_none(), ..CASE };
                assert_equal(case, plugin(strategy, TransformerBasedWrap));
            }
        }
    }
}

#[test]
fn modules_that_stay_whole() {
    for strategy in [FullShard, OptimizerState, HybridShard] {
        for (world_size, accumulation, max_norm) in [(1, 1, None), (2, 1, None), (3, 4, Some(0.05))] {
            for modules in [&["blocks.*.up"][..], &["embed", "blocks.0"], &["blocks", "embed"]] {
                let case = Case { world_size, accumulation, max_norm, momentum_only: max_norm.is_none(), ..CASE };
                let ignored_modules = Some(modules.iter().map(|&path| path.to_owned()).collect());
                let dp_shard_size = (strategy == HybridShard).then_some(1);
                let plugin = plugin(strategy, TransformerBasedWrap);
                assert_equal(case, FullyShardedDataParallelPlugin { ignored_modules, dp_shard_size, ..plugin });
            }
        }
    }
}

#[test]
fn a_module_that_is_not_there_cannot_stay_whole() {
    let plugin =
        FullyShardedDataParallelPlugin { ignored_modules: Some(vec!["heads".into()]), ..plugin(FullShard, NoWrap) };
    let accelerator = Accelerator::builder().cpu(true).fsdp_plugin(plugin).build().unwrap();
    let (_, module) = model(&accelerator).unwrap();
    let text = accelerator.prepare(module).map(drop).unwrap_err().to_string();
    assert!(text.contains("\"heads\"") && text.contains("blocks.0.up, blocks.1"), "{text}");
}

#[test]
fn groups_of_ranks_of_every_size() {
    for (world_size, dp_shard_size) in [(1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (4, 4)] {
        for strategy in [HybridShard, HybridShardZero2] {
            for (accumulation, max_norm) in [(1, None), (4, Some(0.05))] {
                let case = Case { world_size, accumulation, max_norm, momentum_only: max_norm.is_none(), ..CASE };
                let plugin = plugin(strategy, TransformerBasedWrap);
                assert_equal(case, FullyShardedDataParallelPlugin { dp_shard_size: Some(dp_shard_size), ..plugin });
            }
        }
    }
}

#[test]
fn groups_that_ranks_do_not_fill_are_an_error_on_all_of_them() {
    let plugin = FullyShardedDataParallelPlugin { dp_shard_size: Some(2), ..plugin(HybridShard, NoWrap) };
    let texts = testing::ranks(3, Default::default(), |accelerator| {
        let builder = Accelerator::builder().fsdp_plugin(plugin.clone());
        Ok(builder.build_from(&accelerator).map(drop).unwrap_err().to_string())
    });
    for text in texts.unwrap() {
        assert!(text.contains("3 ranks do not fill groups of 2"), "{text}");
    }
}

#[test]
fn every_way_to_make_units() {
    for policy in [NoWrap, SizeBasedWrap, TransformerBasedWrap] {
        assert_equal(Case { world_size: 3, momentum_only: true, ..CASE }, plugin(FullShard, policy));
    }
}

#[test]
fn accumulation_and_clipping() {
    for world_size in [1, 2, 3] {
        for (accumulation, max_norm, norm_type) in
            [(4, None, 2.0), (1, Some(0.1), 2.0), (4, Some(0.05), 1.0), (1, Some(0.02), f64::INFINITY)]
        {
            let case = Case { world_size, accumulation, max_norm, norm_type, ..CASE };
            assert_equal(case, plugin(FullShard, TransformerBasedWrap));
        }
    }
}

#[test]
fn an_overflow_in_one_part_skips_the_step_on_all_ranks() {
    let mixed_precision_policy = Some(MixedPrecisionPolicy::default());
    let plugin = FullyShardedDataParallelPlugin { mixed_precision_policy, ..plugin(FullShard, NoWrap) };
    // Gradients travel in 16 bits.
    let scaler = accelerate::GradScalerKwargs { init_scale: Some(128.0), ..Default::default() };
    let builder =
        Accelerator::builder().mixed_precision(MixedPrecision::Fp16).kwargs_handler(scaler).fsdp_plugin(plugin);
    let skipped = testing::ranks(3, builder, |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let weight = store.root().param("weight", ([6], Init::Ones))?;
        let used = weight.clone();
        let module = ModuleFn::new(&store, move |input: &Tensor| Ok((used.get()? * input).f_sum(Kind::Float)?));
        let optimizer = Sgd::new(&store, 0.1)?;
        let (model, mut optimizer) = accelerator.prepare((module, optimizer))?;
        let mut seen = Vec::new();
        for bad in [1f32, f32::INFINITY, 1.0] {
            // Only the last element overflows, which is the last rank's.
            let loss = model.forward(&Tensor::from_slice(&[1f32, 1.0, 1.0, 1.0, 1.0, bad]))?;
            accelerator.backward(&loss)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
            seen.push(accelerator.optimizer_step_was_skipped());
        }
        Ok((seen, Vec::<f64>::try_from(weight.local().to_kind(Kind::Double)).unwrap()))
    })
    .unwrap();
    for (seen, own) in skipped {
        assert_eq!(seen, [false, true, false]);
        assert!(own.iter().all(|value| (value - 0.8).abs() < 1e-4), "{own:?}");
    }
}

#[test]
fn weights_move_between_any_numbers_of_ranks_through_files() {
    let full = plugin(FullShard, TransformerBasedWrap);
    let hybrid = |size| FullyShardedDataParallelPlugin {
        dp_shard_size: Some(size),
        ..plugin(HybridShard, TransformerBasedWrap)
    };
    weights_move(3, full.clone(), &[(1, full.clone()), (2, full.clone()), (4, full.clone()), (4, hybrid(2))]);
    weights_move(4, hybrid(2), &[(1, hybrid(1)), (3, hybrid(3)), (3, full)]);
}

/// From a run that saves to runs that load.
fn weights_move(
    world_size: usize,
    plugin: FullyShardedDataParallelPlugin,
    readers: &[(usize, FullyShardedDataParallelPlugin)],
) {
    let folder = tempfile::tempdir().unwrap();
    let builder = |plugin: &FullyShardedDataParallelPlugin| Accelerator::builder().fsdp_plugin(plugin.clone());
    testing::ranks(world_size, builder(&plugin), |accelerator| {
        let (store, module) = model(&accelerator)?;
        let model = accelerator.prepare(module)?;
        store.get("embed.weight").unwrap().copy_(&Tensor::from(7f32))?;
        accelerator.save_model(&model, folder.path(), &Default::default())?;
        accelerator.wait_for_everyone()
    })
    .unwrap();
    for (world_size, plugin) in readers {
        testing::ranks(*world_size, builder(plugin), |accelerator| {
            let (store, module) = model(&accelerator)?;
            let wanted = store.get("blocks.0.up.weight").unwrap().get().unwrap().detach().copy();
            let model = accelerator.prepare(module)?;
            for param in store.parameters() {
                param.copy_(&Tensor::from(0f32))?;
            }
            accelerator.load_checkpoint_in_model(&model, folder.path())?;
            let state = store.state_dict()?;
            assert_eq!(state.get("blocks.0.up.weight").unwrap(), &wanted);
            assert_eq!(state.get("embed.weight").unwrap(), &Tensor::full([11, 5], 7.0, (Kind::Float, Device::Cpu)));
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn what_needs_whole_parameters_is_refused() {
    let texts = testing::ranks(2, Accelerator::builder().fsdp_plugin(plugin(FullShard, NoWrap)), |accelerator| {
        let (store, module) = model(&accelerator)?;
        let adafactor = Adafactor::new(&store, 0.1)?;
        let (model, mut adafactor) = accelerator.prepare((module, adafactor))?;
        let text = |result: Result<()>| result.unwrap_err().to_string();
        let local_sgd: Result<(), Error> = LocalSGD::new(&accelerator, &model, 2).map(drop);
        let join = accelerator.join_uneven_inputs(&model, JoinOptions { even_batches: Some(false) }, || Ok(()));
        Ok([text(adafactor.step()), text(store.to_kind(Kind::Double)), text(local_sgd), text(join)])
    })
    .unwrap();
    for [adafactor, moved, local_sgd, join] in &texts {
        assert!(adafactor.contains("\"embed.weight\" is sharded") && adafactor.contains("AdamW"), "{adafactor}");
        assert!(moved.contains("before `prepare`"), "{moved}");
        assert!(local_sgd.contains("FSDP"), "{local_sgd}");
        assert!(join.contains("join_uneven_inputs of a sharded model"), "{join}");
    }
}

/// Losses of five steps in bfloat16, and where everything has its parts: the types of parts, gradients and what layers see.
fn train_in_bf16(world_size: usize, plugin: FullyShardedDataParallelPlugin) -> (Vec<f64>, [Kind; 3]) {
    let builder = Accelerator::builder().mixed_precision(MixedPrecision::Bf16).fsdp_plugin(plugin);
    let runs = testing::ranks(world_size, builder, |accelerator| {
        let (store, module) = model(&accelerator)?;
        let (model, mut optimizer) = accelerator.prepare((module, AdamW::new(&store, 0.02)?))?;
        let tokens = Tensor::arange(11, (Kind::Int64, Device::Cpu));
        let weight = store.get("blocks.1.up.weight").unwrap();
        let (mut losses, mut gradient) = (Vec::new(), Kind::Int);
        for _ in 0..5 {
            let loss = model.forward(&tokens)?.f_cross_entropy_loss::<Tensor>(&tokens, None, tch_mean(), -100, 0.0)?;
            losses.push(loss.double_value(&[]));
            accelerator.backward(&loss)?;
            gradient = weight.grad().unwrap().kind();
            optimizer.step()?;
            optimizer.zero_grad()?;
        }
        assert_eq!(store.state_dict()?.get("embed.weight").unwrap().kind(), Kind::Float, "nothing is lost on saving");
        Ok((losses, [weight.local().kind(), gradient, weight.get()?.kind()]))
    });
    runs.unwrap().swap_remove(0)
}

#[test]
fn bfloat16_is_what_travels_and_float32_what_is_kept() {
    let (in_float32, _) = train_in_bf16(2, plugin(NoShard, NoWrap));
    for strategy in [FullShard, ShardGradOp, OptimizerState] {
        for world_size in [1, 2] {
            let (losses, kinds) = train_in_bf16(world_size, plugin(strategy, TransformerBasedWrap));
            assert_eq!(kinds, [Kind::Float, Kind::Float, Kind::BFloat16], "{strategy}, {world_size} ranks");
            let difference = largest_difference(&losses, &in_float32);
            assert!(0.0 < difference && difference < 0.004, "{strategy}: {losses:?} {in_float32:?}");
            assert!(losses[4] < losses[0] - 0.015, "{losses:?}");
        }
        let mixed_precision_policy = Some(MixedPrecisionPolicy {
            param_dtype: Some(FloatType::BFloat16),
            reduce_dtype: Some(FloatType::Float32),
            ..Default::default()
        });
        let exact = FullyShardedDataParallelPlugin { mixed_precision_policy, ..plugin(strategy, TransformerBasedWrap) };
        let (exactly_reduced, _) = train_in_bf16(3, exact);
        let (reduced, _) = train_in_bf16(3, plugin(strategy, TransformerBasedWrap));
        assert_ne!(exactly_reduced, reduced, "a third is not a number of bfloat16");
    }
}

#[test]
fn outputs_are_of_the_type_that_is_asked_for() {
    for (mixed_precision, output_dtype, wanted) in [
        (MixedPrecision::Bf16, None, Kind::Float),
        (MixedPrecision::Bf16, Some(FloatType::BFloat16), Kind::BFloat16),
        (MixedPrecision::No, None, Kind::Float),
        (MixedPrecision::No, Some(FloatType::Float16), Kind::Half),
    ] {
        let mixed_precision_policy = Some(MixedPrecisionPolicy { output_dtype, ..Default::default() });
        let plugin =
            FullyShardedDataParallelPlugin { mixed_precision_policy, ..plugin(FullShard, TransformerBasedWrap) };
        let builder = Accelerator::builder().mixed_precision(mixed_precision).fsdp_plugin(plugin);
        let kinds = testing::ranks(2, builder, |accelerator| {
            let (_, module) = model(&accelerator)?;
            Ok(accelerator.prepare(module)?.forward(&Tensor::from_slice(&[1i64, 2]))?.kind())
        });
        assert_eq!(kinds.unwrap(), [wanted; 2], "{mixed_precision:?}, {output_dtype:?}");
    }
}

#[test]
fn rows_of_embeddings_get_the_gradients_of_whole_tables() {
    for is_tied in [false, true] {
        for accumulation in [1, 2] {
            let run = |plugin: Option<FullyShardedDataParallelPlugin>| {
                let builder = Accelerator::builder().gradient_accumulation_steps(accumulation);
                let builder = plugin.map_or(builder.clone(), |plugin| builder.fsdp_plugin(plugin));
                testing::ranks(2, builder, |accelerator| {
                    let store = ParamStore::new(accelerator.device());
                    let config = EmbeddingConfig { padding_idx: Some(3), ..Default::default() };
                    let embed = Embedding::new(store.root() / "embed", 9, 5, config)?;
                    let values = Tensor::arange(45, (Kind::Float, Device::Cpu)).sin().view([9, 5]);
                    embed.weight.copy_(&values)?;
                    let weight = embed.weight.clone();
                    let module = ModuleFn::new(&store, move |tokens: &Tensor| {
                        let rows = embed.forward(tokens)?.f_tanh()?;
                        if is_tied { Ok(rows.f_matmul(&embed.weight.get()?.f_tr()?)?) } else { Ok(rows) }
                    });
                    let (model, mut optimizer) = accelerator.prepare((module, Sgd::new(&store, 0.1)?))?;
                    // Rows that occur several times, the one for padding, and some that do not occur.
                    let rank = accelerator.process_index() as i32;
                    let tokens = Tensor::from_slice(&[1i32, 7, 3, 7, 7, rank]).view([2, 3]);
                    for step in 0..4 {
                        accelerator.accumulate(&model, || {
                            let output = model.forward(&(&tokens + (step % 2)))?;
                            accelerator.backward(&output.f_square()?.f_mean(None)?)?;
                            optimizer.step()?;
                            optimizer.zero_grad()
                        })?;
                    }
                    let whole = store.state_dict()?.get("embed.weight").unwrap().reshape([-1]);
                    assert!(weight.get().unwrap().requires_grad());
                    Ok(Vec::<f32>::try_from(whole).unwrap())
                })
                .unwrap()
            };
            let found = run(Some(plugin(FullShard, NoWrap)));
            assert_eq!(found, run(None), "tied: {is_tied}, accumulation {accumulation}");
            assert_ne!(found[0][35], (35f32).sin(), "it learns");
        }
    }
}

#[test]
fn a_graph_from_before_the_step_is_refused() {
    for strategy in [FullShard, OptimizerState] {
        for world_size in [1, 2] {
            let builder = Accelerator::builder().fsdp_plugin(plugin(strategy, TransformerBasedWrap));
            let texts = testing::ranks(world_size, builder, |accelerator| {
                let (store, module) = model(&accelerator)?;
                let (model, mut optimizer) = accelerator.prepare((module, AdamW::new(&store, 0.1)?))?;
                let loss = || Ok::<_, Error>(model.forward(&Tensor::from_slice(&[1i64, 2]))?.f_sum(Kind::Float)?);
                let (first, second) = (loss()?, loss()?);
                accelerator.backward(&first)?;
                optimizer.step()?;
                Ok(format!("{:?}", accelerator.backward(&second).unwrap_err()))
            });
            for text in texts.unwrap() {
                assert!(text.contains("were changed between"), "{strategy} on {world_size} ranks: {text}");
            }
        }
    }
}

#[test]
fn parts_that_are_written_to_directly_reach_all_ranks() {
    for strategy in [FullShard, ShardGradOp, OptimizerState] {
        let builder = Accelerator::builder().fsdp_plugin(plugin(strategy, TransformerBasedWrap));
        let seen = testing::ranks(2, builder, |accelerator| {
            let (store, module) = model(&accelerator)?;
            let model = accelerator.prepare(module)?;
            let tokens = Tensor::from_slice(&[1i64, 2]);
            let _ = tch::no_grad(|| model.forward(&tokens))?;
            for param in store.parameters() {
                let _ = tch::no_grad(|| param.local().f_zero_())?;
            }
            Ok(tch::no_grad(|| model.forward(&tokens))?.abs().max().double_value(&[]))
        });
        assert_eq!(seen.unwrap(), [0.0, 0.0], "{strategy}");
    }
}

#[test]
fn state_of_full_parameters_is_refused_once_they_are_sharded() {
    let texts = testing::ranks(2, Accelerator::builder().fsdp_plugin(plugin(FullShard, NoWrap)), |accelerator| {
        let (store, module) = model(&accelerator)?;
        let mut optimizers = (AdamW::new(&store, 0.1)?, Sgd::builder(&store).lr(0.1).momentum(0.9).build()?);
        let mut small = AdamW8bit::new(&store, 0.1)?;
        let saved = small.state_dict()?;
        let tokens = Tensor::from_slice(&[1i64, 2]);
        module.forward(&tokens)?.f_sum(Kind::Float)?.backward();
        optimizers.0.step()?;
        optimizers.1.step()?;
        small.load_state_dict(&saved)?;
        let (model, (mut adamw, mut sgd)) = accelerator.prepare((module, optimizers))?;
        let mut small = accelerator.prepare(small)?;
        accelerator.backward(&model.forward(&tokens)?.f_sum(Kind::Float)?)?;
        let text = |result: Result<()>| result.unwrap_err().to_string();
        let texts = [text(adamw.step()), text(sgd.step()), text(small.step())];
        let fresh = AdamW::new(&store, 0.1)?.state_dict()?;
        adamw.load_state_dict(&fresh)?;
        adamw.step()?;
        Ok(texts)
    })
    .unwrap();
    for text in texts.iter().flatten() {
        assert!(text.contains("state is of tensors that are not there any more") && text.contains("Prepare"), "{text}");
    }
}

#[test]
fn tensors_that_others_compute_with_are_not_sharded() {
    let texts = testing::ranks(2, Accelerator::builder().fsdp_plugin(plugin(FullShard, NoWrap)), |accelerator| {
        let variables = tch::nn::VarStore::new(accelerator.device());
        let linear = tch::nn::linear(variables.root(), 2, 1, Default::default());
        let store = ParamStore::from_var_store(&variables)?;
        let tch_model = ModuleFn::new(&store, move |input: &Tensor| Ok(tch::nn::Module::forward(&linear, input)));
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/compiled/mlp.pt");
        let script: ScriptModule = ScriptModule::load(file, accelerator.device())?;
        let (store, module) = model(&accelerator)?;
        let _model = accelerator.prepare(module)?;
        let again = ModuleFn::new(&store, |input: &Tensor| Ok(input.shallow_clone()));
        assert_eq!(store.num_parameters(), model(&accelerator)?.0.num_parameters());
        Ok([
            accelerator.prepare(tch_model).unwrap_err().to_string(),
            accelerator.prepare(script).unwrap_err().to_string(),
            accelerator.prepare(again).unwrap_err().to_string(),
        ])
    })
    .unwrap();
    for [variables, script, again] in &texts {
        assert!(variables.contains("the tensors of a tch::nn::VarStore"), "{variables}");
        assert!(script.contains("a ScriptModule"), "{script}");
        assert!(again.contains("\"embed.weight\" is sharded already"), "{again}");
    }
}

#[test]
fn an_optimizer_made_before_prepare_keeps_parts_of_its_state_only() {
    let elements = testing::ranks(2, Accelerator::builder().fsdp_plugin(plugin(FullShard, NoWrap)), |accelerator| {
        let (store, module) = model(&accelerator)?;
        let optimizer = AdamW::new(&store, 0.1)?;
        let all: usize = store.trainable_parameters().iter().map(Param::numel).sum();
        let (model, mut optimizer) = accelerator.prepare((module, optimizer))?;
        let loss = model.forward(&Tensor::from_slice(&[1i64, 2]))?.f_square()?.f_mean(Kind::Float)?;
        accelerator.backward(&loss)?;
        optimizer.step()?;
        let state = optimizer.state_dict()?;
        let own: usize =
            state.tensors.iter().filter(|(name, _)| name.starts_with("exp_avg_sq")).map(|(_, t)| t.numel()).sum();
        Ok((all, own))
    })
    .unwrap();
    let all = elements[0].0;
    assert_eq!(elements.iter().map(|(_, own)| own).sum::<usize>(), all);
    assert!(elements.iter().all(|(_, own)| own.abs_diff(all / 2) <= 1));
}

/// Two layers of one shape, used in an order that the rank chooses.
fn in_order(
    accelerator: &Accelerator,
    reversed: bool,
) -> Result<(ParamStore, impl Module<Input = Tensor, Output = Tensor>)> {
    let store = ParamStore::new(accelerator.device());
    let mut layers = Vec::new();
    for layer in 0..2 {
        layers.push(Linear::new(store.root() / "layers" / layer, 4, 4, Default::default())?);
    }
    if reversed {
        layers.reverse();
    }
    let module = ModuleFn::new(&store, move |input: &Tensor| {
        layers.iter().try_fold(input.shallow_clone(), |x, layer| Ok(layer.forward(&x)?.f_tanh()?))
    });
    Ok((store, module))
}

#[test]
fn ranks_that_use_units_in_different_orders_are_told_before_the_step() {
    let builder = Accelerator::builder().fsdp_plugin(plugin(FullShard, TransformerBasedWrap));
    let texts = testing::ranks(3, builder, |accelerator| {
        let (store, module) = in_order(&accelerator, accelerator.process_index() == 2)?;
        let (model, mut optimizer) = accelerator.prepare((module, Sgd::new(&store, 0.1)?))?;
        let before = store.state_dict()?.iter().map(|(_, tensor)| tensor.copy()).collect::<Vec<_>>();
        let input = Tensor::ones([2, 4], (Kind::Float, Device::Cpu));
        let loss = model.forward(&input)?.f_sum(Kind::Float)?;
        let trained = accelerator.backward(&loss).and_then(|()| optimizer.step()).unwrap_err().to_string();
        let evaluated = accelerate::tch::no_grad(|| model.forward(&input)).unwrap_err().to_string();
        let after = store.state_dict()?.iter().map(|(_, tensor)| tensor.copy()).collect::<Vec<_>>();
        assert_eq!(before, after);
        Ok([trained, evaluated])
    })
    .unwrap();
    for text in texts.iter().flatten() {
        assert!(text.contains("rank 2 gathers unit 1 (layers.1) where rank 0 gathers unit 0 (layers.0)"), "{text}");
    }
}
