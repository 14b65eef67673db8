//! Linear layers over sharded weights, whose gradient may stay a product that nobody has computed, and over tables with two
//! uses.
//!
//! A rank needs its own shard of a weight's gradient and sends the others away. The full gradient of a large table is
//! more than both its factors together while a batch has few rows, so the factors are kept until somebody wants rows.

use super::Param;
use crate::error::Result;
use std::ops::Range;
use tch::{Device, TchError, Tensor};
use torch_ext::apply_function;
use torch_ext::autocast::is_autocast_enabled;
use torch_ext::autograd::is_grad_enabled;

/// Smaller gradients are made at once: one product is faster than several.
const LARGE_BYTES: usize = 4 << 20;

/// A weight's gradient that has not been computed: `output_gradient^T input`.
#[derive(Debug)]
pub(crate) struct DeferredWeightGrad {
    /// `[n, out_features]`.
    output_gradient: Tensor,
    /// `[n, in_features]`.
    input: Tensor,
}

impl DeferredWeightGrad {
    /// Of an output's gradient, `[n, out_features]`, and the input, `[n, in_features]`.
    pub(crate) fn new(output_gradient: &Tensor, input: &Tensor) -> Self {
        Self { output_gradient: output_gradient.shallow_clone(), input: input.shallow_clone() }
    }

    /// Some rows of the gradient, one per output feature.
    pub(crate) fn rows(&self, range: &Range<usize>) -> Result<Tensor, TchError> {
        let columns = self.output_gradient.f_narrow(1, range.start as i64, range.len() as i64)?;
        columns.f_tr()?.f_mm(&self.input)
    }

    /// Rows and columns of the gradient.
    pub(crate) fn size(&self) -> (usize, usize) {
        (self.output_gradient.size()[1] as usize, self.input.size()[1] as usize)
    }
}

/// Where gradients go that are not computed in the backward pass.
pub(crate) type DeferWeightGrad = Box<dyn Fn(DeferredWeightGrad) + Send>;

/// Is this for [`linear`]: a sharded weight or with two uses, and an input that fits? Others are told what is wrong with
/// them by libtorch.
pub(super) fn is_for_linear(weight: &Param, input: &Tensor) -> Result<bool> {
    if !(weight.is_tied() || weight.is_sharded()) || !is_grad_enabled() {
        return Ok(false);
    }
    if input.device() != Device::Cpu || is_autocast_enabled(Device::Cpu)? {
        return Ok(false);
    }
    let shape = weight.shape();
    Ok(shape.len() == 2 && input.size().last() == shape.last() && input.f_kind()? == weight.kind())
}

/// Who takes the gradient of a weight without its being computed, where it is worth while for this input, which is [for it](is_for_linear).
/// On a GPU it is not: there, products of few rows leave most of it idle.
pub(super) fn deferral(weight: &Param, input: &Tensor) -> Result<Option<DeferWeightGrad>> {
    if !weight.is_sharded() || !weight.requires_grad() {
        return Ok(None);
    }
    let (shape, kind) = (weight.shape(), weight.kind());
    let [out_features, in_features] = shape[..] else { return Ok(None) };
    let (num_elements, num_rows) = (weight.numel(), input.numel() as i64 / in_features.max(1));
    let is_large = LARGE_BYTES < num_elements * kind.elt_size_in_bytes();
    let has_small_factors = num_rows * (out_features + in_features) < num_elements as i64;
    Ok(if is_large && has_small_factors { weight.defer_weight_grad() } else { None })
}

/// `torch.nn.functional.linear` with the gradients, to the bit, that libtorch makes. If there is `defer`, that of the weight
/// is not computed: `defer` gets it as its two factors. Otherwise nobody else has it, and it may be added to in place.
pub(super) fn linear(
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    defer: Option<DeferWeightGrad>,
) -> Result<Tensor> {
    let output = tch::no_grad(|| input.f_linear(weight, bias))?;
    let size = weight.size();
    let inputs: Vec<&Tensor> = [Some(input), Some(weight), bias].into_iter().flatten().collect();
    let num_inputs = inputs.len();
    let mut outputs = apply_function(
        "Linear",
        &inputs,
        |context| {
            // The weight is gathered once more for the input's gradient only.
            if input.requires_grad() {
                context.save_for_backward(&[input, weight]);
            } else {
                context.save_for_backward(&[input]);
            }
            Ok(vec![output])
        },
        move |context, gradients| {
            let mut results: Vec<Option<Tensor>> = (0..num_inputs).map(|_| None).collect();
            let Some(Some(gradient)) = gradients.first() else { return Ok(results) };
            let saved = context.saved_tensors()?;
            let output_gradient = gradient.f_reshape([-1, size[0]])?;
            if let [input, weight] = &saved[..] {
                results[0] = Some(output_gradient.f_mm(weight)?.f_view_as(input)?);
            }
            if num_inputs == 3 {
                // Summed over rows by libtorch.
                results[2] = Some(output_gradient.shallow_clone());
            }
            // Asked for the input's gradient alone, nobody comes to fetch the weight's.
            if !context.needs_input_grad(1) {
                return Ok(results);
            }
            let input = saved[0].f_reshape([-1, size[1]])?;
            match &defer {
                Some(defer) => defer(DeferredWeightGrad::new(&output_gradient.f_detach()?, &input.f_detach()?)),
                None => results[1] = Some(output_gradient.f_tr()?.f_mm(&input)?),
            }
            Ok(results)
        },
    )?;
    Ok(outputs.swap_remove(0))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};
    use tch::Kind;

    #[test]
    fn gradients_are_those_of_libtorch_to_the_bit() {
        let numbers = |size: &[i64]| {
            let count = size.iter().product::<i64>();
            (Tensor::arange(count, (Kind::Float, Device::Cpu)) * 0.7).sin().view(size).set_requires_grad(true)
        };
        for (input_size, has_bias) in [(&[4, 6][..], true), (&[2, 3, 6], true), (&[2, 3, 6], false), (&[6], true)] {
            let run = |kept: Option<Arc<Mutex<Option<DeferredWeightGrad>>>>, takes: bool| {
                let (input, weight) = (numbers(input_size), numbers(&[5, 6]));
                let bias = has_bias.then(|| numbers(&[5]));
                let output = match kept.clone() {
                    None => input.linear(&weight, bias.as_ref()),
                    Some(kept) => {
                        let defer: DeferWeightGrad = Box::new(move |gradient| *kept.lock().unwrap() = Some(gradient));
                        linear(&input, &weight, bias.as_ref(), takes.then_some(defer)).unwrap()
                    }
                };
                output.square().sum(Kind::Float).backward();
                let deferred = kept.and_then(|kept| kept.lock().unwrap().take());
                let of_weight = deferred.map_or_else(|| weight.grad(), |gradient| gradient.rows(&(0..5)).unwrap());
                (output.detach(), input.grad(), of_weight, bias.map(|bias| bias.grad()))
            };
            let wanted = run(None, false);
            for takes in [false, true] {
                assert_eq!(
                    run(Some(Arc::default()), takes),
                    wanted,
                    "{input_size:?}, bias: {has_bias}, takes: {takes}"
                );
            }
        }
    }
}
