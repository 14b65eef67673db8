//! Computing in FP8, beside a transcription of its definition with plain operations on tensors.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod combinations;
mod gathered;
mod ranks;
mod recipes;
mod state;
mod transcription;

use accelerate::nn::{AnyLayer, Linear, Module, ParamStore};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Accelerator, AcceleratorBuilder, FP8RecipeKwargs, KwargsHandler, MixedPrecision, Result};

/// A model of three layers, of which the one in the middle computes in FP8, and alone is used.
struct Middle {
    store: ParamStore,
    middle: Linear,
}

const INPUTS: i64 = 32;
const OUTPUTS: i64 = 48;

impl Middle {
    fn new() -> Self {
        let store = ParamStore::new(Device::Cpu);
        let layer = |name: &str, inputs, outputs| {
            Linear::new(store.root() / name, inputs, outputs, Default::default()).unwrap()
        };
        let first = layer("first", INPUTS, INPUTS);
        let middle = layer("middle", INPUTS, OUTPUTS);
        let last = layer("last", OUTPUTS, OUTPUTS);
        for layer in [first, last] {
            layer.weight.set_requires_grad(false).unwrap();
            layer.bias.unwrap().set_requires_grad(false).unwrap();
        }
        for (number, param) in store.parameters().iter().enumerate() {
            param.copy_(&wave(&param.shape(), number as f64)).unwrap();
        }
        Self { store, middle }
    }
}

impl Module for Middle {
    type Input = Tensor;
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.middle.forward(input)
    }

    fn params(&self) -> &ParamStore {
        &self.store
    }
}

/// Numbers of many sizes, by a formula.
fn wave(shape: &[i64], phase: f64) -> Tensor {
    let count: i64 = shape.iter().product();
    let numbers = Tensor::arange(count, (Kind::Double, Device::Cpu)) * 0.7 + phase;
    (numbers.sin() * (numbers * 0.13).cos()).to_kind(Kind::Float).reshape(shape)
}

fn builder(recipe: impl Into<KwargsHandler>) -> AcceleratorBuilder {
    Accelerator::builder().mixed_precision(MixedPrecision::Fp8).kwargs_handler(recipe)
}

/// What is no product in FP8 is computed in 32 bits.
fn in_32_bits(recipe: impl Into<FP8RecipeKwargs>) -> FP8RecipeKwargs {
    FP8RecipeKwargs { use_autocast: Some(false), ..recipe.into() }
}

/// The paths of layers that compute in FP8.
fn in_8_bits(store: &ParamStore) -> Vec<String> {
    let is_in_8_bits = |layer: &AnyLayer| match layer {
        AnyLayer::Linear(linear) => !format!("{:?}", linear.kernel()).starts_with("DenseKernel"),
        _ => false,
    };
    let named = store.named_layers().into_iter().filter(|(_, layer)| is_in_8_bits(layer));
    named.map(|(path, _)| path).collect()
}

#[track_caller]
fn same(what: &str, found: &Tensor, wanted: &Tensor) {
    assert_eq!((found.kind(), found.size()), (wanted.kind(), wanted.size()), "{what}");
    let apart = (found.to_kind(Kind::Double) - wanted.to_kind(Kind::Double)).abs().max().double_value(&[]);
    assert_eq!(apart, 0.0, "{what}");
}
