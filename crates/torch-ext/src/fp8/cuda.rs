//! What the kernels of CUDA devices take, which is checked here, and their calls. `None` is what they do not take.

use crate::border::{Handle, check, handle};
use crate::cuda_kernels::{Kernels, has_kernels, is_aligned, is_float, is_here};
use crate::error::{Error, Result};
use tch::{Kind, Tensor};

unsafe extern "C" {
    fn te_fp8_cuda_largest(matrix: Handle, skips_nan: bool, largest: Handle) -> i32;
    fn te_fp8_cuda_largest_along(matrix: Handle, of_rows: bool, largest: Handle) -> i32;
    fn te_fp8_cuda_cast(
        matrix: Handle,
        scales: Handle,
        scales_rows: bool,
        scales_columns: bool,
        is_e4m3: bool,
        codes: Handle,
    ) -> i32;
    fn te_fp8_cuda_transpose(matrix: Handle, result: Handle) -> i32;
}

/// 64 for each block, of which so many fit below each other.
const MOST_ROWS: i64 = 65_535 * 64;

/// In one piece on a CUDA device, of a type that the kernels have?
fn is_readable(tensor: &Tensor) -> bool {
    tensor.f_kind().is_ok_and(|kind| is_float(kind) && is_here(tensor, kind, tensor.device()))
        && is_aligned(tensor)
        && tensor.numel() > 0
        && has_kernels(tensor)
}

/// Rows and columns of a matrix whose rows can be read eight elements at a time.
fn sizes_of(matrix: &Tensor) -> Option<[i64; 2]> {
    let &[rows, columns] = matrix.size().as_slice() else { return None };
    let takes =
        is_readable(matrix) && columns % 8 == 0 && (1..=MOST_ROWS).contains(&rows) && (1..1 << 31).contains(&columns);
    takes.then_some([rows, columns])
}

pub(super) fn largest_value(matrix: &Tensor, dim: Option<i64>, skips_nan: bool) -> Result<Option<Tensor>> {
    const OPERATION: &str = "largest_value";
    let shape = match (dim, sizes_of(matrix)) {
        (None, _) if is_readable(matrix) => vec![],
        (Some(1), Some([rows, _])) => vec![rows, 1],
        (Some(0), Some([_, columns])) => vec![1, columns],
        _ => return Ok(None),
    };
    let largest = Tensor::f_zeros(shape, (Kind::Float, matrix.device())).map_err(tch_error)?;
    // SAFETY: sizes, types and the device were looked at; `largest` has an element for each that is written.
    let status = unsafe {
        match dim {
            None => te_fp8_cuda_largest(handle(matrix), skips_nan, handle(&largest)),
            Some(dim) => te_fp8_cuda_largest_along(handle(matrix), dim == 1, handle(&largest)),
        }
    };
    check(OPERATION, status)?;
    Ok(Some(largest))
}

pub(super) fn saturating_cast(matrix: &Tensor, scale: &Tensor, kind: Kind) -> Result<Option<Tensor>> {
    let Some([rows, columns]) = sizes_of(matrix) else { return Ok(None) };
    // Older devices do not round to FP8 themselves.
    if Kernels::of(matrix.device()).map_or(0, |kernels| kernels.capability) < 89 {
        return Ok(None);
    }
    let [scales_rows, scales_columns] = match scale.size().as_slice() {
        [] => [false, false],
        &[own, 1] if own == rows => [true, false],
        &[1, own] if own == columns => [false, true],
        _ => return Ok(None),
    };
    if !is_here(scale, Kind::Float, matrix.device()) {
        return Ok(None);
    }
    let codes = Tensor::f_empty([rows, columns], (kind, matrix.device())).map_err(tch_error)?;
    // SAFETY: as above.
    let status = unsafe {
        let (matrix, scale, codes) = (handle(matrix), handle(scale), handle(&codes));
        te_fp8_cuda_cast(matrix, scale, scales_rows, scales_columns, kind == Kind::Float8e4m3fn, codes)
    };
    check("saturating_cast", status)?;
    Ok(Some(codes))
}

/// A matrix of bytes whose columns are in one piece each.
pub(super) fn transposed_back(matrix: &Tensor) -> Result<Option<Tensor>> {
    let (device, sizes, strides) = (matrix.device(), matrix.size(), matrix.stride());
    let (&[rows, columns], &[1, stride]) = (sizes.as_slice(), strides.as_slice()) else { return Ok(None) };
    let takes = matrix.f_kind().is_ok_and(|kind| kind.elt_size_in_bytes() == 1)
        && stride == rows
        && is_aligned(matrix)
        && [rows, columns].iter().all(|size| size % 16 == 0 && (16..=MOST_ROWS).contains(size))
        && has_kernels(matrix);
    if !takes {
        return Ok(None);
    }
    let from = matrix.f_transpose(0, 1).map_err(tch_error)?;
    let result = Tensor::f_empty([rows, columns], (matrix.kind(), device)).map_err(tch_error)?;
    // SAFETY: as above; both have the same number of bytes.
    check("contiguous", unsafe { te_fp8_cuda_transpose(handle(&from), handle(&result)) })?;
    Ok(Some(result))
}

fn tch_error(error: tch::TchError) -> Error {
    Error::callback("fp8", error.into())
}
