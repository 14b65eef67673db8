//! Operations over lists of tensors: `torch._foreach_*`.
//!
//! On CUDA a whole list is a few kernels when its tensors share kind and shapes match pairwise; otherwise, and
//! on CPU, the operation runs tensor by tensor inside one call. Functions that end in `_` write into their first
//! list. Nothing here is recorded by autograd, so leaves that require gradients may be written to. An empty list is
//! nothing to do.

use crate::border::{Handle, adopt, check, handle};
use crate::error::Result;
use crate::kinds::{ListHandles, TensorList, check_lengths};
use tch::Tensor;

unsafe extern "C" {
    fn te_sum_of_squares(tensors: TensorList, is_known: *mut bool, sum: *mut f64) -> i32;
    fn te_foreach_add_scalar(tensors: TensorList, value: f64) -> i32;
    fn te_foreach_add(tensors: TensorList, other: TensorList, alpha: f64) -> i32;
    fn te_foreach_mul_scalar(tensors: TensorList, value: f64) -> i32;
    fn te_foreach_mul_tensor(tensors: TensorList, value: Handle) -> i32;
    fn te_foreach_mul(tensors: TensorList, other: TensorList) -> i32;
    fn te_foreach_div_scalar(tensors: TensorList, value: f64) -> i32;
    fn te_foreach_div(tensors: TensorList, other: TensorList) -> i32;
    fn te_foreach_sqrt(tensors: TensorList) -> i32;
    fn te_foreach_sign(tensors: TensorList) -> i32;
    fn te_foreach_zero(tensors: TensorList) -> i32;
    fn te_foreach_copy(tensors: TensorList, source: TensorList, non_blocking: bool) -> i32;
    fn te_foreach_lerp(tensors: TensorList, end: TensorList, weight: f64) -> i32;
    fn te_foreach_addcmul(tensors: TensorList, left: TensorList, right: TensorList, value: f64) -> i32;
    fn te_foreach_addcdiv(tensors: TensorList, left: TensorList, right: TensorList, value: f64) -> i32;
    fn te_foreach_norm(tensors: TensorList, ord: f64, results: *mut Handle) -> i32;
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
pub fn sum_of_squares(tensors: &[&Tensor]) -> Result<Option<f64>> {
    let handles = ListHandles::new(tensors);
    let (mut is_known, mut sum) = (false, 0.0);
    // SAFETY: the handles are borrowed from tensors that live through the call, and both places are ours.
    let status = unsafe { te_sum_of_squares(handles.list(), &raw mut is_known, &raw mut sum) };
    check("sum_of_squares", status)?;
    Ok(is_known.then_some(sum))
}

/// Runs one call over the border unless there is nothing to do.
fn one_list(operation: &'static str, tensors: &[&Tensor], call: impl FnOnce(TensorList) -> i32) -> Result<()> {
    if tensors.is_empty() {
        return Ok(());
    }
    let tensors = ListHandles::new(tensors);
    check(operation, call(tensors.list()))
}

fn two_lists(
    operation: &'static str,
    tensors: &[&Tensor],
    (name, other): (&str, &[&Tensor]),
    call: impl FnOnce(TensorList, TensorList) -> i32,
) -> Result<()> {
    check_lengths(operation, ("tensors", tensors.len()), &[(name, other.len())])?;
    let other = ListHandles::new(other);
    one_list(operation, tensors, |tensors| call(tensors, other.list()))
}

/// `tensor += value` for each tensor.
///
/// ```
/// let x = tch::Tensor::from_slice(&[1f32, 2.0]);
/// torch_ext::foreach::add_scalar_(&[&x], 1.0)?;
/// assert_eq!(x, tch::Tensor::from_slice(&[2f32, 3.0]));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn add_scalar_(tensors: &[&Tensor], value: f64) -> Result<()> {
    // SAFETY: the handles are borrowed for the call.
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
pub fn add_(tensors: &[&Tensor], other: &[&Tensor], alpha: f64) -> Result<()> {
    // SAFETY: the handles are borrowed for the call.
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
pub fn mul_scalar_(tensors: &[&Tensor], value: f64) -> Result<()> {
    // SAFETY: the handles are borrowed for the call.
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
pub fn mul_tensor_(tensors: &[&Tensor], value: &Tensor) -> Result<()> {
    // SAFETY: the handles are borrowed for the call.
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
pub fn mul_(tensors: &[&Tensor], other: &[&Tensor]) -> Result<()> {
    // SAFETY: the handles are borrowed for the call.
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
pub fn div_scalar_(tensors: &[&Tensor], value: f64) -> Result<()> {
    // SAFETY: the handles are borrowed for the call.
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
pub fn div_(tensors: &[&Tensor], other: &[&Tensor]) -> Result<()> {
    // SAFETY: the handles are borrowed for the call.
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
pub fn sqrt_(tensors: &[&Tensor]) -> Result<()> {
    // SAFETY: the handles are borrowed for the call.
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
pub fn sign_(tensors: &[&Tensor]) -> Result<()> {
    // SAFETY: the handles are borrowed for the call.
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
pub fn zero_(tensors: &[&Tensor]) -> Result<()> {
    // SAFETY: the handles are borrowed for the call.
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
pub fn copy_(tensors: &[&Tensor], source: &[&Tensor]) -> Result<()> {
    // SAFETY: the handles are borrowed for the call.
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
pub fn lerp_(tensors: &[&Tensor], end: &[&Tensor], weight: f64) -> Result<()> {
    // SAFETY: the handles are borrowed for the call.
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
pub fn addcmul_(tensors: &[&Tensor], left: &[&Tensor], right: &[&Tensor], value: f64) -> Result<()> {
    const OPERATION: &str = "foreach::addcmul_";
    check_lengths(OPERATION, ("tensors", tensors.len()), &[("left", left.len())])?;
    let left = ListHandles::new(left);
    // SAFETY: the handles are borrowed for the call.
    two_lists(OPERATION, tensors, ("right", right), |list, right| unsafe {
        te_foreach_addcmul(list, left.list(), right, value)
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
pub fn addcdiv_(tensors: &[&Tensor], numerator: &[&Tensor], denominator: &[&Tensor], value: f64) -> Result<()> {
    const OPERATION: &str = "foreach::addcdiv_";
    check_lengths(OPERATION, ("tensors", tensors.len()), &[("numerator", numerator.len())])?;
    let numerator = ListHandles::new(numerator);
    // SAFETY: the handles are borrowed for the call.
    two_lists(OPERATION, tensors, ("denominator", denominator), |list, denominator| unsafe {
        te_foreach_addcdiv(list, numerator.list(), denominator, value)
    })
}

/// The norm of each tensor over all its entries, as scalars of the tensors' kinds and devices.
///
/// `ord` is the exponent; `f64::INFINITY` gives the largest absolute value. The norm of the stacked results is the
/// norm of all entries together, which is how gradients are clipped.
///
/// ```
/// let x = tch::Tensor::from_slice(&[3f32, 4.0]);
/// assert_eq!(torch_ext::foreach::norm(&[&x], 2.0)?[0].double_value(&[]), 5.0);
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn norm(tensors: &[&Tensor], ord: f64) -> Result<Vec<Tensor>> {
    let mut results = vec![std::ptr::null_mut(); tensors.len()];
    // SAFETY: the handles are borrowed for the call; `results` has one place per tensor.
    one_list("foreach::norm", tensors, |list| unsafe { te_foreach_norm(list, ord, results.as_mut_ptr()) })?;
    // SAFETY: on success every place holds a fresh handle, adopted once.
    Ok(results.into_iter().map(|raw| unsafe { adopt(raw) }).collect())
}
