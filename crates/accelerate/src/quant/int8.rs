//! A weight of eight bits: rows of codes with a scale each, and inputs that become such rows while they are used.

use super::{bias_gradient, computed_in, dtype_of, kind_of};
use crate::error::{NnError, Result, WeightsError};
use crate::nn::{DenseKernel, Init, Layout, LinearKernel, Param, Role, Storage, TrainingFlag};
use accelerate_core::quantization::Int8Names;
use tch::{Kind, Tensor};
use torch_ext::autograd::is_grad_enabled;
use torch_ext::quantization::{int8_dequantize, int8_scaled_mm, int8_vectorwise_quant};
use torch_ext::{apply_function, scalar};

/// The tensors of a weight of eight bits.
#[derive(Debug)]
pub(crate) struct Int8Tensors {
    /// int8, `[out_features, in_features]`.
    pub(crate) codes: Tensor,
    /// float32, `[out_features]`.
    pub(crate) scb: Tensor,
}

/// The storage of a weight of eight bits.
pub(super) struct Int8Weight {
    name: String,
    shape: Vec<i64>,
    /// The type that the numbers had.
    kind: Kind,
    /// Codes, scales, format.
    parts: Vec<Param>,
}

impl Int8Weight {
    pub(super) fn quantize(name: &str, full: &Tensor) -> Result<Self> {
        let kind = kind_of(dtype_of(full.f_kind()?));
        Self::new(name, &full.size(), kind, quantize(name, full)?)
    }

    /// Of tensors out of a file, which are compared with the shape that the model has.
    pub(super) fn from_file(name: &str, shape: &[i64], kind: Kind, tensors: Int8Tensors) -> Result<Self> {
        let found = [
            (tensors.codes.size(), tensors.codes.f_kind()?, shape.to_vec(), Kind::Int8),
            (tensors.scb.size(), tensors.scb.f_kind()?, shape[..1].to_vec(), Kind::Float),
        ];
        for (size, kind, wanted, wanted_kind) in found {
            if size != wanted || kind != wanted_kind {
                let (weight, found) = (name.to_owned(), format!("{kind:?} of shape {size:?}"));
                return Err(WeightsError::Int8Part {
                    weight,
                    found,
                    wanted: format!("{wanted_kind:?} of shape {wanted:?}"),
                }
                .into());
            }
        }
        Self::new(name, shape, kind, tensors)
    }

    fn new(name: &str, shape: &[i64], kind: Kind, tensors: Int8Tensors) -> Result<Self> {
        let names = Int8Names::of(name);
        let format = scalar::full(&[], 0, (Kind::Uint8, tensors.codes.device()))?;
        let part = |name: &str, tensor| Param::new(name.to_owned(), Role::Buffer { persistent: true }, tensor);
        let parts = vec![part(name, tensors.codes), part(&names.scb, tensors.scb), part(&names.weight_format, format)];
        Ok(Self { name: name.to_owned(), shape: shape.to_vec(), kind, parts })
    }
}

impl Storage for Int8Weight {
    fn materialize(&self) -> Result<Tensor> {
        numbers(&self.parts, self.kind)
    }

    fn local(&self) -> Tensor {
        self.parts[0].local()
    }

    fn layout(&self) -> Layout {
        Layout::full(self.shape.iter().map(|&size| size.max(0) as usize).collect::<Vec<_>>())
    }

    fn stored_as(&self) -> Option<Vec<Param>> {
        Some(self.parts.clone())
    }

    fn piece_sizes(&self) -> Vec<usize> {
        let row = self.shape.get(1).map_or(0, |&columns| columns.max(0) as usize);
        vec![row, 1]
    }

    fn full_tensor(&self) -> Result<Tensor> {
        self.materialize()
    }

    fn overwrite(&self, full: &Tensor) -> Result<()> {
        let Int8Tensors { codes, scb } = quantize(&self.name, &full.f_expand(&self.shape, false)?)?;
        self.parts[0].copy_(&codes)?;
        self.parts[1].copy_(&scb)
    }

    fn overwrite_shard(&self, shard: &Tensor) -> Result<()> {
        self.overwrite(&shard.f_reshape(&self.shape)?)
    }

    fn initialise(&self, _row: Option<i64>, _init: Init) -> Result<()> {
        Err(NnError::QuantizedInitialisation { parameter: self.name.clone() }.into())
    }

    fn set_requires_grad(&self, requires_grad: bool) -> Result<()> {
        match requires_grad {
            true => Err(NnError::QuantizedRequiresGrad { parameter: self.name.clone() }.into()),
            false => Ok(()),
        }
    }
}

/// Codes of rows, by way of float16.
fn quantize(name: &str, full: &Tensor) -> Result<Int8Tensors> {
    let _no_grad = tch::no_grad_guard();
    let rows = int8_vectorwise_quant(&full.f_detach()?.f_to_kind(Kind::Half)?, 0.0)?;
    // A number that float16 does not hold would make a row of zeros of all others.
    if rows.scales.f_isfinite()?.f_all()?.f_int64_value(&[])? == 0 {
        return Err(NnError::BeyondFloat16 { parameter: name.to_owned() }.into());
    }
    Ok(Int8Tensors { codes: rows.codes, scb: rows.scales })
}

fn numbers(parts: &[Param], kind: Kind) -> Result<Tensor> {
    let made = match kind {
        Kind::Float | Kind::BFloat16 | Kind::Half => kind,
        _ => Kind::Float,
    };
    let numbers = int8_dequantize(&parts[0].get()?, &parts[1].get()?, made)?;
    Ok(numbers.f_to_kind(kind)?)
}

/// `x W^T + b` with a weight of eight bits. The gradient reaches the input and the bias.
///
/// In training mode the numbers of the weight are made and multiplied with, as bitsandbytes does on the CPU: the result has no error
/// of a quantised input then.
#[derive(Debug)]
pub(super) struct Linear8bit {
    /// From which size on an element of the input is an outlier; 0 for none.
    pub(super) threshold: f64,
    pub(super) training: TrainingFlag,
}

impl LinearKernel for Linear8bit {
    fn linear(&self, input: &Tensor, weight: &Param, bias: Option<&Param>) -> Result<Tensor> {
        let parts = weight.stored_as();
        if !weight.is_stored_as_several() || parts.len() != 3 {
            return DenseKernel.linear(input, weight, bias);
        }
        let [kind, result] = computed_in(input, None)?;
        check_input(input, weight)?;
        let bias = bias.map(Param::get).transpose()?;
        let x = input.f_to_kind(kind)?;
        let product = || match self.training.get() {
            true => {
                let bias = bias.as_ref().map(|bias| bias.f_to_kind(kind)).transpose()?;
                Ok(x.f_linear(&numbers(&parts, kind)?, bias)?)
            }
            false => product(&x, [&parts[0].get()?, &parts[1].get()?], bias.as_ref(), self.threshold),
        };
        let is_recorded = is_grad_enabled() && (x.requires_grad() || bias.as_ref().is_some_and(Tensor::requires_grad));
        if !is_recorded {
            return Ok(tch::no_grad(product)?.f_to_kind(result)?);
        }
        let inputs: Vec<&Tensor> = std::iter::once(&x).chain(&bias).collect();
        let (needs_x, saved_parts) = (x.requires_grad(), parts.clone());
        let saved_bias = bias.as_ref().map(|bias| bias.f_detach()).transpose()?;
        let output = apply_function(
            "Linear8bit",
            &inputs,
            |_| Ok(vec![product()?]),
            move |_, gradients| {
                let mut results: Vec<Option<Tensor>> = saved_bias.iter().map(|_| None).chain([None]).collect();
                let Some(Some(gradient)) = gradients.first() else { return Ok(results) };
                if needs_x {
                    results[0] = Some(gradient.f_matmul(&numbers(&saved_parts, gradient.f_kind()?)?)?);
                }
                if let Some(bias) = &saved_bias {
                    results[1] = Some(bias_gradient(gradient, bias)?);
                }
                Ok(results)
            },
        )?
        .swap_remove(0);
        Ok(output.f_to_kind(result)?)
    }
}

/// `x W^T + b` with a weight of 16 bits, of which codes are made in every forward pass (`has_fp16_weights` of bitsandbytes). The
/// gradient of the weight is that of the product with its numbers.
#[derive(Debug)]
pub(super) struct LinearFp16Weight {
    pub(super) threshold: f64,
    pub(super) training: TrainingFlag,
}

impl LinearKernel for LinearFp16Weight {
    fn linear(&self, input: &Tensor, weight: &Param, bias: Option<&Param>) -> Result<Tensor> {
        let [kind, result] = computed_in(input, None)?;
        check_input(input, weight)?;
        let (full, bias) = (weight.get()?, bias.map(Param::get).transpose()?);
        let x = input.f_to_kind(kind)?;
        let Int8Tensors { codes, scb } = quantize(weight.name(), &full)?;
        let product = || match self.training.get() {
            true => {
                let bias = bias.as_ref().map(|bias| bias.f_to_kind(kind)).transpose()?;
                Ok(x.f_linear(&int8_dequantize(&codes, &scb, kind)?, bias)?)
            }
            false => product(&x, [&codes, &scb], bias.as_ref(), self.threshold),
        };
        if !is_grad_enabled() {
            return Ok(product()?.f_to_kind(result)?);
        }
        let inputs: Vec<&Tensor> = [&x, &full].into_iter().chain(&bias).collect();
        let (saved_codes, saved_scb, weight_kind) = (codes.shallow_clone(), scb.shallow_clone(), full.f_kind()?);
        let saved_bias = bias.as_ref().map(|bias| bias.f_detach()).transpose()?;
        let [out_features, in_features] = full.size()[..] else { return DenseKernel.linear(input, weight, None) };
        let output = apply_function(
            "LinearFp16Weight",
            &inputs,
            |context| {
                context.save_for_backward(&[&x]);
                Ok(vec![product()?])
            },
            move |context, gradients| {
                let mut results: Vec<Option<Tensor>> = saved_bias.iter().map(|_| None).chain([None, None]).collect();
                let Some(Some(gradient)) = gradients.first() else { return Ok(results) };
                let kind = gradient.f_kind()?;
                if context.needs_input_grad(0) {
                    results[0] = Some(gradient.f_matmul(&int8_dequantize(&saved_codes, &saved_scb, kind)?)?);
                }
                if context.needs_input_grad(1) {
                    let rows = gradient.f_reshape([-1, out_features])?;
                    let x = context.saved_tensors()?[0].f_reshape([-1, in_features])?;
                    results[1] = Some(rows.f_transpose(0, 1)?.f_mm(&x)?.f_to_kind(weight_kind)?);
                }
                if let Some(bias) = &saved_bias {
                    results[2] = Some(bias_gradient(gradient, bias)?);
                }
                Ok(results)
            },
        )?
        .swap_remove(0);
        Ok(output.f_to_kind(result)?)
    }
}

fn check_input(input: &Tensor, weight: &Param) -> Result<()> {
    let columns = weight.shape().get(1).copied().unwrap_or_default();
    if input.size().last() == Some(&columns) && crate::nn::is_floating(input.f_kind()?) {
        return Ok(());
    }
    let (name, wanted) = (weight.name().to_owned(), format!("[.., {columns}] of a floating-point type"));
    Err(NnError::QuantizedForward { name, wanted, found: input.size(), kind: input.f_kind().ok() }.into())
}

/// The product of codes, with columns of outliers computed apart in the input's own type.
fn product(x: &Tensor, [codes, scb]: [&Tensor; 2], bias: Option<&Tensor>, threshold: f64) -> Result<Tensor> {
    // 1 / 127, as bitsandbytes writes it.
    const PART: f64 = 7.874_015_718_698_502e-3;
    let (kind, mut size) = (x.f_kind()?, x.size());
    let x = x.f_reshape([-1, codes.size()[1]])?;
    let rows = int8_vectorwise_quant(&x.f_to_kind(Kind::Half)?, threshold)?;
    let made = match kind {
        Kind::Float | Kind::BFloat16 | Kind::Half => kind,
        _ => Kind::Float,
    };
    let mut output = int8_scaled_mm((&rows.codes, &rows.scales), (codes, scb), bias, made)?.f_to_kind(kind)?;
    if rows.outlier_columns.numel() > 0 {
        let columns = &rows.outlier_columns;
        let numbers = codes.f_index_select(1, columns)?.f_to_kind(Kind::Float)?.f_mul(&scb.f_unsqueeze(1)?)?;
        let numbers = scalar::mul(&numbers, PART)?.f_to_kind(kind)?;
        output = output.f_addmm(&x.f_index_select(1, columns)?, &numbers.f_transpose(0, 1)?)?;
    }
    if let Some(last) = size.last_mut() {
        *last = codes.size()[0];
    }
    Ok(output.f_reshape(size)?)
}
