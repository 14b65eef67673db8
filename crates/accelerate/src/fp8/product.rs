//! Products of FP8 matrices.

use super::cast::Codes;
use crate::error::{Fp8Error, Result};
use accelerate_core::fp8::MULTIPLE;
use tch::{Device, Kind, TchError, Tensor};
use torch_ext::fp8::contiguous;
use torch_ext::scalar;

/// How products are computed, which the device decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Products {
    /// By `_scaled_mm`, where both matrices have one scale?
    of_matrices: bool,
    /// By `_scaled_mm`, where rows of the first and columns of the second matrix have scales of their own?
    of_rows: bool,
}

impl Products {
    /// Codes become numbers, and those are multiplied.
    pub(super) const OF_NUMBERS: Self = Self { of_matrices: false, of_rows: false };

    /// By `_scaled_mm`, also on a CPU, where it is slow and adds up in another order.
    #[cfg(test)]
    pub(super) const SCALED: Self = Self { of_matrices: true, of_rows: false };

    /// What a device has. On a GPU a small product is tried: libtorch knows best what it can do.
    ///
    /// # Errors
    /// A GPU that cannot multiply FP8 numbers, by its name.
    pub(crate) fn of_device(device: Device) -> Result<Self> {
        if !device.is_cuda() {
            return Ok(Self::OF_NUMBERS);
        }
        let index = match device {
            Device::Cuda(index) => index,
            _ => 0,
        };
        try_product(device, false)
            .map_err(|source| Fp8Error::Device { device: format!("the GPU cuda:{index}"), source })?;
        Ok(Self { of_matrices: true, of_rows: try_product(device, true).is_ok() })
    }

    /// `a b`, of `[m, k]` and `[k, n]`, as `[m, n]` of `kind`. `adds_fast`: in fewer bits than 32, where a GPU can.
    pub(super) fn product(self, a: &Codes, b: &Codes, kind: Kind, options: ProductOptions<'_>) -> Result<Tensor> {
        let has_rows = a.scale.dim() == 2 || b.scale.dim() == 2;
        // Products with scales of rows are made in bfloat16 only.
        let is_scaled = if has_rows { self.of_rows && kind == Kind::BFloat16 } else { self.of_matrices };
        if !is_scaled {
            return Ok(a.numbers()?.f_mm(&b.numbers()?)?.f_to_kind(kind)?);
        }
        let (mut first, mut second) = (a.data.shallow_clone(), b.data.shallow_clone());
        let (m, k) = first.size2()?;
        let n = second.size2()?.1;
        let missing = (MULTIPLE - k % MULTIPLE) % MULTIPLE;
        if missing > 0 && !options.pad_inner_dim {
            return Err(Fp8Error::Rows { path: options.path.to_owned(), rows: k }.into());
        }
        if missing > 0 {
            first = padded(&first, &[m, missing], 1)?;
            second = padded(&second, &[missing, n], 0)?;
        }
        // Rows of the first and columns of the second matrix have to lie in one piece.
        let second = contiguous(&second.f_transpose(0, 1)?)?.f_transpose(0, 1)?;
        let [scale_a, scale_b] = match has_rows {
            true => [a.scale.f_expand([m, 1], false)?, b.scale.f_expand([1, n], false)?],
            false => [a.scale.shallow_clone(), b.scale.shallow_clone()],
        };
        let [scale_a, scale_b] = [scale_a.f_contiguous()?.f_reciprocal()?, scale_b.f_contiguous()?.f_reciprocal()?];
        Ok(scaled_mm(&contiguous(&first)?, &second, [&scale_a, &scale_b], kind, options.adds_fast)?)
    }
}

/// What a product is told besides its matrices.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProductOptions<'a> {
    /// The layer, for errors.
    pub(super) path: &'a str,
    pub(super) pad_inner_dim: bool,
    /// Add up in fewer bits than 32, where a GPU can.
    pub(super) adds_fast: bool,
}

fn scaled_mm(
    a: &Tensor,
    b: &Tensor,
    [scale_a, scale_b]: [&Tensor; 2],
    kind: Kind,
    adds_fast: bool,
) -> Result<Tensor, TchError> {
    a.f_internal_scaled_mm::<&Tensor>(b, scale_a, scale_b, None, None, kind, adds_fast)
}

/// Zeros are codes of zero bytes.
fn padded(codes: &Tensor, shape: &[i64], dim: i64) -> Result<Tensor> {
    let bytes = codes.f_contiguous()?.f_view_dtype(Kind::Uint8)?;
    let zeros = scalar::full(shape, 0, (Kind::Uint8, codes.device()))?;
    Ok(Tensor::f_cat(&[bytes, zeros], dim)?.f_view_dtype(codes.f_kind()?)?)
}

/// A product of two small matrices of ones, with or without scales for rows.
fn try_product(device: Device, of_rows: bool) -> Result<(), TchError> {
    let ones = |shape: [i64; 2], kind: Kind| Tensor::f_ones(shape, (Kind::Float, device))?.f_to_kind(kind);
    let matrix = ones([MULTIPLE, MULTIPLE], Kind::Float8e4m3fn)?;
    let scales = match of_rows {
        true => [ones([MULTIPLE, 1], Kind::Float)?, ones([1, MULTIPLE], Kind::Float)?],
        false => [Tensor::f_ones([], (Kind::Float, device))?, Tensor::f_ones([], (Kind::Float, device))?],
    };
    let product = scaled_mm(&matrix, &matrix.f_transpose(0, 1)?, [&scales[0], &scales[1]], Kind::BFloat16, false)?;
    // A kernel that the GPU does not have may be found out only when its result is looked at.
    product.f_to_kind(Kind::Float)?.f_sum(Kind::Float)?.f_double_value(&[]).map(|_| ())
}
