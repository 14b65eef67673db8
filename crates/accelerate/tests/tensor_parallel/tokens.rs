//! Ranks that also divide the tokens between divided layers train the model of one rank: norms, positions, and layers that see some heads.
//! What dropout drops, processes show (`conformance`): threads share their random numbers.

use super::{assert_close, builder, fill, values};
use accelerate::nn::{
    CheckpointOptions, Checkpointed, Dropout, Embedding, Init, LayerNorm, Linear, Module, ModuleFn, ParamStore,
    RMSNorm, RMSNormConfig, checkpoint,
};
use accelerate::optim::{AcceleratedOptimizer, Sgd};
use accelerate::tch::{self, Device, Kind, Tensor};
use accelerate::{Accelerator, PreparedModel, Result, TorchTensorParallelPlugin, testing};
use rstest::rstest;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// So long that tokens travel beside the products of two ranks, and one of these has a token more.
const LONGEST: i64 = 1025;

/// How the model's parts are made.
#[derive(Clone, Copy, Default)]
struct Parts {
    checkpoints: bool,
    /// The head is a layer that no plan divides.
    whole_head: bool,
    dropout: f64,
}

/// Tokens and positions, a dropout, a block of two divided layers between a norm and a dropout, a last norm and a head.
fn model(
    accelerator: &Accelerator,
    parts: Parts,
) -> Result<(ParamStore, impl Module<Input = Tensor, Output = Tensor>)> {
    let store = ParamStore::new(accelerator.device());
    let root = store.root();
    let embed = Embedding::new(&root / "embed", 11, 6, Default::default())?;
    let positions = Embedding::new(&root / "positions", LONGEST, 6, Default::default())?;
    let drop = Dropout::new(&root / "dropout", parts.dropout)?;
    let block = Checkpointed::new(&root / "block", |path| {
        let norm = RMSNorm::new(path / "norm", [6], RMSNormConfig::default())?;
        let up = Linear::new(path / "up", 6, 8, Default::default())?;
        let gate = Linear::new(path / "gate", 6, 8, Default::default())?;
        let down = Linear::new(path / "down", 8, 6, Default::default())?;
        Ok((norm, up, gate, down, Dropout::new(path / "drop", parts.dropout)?))
    })?;
    let norm = LayerNorm::new(&root / "last_norm", [6], Default::default())?;
    let head = Linear::new(&root / "head", 6, 11, Default::default())?;
    fill(&store)?;
    if parts.checkpoints {
        store.gradient_checkpointing_enable(Default::default())?;
    }
    let whole_head = parts.whole_head;
    let module = ModuleFn::new(&store, move |tokens: &Tensor| {
        let places = Tensor::arange(*tokens.size().last().unwrap(), (Kind::Int64, Device::Cpu));
        let x = drop.forward(&embed.forward(tokens)?.f_add(&positions.forward(&places)?)?)?;
        let x = block.call(&[&x], |(norm, up, gate, down, drop), inputs| {
            let normed = norm.forward(&inputs[0])?;
            let inner = up.forward(&normed)?.f_gelu("none")?.f_mul(&gate.forward(&normed)?)?;
            Ok(drop.forward(&down.forward(&inner)?)?.f_add(&inputs[0])?)
        })?;
        let last = norm.forward(&x)?;
        // What is not divided sees all tokens.
        head.forward(&if whole_head { last.f_cumsum(-2, Kind::Float)? } else { last })
    });
    Ok((store, module))
}

fn plan(changes: &[(&str, Value)]) -> Value {
    let mut plan = json!({
        "embed": "embedding_rowwise",
        "positions": "sequence_parallel",
        "dropout": "sequence_parallel",
        "block.norm": "sequence_parallel",
        "block.up": "colwise",
        "block.gate": "colwise",
        "block.down": "rowwise",
        "block.drop": "sequence_parallel",
        "last_norm": "sequence_parallel",
        "head": "colwise_gather_output",
    });
    for (pattern, rule) in changes {
        plan[*pattern] = rule.clone();
    }
    plan
}

/// Trains for two steps, and gives the output of each.
fn two_steps<M: Module<Input = Tensor, Output = Tensor>>(
    accelerator: &Accelerator,
    model: &PreparedModel<M>,
    optimizer: &mut AcceleratedOptimizer<Sgd>,
    tokens: &Tensor,
) -> Result<Vec<Vec<f64>>> {
    let mut found = Vec::new();
    for _ in 0..2 {
        let output = model.forward(tokens)?;
        found.push(values(&output));
        accelerator.backward(&output.f_square()?.f_mean(Kind::Float)?)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
    }
    Ok(found)
}

/// Outputs of two steps, of a pass without gradients after them, and all parameters.
fn train(accelerator: &Accelerator, parts: Parts, length: i64) -> Result<Vec<Vec<f64>>> {
    let (store, module) = model(accelerator, parts)?;
    let (model, mut optimizer) = accelerator.prepare((module, Sgd::new(&store, 0.1)?))?;
    let tokens =
        Tensor::arange(2 * length, (Kind::Int64, Device::Cpu)).f_mul_scalar(3)?.remainder(11).view([2, length]);
    let mut found = two_steps(accelerator, &model, &mut optimizer, &tokens)?;
    store.eval();
    found.push(values(&tch::no_grad(|| model.forward(&tokens))?));
    let state = store.state_dict()?;
    found.extend(state.iter().map(|(_, tensor)| values(tensor)));
    Ok(found)
}

#[rstest]
#[case::plain(Parts::default(), vec![])]
#[case::checkpointing(Parts { checkpoints: true, ..Default::default() }, vec![])]
#[case::columns_of_the_table(Parts::default(), vec![("embed", json!("embedding_colwise"))])]
#[case::tokens_that_are_looked_up_by_one_rank_each(Parts::default(), vec![("embed", json!("sequence_parallel"))])]
#[case::layers_that_each_rank_has_whole(
    Parts::default(),
    vec![
        ("block.up", json!("replicated_with_grad_allreduce")),
        ("block.gate", json!("replicated_with_grad_allreduce")),
        ("block.down", json!("rowwise_split_input")),
    ]
)]
#[case::head_that_is_whole(
    Parts { whole_head: true, ..Default::default() },
    vec![
        ("last_norm", json!({ "style": "sequence_parallel", "output_layouts": "Replicate" })),
        ("head", json!("replicate")),
    ]
)]
fn ranks_that_divide_tokens_train_the_model_of_one_rank(
    #[case] parts: Parts,
    #[case] changes: Vec<(&str, Value)>,
    #[values(1, 2, 3, 4)] world_size: usize,
    #[values(1, 6)] length: i64,
) {
    check_training(parts, &changes, world_size, length);
}

#[rstest]
fn ranks_that_divide_a_long_sequence_train_the_model_of_one_rank(#[values(false, true)] checkpoints: bool) {
    check_training(Parts { checkpoints, ..Default::default() }, &[], 2, LONGEST);
}

/// Computes the same with gradients and without, in this order or the other.
fn partly_without_gradients(
    norm: RMSNorm,
    up: Linear,
    down: Linear,
    is_detached: bool,
) -> impl Fn(&Tensor) -> Result<Tensor> + Send + Sync {
    move |x: &Tensor| {
        let normed = norm.forward(x)?;
        let scale = match is_detached {
            true => {
                let detached = normed.f_detach()?;
                tch::no_grad(|| down.forward(&up.forward(&detached)?.f_gelu("none")?))?
            }
            // The same input, which gradients have to reach.
            false => down.forward(&(up.forward(&normed)? * tch::no_grad(|| up.forward(&normed))?))?,
        };
        let first = tch::no_grad(|| up.forward(&normed))?;
        Ok(down.forward(&(up.forward(&normed)? * first))? * (scale + 1.0) + x)
    }
}

/// A part of a block is computed without gradients, before or instead of with them.
#[rstest]
fn parts_without_gradients_see_the_tokens_of_the_others(
    #[values(false, true)] checkpoints: bool,
    #[values(false, true)] is_detached: bool,
    #[values(6, 9, LONGEST)] length: i64,
) {
    let run = |accelerator: Accelerator| {
        let store = ParamStore::new(accelerator.device());
        let root = store.root();
        let embed = Embedding::new(&root / "embed", 11, 6, Default::default())?;
        let norm = RMSNorm::new(&root / "norm", [6], RMSNormConfig::default())?;
        let up = Linear::new(&root / "up", 6, 8, Default::default())?;
        let down = Linear::new(&root / "down", 8, 6, Default::default())?;
        let head = Linear::new(&root / "head", 6, 11, Default::default())?;
        fill(&store)?;
        let block = partly_without_gradients(norm, up, down, is_detached);
        let block = Arc::new(block);
        let module = ModuleFn::new(&store, move |tokens: &Tensor| {
            let x = embed.forward(tokens)?;
            let block = Arc::clone(&block);
            let x = match checkpoints {
                true => checkpoint(&[&x], CheckpointOptions::default(), move |inputs| block(&inputs[0]))?,
                false => block(&x)?,
            };
            head.forward(&x)
        });
        let (model, mut optimizer) = accelerator.prepare((module, Sgd::new(&store, 0.1)?))?;
        let tokens = (Tensor::arange(length, (Kind::Int64, Device::Cpu)) * 3).remainder(11).view([1, length]);
        let mut found = two_steps(&accelerator, &model, &mut optimizer, &tokens)?;
        found.extend(store.state_dict()?.iter().map(|(_, tensor)| values(tensor)));
        Ok(found)
    };
    let plan = json!({
        "embed": "embedding_rowwise", "norm": "sequence_parallel", "up": "colwise", "down": "rowwise",
        "head": "colwise_gather_output",
    });
    let wanted = testing::ranks(1, Default::default(), run).unwrap();
    for own in testing::ranks(2, builder(2, &plan), run).unwrap() {
        for (number, (found, wanted)) in own.iter().zip(&wanted[0]).enumerate() {
            assert_close(found, wanted, 2e-6, &format!("value {number}"));
        }
    }
}

/// The input of a segment that is computed again has been collected before it.
#[rstest]
fn a_checkpointed_layer_keeps_the_same_both_times(#[values(9, LONGEST)] length: i64) {
    let run = |accelerator: Accelerator| {
        let store = ParamStore::new(accelerator.device());
        let root = store.root();
        let embed = Embedding::new(&root / "embed", 11, 6, Default::default())?;
        let norm = RMSNorm::new(&root / "norm", [6], RMSNormConfig::default())?;
        let [up, gate] = ["up", "gate"].map(|name| Linear::new(&root / name, 6, 8, Default::default()).unwrap());
        let down = Linear::new(&root / "down", 8, 6, Default::default())?;
        let head = Linear::new(&root / "head", 6, 11, Default::default())?;
        fill(&store)?;
        let module = ModuleFn::new(&store, move |tokens: &Tensor| {
            let x = norm.forward(&embed.forward(tokens)?)?;
            let (own, gate) = (up.forward(&x)?, gate.clone());
            let again = checkpoint(&[&x], CheckpointOptions::default(), move |inputs| {
                Ok(gate.forward(&inputs[0])?.f_gelu("none")?)
            })?;
            head.forward(&down.forward(&(own * again))?)
        });
        let model = accelerator.prepare(module)?;
        let tokens = (Tensor::arange(2 * length, (Kind::Int64, Device::Cpu)) * 3).remainder(11).view([2, length]);
        let output = model.forward(&tokens)?;
        accelerator.backward(&output.f_square()?.f_mean(Kind::Float)?)?;
        Ok(accelerator.clip_grad_norm_(&model, 1e9)?.double_value(&[]))
    };
    let plan = json!({
        "embed": "embedding_rowwise", "norm": "sequence_parallel", "up": "colwise", "gate": "colwise", "down": "rowwise", "head": "colwise_gather_output",
    });
    let wanted = testing::ranks(1, Default::default(), run).unwrap();
    for own in testing::ranks(2, builder(2, &plan), run).unwrap() {
        assert_close(&[own], &wanted, 2e-6, "norm of gradients");
    }
}

/// What ranks exchange in a backward pass is not recorded.
#[rstest]
fn gradients_of_gradients_are_refused(#[values(6, LONGEST)] length: i64) {
    testing::ranks(2, builder(2, &plan(&[])), |accelerator| {
        let (_store, module) = model(&accelerator, Parts::default())?;
        let model = accelerator.prepare(module)?;
        let tokens = Tensor::arange(length, (Kind::Int64, Device::Cpu)).remainder(11).view([1, length]);
        let loss = model.forward(&tokens)?.f_square()?.f_mean(Kind::Float)?;
        let weight = model.params().parameters()[0].local();
        for create_graph in [false, true] {
            let gradient = Tensor::f_run_backward(&[&loss], &[&weight], true, create_graph);
            assert_eq!(gradient.is_err(), create_graph, "{gradient:?}");
        }
        Ok(())
    })
    .unwrap();
}

fn check_training(parts: Parts, changes: &[(&str, Value)], world_size: usize, length: i64) {
    let wanted = testing::ranks(1, Default::default(), |accelerator| train(&accelerator, parts, length)).unwrap();
    let plan = plan(changes);
    let found =
        testing::ranks(world_size, builder(world_size, &plan), |accelerator| train(&accelerator, parts, length));
    for own in found.unwrap() {
        assert_eq!(own.len(), wanted[0].len());
        for (number, (found, wanted)) in own.iter().zip(&wanted[0]).enumerate() {
            assert_close(found, wanted, 2e-6, &format!("value {number}"));
        }
    }
}

/// Query-key norms (Qwen3): each rank sees some heads.
#[test]
fn gradients_of_a_layer_that_sees_some_heads_are_summed() {
    let run = |accelerator: Accelerator| -> Result<Vec<Vec<f64>>> {
        let store = ParamStore::new(accelerator.device());
        let root = store.root();
        let up = Linear::new(&root / "up", 4, 12, Default::default())?;
        let norm = LayerNorm::new(&root / "norm", [4], Default::default())?;
        let down = Linear::new(&root / "down", 12, 4, Default::default())?;
        fill(&store)?;
        let module = ModuleFn::new(&store, move |x: &Tensor| {
            let heads = up.forward(x)?.f_unflatten(-1, [-1, 4])?;
            down.forward(&norm.forward(&heads)?.f_flatten(-2, -1)?)
        });
        let (model, mut optimizer) = accelerator.prepare((module, Sgd::new(&store, 0.1)?))?;
        for _ in 0..4 {
            let output = model.forward(&Tensor::arange(8, (Kind::Float, Device::Cpu)).cos().view([2, 4]))?;
            accelerator.backward(&output.f_square()?.f_sum(Kind::Float)?)?;
            let _norm = accelerator.clip_grad_norm_(&model, 0.5)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
        }
        Ok(store.state_dict()?.iter().map(|(_, tensor)| values(tensor)).collect())
    };
    let wanted = testing::ranks(1, Default::default(), run).unwrap();
    let plan = json!({
        "up": { "style": "colwise", "unit": 4 },
        "norm": "replicated_with_grad_allreduce",
        "down": { "style": "rowwise", "unit": 4 },
    });
    for world_size in [2, 3] {
        for own in testing::ranks(world_size, builder(world_size, &plan), run).unwrap() {
            for (found, wanted) in own.iter().zip(&wanted[0]) {
                assert_close(found, wanted, 2e-6, "parameters");
            }
        }
    }
}

#[rstest]
#[case::nothing_divides_them_before(&["embed", "positions", "dropout"], "2 tokens")]
#[case::one_addend_is_whole(&["positions"], "tokens")]
#[case::a_norm_of_all_tokens(&["last_norm"], "different gradients of last_norm")]
fn a_plan_that_forgets_a_layer_is_named(#[case] forgotten: &[&str], #[case] words: &str) {
    let mut plan = plan(&[]);
    forgotten.iter().for_each(|pattern| plan[*pattern] = json!("replicate"));
    let errors = testing::ranks(2, builder(2, &plan), |accelerator| {
        Ok(train(&accelerator, Parts::default(), 2).err().map(|error| format!("{error:#}")))
    });
    for error in errors.unwrap() {
        assert!(error.as_ref().is_some_and(|error| error.contains(words)), "{error:?}");
    }
}

/// What a program does with the last activations `[2, 6, 4]`, of which a rank has some tokens, and with the head.
#[rstest]
#[case::gives_some_tokens(|_: &Linear, x: &Tensor| Ok(x.shallow_clone()), "the last layers have to give all of them")]
#[case::puts_them_into_other_places(|head: &Linear, x: &Tensor| head.forward(&x.f_reshape([-1, 4])?), "into other places")]
#[case::looks_without_gradients(
    |head: &Linear, x: &Tensor| {
        let seen = tch::no_grad(|| head.forward(x))?;
        Ok(head.forward(x)?.f_add(&seen)?.f_mul_scalar(0.5)?)
    },
    ""
)]
#[case::all_is_well(|head: &Linear, x: &Tensor| head.forward(x), "")]
fn tokens_are_put_together_or_the_program_is_told(
    #[case] end: fn(&Linear, &Tensor) -> Result<Tensor>,
    #[case] words: &str,
    #[values(false, true)] is_frozen_in_front: bool,
) {
    let run = |accelerator: Accelerator| {
        let store = ParamStore::new(accelerator.device());
        let embed = Embedding::new(store.root() / "embed", 11, 4, Default::default())?;
        let norm = LayerNorm::new(store.root() / "norm", [4], Default::default())?;
        let head = Linear::new(store.root() / "head", 4, 5, Default::default())?;
        fill(&store)?;
        let model = accelerator.prepare(ModuleFn::new(&store, move |tokens: &Tensor| {
            let rows = if is_frozen_in_front { tch::no_grad(|| embed.forward(tokens)) } else { embed.forward(tokens) };
            end(&head, &norm.forward(&rows?)?)
        }))?;
        let tokens = Tensor::arange(12, (Kind::Int64, Device::Cpu)).remainder(11);
        // As many tokens as two shorter texts have together.
        let _one_text = model.forward(&tokens.view([1, 12]));
        let output = model.forward(&tokens.view([2, 6]));
        Ok(output.map(|output| values(&output)).map_err(|error| error.to_string()))
    };
    let plan = json!({ "embed": "embedding_rowwise", "norm": "sequence_parallel", "head": "colwise_gather_output" });
    let wanted = testing::ranks(1, Default::default(), run).unwrap().remove(0).unwrap();
    for own in testing::ranks(2, builder(2, &plan), run).unwrap() {
        match own {
            Ok(found) if words.is_empty() => assert_close(&found, &wanted, 2e-6, "outputs"),
            Err(error) if !words.is_empty() => assert!(error.contains(words), "{error}"),
            other => panic!("{other:?}"),
        }
    }
}

/// Layers with the usual names find their rules themselves, and rules beside them count as well.
#[rstest]
#[case(json!({ "auto": {} }))]
#[case(json!({ "auto": {}, "positions": "sequence_parallel", "dropout": "sequence_parallel", "block.norm": "sequence_parallel",
    "block.drop": "sequence_parallel", "last_norm": { "style": "sequence_parallel", "output_layouts": "Replicate" },
    "embed": "embedding_rowwise" }))]
fn layers_with_the_usual_names_are_divided(#[case] plan: Value) {
    let wanted = testing::ranks(1, Default::default(), |accelerator| train(&accelerator, Parts::default(), 5)).unwrap();
    let found = testing::ranks(2, builder(2, &plan), |accelerator| {
        let (store, module) = model(&accelerator, Parts::default())?;
        let _model = accelerator.prepare(module)?;
        assert_eq!(store.get("block.down.weight").unwrap().local().numel(), 24);
        train(&accelerator, Parts::default(), 5)
    });
    for own in found.unwrap() {
        for (found, wanted) in own.iter().zip(&wanted[0]) {
            assert_close(found, wanted, 2e-6, "values");
        }
    }
}

#[test]
fn a_plan_without_rules_for_tokens_is_refused_where_they_are_asked_for() {
    let plugin = TorchTensorParallelPlugin {
        tensor_parallel_degree: Some(2),
        parallelize_plan: json!({ "block.up": "colwise" }).as_object().cloned(),
        sequence_parallelism: Some(true),
    };
    let builder = Accelerator::builder().torch_tp_plugin(plugin);
    let errors = testing::ranks(2, builder, |accelerator| {
        let (_, module) = model(&accelerator, Parts::default())?;
        Ok(accelerator.prepare(module).err().map(|error| error.to_string()))
    });
    for error in errors.unwrap() {
        assert!(error.as_ref().is_some_and(|error| error.contains("sequence_parallelism")), "{error:?}");
    }
}

/// It would drop others than one process does, and ranks with fewer tokens would draw fewer numbers.
#[rstest]
fn a_dropout_that_no_rule_names_is_an_error(
    #[values("dropout", "block.drop")] name: &str,
    #[values(2, 6)] length: i64,
) {
    let mut plan = plan(&[]);
    plan.as_object_mut().unwrap().remove(name);
    let errors = testing::ranks(2, builder(2, &plan), |accelerator| {
        // One that drops nothing is right without a rule.
        train(&accelerator, Parts::default(), length)?;
        let parts = Parts { dropout: 0.1, ..Default::default() };
        Ok(train(&accelerator, parts, length).err().map(|error| error.to_string()))
    });
    for error in errors.unwrap() {
        let wanted = format!("the dropout {name} gets some tokens on each rank");
        assert!(error.as_ref().is_some_and(|error| error.contains(&wanted)), "{error:?}");
    }
}

/// Its gradients are compared when there are some, and not in the first steps of the run.
#[test]
fn a_parameter_that_is_first_used_later_is_compared_then() {
    let plan = json!({
        "embed": "embedding_rowwise",
        "norm": "sequence_parallel",
        "up": "colwise",
        "down": "rowwise",
        "last": { "style": "sequence_parallel", "output_layouts": "Replicate" },
    });
    let errors = testing::ranks(2, builder(2, &plan), |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let root = store.root();
        let norm = LayerNorm::new(&root / "norm", [4], Default::default())?;
        let up = Linear::new(&root / "up", 4, 8, Default::default())?;
        let down = Linear::new(&root / "down", 8, 4, Default::default())?;
        let embed = Embedding::new(&root / "embed", 5, 4, Default::default())?;
        let last = LayerNorm::new(&root / "last", [4], Default::default())?;
        let scale = root.param("scale", ([4], Init::Ones))?;
        fill(&store)?;
        let uses = Arc::new(AtomicBool::new(false));
        let uses_scale = Arc::clone(&uses);
        let model = ModuleFn::new(&store, move |tokens: &Tensor| {
            let first = down.forward(&up.forward(&norm.forward(&embed.forward(tokens)?)?)?)?;
            let scaled = if uses_scale.load(Ordering::Relaxed) { first.f_mul(&scale.get()?)? } else { first };
            Ok(last.forward(&down.forward(&up.forward(&norm.forward(&scaled)?)?)?)?.f_square()?.f_mean(Kind::Float)?)
        });
        let (model, mut optimizer) = accelerator.prepare((model, Sgd::new(&store, 0.1)?))?;
        let tokens = Tensor::from_slice(&[1i64, 2, 3, 4, 0, 1]).view([1, 6]);
        let mut step = || {
            accelerator.backward(&model.forward(&tokens)?)?;
            optimizer.step()?;
            optimizer.zero_grad()
        };
        (0..5).try_for_each(|_| step())?;
        uses.store(true, Ordering::Relaxed);
        Ok(step().err().map(|error| error.to_string()))
    });
    for error in errors.unwrap() {
        let is_named =
            |error: &String| error.contains("different gradients of scale") && error.contains("it is of no layer");
        assert!(error.as_ref().is_some_and(is_named), "{error:?}");
    }
}
