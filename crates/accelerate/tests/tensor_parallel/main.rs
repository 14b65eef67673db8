//! A model whose layers ranks compute together is the same model, and what ranks have to agree on is compared.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod misuse;
mod tokens;
mod training;

use accelerate::nn::ParamStore;
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Accelerator, AcceleratorBuilder, Result, TorchTensorParallelPlugin};
use serde_json::Value;

fn builder(degree: usize, plan: &Value) -> AcceleratorBuilder {
    let plugin = TorchTensorParallelPlugin {
        tensor_parallel_degree: Some(degree),
        parallelize_plan: plan.as_object().cloned(),
        ..Default::default()
    };
    Accelerator::builder().torch_tp_plugin(plugin)
}

/// Values that depend on the name and the place alone.
fn fill(store: &ParamStore) -> Result<()> {
    for (index, param) in store.parameters().iter().enumerate() {
        let values = Tensor::arange(param.numel() as i64, (Kind::Double, Device::Cpu)) * 0.7 + index as f64;
        param.copy_(&(values.sin() * 0.5).reshape(param.shape()))?;
    }
    Ok(())
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::<f64>::try_from(tensor.detach().to_kind(Kind::Double).reshape([-1])).unwrap()
}

/// The tolerance is a part of the largest value: processors add up products in other orders, and round at its last digits.
fn assert_close(found: &[f64], wanted: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    let largest = found.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    let size = wanted.iter().fold(1.0, |size: f64, value| size.max(value.abs()));
    assert!(largest <= tolerance * size, "{what} of up to {size} differ by {largest:e}");
}
