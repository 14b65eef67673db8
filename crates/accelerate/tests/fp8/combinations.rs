//! Layers that compute in FP8 beside what else can be done with layers: it works, or it is an error that names the layer.

use super::{INPUTS, Middle, OUTPUTS, builder, in_8_bits, wave};
use accelerate::big_model::{DispatchOptions, disk_offload};
use accelerate::checkpoint::LoadOptions;
use accelerate::lora::{LoraConfig, get_peft_model};
use accelerate::nn::{
    CheckpointOptions, DenseKernel, Linear, LinearKernel, Module, ModuleFn, Param, ParamStore, checkpoint,
};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::testing::ranks;
use accelerate::{
    AORecipeKwargs, Accelerator, BnbQuantizationConfig, FP8RecipeKwargs, ParallelismConfig, Result, TERecipeKwargs,
    load_and_quantize_model,
};
use rstest::rstest;
use std::sync::Arc;

fn recipes() -> [FP8RecipeKwargs; 2] {
    [AORecipeKwargs::default().into(), TERecipeKwargs::default().into()]
}

fn values(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.detach().to_kind(Kind::Float).reshape([-1])).unwrap()
}

/// Losses and gradients of three passes of four layers, of which the two in the middle are computed again if `checkpointed`.
fn trained(recipe: FP8RecipeKwargs, checkpointed: bool) -> Result<Vec<Vec<f32>>> {
    let accelerator = builder(recipe).cpu(true).build()?;
    let store = ParamStore::new(Device::Cpu);
    let layer = |number: usize| Linear::new(store.root() / number, 32, 32, Default::default());
    let layers: Vec<Linear> = (0..4).map(layer).collect::<Result<_>>()?;
    for (number, param) in store.parameters().iter().enumerate() {
        param.copy_(&wave(&param.shape(), number as f64))?;
    }
    let model = ModuleFn::new(&store, move |x: &Tensor| {
        let x = layers[0].forward(x)?;
        let middle = [layers[1].clone(), layers[2].clone()];
        let both = move |x: &Tensor| middle[1].forward(&middle[0].forward(x)?.tanh());
        let x = match checkpointed {
            true => checkpoint(&[&x], CheckpointOptions::default(), move |inputs| both(&inputs[0]))?,
            false => both(&x)?,
        };
        layers[3].forward(&x)
    });
    let model = accelerator.prepare(model)?;
    let mut found = Vec::new();
    for step in 0..3 {
        store.parameters().iter().for_each(|param| param.local().zero_grad());
        let loss = model.forward(&(wave(&[8, 32], f64::from(step)) * 3.0))?.square().mean(Kind::Float);
        accelerator.backward(&loss)?;
        found.push(values(&loss));
        found.extend(store.parameters().iter().map(|param| values(&param.grad().unwrap())));
    }
    Ok(found)
}

#[test]
fn activation_checkpointing_changes_nothing() {
    for recipe in recipes() {
        assert_eq!(trained(recipe.clone(), true).unwrap(), trained(recipe, false).unwrap());
    }
}

/// The layer below an adapter computes in FP8, the adapter itself as before, and only that is trained.
#[test]
fn adapters_go_around_layers_in_8_bits() -> Result<()> {
    for recipe in recipes() {
        let accelerator = builder(recipe).cpu(true).build()?;
        let model = Middle::new();
        let names = vec!["middle".to_owned()];
        let config = LoraConfig { target_modules: Some(names.into()), r: 4, ..Default::default() };
        let _peft = get_peft_model(&model.store, config)?;
        let model = accelerator.prepare(model)?;
        assert_eq!(in_8_bits(model.params()), ["middle"]);
        let before = model.forward(&wave(&[8, INPUTS], 0.0))?;
        accelerator.backward(&before.square().mean(Kind::Float))?;
        let store = model.params();
        assert!(store.get("middle.weight").unwrap().grad().is_none());
        let trained = store.trainable_parameters();
        assert_eq!(trained.len(), 2);
        assert!(trained.iter().all(|param| param.grad().is_some()));
        // An adapter begins with a zero matrix, so the output is that of the layer.
        let plain = Middle::new();
        let other = accelerator.prepare(plain)?;
        assert_eq!(values(&other.forward(&wave(&[8, INPUTS], 0.0))?), values(&before));
    }
    Ok(())
}

/// Weights that wait on a disk are asked for as any others.
#[test]
fn weights_on_a_disk_become_codes() -> Result<()> {
    for recipe in recipes() {
        let folder = tempfile::tempdir().unwrap();
        let accelerator = builder(recipe).cpu(true).build()?;
        let [here, there] = [Middle::new(), Middle::new()];
        disk_offload(&there.store, folder.path(), &DispatchOptions::default())?;
        let [here, there] = [accelerator.prepare(here)?, accelerator.prepare(there)?];
        assert_eq!(in_8_bits(there.params()), ["middle"]);
        let x = wave(&[8, INPUTS], 0.0);
        let [here, there] = tch::no_grad(|| [here.forward(&x), there.forward(&x)]);
        assert_eq!(values(&here?), values(&there?));
    }
    Ok(())
}

#[derive(Debug)]
struct Own;

impl LinearKernel for Own {
    fn linear(&self, input: &Tensor, weight: &Param, bias: Option<&Param>) -> Result<Tensor> {
        DenseKernel.linear(input, weight, bias)
    }
}

#[rstest]
#[case::kernel("it is computed by a kernel of its own", |model: &Middle| {
    model.middle.set_kernel(Arc::new(Own));
    Ok(())
})]
#[case::quantised("its weight is quantised", |model: &Middle| {
    let config = BnbQuantizationConfig {
        load_in_8bit: Some(true),
        llm_int8_skip_modules: Some(vec!["first".into(), "last".into()]),
        ..Default::default()
    };
    load_and_quantize_model(&model.store, &config, None, &LoadOptions::default()).map(drop)
})]
fn a_layer_that_is_computed_in_another_way_is_named(
    #[case] why: &str,
    #[case] change: fn(&Middle) -> Result<()>,
) -> Result<()> {
    for recipe in recipes() {
        let accelerator = builder(recipe).cpu(true).build()?;
        let model = Middle::new();
        change(&model)?;
        let error = accelerator.prepare(model).map(drop).unwrap_err();
        let text = error.to_string();
        assert!(error.is_config() && text.contains("the layer middle cannot") && text.contains(why), "{text}");
    }
    Ok(())
}

#[test]
fn ranks_that_divide_layers_are_told() {
    let config = ParallelismConfig { tp_size: Some(2), ..Default::default() };
    let builder = builder(AORecipeKwargs::default()).parallelism_config(config);
    let errors = ranks(2, builder, |accelerator: Accelerator| {
        Ok(accelerator.prepare(Middle::new()).map(drop).unwrap_err().to_string())
    });
    for error in errors.unwrap() {
        assert!(error.contains("the layer middle cannot compute in FP8") && error.contains("tp_size"), "{error}");
    }
}

/// Gradients of several micro-batches add up as in any precision, and each backward pass is one of the history.
#[test]
fn each_micro_batch_is_a_pass_of_delayed_scaling() -> Result<()> {
    let accelerator = builder(TERecipeKwargs::default()).cpu(true).gradient_accumulation_steps(2).build()?;
    let model = accelerator.prepare(Middle::new())?;
    for size in [1.0, 2.0, 4.0] {
        accelerator.accumulate(&model, || {
            let output = model.forward(&(wave(&[8, INPUTS], 0.0).sign() * size))?;
            accelerator.backward(&(output * wave(&[8, OUTPUTS], 0.0)).sum(Kind::Float))
        })?;
    }
    let states = accelerator.state_dict()?;
    assert_eq!(states["model"].values["fp8"]["middle"]["input"]["amax_history"], serde_json::json!([1.0, 2.0, 4.0]));
    Ok(())
}
