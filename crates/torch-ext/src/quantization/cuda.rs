//! What the kernels take, which is checked here, and their calls. `None` is what they do not take: libtorch's operators do that.

use crate::border::{Handle, check, handle};
use crate::cuda_kernels::{has_kernels, is_aligned, is_float, is_here};
use crate::error::{Error, Result};
use crate::quantization::{Blocks4bit, FourBitCode, Int8Rows};
use tch::{Device, Kind, Tensor};

unsafe extern "C" {
    fn te_quant_cuda_dequantize_4bit(
        packed: Handle,
        absmax: Handle,
        code: *const FourBitCode,
        block_size: i64,
        numbers: Handle,
    ) -> i32;
    fn te_quant_cuda_linear_4bit(
        input: Handle,
        packed: Handle,
        absmax: Handle,
        code: *const FourBitCode,
        block_size: i64,
        rows: i64,
        columns: i64,
        bias: Handle,
        output: Handle,
    ) -> i32;
    fn te_quant_cuda_dequantize_blockwise(
        codes: Handle,
        absmax: Handle,
        table: Handle,
        block_size: i64,
        offset: f32,
        numbers: Handle,
    ) -> i32;
    fn te_quant_cuda_int8_rows(
        matrix: Handle,
        threshold: f32,
        scales: Handle,
        is_outlier_column: Handle,
        codes: Handle,
    ) -> i32;
    fn te_quant_cuda_int8_scale(sums: Handle, a_scales: Handle, b_scales: Handle, bias: Handle, numbers: Handle)
    -> i32;
}

/// Inputs of a product in which the weight's numbers are made within the product. For more, making them first costs less.
const MOST_INPUTS: i64 = 8;

/// `_int_mm` takes more than so many rows, and sizes that are multiples.
const FEW_ROWS: i64 = 16;
const MULTIPLE: i64 = 8;

pub(super) fn dequantize_4bit(blocks: Blocks4bit<'_>, shape: &[i64], kind: Kind) -> Result<Option<Tensor>> {
    let count: i64 = shape.iter().product();
    if !is_float(kind) || !fits(blocks, count) || count >= 1 << 34 || !has_kernels(blocks.packed) {
        return Ok(None);
    }
    let numbers = empty(shape, kind, blocks.packed.device())?;
    let (packed, absmax) = (handle(blocks.packed), handle(blocks.absmax));
    // SAFETY: lengths, types and the device were compared; the kernel writes `count` numbers of `kind`.
    let status =
        unsafe { te_quant_cuda_dequantize_4bit(packed, absmax, blocks.code, blocks.block_size, handle(&numbers)) };
    check("dequantize_4bit", status)?;
    Ok(Some(numbers))
}

pub(super) fn linear_4bit(
    input: &Tensor,
    blocks: Blocks4bit<'_>,
    [rows, columns]: [i64; 2],
    bias: Option<&Tensor>,
) -> Result<Option<Tensor>> {
    let (kind, mut shape) = (input.f_kind().map_err(tch_error)?, input.size());
    let (Some(last), true) = (shape.last_mut(), rows > 0 && columns > 0) else { return Ok(None) };
    let num_inputs = input.numel() as i64 / columns;
    let takes = is_float(kind)
        && *last == columns
        && (1..=MOST_INPUTS).contains(&num_inputs)
        && columns % 32 == 0
        && columns < 1 << 31
        && rows < 1 << 31
        && rows * (columns / 32) < 1 << 32
        && fits(blocks, rows * columns)
        && is_here(input, kind, blocks.packed.device())
        && is_aligned(input)
        && bias.is_none_or(|bias| bias.numel() as i64 == rows && is_here(bias, kind, input.device()))
        && has_kernels(input);
    if !takes {
        return Ok(None);
    }
    *last = rows;
    let output = empty(&shape, kind, input.device())?;
    let bias = bias.map_or(std::ptr::null_mut(), handle);
    // SAFETY: as above; all that the kernel reads and writes was measured.
    let status = unsafe {
        let (input, packed, absmax) = (handle(input), handle(blocks.packed), handle(blocks.absmax));
        let (code, block_size, output) = (blocks.code, blocks.block_size, handle(&output));
        te_quant_cuda_linear_4bit(input, packed, absmax, code, block_size, rows, columns, bias, output)
    };
    check("linear_4bit", status)?;
    Ok(Some(output))
}

pub(super) fn dequantize_blockwise(
    codes: &Tensor,
    absmax: &Tensor,
    table: &Tensor,
    block_size: i64,
    offset: f32,
) -> Result<Option<Tensor>> {
    let (device, count) = (codes.device(), codes.numel() as i64);
    let takes = is_here(codes, Kind::Uint8, device)
        && is_here(absmax, Kind::Float, device)
        && is_here(table, Kind::Float, device)
        && table.numel() == 256
        && (1..1 << 31).contains(&block_size)
        && count < 1 << 28
        && absmax.numel() as i64 >= (count + block_size - 1) / block_size
        && has_kernels(codes);
    if !takes {
        return Ok(None);
    }
    let numbers = empty(&codes.size(), Kind::Float, device)?;
    let (codes, absmax, table) = (handle(codes), handle(absmax), handle(table));
    // SAFETY: as above.
    let status =
        unsafe { te_quant_cuda_dequantize_blockwise(codes, absmax, table, block_size, offset, handle(&numbers)) };
    check("dequantize_blockwise", status)?;
    Ok(Some(numbers))
}

pub(super) fn int8_vectorwise_quant(matrix: &Tensor, threshold: f64) -> Result<Option<Int8Rows>> {
    let device = matrix.device();
    let &[rows, columns] = matrix.size().as_slice() else { return Ok(None) };
    if !is_here(matrix, Kind::Half, device)
        || columns == 0
        || columns >= 1 << 31
        || rows >= 1 << 31
        || !has_kernels(matrix)
    {
        return Ok(None);
    }
    let (codes, scales) = (empty(&[rows, columns], Kind::Int8, device)?, empty(&[rows], Kind::Float, device)?);
    let is_outlier = Tensor::f_zeros([columns], (Kind::Uint8, device)).map_err(tch_error)?;
    // SAFETY: as above.
    let status = unsafe {
        let (scales, is_outlier, codes) = (handle(&scales), handle(&is_outlier), handle(&codes));
        te_quant_cuda_int8_rows(handle(matrix), threshold as f32, scales, is_outlier, codes)
    };
    check("int8_vectorwise_quant", status)?;
    let outlier_columns = match threshold > 0.0 {
        true => is_outlier.f_nonzero().and_then(|found| found.f_squeeze_dim(1)).map_err(tch_error)?,
        false => empty(&[0], Kind::Int64, device)?,
    };
    Ok(Some(Int8Rows { codes, scales, outlier_columns }))
}

pub(super) fn int8_scaled_mm(
    (a, a_scales): (&Tensor, &Tensor),
    (b, b_scales): (&Tensor, &Tensor),
    bias: Option<&Tensor>,
    kind: Kind,
) -> Result<Option<Tensor>> {
    let device = a.device();
    let (&[m, k], &[n, b_k]) = (a.size().as_slice(), b.size().as_slice()) else { return Ok(None) };
    let takes = is_float(kind)
        && k == b_k
        && k > 0
        && k % MULTIPLE == 0
        && n % MULTIPLE == 0
        && m > 0
        && n > 0
        && is_here(a, Kind::Int8, device)
        && is_here(b, Kind::Int8, device)
        && is_here(a_scales, Kind::Float, device)
        && is_here(b_scales, Kind::Float, device)
        && a_scales.numel() as i64 == m
        && b_scales.numel() as i64 == n
        && bias.is_none_or(|bias| bias.numel() as i64 == n && bias.device() == device)
        && has_kernels(a);
    if !takes {
        return Ok(None);
    }
    let sums = || {
        let missing = if m > FEW_ROWS { (MULTIPLE - m % MULTIPLE) % MULTIPLE } else { 2 * FEW_ROWS - m };
        let padded = match missing {
            0 => a.shallow_clone(),
            _ => Tensor::f_cat(&[a, &Tensor::f_zeros([missing, k], (Kind::Int8, device))?], 0)?,
        };
        padded.f_internal_int_mm(&b.f_transpose(0, 1)?)?.f_contiguous()
    };
    let sums = sums().map_err(tch_error)?;
    let bias = bias.map(|bias| bias.f_to_kind(Kind::Float)?.f_contiguous()).transpose().map_err(tch_error)?;
    let numbers = empty(&[m, n], kind, device)?;
    let bias = bias.as_ref().map_or(std::ptr::null_mut(), handle);
    // SAFETY: as above; the sums are `[at least m, n]` of int32.
    let status = unsafe {
        let (a_scales, b_scales) = (handle(a_scales), handle(b_scales));
        te_quant_cuda_int8_scale(handle(&sums), a_scales, b_scales, bias, handle(&numbers))
    };
    check("int8_scaled_mm", status)?;
    Ok(Some(numbers))
}

/// Are there codes and scales for so many numbers?
fn fits(blocks: Blocks4bit<'_>, count: i64) -> bool {
    let Blocks4bit { packed, absmax, block_size, .. } = blocks;
    let device = packed.device();
    (32..=4096).contains(&block_size)
        && block_size % 32 == 0
        && is_here(packed, Kind::Uint8, device)
        && is_aligned(packed)
        && is_here(absmax, Kind::Float, device)
        && packed.numel() as i64 == (count + 1) / 2
        && absmax.numel() as i64 == (count + block_size - 1) / block_size
}

fn empty(shape: &[i64], kind: Kind, device: Device) -> Result<Tensor> {
    Tensor::f_empty(shape, (kind, device)).map_err(tch_error)
}

fn tch_error(error: tch::TchError) -> Error {
    Error::callback("quantization", error.into())
}
