//! Computing in FP8: the kernels of linear layers, and the scales that delayed scaling remembers.
//!
//! `prepare` gives a kernel to each layer that [`accelerate_core::fp8::layers_in_8_bits`] names. A layer keeps its parameters as they
//! are: a kernel makes codes of input, weight and gradient where it multiplies them. So storages, engines, optimizers and files
//! know nothing of it.
//!
//! On a GPU products are those of `_scaled_mm`. On a CPU, and where a GPU has no such product, codes become numbers of 32 bits
//! again, and those are multiplied: exactly what the codes mean, and slower than without FP8.

mod cast;
mod delayed;
mod dynamic;
mod product;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use crate::error::{Fp8Error, Result};
use crate::group::Group;
use crate::nn::{AnyLayer, DenseKernel, Linear, LinearKernel, Param, ParamStore, is_floating};
use accelerate_core::fp8::{Fp8Recipe, LinearSize, layers_in_8_bits};
use delayed::{DelayedLinear, DelayedScales};
use dynamic::DynamicLinear;
pub(crate) use product::Products;
use std::sync::Arc;
use tch::{Kind, Tensor};
use torch_ext::autocast::{Autocast, autocast_dtype, is_autocast_enabled};

/// What has become of a model's layers.
#[derive(Debug)]
pub(crate) struct Installed {
    /// Number of layers that compute in FP8.
    pub(crate) num_layers: usize,
    /// What delayed scaling remembers of them.
    pub(crate) scales: Option<Arc<DelayedScales>>,
}

/// Gives back their own product to layers that an earlier `prepare` has made compute in FP8.
pub(crate) fn take_out(store: &ParamStore) {
    for (_, linear) in linears(store) {
        if let Some(before) = linear.kernel().replaced() {
            linear.set_kernel(before);
        }
    }
}

/// Makes the layers of a model compute in FP8. Largest values of delayed scaling are those over all ranks of `group`. Not
/// collective.
///
/// # Errors
/// A layer that would take part and is computed in another way already; a device that cannot multiply FP8 numbers.
pub(crate) fn put_in(
    store: &ParamStore,
    recipe: Fp8Recipe,
    group: &Group,
    is_tensor_parallel: bool,
) -> Result<Installed> {
    take_out(store);
    let products = Products::of_device(store.device())?;
    let linears = linears(store);
    let size = |(_, linear): &(String, Linear)| LinearSize {
        in_features: linear.in_features(),
        out_features: linear.out_features(),
    };
    let chosen = layers_in_8_bits(&linears.iter().map(size).collect::<Vec<_>>());
    let chosen: Vec<&(String, Linear)> = chosen.into_iter().filter_map(|place| linears.get(place)).collect();
    for (path, linear) in &chosen {
        if let Some(why) = reason_against(linear, is_tensor_parallel) {
            return Err(Fp8Error::Layer { path: path.clone(), why }.into());
        }
    }
    let num_layers = chosen.len();
    let scales = match recipe {
        Fp8Recipe::Dynamic(scaling) => {
            for (path, linear) in chosen {
                linear.set_kernel(Arc::new(DynamicLinear { path: path.as_str().into(), scaling, products }));
            }
            None
        }
        Fp8Recipe::Delayed(recipe) => {
            let paths = chosen.iter().map(|(path, _)| path.as_str());
            let scales = Arc::new(DelayedScales::new(recipe, paths, group.clone(), store.device()));
            for ((_, linear), scaling) in chosen.iter().zip(scales.layers()) {
                let (training, scaling) = (store.root().training_flag(), Arc::clone(scaling));
                linear.set_kernel(Arc::new(DelayedLinear { recipe, products, training, scaling }));
            }
            Some(scales)
        }
    };
    Ok(Installed { num_layers, scales })
}

fn linears(store: &ParamStore) -> Vec<(String, Linear)> {
    let linear = |(path, layer)| match layer {
        AnyLayer::Linear(linear) => Some((path, linear)),
        _ => None,
    };
    store.named_layers().into_iter().filter_map(linear).collect()
}

fn reason_against(linear: &Linear, is_tensor_parallel: bool) -> Option<&'static str> {
    if is_tensor_parallel {
        return Some("several ranks compute it together (tp_size), each with a slice of its weight");
    }
    if linear.weight.is_stored_as_several() {
        return Some("its weight is quantised to codes of 4 or 8 bits already");
    }
    (!linear.kernel().is_dense()).then_some("it is computed by a kernel of its own")
}

/// Checks that the input of a layer fits its weight. One without rows has no largest value, and nothing to be rounded.
fn check_input(path: &str, input: &Tensor, weight: &Param) -> Result<()> {
    let columns = weight.shape().get(1).copied().unwrap_or_default();
    if input.size().last() == Some(&columns) && is_floating(input.f_kind()?) {
        return Ok(());
    }
    let wanted = format!("[.., {columns}] of a floating-point type");
    Err(Fp8Error::Input { path: path.to_owned(), wanted, found: input.size(), kind: input.f_kind().ok() }.into())
}

/// The type that a layer with this input computes in, which its output has: that of autocast, else that of the input.
fn computed_in(input: &Tensor) -> Result<Kind> {
    match is_autocast_enabled(input.device())? {
        true => Ok(autocast_dtype(input.device())?),
        false => Ok(input.f_kind()?),
    }
}

/// Runs `body` where operations compute in the types that their operands have.
fn without_autocast<T>(tensor: &Tensor, body: impl FnOnce() -> Result<T>) -> Result<T> {
    let device = tensor.device();
    if !is_autocast_enabled(device)? {
        return body();
    }
    Autocast::off(device).run(body)?
}

/// `[.., features]` as rows.
fn rows(tensor: &Tensor) -> Result<Tensor> {
    let features = tensor.size().last().copied().unwrap_or(1);
    Ok(tensor.f_reshape([-1, features])?)
}

/// Rows in the shape of `like`, with as many features as they have.
fn shaped_like(rows: &Tensor, like: &Tensor) -> Result<Tensor> {
    let mut size = like.size();
    if let (Some(last), Some(features)) = (size.last_mut(), rows.size().last()) {
        *last = *features;
    }
    Ok(rows.f_reshape(size)?)
}

/// What computed these layers before; the answer of all kernels here to [`LinearKernel::replaced`].
fn dense() -> Option<Arc<dyn LinearKernel>> {
    Some(Arc::new(DenseKernel))
}
