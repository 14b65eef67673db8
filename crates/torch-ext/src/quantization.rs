//! Weights of 4 and 8 bits: codes, the numbers that they stand for, and products with them.
//!
//! The methods and their results, to the bit, are those of bitsandbytes: blocks of 4 bits from "QLoRA" (Dettmers and others,
//! 2023, arXiv 2305.14314), rows of 8 bits from "LLM.int8()" (2022, arXiv 2208.07339), and blocks of 8 bits, which scales are
//! written in, from "8-bit Optimizers via Block-wise Quantization" (2021, arXiv 2110.02861).
//!
//! On the CPU they are kernels of our own, for AVX-512, AVX2 and any other processor. So are those for CUDA devices, with the cargo feature
//! `cuda`, which are compiled when they are first used ([`load_cuda_kernels`](crate::load_cuda_kernels)). What they do not take, and all
//! other devices, is left to libtorch's operators. No function records a graph: who needs a gradient makes a node with
//! [`apply_function`](crate::apply_function).

#[cfg(feature = "cuda")]
mod cuda;
mod operators;

use crate::border::{Handle, adopt, check, handle};
use crate::error::{Error, Result};
use tch::{Device, Kind, Tensor};

unsafe extern "C" {
    fn te_quant_set_widest_vectors(vectors: i32);
    fn te_quantize_4bit(
        source: Handle,
        code: *const FourBitCode,
        block_size: i64,
        packed: *mut Handle,
        absmax: *mut Handle,
    ) -> i32;
    fn te_dequantize_4bit(
        packed: Handle,
        absmax: Handle,
        code: *const FourBitCode,
        block_size: i64,
        shape: *const i64,
        num_dims: usize,
        count: i64,
        element: i32,
        result: *mut Handle,
    ) -> i32;
    fn te_linear_4bit(
        input: Handle,
        packed: Handle,
        absmax: Handle,
        code: *const FourBitCode,
        block_size: i64,
        rows: i64,
        columns: i64,
        bias: Handle,
        result: *mut Handle,
    ) -> i32;
    fn te_quantize_blockwise(
        source: Handle,
        table: Handle,
        block_size: i64,
        codes: *mut Handle,
        absmax: *mut Handle,
    ) -> i32;
    fn te_dequantize_blockwise(
        codes: Handle,
        absmax: Handle,
        table: Handle,
        block_size: i64,
        offset: f64,
        result: *mut Handle,
    ) -> i32;
    fn te_int8_vectorwise_quant(
        source: Handle,
        threshold: f64,
        codes: *mut Handle,
        scales: *mut Handle,
        outliers: *mut Handle,
    ) -> i32;
    fn te_int8_dequantize(codes: Handle, scales: Handle, element: i32, result: *mut Handle) -> i32;
    fn te_int8_scaled_mm(
        a: Handle,
        b: Handle,
        a_scales: Handle,
        b_scales: Handle,
        bias: Handle,
        element: i32,
        result: *mut Handle,
    ) -> i32;
}

/// The sixteen numbers that four bits stand for, by code, and how the nearest is found.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FourBitCode {
    values: [f32; 16],
    bounds: [f32; 15],
    codes: [u8; 16],
}

impl FourBitCode {
    /// The number `values[code]` for each code. Where two codes have the same number, the lower one stands for what is at most
    /// that number, and the other for what is a little above it, as in bitsandbytes.
    ///
    /// ```
    /// use torch_ext::quantization::FourBitCode;
    /// let eighths: [f32; 16] = std::array::from_fn(|code| code as f32 / 8.0 - 1.0);
    /// assert_eq!(FourBitCode::new(eighths).values()[12], 0.5);
    /// ```
    pub fn new(values: [f32; 16]) -> Self {
        let mut codes: [u8; 16] = std::array::from_fn(|code| code as u8);
        codes.sort_by(|a, b| values[usize::from(*a)].total_cmp(&values[usize::from(*b)]));
        let sorted = codes.map(|code| values[usize::from(code)]);
        let bounds = std::array::from_fn(|place| (sorted[place] + sorted[place + 1]) / 2.0);
        Self { values, bounds, codes }
    }

    /// The number of each code.
    pub fn values(&self) -> &[f32; 16] {
        &self.values
    }
}

/// A weight of four bits.
#[derive(Clone, Copy, Debug)]
pub struct Blocks4bit<'a> {
    /// Two codes in a byte, the first in its high half: uint8, `(number of elements + 1) / 2` of them in any shape.
    pub packed: &'a Tensor,
    /// The scale of each block: float32, `[number of blocks]`.
    pub absmax: &'a Tensor,
    /// Elements of a block, in the order of the flat tensor: 32 to 4096.
    pub block_size: i64,
    /// What codes stand for.
    pub code: &'a FourBitCode,
}

/// What [`int8_vectorwise_quant`] makes.
#[derive(Debug)]
pub struct Int8Rows {
    /// int8, `[rows, columns]`; 0 in columns of outliers.
    pub codes: Tensor,
    /// float32, `[rows]`: the largest size of an element that is no outlier.
    pub scales: Tensor,
    /// int64: the columns that have an outlier, in rising order.
    pub outlier_columns: Tensor,
}

/// Codes of a tensor of float32, bfloat16 or float16, and their scales: `bitsandbytes.functional.quantize_4bit`.
///
/// Returns uint8 `[(number of elements + 1) / 2, 1]` and float32 `[number of blocks]`. A block with an element that is not a
/// number, or is infinite, comes back as such.
///
/// # Errors
/// Another element type; a block size that is not a multiple of 32 from 32 to 4096.
///
/// ```
/// use tch::{Kind, Tensor};
/// use torch_ext::quantization::{Blocks4bit, FourBitCode, dequantize_4bit, quantize_4bit};
/// let code = FourBitCode::new(std::array::from_fn(|code| code as f32 / 8.0 - 1.0));
/// let (packed, absmax) = quantize_4bit(&Tensor::from_slice(&[-2f32, 0.5, 1.1]), &code, 64)?;
/// assert_eq!((packed.size(), absmax.double_value(&[0])), (vec![2, 1], 2.0));
/// let blocks = Blocks4bit { packed: &packed, absmax: &absmax, block_size: 64, code: &code };
/// assert_eq!(Vec::<f32>::try_from(dequantize_4bit(blocks, &[3], Kind::Float)?)?, [-2.0, 0.5, 1.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn quantize_4bit(tensor: &Tensor, code: &FourBitCode, block_size: i64) -> Result<(Tensor, Tensor)> {
    const OPERATION: &str = "quantize_4bit";
    if tensor.device() != Device::Cpu {
        return operators::quantize_4bit(tensor, code, block_size).map_err(|source| libtorch(OPERATION, source));
    }
    let mut results = [std::ptr::null_mut(); 2];
    let [packed, absmax] = &mut results;
    // SAFETY: the tensor and the code live through the call; the shim fills both results if it succeeds.
    check(OPERATION, unsafe { te_quantize_4bit(handle(tensor), code, block_size, packed, absmax) })?;
    // SAFETY: fresh handles, adopted once.
    let [packed, absmax] = results.map(|raw| unsafe { adopt(raw) });
    Ok((packed, absmax))
}

/// The numbers of a weight of four bits, each computed in 32 bits and then rounded to `kind`:
/// `bitsandbytes.functional.dequantize_4bit`.
///
/// # Errors
/// Parts that do not have the length that `shape` asks for; another `kind` than float32, bfloat16 and float16.
pub fn dequantize_4bit(blocks: Blocks4bit<'_>, shape: &[i64], kind: Kind) -> Result<Tensor> {
    const OPERATION: &str = "dequantize_4bit";
    let element = element_of(OPERATION, kind)?;
    let count = numel(OPERATION, shape)?;
    if blocks.packed.device() != Device::Cpu {
        #[cfg(feature = "cuda")]
        if let Some(found) = cuda::dequantize_4bit(blocks, shape, kind)? {
            return Ok(found);
        }
        return operators::dequantize_4bit(blocks, shape, kind).map_err(|source| libtorch(OPERATION, source));
    }
    let mut result = std::ptr::null_mut();
    // SAFETY: the tensors, the code and the shape live through the call.
    let status = unsafe {
        let (packed, absmax) = (handle(blocks.packed), handle(blocks.absmax));
        let (shape, num_dims) = (shape.as_ptr(), shape.len());
        te_dequantize_4bit(packed, absmax, blocks.code, blocks.block_size, shape, num_dims, count, element, &mut result)
    };
    check(OPERATION, status)?;
    // SAFETY: a fresh handle, adopted once.
    Ok(unsafe { adopt(result) })
}

/// `input [.., columns]` times the transposed weight `[rows, columns]`, plus `bias [rows]`: `bitsandbytes.matmul_4bit`. The
/// result has the element type of the input, in which the product is computed: float32, bfloat16 or float16.
///
/// Numbers of the weight are made where they are used. For few rows of input that is within the product, whose sums
/// have 32 bits and whose weights are not rounded before; for more, they are rounded to the input's type first.
///
/// # Errors
/// Parts that do not fit the sizes; an input of another type or with another last dim.
pub fn linear_4bit(
    input: &Tensor,
    blocks: Blocks4bit<'_>,
    [rows, columns]: [i64; 2],
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    const OPERATION: &str = "linear_4bit";
    numel(OPERATION, &[rows, columns])?;
    if input.device() != Device::Cpu {
        #[cfg(feature = "cuda")]
        if let Some(found) = cuda::linear_4bit(input, blocks, [rows, columns], bias)? {
            return Ok(found);
        }
        let kind = input.f_kind().map_err(|source| libtorch(OPERATION, source.into()))?;
        let numbers = dequantize_4bit(blocks, &[rows, columns], kind)?;
        return operators::linear(input, &numbers, bias).map_err(|source| libtorch(OPERATION, source));
    }
    let mut result = std::ptr::null_mut();
    let bias = bias.map_or(std::ptr::null_mut(), handle);
    // SAFETY: the tensors and the code live through the call; there may be no bias.
    let status = unsafe {
        let (input, packed, absmax) = (handle(input), handle(blocks.packed), handle(blocks.absmax));
        te_linear_4bit(input, packed, absmax, blocks.code, blocks.block_size, rows, columns, bias, &mut result)
    };
    check(OPERATION, status)?;
    // SAFETY: a fresh handle, adopted once.
    Ok(unsafe { adopt(result) })
}

/// Codes of 8 bits by a table of 256 rising float32 numbers from -1 to 1, and a scale for each block:
/// `bitsandbytes.functional.quantize_blockwise` on the CPU, which rounds a number to one of 65,536 before it looks for the
/// nearest.
///
/// # Errors
/// A tensor or a table that is not contiguous float32; a block size below 1.
pub fn quantize_blockwise(tensor: &Tensor, table: &Tensor, block_size: i64) -> Result<(Tensor, Tensor)> {
    const OPERATION: &str = "quantize_blockwise";
    if tensor.device() != Device::Cpu {
        return operators::quantize_blockwise(tensor, table, block_size).map_err(|source| libtorch(OPERATION, source));
    }
    let mut results = [std::ptr::null_mut(); 2];
    let [codes, absmax] = &mut results;
    // SAFETY: the tensors live through the call; the shim fills both results if it succeeds.
    check(OPERATION, unsafe { te_quantize_blockwise(handle(tensor), handle(table), block_size, codes, absmax) })?;
    // SAFETY: fresh handles, adopted once.
    let [codes, absmax] = results.map(|raw| unsafe { adopt(raw) });
    Ok((codes, absmax))
}

/// The numbers of [`quantize_blockwise`], float32, each with `offset` added: what scales of scales stand for.
///
/// # Errors
/// Codes that are not contiguous uint8; scales or a table of another length.
pub fn dequantize_blockwise(
    codes: &Tensor,
    absmax: &Tensor,
    table: &Tensor,
    block_size: i64,
    offset: f32,
) -> Result<Tensor> {
    const OPERATION: &str = "dequantize_blockwise";
    if codes.device() != Device::Cpu {
        #[cfg(feature = "cuda")]
        if let Some(found) = cuda::dequantize_blockwise(codes, absmax, table, block_size, offset)? {
            return Ok(found);
        }
        let found = operators::dequantize_blockwise(codes, absmax, table, block_size, offset);
        return found.map_err(|source| libtorch(OPERATION, source));
    }
    let mut result = std::ptr::null_mut();
    // SAFETY: the tensors live through the call.
    let status = unsafe {
        let (codes, absmax, table) = (handle(codes), handle(absmax), handle(table));
        te_dequantize_blockwise(codes, absmax, table, block_size, f64::from(offset), &mut result)
    };
    check(OPERATION, status)?;
    // SAFETY: a fresh handle, adopted once.
    Ok(unsafe { adopt(result) })
}

/// Rows of a float16 matrix as bytes with a scale each: `bitsandbytes.functional.int8_vectorwise_quant`. With a `threshold`
/// above 0, elements of at least that size are outliers: they do not count for the scale, and their columns get the code 0.
///
/// # Errors
/// No matrix of float16; a matrix without columns.
///
/// ```
/// use tch::{Kind, Tensor};
/// use torch_ext::quantization::int8_vectorwise_quant;
/// let rows = Tensor::from_slice(&[1f32, -2.0, 0.5, 9.0]).view([2, 2]).to_kind(Kind::Half);
/// let found = int8_vectorwise_quant(&rows, 6.0)?;
/// assert_eq!(Vec::<i64>::try_from(found.outlier_columns)?, [1]);
/// assert_eq!(Vec::<Vec<i64>>::try_from(found.codes.to_kind(Kind::Int64))?, [[64, 0], [127, 0]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn int8_vectorwise_quant(tensor: &Tensor, threshold: f64) -> Result<Int8Rows> {
    const OPERATION: &str = "int8_vectorwise_quant";
    if tensor.device() != Device::Cpu {
        #[cfg(feature = "cuda")]
        if let Some(found) = cuda::int8_vectorwise_quant(tensor, threshold)? {
            return Ok(found);
        }
        return operators::int8_vectorwise_quant(tensor, threshold).map_err(|source| libtorch(OPERATION, source));
    }
    let mut results = [std::ptr::null_mut(); 3];
    let [codes, scales, outliers] = &mut results;
    // SAFETY: the tensor lives through the call; the shim fills all results if it succeeds.
    check(OPERATION, unsafe { te_int8_vectorwise_quant(handle(tensor), threshold, codes, scales, outliers) })?;
    // SAFETY: fresh handles, adopted once.
    let [codes, scales, outlier_columns] = results.map(|raw| unsafe { adopt(raw) });
    Ok(Int8Rows { codes, scales, outlier_columns })
}

/// `codes * (scales / 127)`, computed in 32 bits and rounded to `kind`.
///
/// # Errors
/// Codes that are no contiguous int8 matrix; another number of scales than of rows; another `kind` than float32, bfloat16 and
/// float16.
pub fn int8_dequantize(codes: &Tensor, scales: &Tensor, kind: Kind) -> Result<Tensor> {
    const OPERATION: &str = "int8_dequantize";
    let element = element_of(OPERATION, kind)?;
    if codes.device() != Device::Cpu {
        return operators::int8_dequantize(codes, scales, kind).map_err(|source| libtorch(OPERATION, source));
    }
    let mut result = std::ptr::null_mut();
    // SAFETY: the tensors live through the call.
    check(OPERATION, unsafe { te_int8_dequantize(handle(codes), handle(scales), element, &mut result) })?;
    // SAFETY: a fresh handle, adopted once.
    Ok(unsafe { adopt(result) })
}

/// Rows of `a` times rows of `b`, both with their scales, plus `bias`: the sums of int32 are exact, and
/// `sum * (a_scale * b_scale) / 127^2 + bias` is computed in 32 bits and rounded to `kind`
/// (`bitsandbytes.int8_scaled_mm`).
///
/// # Errors
/// Matrices that do not fit each other or their scales; more than 131,071 columns, whose sums need not fit.
pub fn int8_scaled_mm(
    (a, a_scales): (&Tensor, &Tensor),
    (b, b_scales): (&Tensor, &Tensor),
    bias: Option<&Tensor>,
    kind: Kind,
) -> Result<Tensor> {
    const OPERATION: &str = "int8_scaled_mm";
    /// Of so many products of two bytes 2^31 is more than the sum.
    const MOST_COLUMNS: i64 = 131_071;
    let element = element_of(OPERATION, kind)?;
    if let Some(columns) = a.size().last().copied().filter(|&columns| columns > MOST_COLUMNS) {
        let message =
            format!("sums of {columns} products need not fit into 32 bits; at most {MOST_COLUMNS} columns do");
        return Err(Error::invalid(OPERATION, message));
    }
    if a.device() != Device::Cpu {
        #[cfg(feature = "cuda")]
        if let Some(found) = cuda::int8_scaled_mm((a, a_scales), (b, b_scales), bias, kind)? {
            return Ok(found);
        }
        let product = operators::int8_scaled_mm((a, a_scales), (b, b_scales), bias, kind);
        return product.map_err(|source| libtorch(OPERATION, source));
    }
    let mut result = std::ptr::null_mut();
    let bias = bias.map_or(std::ptr::null_mut(), handle);
    // SAFETY: the tensors live through the call; there may be no bias.
    let status = unsafe {
        te_int8_scaled_mm(handle(a), handle(b), handle(a_scales), handle(b_scales), bias, element, &mut result)
    };
    check(OPERATION, status)?;
    // SAFETY: a fresh handle, adopted once.
    Ok(unsafe { adopt(result) })
}

/// The widest instructions that these kernels use, where the processor has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vectors {
    /// Those that every processor has.
    Portable,
    /// AVX2.
    Avx2,
    /// AVX-512.
    Avx512,
    /// All that are known: AVX-512 with products of bfloat16.
    All,
}

/// Narrows the instructions of all threads, so that tests reach the kernels of other processors. Codes and numbers are the same
/// bits with all of them; products differ in the order in which they are summed up.
pub fn set_widest_vectors(vectors: Vectors) {
    // SAFETY: a number is stored.
    unsafe { te_quant_set_widest_vectors(vectors as i32) }
}

fn element_of(operation: &'static str, kind: Kind) -> Result<i32> {
    match kind {
        Kind::Float => Ok(0),
        Kind::BFloat16 => Ok(1),
        Kind::Half => Ok(2),
        _ => Err(Error::invalid(operation, format!("{kind:?} is not float32, bfloat16 or float16"))),
    }
}

fn numel(operation: &'static str, shape: &[i64]) -> Result<i64> {
    let product = |numel: Option<i64>, size: &i64| numel?.checked_mul(*size).filter(|numel| *numel >= 0 && *size >= 0);
    let numel = shape.iter().fold(Some(1), product);
    numel.ok_or_else(|| Error::invalid(operation, format!("{shape:?} is not the shape of a tensor")))
}

fn libtorch(operation: &'static str, source: Box<dyn std::error::Error + Send + Sync>) -> Error {
    Error::callback(operation, source)
}
