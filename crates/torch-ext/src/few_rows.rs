//! Products of a few bfloat16 rows with a large matrix on the CPU, as a text that is continued token by token needs them.
//!
//! Time is what it takes to read the matrix once. libtorch's own products are made for many rows. Sums are float32 and rounded
//! once, so results are within one rounding of bfloat16 of exact ones.

use crate::border::{Handle, adopt, check, handle};
use crate::error::Result;
use tch::Tensor;

unsafe extern "C" {
    fn te_few_rows_product(input: Handle, weight: Handle, bias: Handle, is_transposed: bool, out: *mut Handle) -> i32;
}

/// `input [.., in]` times `weight [out, in]`, plus `bias [out]`: `[.., out]`, as `torch.nn.functional.linear`. `None` where this is not
/// made for it: other dtypes than bfloat16, other devices than the CPU, more than four rows, shapes that do not fit, tensors that are
/// not contiguous, a gradient that is wanted, a processor without AVX2.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// let options = (Kind::BFloat16, Device::Cpu);
/// let (input, weight) = (Tensor::ones([1, 40], options), Tensor::ones([3, 40], options));
/// if let Some(output) = torch_ext::few_rows::linear(&input, &weight, None)? {
///     assert_eq!(output, Tensor::full([1, 3], 40.0, options));
/// }
/// assert!(torch_ext::few_rows::linear(&input.to_kind(Kind::Float), &weight, None)?.is_none());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// The memory does not suffice.
pub fn linear(input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Option<Tensor>> {
    product("few_rows::linear", input, weight, bias, false)
}

/// `input [.., in]` times `weight [in, out]`, plus `bias [out]`: `[.., out]`, as `torch.addmm`. `None` where [`linear`] gives none.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// let options = (Kind::BFloat16, Device::Cpu);
/// let (input, weight, bias) = (Tensor::ones([1, 40], options), Tensor::ones([40, 3], options), Tensor::ones([3], options));
/// if let Some(output) = torch_ext::few_rows::addmm(&bias, &input, &weight)? {
///     assert_eq!(output, Tensor::full([1, 3], 41.0, options));
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// The memory does not suffice.
pub fn addmm(bias: &Tensor, input: &Tensor, weight: &Tensor) -> Result<Option<Tensor>> {
    product("few_rows::addmm", input, weight, Some(bias), true)
}

fn product(
    operation: &'static str,
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    is_transposed: bool,
) -> Result<Option<Tensor>> {
    let bias = bias.map_or(std::ptr::null_mut(), handle);
    let mut out = std::ptr::null_mut();
    // SAFETY: the handles are borrowed from tensors that live through the call; a null bias is none.
    check(operation, unsafe { te_few_rows_product(handle(input), handle(weight), bias, is_transposed, &raw mut out) })?;
    // SAFETY: a call that succeeds has handed over a tensor, or left the null.
    Ok((!out.is_null()).then(|| unsafe { adopt(out) }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    fn drawn(shape: &[i64], phase: f64) -> Tensor {
        let count: i64 = shape.iter().product();
        let numbers = (Tensor::arange(count, (Kind::Double, Device::Cpu)) * 0.7 + phase).sin();
        numbers.to_kind(Kind::BFloat16).view(shape)
    }

    /// The sum of absolute values bounds what the order of summation changes; the result is rounded to eight bits.
    fn check_close(what: &str, found: &Tensor, exact: &Tensor, magnitude: &Tensor) {
        assert_eq!((found.size(), found.kind()), (exact.size(), Kind::BFloat16), "{what}");
        let bound = exact.abs() * 2f64.powi(-8) + magnitude * 1e-6;
        let excess = ((found.to_kind(Kind::Double) - exact).abs() - bound).max().double_value(&[]);
        assert!(excess <= 0.0, "{what}: {excess}");
    }

    #[test]
    fn products_are_exact_but_for_one_rounding() {
        if !std::arch::is_x86_feature_detected!("avx2") {
            return;
        }
        let sizes = [(1, 1), (3, 5), (15, 17), (16, 16), (33, 130), (64, 4100), (768, 70), (100, 9000)];
        for (num_in, num_out) in sizes {
            for num_rows in 1..=4 {
                let input = drawn(&[num_rows, num_in], 0.3);
                let (weight, bias) = (drawn(&[num_out, num_in], 0.9), drawn(&[num_out], 0.1));
                let double = |tensor: &Tensor| tensor.to_kind(Kind::Double);
                let exact = double(&input).matmul(&double(&weight).tr());
                let magnitude = double(&input).abs().matmul(&double(&weight).abs().tr()) + 1.0;
                let what = format!("{num_rows} rows, {num_in} to {num_out}");
                let found = linear(&input, &weight, None).unwrap().unwrap();
                check_close(&what, &found, &exact, &magnitude);
                let with_bias = exact + double(&bias);
                let found = linear(&input, &weight, Some(&bias)).unwrap().unwrap();
                check_close(&what, &found, &with_bias, &magnitude);
                let found = addmm(&bias, &input, &weight.tr().contiguous()).unwrap().unwrap();
                check_close(&what, &found, &with_bias, &magnitude);
            }
        }
    }

    #[test]
    fn what_it_is_not_made_for_is_left_to_libtorch() {
        let (input, weight) = (drawn(&[2, 8], 0.0), drawn(&[4, 8], 0.0));
        let none = |input: &Tensor, weight: &Tensor| linear(input, weight, None).unwrap().is_none();
        assert!(none(&input.to_kind(Kind::Float), &weight) && none(&input, &weight.to_kind(Kind::Float)));
        assert!(none(&drawn(&[5, 8], 0.0), &weight) && none(&drawn(&[2, 7], 0.0), &weight));
        assert!(none(&drawn(&[8, 2], 0.0).tr(), &weight) && none(&input, &drawn(&[8, 4], 0.0).tr()));
        assert!(none(&drawn(&[0, 8], 0.0), &weight) && none(&input, &drawn(&[8], 0.0)));
        let learned = weight.copy().set_requires_grad(true);
        assert!(none(&input, &learned));
        let within = tch::no_grad(|| linear(&input, &learned, None)).unwrap();
        assert_eq!(within.is_some(), linear(&input, &weight, None).unwrap().is_some());
    }
}
