//! Tensor parallelism where it is easily wrong: what ranks have to agree on, and what their slices must not change.

use super::{assert_close, builder, fill, values};
use accelerate::data::{DataLoader, VecDataset};
use accelerate::nn::{Embedding, LayerNorm, Linear, LinearConfig, Module, ModuleFn, ParamStore};
use accelerate::optim::{AdamW, Sgd};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Accelerator, AcceleratorBuilder, AutoWrapPolicy, FullyShardedDataParallelPlugin, Result, testing};
use serde_json::json;

/// Query-key norms (Qwen3): a layer that works head by head between two divided ones, and is whole on every rank.
#[test]
fn a_layer_with_parameters_between_divided_ones_is_named() {
    let plan = json!({ "up": { "style": "colwise", "unit": 4 }, "down": { "style": "rowwise", "unit": 4 } });
    let errors = testing::ranks(2, builder(2, &plan), |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let root = store.root();
        let up = Linear::new(&root / "up", 4, 8, Default::default())?;
        let norm = LayerNorm::new(&root / "norm", [4], Default::default())?;
        let down = Linear::new(&root / "down", 8, 4, Default::default())?;
        fill(&store)?;
        let model = ModuleFn::new(&store, move |x: &Tensor| {
            let heads = up.forward(x)?.f_unflatten(-1, [-1, 4])?;
            down.forward(&norm.forward(&heads)?.f_flatten(-2, -1)?)
        });
        let (model, mut optimizer) = accelerator.prepare((model, Sgd::new(&store, 0.1)?))?;
        let output = model.forward(&Tensor::arange(8, (Kind::Float, Device::Cpu)).cos().view([2, 4]))?;
        accelerator.backward(&output.f_square()?.f_sum(Kind::Float)?)?;
        Ok(optimizer.step().err().map(|error| error.to_string()))
    });
    for error in errors.unwrap() {
        assert!(error.as_ref().is_some_and(|text| text.contains("different gradients of norm.weight")), "{error:?}");
    }
}

#[test]
fn the_same_rows_in_another_order_are_another_input() {
    let outcomes = testing::ranks(2, builder(2, &json!({ "embed": "embedding_rowwise" })), |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let embed = Embedding::new(store.root() / "embed", 8, 2, Default::default())?;
        fill(&store)?;
        let model = accelerator.prepare(ModuleFn::new(&store, move |x: &Tensor| embed.forward(x)))?;
        let rows = if accelerator.process_index() == 0 { [1i64, 6] } else { [6, 1] };
        Ok(model.forward(&Tensor::from_slice(&rows)).map(|output| values(&output)).map_err(|error| error.to_string()))
    });
    for outcome in outcomes.unwrap() {
        assert!(outcome.is_err(), "no error, and rows {outcome:?}");
    }
}

#[test]
fn schedules_are_as_long_as_training() {
    testing::ranks(2, builder(2, &json!({ "up": "colwise" })), |accelerator| {
        let loader = || DataLoader::builder(VecDataset::new((0i64..10).collect())).batch_size(2).build();
        let steps = accelerator.num_training_steps(&loader()?, 1);
        let batches = accelerator.prepare(loader()?)?.iter()?.count();
        // One share of rows: a scheduler ticks once for each batch.
        assert_eq!(steps, batches);
        Ok(())
    })
    .unwrap();
}

#[test]
fn norms_count_slices_once_that_fsdp_leaves_whole() {
    let run = |accelerator: Accelerator| -> Result<(f64, f64)> {
        let store = ParamStore::new(accelerator.device());
        let root = store.root();
        let up = Linear::new(&root / "up", 4, 8, Default::default())?;
        let down = Linear::new(&root / "down", 8, 4, Default::default())?;
        fill(&store)?;
        let model =
            accelerator.prepare(ModuleFn::new(&store, move |x: &Tensor| down.forward(&up.forward(x)?.f_tanh()?)))?;
        let output = model.forward(&Tensor::arange(8, (Kind::Float, Device::Cpu)).cos().view([2, 4]))?;
        accelerator.backward(&output.f_square()?.f_sum(Kind::Float)?)?;
        let norm = accelerator.clip_grad_norm_(&model, 1e9)?.double_value(&[]);
        Ok((norm, 0.0))
    };
    let wanted = testing::ranks(1, Default::default(), run).unwrap();
    let plugin = FullyShardedDataParallelPlugin {
        auto_wrap_policy: Some(AutoWrapPolicy::NoWrap),
        ignored_modules: Some(vec!["up".to_owned()]),
        ..Default::default()
    };
    let plan = json!({ "up": "colwise", "down": "rowwise" });
    for found in testing::ranks(4, builder(2, &plan).fsdp_plugin(plugin), run).unwrap() {
        assert_close(&[found.0], &[wanted[0].0], 1e-5, "norm");
    }
}

/// The module within, as an error text of DDP advises for ranks that evaluate alone.
#[test]
fn two_passes_of_the_module_within_give_a_gradient_each() {
    let run = |accelerator: Accelerator| -> Result<Vec<f64>> {
        let store = ParamStore::new(accelerator.device());
        let up = Linear::new(store.root() / "up", 4, 6, Default::default())?;
        fill(&store)?;
        let model = accelerator.prepare(ModuleFn::new(&store, move |x: &Tensor| up.forward(x)))?;
        let x = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0]).set_requires_grad(true);
        let mut gradients = Vec::new();
        for _ in 0..2 {
            let mut x = x.shallow_clone();
            (*model).forward(&x)?.f_sum(Kind::Float)?.f_backward()?;
            gradients.extend(values(&x.grad()));
            x.zero_grad();
        }
        Ok(gradients)
    };
    let wanted = testing::ranks(1, Default::default(), run).unwrap();
    for found in testing::ranks(2, builder(2, &json!({ "up": "colwise" })), run).unwrap() {
        assert_close(&found, &wanted[0], 1e-5, "gradients of the input");
    }
}

/// A window of accumulation that is saved under one plan and loaded under another one with as many ranks.
#[test]
fn accumulated_gradients_of_another_plan_are_not_taken() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    let run = |style: &str, loads: bool| {
        let builder = builder(2, &json!({ "w": style })).gradient_accumulation_steps(2);
        testing::ranks(2, builder, |accelerator| {
            let store = ParamStore::new(accelerator.device());
            let w = Linear::new(store.root() / "w", 4, 4, LinearConfig { bias: false, ..Default::default() })?;
            fill(&store)?;
            let (model, mut optimizer) =
                accelerator.prepare((ModuleFn::new(&store, move |x: &Tensor| w.forward(x)), Sgd::new(&store, 0.1)?))?;
            let mut pass = |factor: f64| {
                accelerator.accumulate(&model, || {
                    let x = Tensor::arange(8, (Kind::Float, Device::Cpu)).view([2, 4]) * factor;
                    accelerator.backward(&model.forward(&x)?.f_square()?.f_sum(Kind::Float)?)?;
                    optimizer.step()?;
                    optimizer.zero_grad()
                })
            };
            if loads {
                if let Err(error) = accelerator.load_state(&path) {
                    return Ok(Err(error.to_string()));
                }
            } else {
                pass(0.01)?;
                accelerator.save_state(&path)?;
            }
            pass(0.02)?;
            Ok(Ok(values(store.state_dict()?.get("w.weight").unwrap())))
        })
        .unwrap()
    };
    let wanted = run("colwise_gather_output", false)[0].clone().unwrap();
    let same = run("colwise_gather_output", true)[0].clone().unwrap();
    assert_close(&same, &wanted, 1e-5, "control: weights under the same plan");
    for found in run("rowwise_split_input", true) {
        let text = found.unwrap_err();
        assert!(text.contains("gradients"), "{text}");
    }
}

#[test]
fn a_row_that_is_not_asked_for_does_not_matter() {
    testing::ranks(2, builder(2, &json!({ "embed": "embedding_rowwise" })), |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let embed = Embedding::new(store.root() / "embed", 4, 1, Default::default())?;
        embed.weight.copy_(&Tensor::from_slice(&[f32::NEG_INFINITY, 1.0, 2.0, 3.0]).view([4, 1]))?;
        let model = accelerator.prepare(ModuleFn::new(&store, move |x: &Tensor| embed.forward(x)))?;
        assert_eq!(values(&model.forward(&Tensor::from_slice(&[3i64, 1]))?), [3.0, 1.0]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn plans_that_differ_from_rank_to_rank_are_named() {
    let errors = testing::ranks(2, builder(2, &json!({ "up": "colwise" })), |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let path = if accelerator.process_index() == 0 { "up" } else { "up.projection" };
        let up = Linear::new(store.root() / path, 4, 8, Default::default())?;
        let model = ModuleFn::new(&store, move |x: &Tensor| up.forward(x));
        Ok(accelerator.prepare(model).err().map(|error| error.to_string()))
    });
    for error in errors.unwrap() {
        let error = error.unwrap();
        assert!(error.contains("different plans") || error.contains("projection"), "{error}");
    }
}

/// A table with an odd number of rows is divided unevenly, and what each rank has whole is then cut at other elements.
#[test]
fn a_checkpoint_of_slices_of_other_sizes_is_read_on_any_mesh() {
    let plan = json!({ "embed": "embedding_rowwise", "up": "colwise", "down": "rowwise" });
    let fsdp =
        || FullyShardedDataParallelPlugin { auto_wrap_policy: Some(AutoWrapPolicy::NoWrap), ..Default::default() };
    let run = |builder: AcceleratorBuilder, world_size: usize, folder: &std::path::Path, loads: bool| {
        testing::ranks(world_size, builder, |accelerator| {
            let store = ParamStore::new(accelerator.device());
            let root = store.root();
            let embed = Embedding::new(&root / "embed", 7, 4, Default::default())?;
            let positions = Embedding::new(&root / "positions", 9, 4, Default::default())?;
            let up = Linear::new(&root / "up", 4, 5, Default::default())?;
            let down = Linear::new(&root / "down", 5, 4, Default::default())?;
            fill(&store)?;
            let model = ModuleFn::new(&store, move |tokens: &Tensor| {
                let places = Tensor::arange(5, (Kind::Int64, Device::Cpu));
                let x = embed.forward(tokens)?.f_add(&positions.forward(&places)?)?;
                Ok(down.forward(&up.forward(&x)?.f_gelu("none")?)?.f_square()?.f_mean(Kind::Float)?)
            });
            let (model, mut optimizer) = accelerator.prepare((model, AdamW::new(&store, 0.1)?))?;
            let tokens = Tensor::from_slice(&[1i64, 2, 6, 4, 0]).view([1, 5]);
            let mut step = || -> Result<f64> {
                let loss = model.forward(&tokens)?;
                accelerator.backward(&loss)?;
                optimizer.step()?;
                optimizer.zero_grad()?;
                Ok(loss.double_value(&[]))
            };
            if loads {
                accelerator.load_state(folder)?;
            } else {
                step()?;
                accelerator.save_state(folder)?;
            }
            (0..3).map(|_| step()).collect::<Result<Vec<f64>>>()
        })
        .unwrap()
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    let divided = || builder(2, &plan).fsdp_plugin(fsdp());
    let wanted = run(divided(), 4, &path, false);
    for (builder, world_size) in [(divided(), 4), (builder(2, &plan), 2), (Accelerator::builder(), 1)] {
        for found in run(builder, world_size, &path, true) {
            assert_close(&found, &wanted[0], 2e-6, "losses");
        }
    }
}
