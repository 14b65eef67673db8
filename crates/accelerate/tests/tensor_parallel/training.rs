//! A model whose layers ranks compute together is the same model: outputs, gradients, steps, norms and files.

use super::{assert_close, builder, fill, values};
use accelerate::data::{DataLoader, VecDataset};
use accelerate::nn::{
    Conv1D, Embedding, EmbeddingConfig, LayerNorm, Linear, LinearConfig, Module, ModuleFn, Param, ParamStore,
    tiled_cross_entropy,
};
use accelerate::optim::{AdamW, Sgd};
use accelerate::tch::{self, Device, Kind, Reduction, Tensor};
use accelerate::{
    Accelerator, AutoWrapPolicy, FullyShardedDataParallelPlugin, LocalSGD, ParallelismConfig, Result, SaveModelOptions,
    ShardingStrategy, testing,
};
use rstest::rstest;
use serde_json::{Value, json};

const VOCAB: i64 = 11;

/// An embedding tied to the head, two blocks with three packed projections, a norm in front of each, and sizes that are odd.
fn model(accelerator: &Accelerator) -> Result<(ParamStore, impl Module<Input = Tensor, Output = Tensor>)> {
    let store = ParamStore::new(accelerator.device());
    let root = store.root();
    let padding = EmbeddingConfig { padding_idx: Some(3), ..Default::default() };
    let embed = Embedding::new(&root / "embed", VOCAB, 6, padding)?;
    let mut blocks = Vec::new();
    for block in 0..2 {
        let path = &root / "blocks" / block;
        let norm = LayerNorm::new(&path / "norm", [6], Default::default())?;
        let qkv = Conv1D::new(&path / "qkv", 6, 21, Default::default())?;
        let out = Conv1D::new(&path / "out", 7, 6, Default::default())?;
        let up = Linear::new(&path / "up", 6, 9, Default::default())?;
        let gate = Linear::new(&path / "gate", 6, 9, LinearConfig { bias: false, ..Default::default() })?;
        let down = Linear::new(&path / "down", 9, 6, Default::default())?;
        blocks.push((norm, qkv, out, up, gate, down));
    }
    let head = Linear::from_params(&root / "head", (&root / "head").alias("weight", &embed.weight)?, None);
    fill(&store)?;
    let module = ModuleFn::new(&store, move |tokens: &Tensor| {
        let mut x = embed.forward(tokens)?;
        for (norm, qkv, out, up, gate, down) in &blocks {
            let packed = qkv.forward(&norm.forward(&x)?)?.f_unflatten(-1, [3, -1])?;
            let mixed = packed.f_select(-2, 0)?.f_mul(&packed.f_select(-2, 1)?.f_sigmoid()?)?;
            let mixed = mixed.f_add(&packed.f_select(-2, 2)?)?;
            x = x.f_add(&out.forward(&mixed)?)?;
            let inner = up.forward(&x)?.f_gelu("none")?.f_mul(&gate.forward(&x)?)?;
            x = x.f_add(&down.forward(&inner)?)?;
        }
        head.forward(&x)
    });
    Ok((store, module))
}

/// Ranks may divide the tokens between these layers, too.
fn plan(divides_tokens: bool) -> Value {
    let mut plan = json!({
        "embed": "embedding_rowwise",
        "blocks.*.qkv": { "style": "packed_colwise", "parts": 3 },
        "blocks.*.out": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.gate": "colwise",
        "blocks.*.down": "rowwise",
        "head": "colwise_gather_output",
    });
    if divides_tokens {
        plan["blocks.*.norm"] = json!("sequence_parallel");
    }
    plan
}

/// Logits of the first batch, losses, norms before clipping, and all parameters by name.
type Outcome = (Vec<f64>, Vec<f64>, Vec<f64>, Vec<(String, Vec<f64>)>);

/// Rows of a batch of 4 that this rank sees.
fn train(accelerator: &Accelerator, max_norm: f64) -> Result<Outcome> {
    let (store, module) = model(accelerator)?;
    let optimizer = AdamW::new(&store, 0.02)?;
    let (model, mut optimizer) = accelerator.prepare((module, optimizer))?;
    let (mut losses, mut norms, mut first) = (Vec::new(), Vec::new(), Vec::new());
    let num_shares = (accelerator.num_processes() / accelerator.mesh().size(accelerate::Axis::Tp)) as i64;
    for step in 0..3 * accelerator.gradient_accumulation_steps() as i64 {
        accelerator.accumulate(&model, || {
            let all = (Tensor::arange(20, (Kind::Int64, Device::Cpu)) * 3 + step).remainder(VOCAB).view([4, 5]);
            let share = 4 / num_shares;
            let tokens = all.narrow(0, accelerator.data_parallel_rank() as i64 * share, share);
            let logits = model.forward(&tokens)?;
            if first.is_empty() {
                first = values(&logits);
            }
            let labels = (tokens + 1).remainder(VOCAB).view([-1]);
            let loss =
                logits.view([-1, VOCAB]).f_cross_entropy_loss::<Tensor>(&labels, None, Reduction::Mean, -100, 0.0)?;
            losses.push(loss.double_value(&[]));
            accelerator.backward(&loss)?;
            if accelerator.sync_gradients() {
                norms.push(accelerator.clip_grad_norm_(&model, max_norm)?.double_value(&[]));
            }
            optimizer.step()?;
            optimizer.zero_grad()
        })?;
    }
    let state = store.state_dict()?;
    Ok((first, losses, norms, state.iter().map(|(name, tensor)| (name.to_owned(), values(tensor))).collect()))
}

/// Are replicas of the ranks that divide layers sharded?
#[derive(Clone, Copy, Debug, PartialEq)]
enum Shards {
    None,
    Full,
    OptimizerState,
    Hybrid,
}

impl Shards {
    fn add_to(self, builder: accelerate::AcceleratorBuilder) -> accelerate::AcceleratorBuilder {
        let sharding_strategy = match self {
            Self::None => return builder,
            Self::Full => ShardingStrategy::FullShard,
            Self::OptimizerState => ShardingStrategy::ShardGradOp,
            Self::Hybrid => ShardingStrategy::HybridShard,
        };
        let dp_shard_size = (self == Self::Hybrid).then_some(2);
        let auto_wrap_policy = Some(AutoWrapPolicy::NoWrap);
        let plugin = FullyShardedDataParallelPlugin {
            sharding_strategy: Some(sharding_strategy),
            dp_shard_size,
            auto_wrap_policy,
            ..Default::default()
        };
        builder.fsdp_plugin(plugin)
    }
}

#[rstest]
#[case(2, 2, 1, Shards::None)]
#[case(3, 3, 1, Shards::None)]
#[case(4, 4, 1, Shards::None)]
#[case(4, 2, 1, Shards::None)]
#[case(2, 2, 3, Shards::None)]
#[case(4, 2, 3, Shards::None)]
#[case(4, 2, 1, Shards::Full)]
#[case(4, 2, 3, Shards::Full)]
#[case(4, 2, 3, Shards::OptimizerState)]
#[case(2, 2, 1, Shards::Full)]
#[case(8, 2, 1, Shards::Hybrid)]
fn ranks_that_divide_layers_train_the_model_of_one_rank(
    #[case] world_size: usize,
    #[case] degree: usize,
    #[case] accumulation: usize,
    #[case] shards: Shards,
    #[values(false, true)] divides_tokens: bool,
) {
    let one = Accelerator::builder().gradient_accumulation_steps(accumulation);
    let (logits, losses, norms, parameters) =
        testing::ranks(1, one, |accelerator| train(&accelerator, 0.5)).unwrap().swap_remove(0);
    let tp = shards.add_to(builder(degree, &plan(divides_tokens))).gradient_accumulation_steps(accumulation);
    let outcomes = testing::ranks(world_size, tp, |accelerator| train(&accelerator, 0.5)).unwrap();
    let num_shares = world_size / degree;
    for (rank, (own_logits, own_losses, own_norms, own_parameters)) in outcomes.iter().enumerate() {
        let share = logits.len() / num_shares;
        let place = rank / degree * share;
        assert_close(own_logits, &logits[place..place + share], 1e-6, "logits");
        assert_close(own_norms, &norms, 2e-6, "norms");
        let mean: Vec<f64> = (0..losses.len())
            .map(|step| (0..num_shares).map(|share| outcomes[share * degree].1[step]).sum::<f64>() / num_shares as f64)
            .collect();
        assert_close(&mean, &losses, 1e-6, "losses");
        assert_close(own_losses, &outcomes[rank / degree * degree].1, 0.0, "losses of ranks with the same rows");
        for ((name, found), (other, wanted)) in own_parameters.iter().zip(&parameters) {
            assert_eq!(name, other);
            assert_close(found, wanted, 5e-6, name);
        }
    }
}

/// Gradients by name after one backward pass, in full.
fn gradients(accelerator: &Accelerator, plan_of: Option<&str>) -> Result<Vec<(String, Vec<f64>)>> {
    let store = ParamStore::new(accelerator.device());
    let root = store.root();
    let embed = Embedding::new(&root / "embed", 7, 5, Default::default())?;
    let first =
        Linear::new(&root / "first", 5, 8, LinearConfig { bias: plan_of != Some("no bias"), ..Default::default() })?;
    let second = Linear::new(&root / "second", 8, 6, Default::default())?;
    fill(&store)?;
    let module = ModuleFn::new(&store, move |tokens: &Tensor| {
        second.forward(&first.forward(&embed.forward(tokens)?)?.f_tanh()?)
    });
    let model = accelerator.prepare(module)?;
    let output = model.forward(&Tensor::from_slice(&[1i64, 6, 2, 2, 0]))?;
    accelerator
        .backward(&(&output * Tensor::arange(30, (Kind::Float, Device::Cpu)).view([5, 6]).sin()).sum(Kind::Float))?;
    let mut all = vec![("output".to_owned(), values(&output))];
    // A step of 1 makes a difference of the gradient.
    let before = store.state_dict()?.iter().map(|(name, tensor)| (name.to_owned(), tensor.copy())).collect::<Vec<_>>();
    for param in store.parameters() {
        assert_eq!(param.grad().map(|grad| grad.numel()), Some(param.local().numel()), "{}", param.name());
    }
    let mut optimizer = accelerator.prepare(Sgd::new(&store, 1.0)?)?;
    optimizer.step()?;
    let after = store.state_dict()?;
    all.extend(before.into_iter().map(|(name, tensor)| {
        let gradient = values(&(tensor - after.get(&name).unwrap()));
        (name, gradient)
    }));
    Ok(all)
}

#[rstest]
#[case(json!({ "first": "colwise", "second": "rowwise" }))]
#[case(json!({ "first": "colwise_rep", "second": "rowwise_rep" }))]
#[case(json!({ "first": "colwise_gather_output", "second": "colwise_gather_output" }))]
#[case(json!({ "first": "rowwise_split_input" }))]
#[case(json!({ "embed": "embedding_rowwise" }))]
#[case(json!({ "embed": "embedding_colwise" }))]
#[case(json!({ "embed": "rowwise", "first": "colwise", "second": "rowwise" }))]
#[case(json!({ "first": "replicate", "second": "colwise_rep" }))]
fn every_style_gives_the_outputs_and_gradients_of_one_rank(
    #[case] plan: Value,
    #[values(1, 2, 3, 4)] world_size: usize,
    #[values("bias", "no bias")] bias: &str,
) {
    let wanted = testing::ranks(1, Default::default(), |accelerator| gradients(&accelerator, Some(bias))).unwrap();
    let found =
        testing::ranks(world_size, builder(world_size, &plan), |accelerator| gradients(&accelerator, Some(bias)));
    for own in found.unwrap() {
        for ((name, found), (other, wanted)) in own.iter().zip(&wanted[0]) {
            assert_eq!(name, other);
            assert_close(found, wanted, 1e-6, name);
        }
    }
}

#[test]
fn layers_in_a_row_keep_their_own_inputs() {
    let run = |accelerator: Accelerator| -> Result<Vec<f64>> {
        let store = ParamStore::new(accelerator.device());
        let [a, b, c] = ["a", "b", "c"].map(|name| Linear::new(store.root() / name, 4, 6, Default::default()));
        let (a, b, c) = (a?, b?, c?);
        let down = Linear::new(store.root() / "down", 6, 4, Default::default())?;
        let embed = Linear::new(store.root() / "embed", 4, 4, Default::default())?;
        fill(&store)?;
        let weight = embed.weight.clone();
        let module = ModuleFn::new(&store, move |x: &Tensor| {
            // One tensor, others, and the first one again.
            let x = embed.forward(x)?;
            let (first, second) = (a.forward(&x)?, b.forward(&x.f_mul(&x)?)?);
            let y = x.f_add(&x)?;
            let third = c.forward(&y)?;
            let fourth = a.forward(&y.f_add(&x)?)?.f_add(&b.forward(&x)?)?;
            down.forward(&first.f_mul(&second)?.f_add(&third)?.f_add(&fourth.f_tanh()?)?)
        });
        let model = accelerator.prepare(module)?;
        let output = model.forward(&Tensor::arange(8, (Kind::Float, Device::Cpu)).cos().view([2, 4]))?;
        accelerator.backward(&output.f_square()?.f_sum(Kind::Float)?)?;
        Ok([values(&output), values(&weight.grad().unwrap())].concat())
    };
    let plan = json!({ "a": "colwise", "b": "colwise", "c": "colwise", "down": "rowwise" });
    let wanted = testing::ranks(1, Default::default(), run).unwrap();
    for found in testing::ranks(2, builder(2, &plan), run).unwrap() {
        assert_close(&found, &wanted[0], 1e-5, "outputs and gradients");
    }
}

#[test]
fn a_weight_that_code_of_the_program_asks_for_is_whole_and_learns() {
    let run = |accelerator: Accelerator| -> Result<Vec<Vec<f64>>> {
        let store = ParamStore::new(accelerator.device());
        let embed = Embedding::new(store.root() / "embed", 7, 4, Default::default())?;
        fill(&store)?;
        let weight = embed.weight.clone();
        let module = ModuleFn::new(&store, move |tokens: &Tensor| {
            Ok(embed.forward(tokens)?.f_linear(&embed.weight.get()?, None::<&Tensor>)?.f_tanh()?)
        });
        let (model, mut optimizer) = accelerator.prepare((module, Sgd::new(&store, 0.3)?))?;
        for _ in 0..3 {
            accelerator.backward(&model.forward(&Tensor::from_slice(&[1i64, 5, 5]))?.square().sum(Kind::Float))?;
            optimizer.step()?;
            optimizer.zero_grad()?;
        }
        assert_eq!(weight.shape(), [7, 4]);
        Ok(vec![values(store.state_dict()?.get("embed.weight").unwrap()), values(&weight.get()?)])
    };
    let wanted = testing::ranks(1, Default::default(), run).unwrap();
    for style in ["embedding_rowwise", "embedding_colwise"] {
        for found in testing::ranks(3, builder(3, &json!({ "embed": style })), run).unwrap() {
            assert_close(&found[0], &wanted[0][0], 1e-6, style);
            assert_close(&found[1], &wanted[0][0], 1e-6, style);
        }
    }
}

#[test]
fn ranks_that_divide_layers_get_the_same_rows_which_count_once() {
    let config = ParallelismConfig { dp_replicate_size: Some(2), tp_size: Some(2), ..Default::default() };
    let seen = testing::ranks(4, Accelerator::builder().parallelism_config(config), |accelerator| {
        let dataset = VecDataset::new((0i64..7).collect());
        let loader = accelerator.prepare(DataLoader::builder(dataset).batch_size(2).build()?)?;
        let (mut own, mut counted) = (Vec::new(), Vec::new());
        for batch in loader.iter()? {
            let batch = batch?;
            own.extend(Vec::<i64>::try_from(&batch)?);
            counted.extend(Vec::<i64>::try_from(accelerator.gather_for_metrics(&batch)?)?);
        }
        Ok((own, counted, accelerator.data_parallel_rank(), accelerator.tensor_parallel_rank()))
    })
    .unwrap();
    let wanted = [vec![0i64, 1, 4, 5], vec![2, 3, 6, 0]];
    for (rank, (own, counted, data, tensor)) in seen.into_iter().enumerate() {
        assert_eq!((own, data, tensor), (wanted[rank / 2].clone(), rank / 2, rank % 2));
        let mut counted = counted;
        counted.sort_unstable();
        assert_eq!(counted, [0, 1, 2, 3, 4, 5, 6]);
    }
}

/// Of four ranks, pairs compute layers together, and each pair shards what it has.
#[test]
fn the_plan_says_what_slices_and_shards_leave_on_a_rank() {
    let builder = builder(2, &plan(false)).fsdp_plugin(Default::default());
    let plans = testing::ranks(4, builder, |accelerator| {
        let (_store, module) = model(&accelerator)?;
        let _model = accelerator.prepare(module)?;
        Ok((accelerator.plan().to_string(), accelerator.plan()[0].bytes_per_axis(&accelerator.mesh())))
    })
    .unwrap();
    for (text, axes) in &plans {
        assert!(text.contains("mesh of 4 ranks: dp_shard 2 x tp 2"), "{text}");
        let [layers, shards] = &axes[..] else { panic!("{axes:?}") };
        assert!(layers.held < layers.held_before, "{axes:?}");
        assert_eq!((shards.held_before, layers.sent), (layers.held, None));
        assert!(shards.held < shards.held_before && shards.sent > Some(0), "{axes:?}");
    }
    // All parameters of the model, gradients, and two averages, of four bytes each.
    let whole = 4 * 4 * num_elements();
    assert_eq!(plans[0].1[0].held_before, whole);
    // Norms are on both.
    assert!(plans[0].1[0].held + plans[1].1[0].held > whole);
}

fn num_elements() -> usize {
    let accelerator = Accelerator::builder().cpu(true).build().unwrap();
    let (store, _module) = model(&accelerator).unwrap();
    store.parameters().iter().map(|param| param.shape().iter().product::<i64>() as usize).sum()
}

#[rstest]
fn files_and_states_of_a_divided_model_are_those_of_a_whole_one(#[values(Shards::None, Shards::Full)] shards: Shards) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let save = |accelerator: Accelerator| -> Result<Vec<(String, Vec<f64>)>> {
        let (store, module) = model(&accelerator)?;
        let model = accelerator.prepare(module)?;
        accelerator.save_model(&model, path, &SaveModelOptions::default())?;
        let full = accelerator.get_state_dict(&model)?;
        let state = store.state_dict()?;
        assert_eq!(full.len(), if accelerator.is_main_process() { state.len() } else { 0 });
        Ok(state.iter().map(|(name, tensor)| (name.to_owned(), values(tensor))).collect())
    };
    let saved = testing::ranks(4, shards.add_to(builder(2, &plan(false))), save).unwrap();
    for world_size in [1usize, 3] {
        let load = |accelerator: Accelerator| -> Result<Vec<(String, Vec<f64>)>> {
            let (store, module) = model(&accelerator)?;
            store.parameters().iter().try_for_each(|param| param.copy_(&Tensor::from(0.5f32)))?;
            let model = accelerator.prepare(module)?;
            accelerate::checkpoint::load_checkpoint_in_model(&store, path, &Default::default())?;
            drop(model);
            Ok(store.state_dict()?.iter().map(|(name, tensor)| (name.to_owned(), values(tensor))).collect())
        };
        let loaded = if world_size == 1 {
            testing::ranks(1, Default::default(), load).unwrap()
        } else {
            testing::ranks(world_size, builder(world_size, &plan(false)), load).unwrap()
        };
        assert!(loaded.iter().all(|state| *state == saved[0]));
    }
}

/// Trains for a step, saves, trains on; or loads and trains on.
fn checkpointed(accelerator: &Accelerator, folder: &std::path::Path, loads: bool) -> Result<Vec<f64>> {
    let (store, module) = model(accelerator)?;
    let (model, mut optimizer) = accelerator.prepare((module, AdamW::new(&store, 0.02)?))?;
    let num_shares = accelerator.mesh().num_shares() as i64;
    let mut step = |number: i64| -> Result<f64> {
        let all = (Tensor::arange(20, (Kind::Int64, Device::Cpu)) * 3 + number).remainder(VOCAB).view([4, 5]);
        let share = 4 / num_shares;
        let tokens = all.narrow(0, accelerator.data_parallel_rank() as i64 * share, share);
        let logits = model.forward(&tokens)?;
        let labels = (tokens + 1).remainder(VOCAB).view([-1]);
        let loss =
            logits.view([-1, VOCAB]).f_cross_entropy_loss::<Tensor>(&labels, None, Reduction::Mean, -100, 0.0)?;
        accelerator.backward(&loss)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        Ok(accelerator.reduce(&loss.detach(), accelerate::ReduceOp::Mean)?.double_value(&[]))
    };
    if loads {
        accelerator.load_state(folder)?;
    } else {
        (0..2).try_for_each(|number| step(number).map(drop))?;
        accelerator.save_state(folder)?;
    }
    (2..5).map(&mut step).collect()
}

#[test]
fn a_checkpoint_of_any_mesh_goes_on_in_any_other() {
    type Mesh = (usize, usize, Shards);
    const MESHES: [Mesh; 6] = [
        (1, 1, Shards::None),
        (2, 2, Shards::None),
        (4, 2, Shards::None),
        (3, 3, Shards::None),
        (4, 2, Shards::Full),
        (2, 1, Shards::Full),
    ];
    let run = |(world_size, degree, shards): Mesh, folder: &std::path::Path, loads: bool| {
        let builder = if degree == 1 { Accelerator::builder() } else { builder(degree, &plan(false)) };
        let builder = shards.add_to(builder);
        testing::ranks(world_size, builder, |accelerator| checkpointed(&accelerator, folder, loads)).unwrap()
    };
    for from in MESHES {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("checkpoint");
        let wanted = run(from, &path, false);
        for to in MESHES {
            for found in run(to, &path, true) {
                let tolerance = if from == to { 0.0 } else { 2e-6 };
                assert_close(&found, &wanted[0], tolerance, &format!("losses from {from:?} in {to:?}"));
            }
        }
    }
}

#[test]
fn parameters_without_memory_are_made_slice_by_slice() {
    let outcomes = testing::ranks(2, builder(2, &json!({ "up": "colwise" })), |accelerator| {
        let store = ParamStore::init_empty_weights(accelerator.device());
        let up = Linear::new(store.root() / "up", 4, 6, Default::default())?;
        let (weight, bias) = (up.weight.clone(), up.bias.clone().unwrap());
        let _model = accelerator.prepare(ModuleFn::new(&store, move |x: &Tensor| up.forward(x)))?;
        assert_eq!((weight.local().size(), bias.local().size()), (vec![12], vec![3]));
        Ok(store.state_dict()?.iter().map(|(_, tensor)| values(tensor)).collect::<Vec<_>>())
    })
    .unwrap();
    assert_eq!(outcomes[0], outcomes[1]);
    assert!(outcomes[0].iter().flatten().all(|value| *value != 0.0));
}

#[rstest]
#[case(json!({ "blocks.*.upp": "colwise" }), "is the path of no layer")]
#[case(json!({ "blocks.*.up": "colwise", "blocks.0.up": "rowwise" }), "two rules for blocks.0.up")]
#[case(json!({ "blocks.*.norm": "moe_tp_experts" }), "not available")]
#[case(json!({ "blocks.*.up": "sequence_parallel" }), "blocks.0.up is a linear layer")]
#[case(json!({ "blocks.*.qkv": { "style": "packed_colwise", "parts": 3, "unit": 7 } }), "need 2 units of 7 features, of which there are 1")]
#[case(json!({}), "nobody says how the model's layers are divided")]
fn what_cannot_be_divided_is_named_on_every_rank(#[case] plan: Value, #[case] words: &str) {
    let errors = testing::ranks(2, builder(2, &plan), |accelerator| {
        let (_, module) = model(&accelerator)?;
        Ok(accelerator.prepare(module).err().map(|error| error.to_string()))
    });
    for error in errors.unwrap() {
        assert!(error.as_ref().is_some_and(|text| text.contains(words)), "{error:?}");
    }
}

#[test]
fn different_inputs_are_named_on_every_rank() {
    let errors = testing::ranks(2, builder(2, &plan(false)), |accelerator| {
        let (_, module) = model(&accelerator)?;
        let model = accelerator.prepare(module)?;
        let tokens = Tensor::from_slice(&[1i64 + accelerator.process_index() as i64, 2]);
        Ok(model.forward(&tokens).err().map(|error| error.to_string()))
    });
    for error in errors.unwrap() {
        assert!(
            error.as_ref().is_some_and(|text| text.contains("the same input") && text.contains("rank 1")),
            "{error:?}"
        );
    }
}

#[test]
fn what_does_not_go_with_slices_is_refused() {
    testing::ranks(2, builder(2, &plan(false)), |accelerator| {
        let (store, module) = model(&accelerator)?;
        let model = accelerator.prepare(module)?;
        let error = LocalSGD::new(&accelerator, &model, 2).unwrap_err().to_string();
        assert!(error.contains("LocalSGD is not available with tensor parallelism"), "{error}");
        let options = accelerate::JoinOptions { even_batches: Some(false) };
        let error = accelerator.join_uneven_inputs(&model, options, || Ok(())).unwrap_err().to_string();
        assert!(error.contains("join_uneven_inputs is not available"), "{error}");
        let error = tch::no_grad(|| model.forward(&Tensor::from_slice(&[VOCAB, 0]))).unwrap_err().to_string();
        assert!(error.contains("from 0 to 10"), "{error}");
        drop(store);
        Ok(())
    })
    .unwrap();
}

/// Every reduction of a loss of divided logits, where the last ranks have fewer classes, or none.
#[rstest]
fn a_loss_of_divided_logits_is_that_of_all_logits(
    #[values(1, 2, 3, 4)] degree: usize,
    #[values(Reduction::None, Reduction::Mean, Reduction::Sum)] reduction: Reduction,
    #[values(&[4, -100, 0, 2, -100], &[1, 0, 3, 4, 4])] classes: &'static [i64],
) {
    let plan = json!({ "head": "colwise" });
    let found = testing::ranks(degree, builder(degree, &plan), move |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let head = Linear::new(store.root() / "head", 3, 5, Default::default())?;
        fill(&store)?;
        let whole = |param: &Param| param.get().unwrap().detach();
        let (weight, bias) = (whole(&head.weight), head.bias.as_ref().map(whole));
        let hidden = (Tensor::arange(15, (Kind::Float, Device::Cpu)) * 0.7).sin().view([5, 3]);
        let labels = Tensor::from_slice(classes);
        let scale = Tensor::from_slice(&[0.5f32, 2.0, -1.0, 3.0, 1.5]);
        // Each row's loss counts otherwise, so that gradients of rows cannot be exchanged unseen.
        let total = |loss: Tensor| if loss.dim() == 0 { loss * 1.5 } else { (loss * &scale).sum(None) };

        let wanted_input = hidden.copy().set_requires_grad(true);
        let logits = wanted_input.f_linear(&weight, bias.as_ref())?;
        let wanted = logits.f_cross_entropy_loss::<Tensor>(&labels, None, reduction, -100, 0.0)?;
        total(wanted.shallow_clone()).f_backward()?;

        let layer = head.clone();
        let module = ModuleFn::new(&store, move |input: &Tensor| {
            let logits = layer.forward(input)?;
            match layer.sharded_output() {
                Some(divided) => {
                    assert_eq!(logits.size()[1], divided.range().end - divided.range().start);
                    divided.cross_entropy(&logits, &Tensor::from_slice(classes), reduction, -100)
                }
                None => Ok(logits.f_cross_entropy_loss::<Tensor>(
                    &Tensor::from_slice(classes),
                    None,
                    reduction,
                    -100,
                    0.0,
                )?),
            }
        });
        let model = accelerator.prepare(module)?;
        let input = hidden.copy().set_requires_grad(true);
        let loss = model.forward(&input)?;
        assert_eq!(loss.size(), wanted.size());
        assert_close(&values(&loss), &values(&wanted), 1e-6, "losses");
        accelerator.backward(&total(loss))?;
        assert_close(&values(&input.grad()), &values(&wanted_input.grad()), 1e-6, "gradients of the input");
        Ok(())
    });
    found.unwrap();
}

/// No rank has more than its slice of the logits of one tile.
#[rstest]
fn a_tiled_loss_of_a_divided_head_is_that_of_all_logits(
    #[values(1, 2, 3, 4)] degree: usize,
    #[values(1, 2, 5)] num_tiles: usize,
) {
    const CLASSES: [i64; 5] = [1, -100, 0, 4, 1];
    let found = testing::ranks(degree, builder(degree, &json!({ "head": "colwise" })), move |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let head = Linear::new(store.root() / "head", 3, 5, Default::default())?;
        fill(&store)?;
        let [weight, bias] = [&head.weight, head.bias.as_ref().unwrap()]
            .map(|param| param.get().unwrap().detach().copy().set_requires_grad(true));
        let hidden = (Tensor::arange(15, (Kind::Float, Device::Cpu)) * 0.7).sin().view([5, 3]);
        let labels = Tensor::from_slice(&CLASSES);
        let wanted_input = hidden.copy().set_requires_grad(true);
        let logits = wanted_input.f_linear(&weight, Some(&bias))?;
        let wanted = logits.f_cross_entropy_loss::<Tensor>(&labels, None, Reduction::Mean, -100, 0.0)?;
        wanted.f_backward()?;

        let layer = head.clone();
        let module = ModuleFn::new(&store, move |input: &Tensor| {
            tiled_cross_entropy(input, &Tensor::from_slice(&CLASSES), -100, num_tiles, layer.clone())
        });
        let model = accelerator.prepare(module)?;
        let input = hidden.copy().set_requires_grad(true);
        let loss = model.forward(&input)?;
        assert_close(&values(&loss), &values(&wanted), 1e-6, "losses");
        accelerator.backward(&loss)?;
        assert_close(&values(&input.grad()), &values(&wanted_input.grad()), 1e-6, "gradients of the input");
        let own = head.sharded_output().map_or(0..5, |sharded| sharded.range());
        let wanted = weight.grad().narrow(0, own.start, own.end - own.start);
        let found = head.weight.grad().unwrap().view(wanted.size().as_slice());
        assert_close(&values(&found), &values(&wanted), 1e-6, "gradients of the weight");
        Ok(())
    });
    found.unwrap();
}
