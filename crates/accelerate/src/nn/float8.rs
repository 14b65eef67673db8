//! Weights as FP8 codes: what they are to layers and to ranks that gather them, and how they are made.

use crate::error::Result;
use accelerate_core::fp8::{Float8, SMALLEST_AMAX};
use tch::{Kind, Tensor};
use torch_ext::fp8::saturating_cast;
use torch_ext::scalar;

/// A parameter as FP8 codes (e4m3) and a scale for all of them.
#[derive(Debug)]
pub(crate) struct Float8Codes {
    /// In the shape of the parameter.
    pub(crate) codes: Tensor,
    /// Float, 0-d: what the numbers were multiplied by before they were rounded.
    pub(crate) scale: Tensor,
    /// Stands for the parameter in a graph: of its shape and of the type of its gradient, without numbers of its own.
    pub(crate) stand_in: Tensor,
}

impl Float8Codes {
    /// The type of codes.
    pub(crate) const KIND: Kind = Kind::Float8e4m3fn;

    /// The scale of a weight that has one, by its largest value (0-d, float).
    pub(crate) fn scale_of(largest: &Tensor) -> Result<Tensor> {
        float8_scale(largest, Float8::E4M3, false)
    }

    /// The codes of a flat piece of a weight, under the scale of all of it.
    pub(crate) fn of_piece(piece: &Tensor, scale: &Tensor) -> Result<Tensor> {
        Ok(saturating_cast(&piece.f_view([1, -1])?, scale, Self::KIND)?.f_view_as(piece)?)
    }
}

/// What largest values are multiplied by: the largest number of the format over them, computed in 64 bits and rounded to 32.
/// [`accelerate_core::fp8::dynamic_scale`] is the same for one number.
pub(crate) fn float8_scale(largest: &Tensor, format: Float8, power_of_two: bool) -> Result<Tensor> {
    let amax = scalar::clamp_min(&largest.f_to_kind(Kind::Double)?, SMALLEST_AMAX)?;
    let most = scalar::full(&[], f64::from(format.max()), (Kind::Double, largest.device()))?;
    let scale = most.f_div(&amax)?.f_to_kind(Kind::Float)?;
    match power_of_two {
        true => Ok(scale.f_log2()?.f_floor()?.f_exp2()?),
        false => Ok(scale),
    }
}
