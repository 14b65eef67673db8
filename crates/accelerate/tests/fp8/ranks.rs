//! Several ranks: largest values are those over all of them, and models stay in step.

use super::{INPUTS, Middle, OUTPUTS, builder, in_32_bits, wave};
use accelerate::nn::{Linear, Module, ParamStore};
use accelerate::optim::Sgd;
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::testing::ranks;
use accelerate::{
    AORecipeKwargs, Accelerator, AcceleratorBuilder, FP8RecipeKwargs, Float8LinearRecipeName, FloatType,
    FullyShardedDataParallelPlugin, JoinOptions, MixedPrecisionPolicy, Result, TERecipeKwargs,
};
use rstest::rstest;

/// Five layers, all of which are used.
pub(crate) struct Deep {
    pub(crate) store: ParamStore,
    pub(crate) layers: Vec<Linear>,
}

impl Deep {
    pub(crate) fn new() -> Self {
        let store = ParamStore::new(Device::Cpu);
        let sizes = [16, 32, 48, 32, 32, 16];
        let layer = |(number, sizes): (usize, &[i64])| {
            Linear::new(store.root() / "layers" / number, sizes[0], sizes[1], Default::default()).unwrap()
        };
        let layers = sizes.windows(2).enumerate().map(layer).collect();
        for (number, param) in store.parameters().iter().enumerate() {
            param.copy_(&(wave(&param.shape(), number as f64) * 0.4)).unwrap();
        }
        Self { store, layers }
    }
}

impl Module for Deep {
    type Input = Tensor;
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.layers.iter().try_fold(input.shallow_clone(), |x, layer| Ok(layer.forward(&x)?.tanh()))
    }

    fn params(&self) -> &ParamStore {
        &self.store
    }
}

/// Losses of a training in which all ranks have the rows that one process has, so that all are the same.
fn losses(accelerator: &Accelerator) -> Result<Vec<f64>> {
    let model = Deep::new();
    let optimizer = Sgd::new(&model.store, 0.1)?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let mut losses = Vec::new();
    for step in 0..6 {
        let (x, target) = (wave(&[8, 16], f64::from(step)), wave(&[8, 16], f64::from(step) + 0.5));
        let loss = (model.forward(&x)? - target).square().mean(Kind::Float);
        accelerator.backward(&loss)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        losses.push(loss.double_value(&[]));
    }
    Ok(losses)
}

fn recipes() -> Vec<FP8RecipeKwargs> {
    let ao = |recipe| AORecipeKwargs { recipe_name: Some(recipe), ..Default::default() }.into();
    vec![
        ao(Float8LinearRecipeName::Tensorwise),
        ao(Float8LinearRecipeName::Rowwise),
        ao(Float8LinearRecipeName::RowwiseWithGwHp),
        TERecipeKwargs::default().into(),
    ]
}

fn sharded(builder: AcceleratorBuilder) -> AcceleratorBuilder {
    let policy = MixedPrecisionPolicy { reduce_dtype: Some(FloatType::Float32), ..Default::default() };
    let mixed_precision_policy = Some(policy);
    builder.fsdp_plugin(FullyShardedDataParallelPlugin { mixed_precision_policy, ..Default::default() })
}

#[rstest]
fn any_number_of_ranks_trains_alike(#[values(false, true)] is_sharded: bool, #[values(2, 3)] world_size: usize) {
    // A mean over three ranks of equal numbers is rounded. Shards are gathered in bfloat16, where a last digit of 32 bits may become
    // one of 16, and a code another one.
    let tolerance = if is_sharded { 1e-2 } else { 1e-4 };
    for recipe in recipes() {
        let builder = || if is_sharded { sharded(builder(recipe.clone())) } else { builder(recipe.clone()) };
        let alone = ranks(1, builder(), |accelerator| losses(&accelerator)).unwrap().swap_remove(0);
        assert!(alone.iter().all(|loss| loss.is_finite()) && alone.last() < alone.first(), "{alone:?}");
        for together in ranks(world_size, builder(), |accelerator| losses(&accelerator)).unwrap() {
            for (found, wanted) in together.iter().zip(&alone) {
                assert!((found - wanted).abs() < tolerance * wanted.abs(), "{recipe:?}: {together:?} {alone:?}");
            }
        }
    }
}

/// Ranks with rows of other sizes have the same scales, which are those of the largest value anywhere.
#[rstest]
fn largest_values_are_those_over_all_ranks(#[values(1, 2, 3)] world_size: usize) {
    let recipe = in_32_bits(TERecipeKwargs { amax_history_len: Some(5), ..Default::default() });
    let states = ranks(world_size, builder(recipe), |accelerator| {
        let (model, rank) = (accelerator.prepare(Middle::new())?, accelerator.process_index() as f64);
        for size in [2.0, 8.0] {
            let x = wave(&[8, INPUTS], 0.0).sign() * size * (rank + 1.0);
            let output = model.forward(&x)?;
            let gradient = wave(&[8, OUTPUTS], 0.0).sign() * size * 10.0 / (rank + 1.0);
            accelerator.backward(&(output * gradient).sum(Kind::Float))?;
        }
        Ok(accelerator.state_dict()?["model"].values["fp8"]["middle"].clone())
    })
    .unwrap();
    for state in &states {
        assert_eq!(state, &states[0]);
    }
    let ranks = world_size as f64;
    assert_eq!(states[0]["input"]["amax_history"], serde_json::json!([2.0 * ranks, 8.0 * ranks]));
    assert_eq!(states[0]["input"]["scale"], f64::from(448.0f32 / (8.0 * ranks as f32)));
    assert_eq!(states[0]["grad_output"]["amax_history"], serde_json::json!([20.0, 80.0]));
    assert_eq!(states[0]["grad_output"]["scale"], f64::from(57344.0f32 / 80.0));
}

/// Ranks that are out of batches have no largest values to compare.
#[test]
fn delayed_scaling_does_not_join_uneven_inputs() {
    let errors = ranks(2, builder(TERecipeKwargs::default()), |accelerator| {
        let model = accelerator.prepare(Middle::new())?;
        let options = JoinOptions { even_batches: Some(false) };
        Ok(accelerator.join_uneven_inputs(&model, options, || Ok(())).unwrap_err())
    })
    .unwrap();
    assert!(errors.iter().all(|error| error.is_config() && error.to_string().contains("even batches")), "{errors:?}");
}
