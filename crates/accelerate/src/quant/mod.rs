//! Weights of 4 and 8 bits: how a parameter stores them, and how a layer computes with them.
//!
//! A quantised weight is a storage that consists of several parameters, under the names that bitsandbytes gives them; state dicts
//! and files have those in its place. Its layer has a kernel that multiplies with the codes. Both are put in by
//! [`load_and_quantize_model`](crate::load_and_quantize_model), and a model is written as before.
//!
//! A quantised weight is frozen. Gradients of inputs pass through it, so adapters beside it can be trained: a kernel may wrap the one
//! that a layer has ([`Linear::kernel`](crate::nn::Linear::kernel)) and is given the same parameters.

mod four_bit;
mod int8;
mod quantizer;

pub(crate) use four_bit::FourBitTensors;
pub(crate) use int8::Int8Tensors;
pub(crate) use quantizer::{Quantized, Quantizer, put_in};

use crate::error::Result;
use accelerate_core::config::FloatType;
use tch::{Kind, Tensor};
use torch_ext::autocast::{autocast_dtype, is_autocast_enabled};

pub(crate) fn kind_of(dtype: FloatType) -> Kind {
    match dtype {
        FloatType::Float32 => Kind::Float,
        FloatType::BFloat16 => Kind::BFloat16,
        FloatType::Float16 => Kind::Half,
    }
}

/// Other types than these become 32 bits before they are quantised.
fn dtype_of(kind: Kind) -> FloatType {
    match kind {
        Kind::BFloat16 => FloatType::BFloat16,
        Kind::Half => FloatType::Float16,
        _ => FloatType::Float32,
    }
}

/// In which type a product with this input is computed, and which type its result has: as in any other layer under autocast, else
/// as asked for, with a result of the input's type.
fn computed_in(input: &Tensor, asked: Option<Kind>) -> Result<[Kind; 2]> {
    let found = input.f_kind()?;
    match asked {
        Some(kind) => Ok([kind, found]),
        None if is_autocast_enabled(input.device())? => Ok([autocast_dtype(input.device())?; 2]),
        None => Ok([found; 2]),
    }
}

/// The sum over all rows of the gradient of an output, which is that of the bias.
fn bias_gradient(gradient: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let rows = gradient.f_reshape([-1, bias.numel() as i64])?;
    Ok(rows.f_sum_dim_intlist([0i64].as_slice(), false, bias.f_kind()?)?)
}
