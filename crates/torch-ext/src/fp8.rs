//! Matrices in FP8: largest values, rounding under a scale, and order in memory. On CUDA devices, with the cargo feature `cuda`, by kernels of
//! our own, which read a matrix once; else by libtorch's operators.

#[cfg(feature = "cuda")]
mod cuda;

use crate::error::{Error, Result};
use crate::scalar;
use tch::{Kind, Tensor};

/// The largest absolute value of a matrix, of all elements (0-d) or along `dim` (which has size 1 then), in float32. What is not a number
/// is larger than all others. No gradients are recorded.
///
/// # Errors
/// libtorch's own: no elements, no such dim.
///
/// ```
/// use tch::Tensor;
/// let matrix = Tensor::from_slice2(&[[1f32, -3.0], [2.0, 0.5]]);
/// assert_eq!(torch_ext::fp8::largest_value(&matrix, None)?.double_value(&[]), 3.0);
/// assert_eq!(torch_ext::fp8::largest_value(&matrix, Some(1))?, Tensor::from_slice2(&[[3f32], [2.0]]));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn largest_value(matrix: &Tensor, dim: Option<i64>) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(found) = cuda::largest_value(matrix, dim, false)? {
        return Ok(found);
    }
    let operators = || {
        let absolute = matrix.f_detach()?.f_abs()?;
        let largest = match dim {
            Some(dim) => absolute.f_amax([dim].as_slice(), true)?,
            None => absolute.f_max()?,
        };
        Ok(largest.f_to_kind(Kind::Float)?)
    };
    tch::no_grad(operators).map_err(|source| libtorch("largest_value", source))
}

/// The same of all elements, where what is not a number is passed over.
///
/// # Errors
/// libtorch's own: no elements.
///
/// ```
/// let matrix = tch::Tensor::from_slice(&[1f32, f32::NAN, -2.0]);
/// assert_eq!(torch_ext::fp8::largest_number(&matrix)?.double_value(&[]), 2.0);
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn largest_number(matrix: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(found) = cuda::largest_value(matrix, None, true)? {
        return Ok(found);
    }
    let operators = || {
        let absolute = matrix.f_detach()?.f_abs()?;
        let numbers = absolute.f_nan_to_num(Some(0.0), Some(f64::INFINITY), Some(f64::INFINITY))?;
        Ok(numbers.f_max()?.f_to_kind(Kind::Float)?)
    };
    tch::no_grad(operators).map_err(|source| libtorch("largest_number", source))
}

/// A matrix times `scale`, computed in float32 and rounded to `kind`, e4m3 or e5m2. What is beyond the largest number becomes that, which a
/// cast of libtorch's would make infinite or not a number; what is not a number stays so. `scale` is float32, 0-d, `[rows, 1]` or
/// `[1, columns]`. No gradients are recorded.
///
/// # Errors
/// Another `kind`; a scale that does not fit.
///
/// ```
/// use tch::{Kind, Tensor};
/// let matrix = Tensor::from_slice2(&[[1f32, -1000.0]]);
/// let codes = torch_ext::fp8::saturating_cast(&matrix, &Tensor::from(2f32), Kind::Float8e4m3fn)?;
/// assert_eq!(codes.to_kind(Kind::Float), Tensor::from_slice2(&[[2f32, -448.0]]));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn saturating_cast(matrix: &Tensor, scale: &Tensor, kind: Kind) -> Result<Tensor> {
    const OPERATION: &str = "saturating_cast";
    let most = match kind {
        Kind::Float8e4m3fn => 448.0,
        Kind::Float8e5m2 => 57344.0,
        _ => return Err(Error::invalid(OPERATION, format!("{kind:?} is not e4m3 or e5m2"))),
    };
    #[cfg(feature = "cuda")]
    if let Some(found) = cuda::saturating_cast(matrix, scale, kind)? {
        return Ok(found);
    }
    let operators = || {
        let scaled = matrix.f_detach()?.f_to_kind(Kind::Float)?.f_mul(scale)?;
        scalar::clamp_(&scaled, -most, most)?;
        Ok(scaled.f_to_kind(kind)?)
    };
    tch::no_grad(operators).map_err(|source| libtorch(OPERATION, source))
}

/// The matrix with its rows in one piece each, one after the other. If they are, it is the same tensor; else a copy. Of elements of one byte.
///
/// # Errors
/// libtorch's own.
///
/// ```
/// use tch::{Kind, Tensor};
/// let matrix = Tensor::from_slice2(&[[1f32, 2.0], [3.0, 4.0]]).to_kind(Kind::Float8e4m3fn);
/// let transposed = torch_ext::fp8::contiguous(&matrix.transpose(0, 1))?;
/// assert!(transposed.is_contiguous());
/// assert_eq!(transposed.to_kind(Kind::Float), Tensor::from_slice2(&[[1f32, 3.0], [2.0, 4.0]]));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn contiguous(matrix: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(found) = cuda::transposed_back(matrix)? {
        return Ok(found);
    }
    matrix.f_contiguous().map_err(|source| libtorch("contiguous", source.into()))
}

fn libtorch(operation: &'static str, source: Box<dyn std::error::Error + Send + Sync>) -> Error {
    Error::callback(operation, source)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tch::Device;

    #[test]
    fn what_is_not_a_number_counts_or_is_passed_over() {
        let matrix = Tensor::from_slice2(&[[1f32, f32::NAN], [f32::NEG_INFINITY, 2.0]]);
        assert!(largest_value(&matrix, None).unwrap().double_value(&[]).is_nan());
        assert_eq!(largest_number(&matrix).unwrap().double_value(&[]), f64::INFINITY);
        let rows = Vec::<f64>::try_from(largest_value(&matrix, Some(1)).unwrap().view([-1])).unwrap();
        assert!(rows[0].is_nan() && rows[1] == f64::INFINITY);
    }

    #[test]
    fn scales_are_of_all_of_rows_or_of_columns() {
        let matrix = Tensor::from_slice2(&[[1f32, 2.0], [3.0, f32::NAN]]);
        let cast = |scale: &Tensor| saturating_cast(&matrix, scale, Kind::Float8e5m2).unwrap().to_kind(Kind::Float);
        let rows = cast(&Tensor::from_slice2(&[[1f32], [1e6]]));
        assert_eq!(Vec::<f32>::try_from(rows.view([-1]).narrow(0, 0, 3)).unwrap(), [1.0, 2.0, 57344.0]);
        assert!(rows.double_value(&[1, 1]).is_nan());
        let columns = cast(&Tensor::from_slice2(&[[4f32, 1.0]]));
        assert_eq!(Vec::<f32>::try_from(columns.view([-1]).narrow(0, 0, 3)).unwrap(), [4.0, 2.0, 12.0]);
        let error = saturating_cast(&matrix, &Tensor::from(1f32), Kind::Half).unwrap_err();
        assert!(error.message().contains("not e4m3 or e5m2"), "{error}");
        assert!(largest_value(&Tensor::zeros([0, 4], (Kind::Float, Device::Cpu)), None).is_err());
    }
}
