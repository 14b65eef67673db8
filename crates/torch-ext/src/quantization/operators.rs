//! The same made of libtorch's operators, for devices that have no kernel of our own.

use super::{Blocks4bit, FourBitCode, Int8Rows};
use crate::autograd::CallbackResult;
use crate::scalar;
use tch::{Kind, Tensor};

/// bitsandbytes divides no block by less.
const SMALLEST: f64 = 1e-38;

pub(super) fn quantize_4bit(tensor: &Tensor, code: &FourBitCode, block_size: i64) -> CallbackResult<(Tensor, Tensor)> {
    let device = tensor.device();
    let flat = tensor.f_detach()?.f_reshape([-1])?.f_to_kind(Kind::Float)?;
    let (scaled, absmax) = scaled(&flat, block_size)?;
    let filler = Tensor::f_zeros([scaled.size()[0] % 2], (Kind::Float, device))?;
    let scaled = Tensor::f_cat(&[scaled, filler], 0)?;
    let bounds = Tensor::f_from_slice(&code.bounds)?.f_to_device(device)?;
    let order = Tensor::f_from_slice(&code.codes)?.f_to_device(device)?;
    let places = scaled.f_bucketize(&bounds, true, false)?;
    let pairs = order.f_index_select(0, &places)?.f_view([-1, 2])?;
    let high = scalar::mul(&pairs.f_select(1, 0)?, 16)?;
    Ok((high.f_bitwise_or_tensor(&pairs.f_select(1, 1)?)?.f_unsqueeze(1)?, absmax))
}

/// Each element divided by the scale of its block, and the scales.
fn scaled(flat: &Tensor, block_size: i64) -> CallbackResult<(Tensor, Tensor)> {
    let count = flat.size()[0];
    let whole = count / block_size * block_size;
    let blocks = flat.f_narrow(0, 0, whole)?.f_view([-1, block_size])?;
    let absmax = blocks.f_abs()?.f_amax([1], false)?;
    let factors = scalar::clamp_min(&absmax, SMALLEST)?.f_reciprocal()?.f_unsqueeze(1)?;
    let scaled = blocks.f_mul(&factors)?.f_reshape([-1])?;
    if whole == count {
        return Ok((scaled, absmax));
    }
    let rest = flat.f_narrow(0, whole, count - whole)?;
    let scale = scalar::clamp_min(&rest.f_abs()?.f_amax([0], true)?, SMALLEST)?;
    let scaled = Tensor::f_cat(&[scaled, rest.f_div(&scale)?], 0)?;
    Ok((scaled, Tensor::f_cat(&[absmax, scale], 0)?))
}

pub(super) fn dequantize_4bit(blocks: Blocks4bit<'_>, shape: &[i64], kind: Kind) -> CallbackResult<Tensor> {
    let count: i64 = shape.iter().product();
    let bytes = blocks.packed.f_reshape([-1])?.f_to_kind(Kind::Int)?;
    let four = scalar::full(&[], 4, (Kind::Int, bytes.device()))?;
    let high = bytes.f_bitwise_right_shift(&four)?;
    let low = bytes.f_sub(&scalar::mul(&high, 16)?)?;
    let codes = Tensor::f_stack(&[high, low], 1)?.f_reshape([-1])?.f_narrow(0, 0, count)?;
    let values = Tensor::f_from_slice(blocks.code.values())?.f_to_device(bytes.device())?;
    let scales = blocks.absmax.f_repeat_interleave_self_int(blocks.block_size, 0, None)?.f_narrow(0, 0, count)?;
    Ok(values.f_index_select(0, &codes)?.f_mul(&scales)?.f_to_kind(kind)?.f_reshape(shape)?)
}

pub(super) fn linear(input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> CallbackResult<Tensor> {
    let bias = bias.map(|bias| bias.f_to_kind(input.f_kind()?)).transpose()?;
    tch::no_grad(|| Ok(input.f_linear(weight, bias)?))
}

pub(super) fn quantize_blockwise(tensor: &Tensor, table: &Tensor, block_size: i64) -> CallbackResult<(Tensor, Tensor)> {
    let (scaled, absmax) = scaled(&tensor.f_detach()?.f_reshape([-1])?, block_size)?;
    let bounds = table.f_narrow(0, 0, 255)?.f_add(&table.f_narrow(0, 1, 255)?)?;
    let codes = scaled.f_bucketize(&scalar::mul(&bounds, 0.5)?, true, false)?;
    Ok((codes.f_to_kind(Kind::Uint8)?.f_reshape(tensor.size())?, absmax))
}

pub(super) fn dequantize_blockwise(
    codes: &Tensor,
    absmax: &Tensor,
    table: &Tensor,
    block_size: i64,
    offset: f32,
) -> CallbackResult<Tensor> {
    let flat = codes.f_reshape([-1])?;
    let scales = absmax.f_repeat_interleave_self_int(block_size, 0, None)?.f_narrow(0, 0, flat.size()[0])?;
    let numbers = table.f_index_select(0, &flat.f_to_kind(Kind::Int)?)?.f_mul(&scales)?;
    Ok(scalar::add(&numbers, f64::from(offset))?.f_reshape(codes.size())?)
}

pub(super) fn int8_vectorwise_quant(tensor: &Tensor, threshold: f64) -> CallbackResult<Int8Rows> {
    let numbers = tensor.f_detach()?.f_to_kind(Kind::Float)?;
    let is_outlier = match threshold > 0.0 {
        true => numbers.f_abs()?.f_ge_tensor(&scalar::full(&[], threshold, (Kind::Float, numbers.device()))?)?,
        false => numbers.f_zeros_like()?.f_to_kind(Kind::Bool)?,
    };
    let kept = scalar::masked_fill(&numbers, &is_outlier, 0.0)?;
    let scales = kept.f_abs()?.f_amax([1], false)?;
    let factors = scalar::mul(&scales.f_reciprocal()?, 127.0)?.f_unsqueeze(1)?;
    let factors = factors.f_nan_to_num(0.0, 0.0, 0.0)?;
    let in_column = is_outlier.f_any_dim(0, false)?;
    let codes = scalar::masked_fill(&kept.f_mul(&factors)?.f_round()?, &in_column.f_unsqueeze(0)?, 0.0)?;
    let outlier_columns = in_column.f_nonzero()?.f_squeeze_dim(1)?;
    Ok(Int8Rows { codes: codes.f_to_kind(Kind::Int8)?, scales, outlier_columns })
}

pub(super) fn int8_dequantize(codes: &Tensor, scales: &Tensor, kind: Kind) -> CallbackResult<Tensor> {
    let factors = scalar::mul(scales, 1.0 / 127.0)?.f_unsqueeze(1)?;
    Ok(codes.f_to_kind(Kind::Float)?.f_mul(&factors)?.f_to_kind(kind)?)
}

pub(super) fn int8_scaled_mm(
    (a, a_scales): (&Tensor, &Tensor),
    (b, b_scales): (&Tensor, &Tensor),
    bias: Option<&Tensor>,
    kind: Kind,
) -> CallbackResult<Tensor> {
    // Sums of so few products are whole numbers below 2^24, which float32 holds.
    let kind_of_sums = if a.size().last().is_some_and(|&columns| columns <= 1040) { Kind::Float } else { Kind::Double };
    let sums = a.f_to_kind(kind_of_sums)?.f_matmul(&b.f_to_kind(kind_of_sums)?.f_transpose(0, 1)?)?;
    let sums = sums.f_to_kind(Kind::Float)?;
    let scales = a_scales.f_unsqueeze(1)?.f_mul(&b_scales.f_unsqueeze(0)?)?;
    let product = scalar::mul(&sums.f_mul(&scales)?, 1.0 / (127.0 * 127.0))?;
    match bias {
        Some(bias) => Ok(product.f_add(&bias.f_to_kind(Kind::Float)?)?.f_to_kind(kind)?),
        None => Ok(product.f_to_kind(kind)?),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super as kernels;
    use super::*;
    use tch::Device;

    /// What the kernels and the operators make is the same to the bit, so either may be trusted if the other is right.
    #[test]
    fn quantization_kernels_and_operators_agree() {
        let code = FourBitCode::new(std::array::from_fn(|code| ((code as f32) - 7.0) / 8.0));
        let numbers = |count: i64| Tensor::f_randn([count], (Kind::Float, Device::Cpu)).unwrap();
        for count in [1, 2, 63, 64, 65, 1000] {
            for block_size in [32, 64, 256] {
                let numbers = numbers(count);
                let (packed, absmax) = quantize_4bit(&numbers, &code, block_size).unwrap();
                assert_eq!(
                    kernels::quantize_4bit(&numbers, &code, block_size).unwrap(),
                    (packed.copy(), absmax.copy())
                );
                let blocks = Blocks4bit { packed: &packed, absmax: &absmax, block_size, code: &code };
                for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
                    let found = kernels::dequantize_4bit(blocks, &[count], kind).unwrap();
                    assert_eq!(
                        found,
                        dequantize_4bit(blocks, &[count], kind).unwrap(),
                        "{count} {block_size} {kind:?}"
                    );
                }
            }
        }
        let rows = (numbers(640).view([10, 64]) * 3.0).to_kind(Kind::Half);
        for threshold in [0.0, 6.0] {
            let (found, wanted) = (
                kernels::int8_vectorwise_quant(&rows, threshold).unwrap(),
                int8_vectorwise_quant(&rows, threshold).unwrap(),
            );
            assert_eq!((found.codes, found.scales), (wanted.codes, wanted.scales));
            assert_eq!(found.outlier_columns, wanted.outlier_columns);
        }
    }
}
