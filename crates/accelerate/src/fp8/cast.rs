//! Numbers as FP8 values with a scale, and back.

use crate::error::Result;
use accelerate_core::fp8::{Float8, SMALLEST_AMAX};
use tch::{Kind, Tensor};
use torch_ext::scalar;

/// The type as libtorch has it.
pub(super) fn kind_of(format: Float8) -> Kind {
    match format {
        Float8::E4M3 => Kind::Float8e4m3fn,
        Float8::E5M2 => Kind::Float8e5m2,
    }
}

/// An FP8 matrix: its codes, and what its numbers were multiplied by before they were rounded.
#[derive(Debug)]
pub(super) struct Codes {
    pub(super) data: Tensor,
    /// Float, 0-d for the whole matrix, or `[rows, 1]` or `[1, columns]`.
    pub(super) scale: Tensor,
}

impl Codes {
    /// The codes of a matrix under a scale that is made of itself: of all elements, or of those along `dim`.
    pub(super) fn dynamic(matrix: &Tensor, format: Float8, dim: Option<i64>, power_of_two: bool) -> Result<Self> {
        let scale = dynamic_scale(matrix, format, dim, power_of_two)?;
        let scaled = matrix.f_detach()?.f_to_kind(Kind::Float)?.f_mul(&scale)?;
        Ok(Self { data: saturated(scaled, format)?, scale })
    }

    /// The codes of a matrix under a scale that is known before.
    pub(super) fn delayed(matrix: &Tensor, format: Float8, scale: f32) -> Result<Self> {
        let scaled = scalar::mul(&matrix.f_detach()?.f_to_kind(Kind::Float)?, f64::from(scale))?;
        let scale = scalar::full(&[], f64::from(scale), (Kind::Float, matrix.device()))?;
        Ok(Self { data: saturated(scaled, format)?, scale })
    }

    /// The transposed matrix, in the same memory.
    pub(super) fn transposed(&self) -> Result<Self> {
        let scale = if self.scale.dim() == 2 { self.scale.f_transpose(0, 1)? } else { self.scale.shallow_clone() };
        Ok(Self { data: self.data.f_transpose(0, 1)?, scale })
    }

    /// The numbers that the codes stand for, in 32 bits.
    pub(super) fn numbers(&self) -> Result<Tensor> {
        Ok(self.data.f_to_kind(Kind::Float)?.f_div(&self.scale)?)
    }
}

/// What torchao multiplies a matrix by: the largest number of the format over the largest value, computed in 64 bits and rounded to
/// 32. [`accelerate_core::fp8::dynamic_scale`] is the same for one number.
pub(super) fn dynamic_scale(matrix: &Tensor, format: Float8, dim: Option<i64>, power_of_two: bool) -> Result<Tensor> {
    let absolute = matrix.f_detach()?.f_abs()?;
    let amax = match dim {
        Some(dim) => absolute.f_amax([dim].as_slice(), true)?,
        None => absolute.f_max()?,
    };
    let amax = scalar::clamp_min(&amax.f_to_kind(Kind::Double)?, SMALLEST_AMAX)?;
    let largest = scalar::full(&[], f64::from(format.max()), (Kind::Double, matrix.device()))?;
    let scale = largest.f_div(&amax)?.f_to_kind(Kind::Float)?;
    match power_of_two {
        true => Ok(scale.f_log2()?.f_floor()?.f_exp2()?),
        false => Ok(scale),
    }
}

/// The largest absolute value, 0-d and Float. What is not a number is passed over, as TransformerEngine's kernels do.
pub(super) fn amax(matrix: &Tensor) -> Result<Tensor> {
    let absolute = matrix.f_detach()?.f_abs()?;
    let numbers = absolute.f_nan_to_num(Some(0.0), Some(f64::INFINITY), Some(f64::INFINITY))?;
    Ok(numbers.f_max()?.f_to_kind(Kind::Float)?)
}

/// Rounds to 8 bits. What is beyond the largest number becomes that, which a cast of libtorch's would make infinite or not a number;
/// what is not a number stays so. `scaled` is nobody else's.
fn saturated(scaled: Tensor, format: Float8) -> Result<Tensor> {
    let most = f64::from(format.max());
    scalar::clamp_(&scaled, -most, most)?;
    Ok(scaled.f_to_kind(kind_of(format))?)
}
