//! Backward passes and gradients, with errors and panics of callbacks kept whole.

use crate::border::{Handle, adopt, check, handle, handles};
use crate::error::{Error, Result};
use std::sync::{Mutex, PoisonError};
use tch::Tensor;

unsafe extern "C" {
    fn te_backward(
        outputs: *const Handle,
        num_outputs: usize,
        gradients: *const Handle,
        inputs: *const Handle,
        num_inputs: usize,
        retain_graph: bool,
        create_graph: bool,
    ) -> i32;
    fn te_grad(
        outputs: *const Handle,
        num_outputs: usize,
        gradients: *const Handle,
        inputs: *const Handle,
        num_inputs: usize,
        retain_graph: bool,
        create_graph: bool,
        allow_unused: bool,
        results: *mut Handle,
    ) -> i32;
    fn te_gradient_of(tensor: Handle, result: *mut Handle) -> i32;
    fn te_set_gradient(tensor: Handle, gradient: Handle) -> i32;
    fn te_is_grad_enabled() -> bool;
    fn te_is_leaf(tensor: Handle) -> bool;
    fn te_set_requires_grad(tensor: Handle, requires_grad: bool) -> i32;
    fn te_version(tensor: Handle, version: *mut i64) -> i32;
    fn te_warn_on_stream_mismatch(enabled: bool) -> bool;
}

/// Runs `body`, in which gradients may go from one stream of a device to leaves that were first used on another one without libtorch's
/// warning of it (`torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch`). It is off in the whole process meanwhile.
///
/// ```
/// assert_eq!(torch_ext::autograd::without_stream_mismatch_warning(|| 3), 3);
/// ```
pub fn without_stream_mismatch_warning<R>(body: impl FnOnce() -> R) -> R {
    /// How many are within, and what was set before the first of them.
    static WITHIN: Mutex<(usize, bool)> = Mutex::new((0, true));
    struct PutBack;
    impl Drop for PutBack {
        fn drop(&mut self) {
            let mut within = WITHIN.lock().unwrap_or_else(PoisonError::into_inner);
            within.0 -= 1;
            if within.0 == 0 {
                // SAFETY: sets a flag of libtorch's, one thread at a time.
                let _ = unsafe { te_warn_on_stream_mismatch(within.1) };
            }
        }
    }
    let put_back = {
        let mut within = WITHIN.lock().unwrap_or_else(PoisonError::into_inner);
        if within.0 == 0 {
            // SAFETY: as above.
            within.1 = unsafe { te_warn_on_stream_mismatch(false) };
        }
        within.0 += 1;
        PutBack
    };
    let result = body();
    drop(put_back);
    result
}

/// Does this thread record operations for a backward pass? False inside `tch::no_grad`.
///
/// ```
/// assert!(torch_ext::autograd::is_grad_enabled());
/// assert!(!tch::no_grad(torch_ext::autograd::is_grad_enabled));
/// ```
pub fn is_grad_enabled() -> bool {
    // SAFETY: reads a flag of this thread.
    unsafe { te_is_grad_enabled() }
}

/// What a closure that libtorch calls returns: any error will do, `?` works on this crate's and tch's.
pub type CallbackResult<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// How [`backward`] treats the graph.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackwardOptions {
    /// Keep the graph for another pass.
    pub retain_graph: bool,
    /// Record the pass itself, so that gradients can be differentiated again; keeps the graph as well.
    pub create_graph: bool,
}

/// Runs the backward pass from `outputs` and *adds* the gradients to the leaves' gradients.
///
/// `grad_outputs` holds one gradient per output, of the output's shape and kind; without it every output
/// must be a scalar, whose gradient is one.
///
/// An error that a hook, a custom function or a saved-tensor token returned comes back as an error whose
/// [`source`](std::error::Error::source) it is; a panic in one of them is raised again here. With tch's own
/// `Tensor::backward` both would be lost. It is the counterpart of `torch.autograd.backward`.
///
/// ```
/// use tch::Tensor;
/// use torch_ext::autograd;
/// let weight = Tensor::from(3f32).set_requires_grad(true);
/// let loss = &weight * &weight;
/// autograd::backward(&[&loss], None, Default::default())?;
/// assert_eq!(autograd::gradient_of(&weight)?.map(|gradient| gradient.double_value(&[])), Some(6.0));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn backward(outputs: &[&Tensor], grad_outputs: Option<&[&Tensor]>, options: BackwardOptions) -> Result<()> {
    check_gradient_count("backward", outputs, grad_outputs)?;
    let outputs = handles(outputs.iter().copied());
    let gradients = grad_outputs.map(|list| handles(list.iter().copied()));
    // SAFETY: all handles are borrowed from tensors that live through the call; null means "no gradients".
    let status = unsafe {
        te_backward(
            outputs.as_ptr(),
            outputs.len(),
            gradients.as_ref().map_or(std::ptr::null(), |list| list.as_ptr()),
            std::ptr::null(),
            0,
            options.retain_graph || options.create_graph,
            options.create_graph,
        )
    };
    check("backward", status)
}

/// How [`grad`] treats the graph.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GradOptions {
    /// Keep the graph for another pass.
    pub retain_graph: bool,
    /// Record the pass itself, so that its results can be differentiated; keeps the graph as well.
    pub create_graph: bool,
    /// Give `None` for an input that the outputs do not depend on, instead of an error.
    pub allow_unused: bool,
}

/// The gradients of the sum of `outputs` with respect to `inputs`, one per input; nothing is accumulated.
///
/// `grad_outputs` as in [`backward`]. The counterpart of `torch.autograd.grad`.
///
/// ```
/// use tch::Tensor;
/// use torch_ext::autograd::{self, GradOptions};
/// let x = Tensor::from(2f32).set_requires_grad(true);
/// let y = &x * &x * &x;
/// let gradients = autograd::grad(&[&y], &[&x], None, GradOptions::default())?;
/// assert_eq!(gradients[0].as_ref().map(|gradient| gradient.double_value(&[])), Some(12.0));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn grad(
    outputs: &[&Tensor],
    inputs: &[&Tensor],
    grad_outputs: Option<&[&Tensor]>,
    options: GradOptions,
) -> Result<Vec<Option<Tensor>>> {
    check_gradient_count("grad", outputs, grad_outputs)?;
    let outputs = handles(outputs.iter().copied());
    let inputs = handles(inputs.iter().copied());
    let gradients = grad_outputs.map(|list| handles(list.iter().copied()));
    let mut results = vec![std::ptr::null_mut(); inputs.len()];
    // SAFETY: handles live through the call; `results` has one place per input.
    let status = unsafe {
        te_grad(
            outputs.as_ptr(),
            outputs.len(),
            gradients.as_ref().map_or(std::ptr::null(), |list| list.as_ptr()),
            inputs.as_ptr(),
            inputs.len(),
            options.retain_graph || options.create_graph,
            options.create_graph,
            options.allow_unused,
            results.as_mut_ptr(),
        )
    };
    check("grad", status)?;
    // SAFETY: each result is null or a fresh handle, adopted once.
    Ok(results.into_iter().map(|raw| unsafe { adopt_optional(raw) }).collect())
}

/// The gradient accumulated in a tensor: `None` before the first backward pass and after it was cleared.
///
/// The result shares its memory with the tensor's gradient. (tch's `grad` gives an undefined tensor instead
/// of `None`.)
///
/// ```
/// let weight = tch::Tensor::from(3f32).set_requires_grad(true);
/// assert!(torch_ext::autograd::gradient_of(&weight)?.is_none());
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn gradient_of(tensor: &Tensor) -> Result<Option<Tensor>> {
    let mut raw = std::ptr::null_mut();
    // SAFETY: the handle is borrowed for the call; the result is null or fresh and adopted once.
    unsafe {
        check("gradient_of", te_gradient_of(handle(tensor), &mut raw))?;
        Ok(adopt_optional(raw))
    }
}

/// Puts a gradient into a tensor, sharing its memory, or takes the gradient out with `None`.
///
/// # Errors
/// The gradient's device, kind or shape differs from the tensor's.
///
/// ```
/// use torch_ext::autograd::{gradient_of, set_gradient};
/// let weight = tch::Tensor::from(3f32).set_requires_grad(true);
/// set_gradient(&weight, Some(&tch::Tensor::from(0.5f32)))?;
/// assert!(gradient_of(&weight)?.is_some());
/// set_gradient(&weight, None)?;
/// assert!(gradient_of(&weight)?.is_none());
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn set_gradient(tensor: &Tensor, gradient: Option<&Tensor>) -> Result<()> {
    let gradient = gradient.map_or(std::ptr::null_mut(), handle);
    // SAFETY: both handles are borrowed for the call.
    check("set_gradient", unsafe { te_set_gradient(handle(tensor), gradient) })
}

/// Whether a tensor is a leaf of the graph: made by the user, or outside every graph.
///
/// ```
/// let x = tch::Tensor::from(3f32).set_requires_grad(true);
/// assert!(torch_ext::autograd::is_leaf(&x));
/// assert!(!torch_ext::autograd::is_leaf(&(&x * 2.0)));
/// ```
pub fn is_leaf(tensor: &Tensor) -> bool {
    // SAFETY: the handle is borrowed for the call.
    unsafe { te_is_leaf(handle(tensor)) }
}

/// Makes a leaf record gradients, or stop recording them, in place. (tch's `set_requires_grad` gives a new handle.)
///
/// # Errors
/// The kind is not floating or complex, or recording is turned off on a tensor inside a graph.
///
/// ```
/// let weight = tch::Tensor::from(3f32);
/// torch_ext::autograd::set_requires_grad_(&weight, true)?;
/// assert!(weight.requires_grad());
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn set_requires_grad_(tensor: &Tensor, requires_grad: bool) -> Result<()> {
    // SAFETY: the handle is borrowed for the call.
    check("set_requires_grad_", unsafe { te_set_requires_grad(handle(tensor), requires_grad) })
}

/// How often a tensor, or any tensor over the same storage, was changed in place.
///
/// ```
/// let mut x = tch::Tensor::from(3f32);
/// let before = torch_ext::autograd::version(&x)?;
/// let _ = x.fill_(1.0);
/// assert!(torch_ext::autograd::version(&x)? > before);
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn version(tensor: &Tensor) -> Result<i64> {
    let mut version = 0;
    // SAFETY: the handle is borrowed for the call.
    check("version", unsafe { te_version(handle(tensor), &mut version) })?;
    Ok(version)
}

/// # Safety
/// As for `adopt`; null is allowed and means undefined.
pub(crate) unsafe fn adopt_optional(raw: Handle) -> Option<Tensor> {
    // SAFETY: passed on from the caller.
    (!raw.is_null()).then(|| unsafe { adopt(raw) })
}

fn check_gradient_count(operation: &'static str, outputs: &[&Tensor], grad_outputs: Option<&[&Tensor]>) -> Result<()> {
    match grad_outputs {
        Some(gradients) if gradients.len() != outputs.len() => Err(Error::invalid(
            operation,
            format!("{} gradients were given for {} outputs", gradients.len(), outputs.len()),
        )),
        _ => Ok(()),
    }
}
