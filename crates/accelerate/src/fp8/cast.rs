//! Numbers as FP8 values with a scale, and back.

use crate::error::Result;
use crate::nn::float8_scale;
use accelerate_core::fp8::Float8;
use tch::{Kind, Tensor};
use torch_ext::fp8::{largest_value, saturating_cast};
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
        Ok(Self { data: saturating_cast(matrix, &scale, kind_of(format))?, scale })
    }

    /// The codes of a matrix under a scale that is known before.
    pub(super) fn delayed(matrix: &Tensor, format: Float8, scale: f32) -> Result<Self> {
        let scale = scalar::full(&[], f64::from(scale), (Kind::Float, matrix.device()))?;
        Ok(Self { data: saturating_cast(matrix, &scale, kind_of(format))?, scale })
    }

    pub(super) fn shallow_clone(&self) -> Self {
        Self { data: self.data.shallow_clone(), scale: self.scale.shallow_clone() }
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
    float8_scale(&largest_value(matrix, dim)?, format, power_of_two)
}
