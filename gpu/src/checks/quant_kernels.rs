//! The device's kernels for weights of few bits beside those of the CPU, sizes by sizes.

use accelerate::tch::{Device, Kind, Tensor};
use anyhow::{Result, ensure};
use torch_ext::fp8::{contiguous, largest_number, largest_value, saturating_cast};
use torch_ext::quantization::{
    Blocks4bit, FourBitCode, Int8Rows, dequantize_4bit, dequantize_blockwise, int8_scaled_mm, int8_vectorwise_quant,
    linear_4bit, quantize_4bit, quantize_blockwise,
};

use crate::check::{Context, Found};
use crate::models::wave;

const KINDS: [Kind; 3] = [Kind::Float, Kind::BFloat16, Kind::Half];

/// Numbers are the same bits, and sums of products the same but for their order.
pub(crate) fn beside_the_cpu(context: &Context<'_>) -> Result<Found> {
    if context.is_cuda() {
        torch_ext::load_cuda_kernels(context.device)?;
    }
    let code = FourBitCode::new(std::array::from_fn(|code| ((code as f32) - 7.0) / 8.0));
    let mut num_calls = 0;
    for block_size in [32, 64, 96, 256, 4096] {
        for count in [1, 7, 8, 63, 64, 65, 1000, 12293] {
            let numbers = wave(&[count], 0.2)?;
            let (packed, absmax) = quantize_4bit(&numbers, &code, block_size)?;
            let blocks = Blocks4bit { packed: &packed, absmax: &absmax, block_size, code: &code };
            let (far_packed, far_absmax) = (packed.f_to_device(context.device)?, absmax.f_to_device(context.device)?);
            let far = Blocks4bit { packed: &far_packed, absmax: &far_absmax, ..blocks };
            for kind in KINDS {
                let (found, wanted) = (dequantize_4bit(far, &[count], kind)?, dequantize_4bit(blocks, &[count], kind)?);
                context.same(&format!("{count} numbers of {kind:?}, blocks of {block_size}"), &found, &wanted)?;
                num_calls += 1;
            }
        }
    }
    // A thread that has not used the device yet.
    let (numbers, device) = (wave(&[64, 64], 0.2)?, context.device);
    let (packed, absmax) = quantize_4bit(&numbers, &code, 64)?;
    let wanted = dequantize_4bit(
        Blocks4bit { packed: &packed, absmax: &absmax, block_size: 64, code: &code },
        &[64, 64],
        Kind::Float,
    )?;
    let (packed, absmax) = (packed.f_to_device(device)?, absmax.f_to_device(device)?);
    let found = std::thread::spawn(move || {
        let far = Blocks4bit { packed: &packed, absmax: &absmax, block_size: 64, code: &code };
        dequantize_4bit(far, &[64, 64], Kind::Float)
    });
    let found = found.join().map_err(|_| anyhow::anyhow!("the thread has panicked"))??;
    context.same("numbers that another thread made", &found, &wanted)?;
    num_calls += products(context, &code)?;
    num_calls += scales(context)?;
    num_calls += rows_of_bytes(context)?;
    Found::figure(format!("{num_calls} calls"))
}

/// Few rows and many, weights whose rows begin within a block, and sizes that the kernels leave to others.
fn products(context: &Context<'_>, code: &FourBitCode) -> Result<usize> {
    let mut num_calls = 0;
    for (rows, columns) in [(1, 32), (5, 96), (64, 64), (130, 4096), (7, 50)] {
        for block_size in [32, 64, 4096] {
            let weight = wave(&[rows, columns], 0.3)?;
            let (packed, absmax) = quantize_4bit(&weight, code, block_size)?;
            let (far_packed, far_absmax) = (packed.f_to_device(context.device)?, absmax.f_to_device(context.device)?);
            let far = Blocks4bit { packed: &far_packed, absmax: &far_absmax, block_size, code };
            let numbers = dequantize_4bit(
                Blocks4bit { packed: &packed, absmax: &absmax, block_size, code },
                &[rows, columns],
                Kind::Float,
            )?;
            for num_inputs in [1, 2, 3, 4, 5, 8, 9, 33] {
                for kind in KINDS {
                    let input = wave(&[num_inputs, columns], 0.8)?.f_to_kind(kind)?;
                    let bias = wave(&[rows], 0.5)?.f_to_kind(kind)?;
                    for bias in [None, Some(&bias)] {
                        let wide = bias.map(|bias| bias.f_to_kind(Kind::Float)).transpose()?;
                        let wanted = input.f_to_kind(Kind::Float)?.f_linear(&numbers, wide)?;
                        let far_bias = bias.map(|bias| bias.f_to_device(context.device)).transpose()?;
                        let far_input = input.f_to_device(context.device)?;
                        let found = linear_4bit(&far_input, far, [rows, columns], far_bias.as_ref())?;
                        ensure!(found.f_kind()? == kind, "a product of {kind:?} is {:?}", found.kind());
                        // Rounding as a part of the sum of all terms without their signs: for many inputs, weights are rounded too.
                        let terms =
                            input.f_to_kind(Kind::Float)?.f_abs()?.f_matmul(&numbers.f_abs()?.f_transpose(0, 1)?)?;
                        let part = match kind {
                            Kind::Float => 2e-6,
                            Kind::BFloat16 => 8e-3,
                            _ => 1e-3,
                        };
                        let most = part * terms.f_max()?.f_double_value(&[])?;
                        let what =
                            format!("{num_inputs} inputs of {kind:?} by {rows} x {columns}, blocks of {block_size}");
                        context.near(&what, &found.f_to_kind(Kind::Float)?, &wanted, most)?;
                        num_calls += 1;
                    }
                }
            }
        }
    }
    Ok(num_calls)
}

/// Scales that are codes themselves.
fn scales(context: &Context<'_>) -> Result<usize> {
    let table = Tensor::f_linspace(-1.0, 1.0, 256, (Kind::Float, Device::Cpu))?;
    let counts = [1, 255, 256, 257, 5000];
    for count in counts {
        let (codes, absmax) = quantize_blockwise(&wave(&[count], 0.1)?, &table, 256)?;
        let wanted = dequantize_blockwise(&codes, &absmax, &table, 256, 0.37)?;
        let [codes, absmax, table] = [&codes, &absmax, &table].map(|tensor| tensor.f_to_device(context.device));
        let found = dequantize_blockwise(&codes?, &absmax?, &table?, 256, 0.37)?;
        context.same(&format!("{count} scales"), &found, &wanted)?;
    }
    Ok(counts.len())
}

/// Rows as bytes, with outliers, zeros and what is not a number in them, and their products.
fn rows_of_bytes(context: &Context<'_>) -> Result<usize> {
    let mut num_calls = 0;
    for (m, n, k) in [(1, 8, 8), (3, 24, 264), (17, 8, 16), (33, 40, 4096), (4, 5, 7), (40, 8, 1544)] {
        for threshold in [0.0, 6.0] {
            let a = wave(&[m, k], 0.6)?.f_mul_scalar(3.0)?;
            let _ = a.f_select(1, k / 2)?.f_fill_(8.0)?;
            let _ = a.f_select(0, m - 1)?.f_narrow(0, 0, k / 2)?.f_zero_()?;
            let a = a.f_to_kind(Kind::Half)?;
            let (wanted, found) = (
                int8_vectorwise_quant(&a, threshold)?,
                int8_vectorwise_quant(&a.f_to_device(context.device)?, threshold)?,
            );
            let what = format!("{m} x {k} with {threshold}");
            context.same(&format!("codes of {what}"), &found.codes, &wanted.codes)?;
            context.same(&format!("scales of {what}"), &found.scales, &wanted.scales)?;
            context.same(&format!("outliers of {what}"), &found.outlier_columns, &wanted.outlier_columns)?;
            let b = int8_vectorwise_quant(&wave(&[n, k], 0.1)?.f_to_kind(Kind::Half)?, 0.0)?;
            let bias = wave(&[n], 0.4)?;
            for kind in KINDS {
                for bias in [None, Some(&bias)] {
                    let product = |a: &Int8Rows, device: Device| -> Result<Tensor> {
                        let [b_codes, b_scales] = [b.codes.f_to_device(device)?, b.scales.f_to_device(device)?];
                        let bias = bias.map(|bias| bias.f_to_device(device)).transpose()?;
                        Ok(int8_scaled_mm((&a.codes, &a.scales), (&b_codes, &b_scales), bias.as_ref(), kind)?)
                    };
                    let (found, wanted) = (product(&found, context.device)?, product(&wanted, Device::Cpu)?);
                    context.same(&format!("the product of {what} by {n} of {kind:?}"), &found, &wanted)?;
                    num_calls += 1;
                }
            }
        }
    }
    let broken = Tensor::f_from_slice(&[1f32, f32::NAN, 2.0, 4.0])?.f_view([2, 2])?.f_to_kind(Kind::Half)?;
    let found = int8_vectorwise_quant(&broken.f_to_device(context.device)?, 0.0)?;
    ensure!(found.scales.f_isnan()?.f_int64_value(&[0])? == 1, "what is not a number has a scale");
    context.close("the scale of the row beside it", found.scales.f_double_value(&[1])?, 4.0, 0.0)?;
    Ok(num_calls + 1)
}

/// FP8 matrices: largest values, codes and order in memory are those of the CPU, also where the kernels leave sizes to operators.
pub(crate) fn fp8_beside_the_cpu(context: &Context<'_>) -> Result<Found> {
    if context.is_cuda() {
        torch_ext::load_cuda_kernels(context.device)?;
    }
    let mut num_calls = 0;
    for (rows, columns) in [(1, 8), (3, 16), (64, 64), (130, 48), (80, 4096), (5, 7)] {
        for kind in KINDS {
            let near = wave(&[rows, columns], 0.7)?.f_mul_scalar(30.0)?;
            let _ = near.f_select(0, rows - 1)?.f_mul_(&Tensor::f_full([], 1e3, (Kind::Float, Device::Cpu))?)?;
            let near = near.f_to_kind(kind)?;
            let far = near.f_to_device(context.device)?;
            let what = format!("{rows} x {columns} of {kind:?}");
            for dim in [None, Some(0), Some(1)] {
                let (found, wanted) = (largest_value(&far, dim)?, largest_value(&near, dim)?);
                context.same(&format!("the largest along {dim:?} of {what}"), &found, &wanted)?;
                let scale = wanted.f_reciprocal()?.f_mul_scalar(if dim.is_some() { 448.0 } else { 3e5 })?;
                for format in [Kind::Float8e4m3fn, Kind::Float8e5m2] {
                    let wanted = saturating_cast(&near, &scale, format)?;
                    let found = saturating_cast(&far, &scale.f_to_device(context.device)?, format)?;
                    let numbers = |codes: &Tensor| codes.f_to_kind(Kind::Float);
                    context.same(
                        &format!("{format:?} codes of {what} along {dim:?}"),
                        &numbers(&found)?,
                        &numbers(&wanted)?,
                    )?;
                    let turned = contiguous(&found.f_transpose(0, 1)?)?;
                    ensure!(turned.is_contiguous(), "{what} is not in one piece");
                    let wanted = numbers(&wanted)?.f_transpose(0, 1)?.f_contiguous()?;
                    context.same(&format!("transposed {format:?} codes of {what}"), &numbers(&turned)?, &wanted)?;
                    num_calls += 2;
                }
                num_calls += 1;
            }
            let (found, wanted) = (largest_number(&far)?, largest_number(&near)?);
            context.same(&format!("the largest number of {what}"), &found, &wanted)?;
        }
    }
    let broken = Tensor::f_from_slice(&[1f32, f32::NAN, -7.0, 2.0, 0.0, 3.0, 1.0, 2.0])?.f_view([1, 8])?;
    let broken = broken.f_to_device(context.device)?;
    ensure!(largest_value(&broken, None)?.f_isnan()?.f_int64_value(&[])? == 1, "what is not a number was passed over");
    context.close("the largest number beside it", largest_number(&broken)?.f_double_value(&[])?, 7.0, 0.0)?;
    let one = Tensor::f_ones([], (Kind::Float, context.device))?;
    for format in [Kind::Float8e4m3fn, Kind::Float8e5m2] {
        let codes = saturating_cast(&broken, &one, format)?.f_to_kind(Kind::Float)?;
        ensure!(codes.f_isnan()?.f_int64_value(&[0, 1])? == 1, "what is not a number became one in {format:?}");
        context.close("the number beside it", codes.f_double_value(&[0, 2])?, -7.0, 0.0)?;
    }
    Found::figure(format!("{num_calls} calls"))
}
