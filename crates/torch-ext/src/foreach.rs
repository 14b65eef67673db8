//! Operations over lists of tensors: `torch._foreach_*`.
//!
//! On CUDA a whole list is a few kernels when its tensors share kind and shapes match pairwise; otherwise, and
//! on CPU, the operation runs tensor by tensor inside one call. Functions that end in `_` write into their first
//! list. Nothing here is recorded by autograd, so leaves that require gradients may be written to. An empty list is
//! nothing to do.

use crate::border::{Handle, check, handle};
use crate::error::Result;
use crate::kinds::check_lengths;
use crate::tensor_vec::{TensorList, TensorVec};
use tch::Tensor;

unsafe extern "C" {
    fn te_sum_of_squares(tensors: Handle, is_known: *mut bool, sum: *mut f64) -> i32;
    fn te_foreach_add_scalar(tensors: Handle, value: f64) -> i32;
    fn te_foreach_add(tensors: Handle, other: Handle, alpha: f64) -> i32;
    fn te_foreach_mul_scalar(tensors: Handle, value: f64) -> i32;
    fn te_foreach_mul_tensor(tensors: Handle, value: Handle) -> i32;
    fn te_foreach_mul(tensors: Handle, other: Handle) -> i32;
    fn te_foreach_div_scalar(tensors: Handle, value: f64) -> i32;
    fn te_foreach_div(tensors: Handle, other: Handle) -> i32;
    fn te_foreach_sqrt(tensors: Handle) -> i32;
    fn te_foreach_sign(tensors: Handle) -> i32;
    fn te_foreach_zero(tensors: Handle) -> i32;
    fn te_foreach_copy(tensors: Handle, source: Handle, non_blocking: bool) -> i32;
    fn te_foreach_lerp(tensors: Handle, end: Handle, weight: f64) -> i32;
    fn te_foreach_addcmul(tensors: Handle, left: Handle, right: Handle, value: f64) -> i32;
    fn te_foreach_addcdiv(tensors: Handle, left: Handle, right: Handle, value: f64) -> i32;
    fn te_foreach_norm(tensors: Handle, ord: f64, norms: Handle) -> i32;
    fn te_foreach_empty_like(tensors: Handle, empty: Handle) -> i32;
}

/// The sum of the squares of all elements, in double precision and in one pass: finite exactly where all elements are.
/// The same for any number of threads. `None` unless all tensors are float32 on the CPU and without gaps, and where the
/// processor lacks AVX2.
///
/// # Errors
/// None that is expected.
///
/// ```
/// use tch::Tensor;
/// use torch_ext::foreach::sum_of_squares;
/// let sum = sum_of_squares(&[&Tensor::from_slice(&[3f32]), &Tensor::from_slice(&[4f32, 0.0])])?;
/// assert!(sum.is_none_or(|sum| sum == 25.0));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn sum_of_squares(tensors: &dyn TensorList) -> Result<Option<f64>> {
    let tensors = tensors.lend();
    let (mut is_known, mut sum) = (false, 0.0);
    // SAFETY: the handles are borrowed from tensors that live through the call, and both places are ours.
    let status = unsafe { te_sum_of_squares(tensors.raw(), &raw mut is_known, &raw mut sum) };
    check("sum_of_squares", status)?;
    Ok(is_known.then_some(sum))
}

/// Runs one call over the border unless there is nothing to do.
fn one_list(operation: &'static str, tensors: &dyn TensorList, call: impl FnOnce(Handle) -> i32) -> Result<()> {
    let tensors = tensors.lend();
    if tensors.is_empty() { Ok(()) } else { check(operation, call(tensors.raw())) }
}

fn two_lists(
    operation: &'static str,
    tensors: &dyn TensorList,
    (name, other): (&str, &dyn TensorList),
    call: impl FnOnce(Handle, Handle) -> i32,
) -> Result<()> {
    let (tensors, other) = (tensors.lend(), other.lend());
    check_lengths(operation, ("tensors", tensors.len()), &[(name, other.len())])?;
    if tensors.is_empty() { Ok(()) } else { check(operation, call(tensors.raw(), other.raw())) }
}

/// `tensor += value` for each tensor.
///
/// ```
/// let x = tch::Tensor::from_slice(&[1f32, 2.0]);
/// torch_ext::foreach::add_scalar_(&[&x], 1.0)?;
/// assert_eq!(x, tch::Tensor::from_slice(&[2f32, 3.0]));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn add_scalar_(tensors: &dyn TensorList, value: f64) -> Result<()> {
    // SAFETY: the lists are borrowed for the call.
    one_list("foreach::add_scalar_", tensors, |list| unsafe { te_foreach_add_scalar(list, value) })
}

/// `tensor += alpha * other` pairwise.
///
/// ```
/// let (x, y) = (tch::Tensor::from_slice(&[1f32, 2.0]), tch::Tensor::from_slice(&[10f32, 20.0]));
/// torch_ext::foreach::add_(&[&x], &[&y], 0.5)?;
/// assert_eq!(x, tch::Tensor::from_slice(&[6f32, 12.0]));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn add_(tensors: &dyn TensorList, other: &dyn TensorList, alpha: f64) -> Result<()> {
    // SAFETY: the lists are borrowed for the call.
    two_lists("foreach::add_", tensors, ("other", other), |list, other| unsafe { te_foreach_add(list, other, alpha) })
}

/// `tensor *= value` for each tensor.
///
/// ```
/// let x = tch::Tensor::from_slice(&[1f32, 2.0]);
/// torch_ext::foreach::mul_scalar_(&[&x], 3.0)?;
/// assert_eq!(x, tch::Tensor::from_slice(&[3f32, 6.0]));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn mul_scalar_(tensors: &dyn TensorList, value: f64) -> Result<()> {
    // SAFETY: the lists are borrowed for the call.
    one_list("foreach::mul_scalar_", tensors, |list| unsafe { te_foreach_mul_scalar(list, value) })
}

/// `tensor *= value` for each tensor, with a value that lives on the device: clipping needs no host sync.
///
/// ```
/// let x = tch::Tensor::from_slice(&[1f32, 2.0]);
/// torch_ext::foreach::mul_tensor_(&[&x], &tch::Tensor::from(0.5f32))?;
/// assert_eq!(x, tch::Tensor::from_slice(&[0.5f32, 1.0]));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn mul_tensor_(tensors: &dyn TensorList, value: &Tensor) -> Result<()> {
    // SAFETY: the lists are borrowed for the call.
    one_list("foreach::mul_tensor_", tensors, |list| unsafe { te_foreach_mul_tensor(list, handle(value)) })
}

/// `tensor *= other` pairwise.
///
/// ```
/// let (x, y) = (tch::Tensor::from_slice(&[1f32, 2.0]), tch::Tensor::from_slice(&[10f32, 20.0]));
/// torch_ext::foreach::mul_(&[&x], &[&y])?;
/// assert_eq!(x, tch::Tensor::from_slice(&[10f32, 40.0]));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn mul_(tensors: &dyn TensorList, other: &dyn TensorList) -> Result<()> {
    // SAFETY: the lists are borrowed for the call.
    two_lists("foreach::mul_", tensors, ("other", other), |list, other| unsafe { te_foreach_mul(list, other) })
}

/// `tensor /= value` for each tensor.
///
/// ```
/// let x = tch::Tensor::from_slice(&[1f32, 2.0]);
/// torch_ext::foreach::div_scalar_(&[&x], 2.0)?;
/// assert_eq!(x, tch::Tensor::from_slice(&[0.5f32, 1.0]));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn div_scalar_(tensors: &dyn TensorList, value: f64) -> Result<()> {
    // SAFETY: the lists are borrowed for the call.
    one_list("foreach::div_scalar_", tensors, |list| unsafe { te_foreach_div_scalar(list, value) })
}

/// `tensor /= other` pairwise.
///
/// ```
/// let (x, y) = (tch::Tensor::from_slice(&[1f32, 2.0]), tch::Tensor::from_slice(&[2f32, 8.0]));
/// torch_ext::foreach::div_(&[&x], &[&y])?;
/// assert_eq!(x, tch::Tensor::from_slice(&[0.5f32, 0.25]));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn div_(tensors: &dyn TensorList, other: &dyn TensorList) -> Result<()> {
    // SAFETY: the lists are borrowed for the call.
    two_lists("foreach::div_", tensors, ("other", other), |list, other| unsafe { te_foreach_div(list, other) })
}

/// Each entry becomes its square root.
///
/// ```
/// let x = tch::Tensor::from_slice(&[4f32, 9.0]);
/// torch_ext::foreach::sqrt_(&[&x])?;
/// assert_eq!(x, tch::Tensor::from_slice(&[2f32, 3.0]));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn sqrt_(tensors: &dyn TensorList) -> Result<()> {
    // SAFETY: the lists are borrowed for the call.
    one_list("foreach::sqrt_", tensors, |list| unsafe { te_foreach_sqrt(list) })
}

/// Each entry becomes its sign: -1, 0 or 1.
///
/// ```
/// let x = tch::Tensor::from_slice(&[4f32, 0.0, -0.5]);
/// torch_ext::foreach::sign_(&[&x])?;
/// assert_eq!(x, tch::Tensor::from_slice(&[1f32, 0.0, -1.0]));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn sign_(tensors: &dyn TensorList) -> Result<()> {
    // SAFETY: the lists are borrowed for the call.
    one_list("foreach::sign_", tensors, |list| unsafe { te_foreach_sign(list) })
}

/// Fills each tensor with zeros.
///
/// ```
/// let x = tch::Tensor::from_slice(&[1f32, 2.0]);
/// torch_ext::foreach::zero_(&[&x])?;
/// assert_eq!(x, tch::Tensor::from_slice(&[0f32, 0.0]));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn zero_(tensors: &dyn TensorList) -> Result<()> {
    // SAFETY: the lists are borrowed for the call.
    one_list("foreach::zero_", tensors, |list| unsafe { te_foreach_zero(list) })
}

/// Copies pairwise, across kinds and devices; blocks until the host may read the copies.
///
/// ```
/// let (x, y) = (tch::Tensor::from_slice(&[0f32, 0.0]), tch::Tensor::from_slice(&[1f64, 2.0]));
/// torch_ext::foreach::copy_(&[&x], &[&y])?;
/// assert_eq!(x, tch::Tensor::from_slice(&[1f32, 2.0]));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn copy_(tensors: &dyn TensorList, source: &dyn TensorList) -> Result<()> {
    // SAFETY: the lists are borrowed for the call.
    two_lists("foreach::copy_", tensors, ("source", source), |list, source| unsafe {
        te_foreach_copy(list, source, false)
    })
}

/// `tensor += weight * (end - tensor)` pairwise: a moving average is `weight = 1 - decay`.
///
/// ```
/// let (x, y) = (tch::Tensor::from_slice(&[0f32, 2.0]), tch::Tensor::from_slice(&[4f32, 4.0]));
/// torch_ext::foreach::lerp_(&[&x], &[&y], 0.25)?;
/// assert_eq!(x, tch::Tensor::from_slice(&[1f32, 2.5]));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn lerp_(tensors: &dyn TensorList, end: &dyn TensorList, weight: f64) -> Result<()> {
    // SAFETY: the lists are borrowed for the call.
    two_lists("foreach::lerp_", tensors, ("end", end), |list, end| unsafe { te_foreach_lerp(list, end, weight) })
}

/// `tensor += value * left * right` entry by entry.
///
/// ```
/// let (x, y) = (tch::Tensor::from_slice(&[1f32]), tch::Tensor::from_slice(&[3f32]));
/// torch_ext::foreach::addcmul_(&[&x], &[&y], &[&y], 2.0)?;
/// assert_eq!(x, tch::Tensor::from_slice(&[19f32]));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn addcmul_(tensors: &dyn TensorList, left: &dyn TensorList, right: &dyn TensorList, value: f64) -> Result<()> {
    const OPERATION: &str = "foreach::addcmul_";
    let (tensors, left) = (tensors.lend(), left.lend());
    check_lengths(OPERATION, ("tensors", tensors.len()), &[("left", left.len())])?;
    // SAFETY: the lists are borrowed for the call.
    two_lists(OPERATION, &*tensors, ("right", right), |list, right| unsafe {
        te_foreach_addcmul(list, left.raw(), right, value)
    })
}

/// `tensor += value * numerator / denominator` entry by entry.
///
/// ```
/// let x = tch::Tensor::from_slice(&[1f32]);
/// let (six, three) = (tch::Tensor::from_slice(&[6f32]), tch::Tensor::from_slice(&[3f32]));
/// torch_ext::foreach::addcdiv_(&[&x], &[&six], &[&three], -1.0)?;
/// assert_eq!(x, tch::Tensor::from_slice(&[-1f32]));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn addcdiv_(
    tensors: &dyn TensorList,
    numerator: &dyn TensorList,
    denominator: &dyn TensorList,
    value: f64,
) -> Result<()> {
    const OPERATION: &str = "foreach::addcdiv_";
    let (tensors, numerator) = (tensors.lend(), numerator.lend());
    check_lengths(OPERATION, ("tensors", tensors.len()), &[("numerator", numerator.len())])?;
    // SAFETY: the lists are borrowed for the call.
    two_lists(OPERATION, &*tensors, ("denominator", denominator), |list, denominator| unsafe {
        te_foreach_addcdiv(list, numerator.raw(), denominator, value)
    })
}

/// The norm of each tensor over all its entries, as scalars of the tensors' kinds and devices.
///
/// `ord` is the exponent; `f64::INFINITY` gives the largest absolute value. The norm of the stacked results is the
/// norm of all entries together, which is how gradients are clipped.
///
/// ```
/// let x = tch::Tensor::from_slice(&[3f32, 4.0]);
/// assert_eq!(torch_ext::foreach::norm(&[&x], 2.0)?.get(0)?.double_value(&[]), 5.0);
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn norm(tensors: &dyn TensorList, ord: f64) -> Result<TensorVec> {
    let tensors = tensors.lend();
    let norms = TensorVec::with_capacity(tensors.len());
    // SAFETY: the lists are borrowed for the call; `norms` is ours alone.
    one_list("foreach::norm", &*tensors, |list| unsafe { te_foreach_norm(list, ord, norms.raw()) })?;
    Ok(norms)
}

/// New tensors, with nothing in them yet, of the shapes, kinds and devices of these.
///
/// ```
/// let x = tch::Tensor::from_slice(&[3f32, 4.0]);
/// assert_eq!(torch_ext::foreach::empty_like(&[&x])?.get(0)?.size(), [2]);
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn empty_like(tensors: &dyn TensorList) -> Result<TensorVec> {
    let tensors = tensors.lend();
    let empty = TensorVec::with_capacity(tensors.len());
    // SAFETY: the lists are borrowed for the call; `empty` is ours alone.
    one_list("foreach::empty_like", &*tensors, |list| unsafe { te_foreach_empty_like(list, empty.raw()) })?;
    Ok(empty)
}
