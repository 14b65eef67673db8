//! Custom autograd functions: a graph node whose forward and backward are Rust closures.

use crate::autograd::{CallbackResult, adopt_optional, is_grad_enabled};
use crate::border::{Handle, adopt, check, give, handle, handles, run_callback};
use crate::error::{Error, Result};
use crate::hooks::drop_without_unwinding;
use std::ffi::{c_char, c_void};
use std::fmt;
use tch::Tensor;

type BackwardCall = unsafe extern "C" fn(
    data: *mut c_void,
    node: *mut c_void,
    gradients: *const Handle,
    num_gradients: usize,
    results: *mut Handle,
    num_results: usize,
) -> i32;

unsafe extern "C" {
    fn te_function_begin(
        name: *const c_char,
        name_length: usize,
        inputs: *const Handle,
        num_inputs: usize,
        pending: *mut *mut c_void,
    ) -> i32;
    fn te_function_is_differentiated(pending: *mut c_void) -> bool;
    fn te_function_free(pending: *mut c_void);
    fn te_function_finish(
        pending: *mut c_void,
        outputs: *const Handle,
        num_outputs: usize,
        non_differentiable: *const Handle,
        num_non_differentiable: usize,
        to_save: *const Handle,
        num_to_save: usize,
        data: *mut c_void,
        call: BackwardCall,
        drop: unsafe extern "C" fn(*mut c_void),
        results: *mut Handle,
    ) -> i32;
    fn te_two_uses(tensor: Handle, results: *mut Handle) -> i32;
    fn te_function_num_saved(node: *mut c_void) -> usize;
    fn te_function_saved(node: *mut c_void, results: *mut Handle) -> i32;
    fn te_function_needs_input_grad(node: *mut c_void, index: usize) -> bool;
    fn te_function_keeps_graph() -> bool;
}

/// Computes `forward` outside the graph and makes its outputs the results of one node of the graph,
/// whose derivative is `backward`. The counterpart of `torch.autograd.Function.apply`.
///
/// * `name` appears in errors.
/// * `inputs` are the tensors the function differentiates with respect to, in the order in which `backward`
///   returns gradients. They need not require gradients.
/// * `forward` returns the outputs. Whatever else it needs it captures.
/// * `backward` gets one gradient per output, `None` where nothing flowed back (a zero that is not worth its
///   memory), and returns one per input, `None` for "no gradient". A gradient may be expandable-from: it
///   is summed down to the input's shape as for any other operation. It runs on the thread that called
///   `backward` for CPU tensors and on a thread of libtorch's for others. It is dropped, with all it captured, as
///   soon as its node has run without `retain_graph`, or with the graph.
///
/// A tensor that `backward` needs should be saved with [`ForwardContext::save_for_backward`]; an *output*
/// must be, because a closure that captures an output keeps its own graph alive for ever.
///
/// # Errors
/// `forward` failed. Errors of `backward` (its own, a wrong number of gradients, a gradient of a wrong shape) come
/// out of [`autograd::backward`](crate::autograd::backward) and name the function.
///
/// ```
/// use tch::Tensor;
/// use torch_ext::{autograd, function::apply_function};
/// let x = Tensor::from(3f32).set_requires_grad(true);
/// let y = apply_function(
///     "Square",
///     &[&x],
///     |context| {
///         context.save_for_backward(&[&x]);
///         Ok(vec![&x * &x])
///     },
///     |context, gradients| {
///         let x = &context.saved_tensors()?[0];
///         Ok(vec![gradients[0].as_ref().map(|gradient| gradient * x * 2.0)])
///     },
/// )?;
/// autograd::backward(&[&y[0]], None, Default::default())?;
/// assert_eq!(autograd::gradient_of(&x)?.map(|gradient| gradient.double_value(&[])), Some(6.0));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn apply_function(
    name: &str,
    inputs: &[&Tensor],
    forward: impl FnOnce(&mut ForwardContext) -> CallbackResult<Vec<Tensor>>,
    backward: impl FnMut(&BackwardContext<'_>, Vec<Option<Tensor>>) -> CallbackResult<Vec<Option<Tensor>>> + Send + 'static,
) -> Result<Vec<Tensor>> {
    const OPERATION: &str = "apply_function";
    let pending = Pending::begin(name, inputs)?;
    let mut context = ForwardContext {
        differentiated: pending.is_differentiated(),
        saved: Vec::new(),
        non_differentiable: Vec::new(),
        is_once_differentiable: false,
    };
    let outputs = {
        let _no_grad = tch::no_grad_guard();
        forward(&mut context)
    }
    .map_err(|source| Error::callback(OPERATION, Failure::wrap(name, "forward", source)))?;
    if let Some(index) = outputs.iter().position(|output| !output.defined()) {
        return Err(Error::invalid(OPERATION, format!("output {index} of `{name}` is undefined")));
    }
    let is_once_differentiable = context.is_once_differentiable;
    let backward = Backward { name: name.to_owned(), is_once_differentiable, closure: Box::new(backward) };
    pending.finish(&outputs, &context, backward)
}

/// Two tensors that share the memory of `tensor`, whose gradients become one before they reach it.
///
/// Where both come and the gradient of the first belongs to nobody else, that of the second is added to it in place, also
/// if it is sparse: libtorch needs memory for a third then. Meant for a large table with two uses, one of which touches few
/// rows. The two may be used again after a backward pass, in any number of graphs. In passes with `create_graph` nothing is
/// changed in place.
///
/// # Errors
/// `tensor` does not require a gradient.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use torch_ext::{autograd, function::two_uses};
/// let table = Tensor::ones([4, 2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let [whole, rows] = two_uses(&table)?;
/// let loss = whole.sum(Kind::Float) + Tensor::embedding(&rows, &Tensor::from(1i64), -1, false, true).sum(Kind::Float);
/// autograd::backward(&[&loss], None, Default::default())?;
/// let gradient = autograd::gradient_of(&table)?.ok_or("no gradient")?;
/// assert_eq!(Vec::<Vec<f32>>::try_from(&gradient)?, [[1.0, 1.0], [2.0, 2.0], [1.0, 1.0], [1.0, 1.0]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn two_uses(tensor: &Tensor) -> Result<[Tensor; 2]> {
    const OPERATION: &str = "two_uses";
    if !tensor.requires_grad() {
        return Err(Error::invalid(OPERATION, "a tensor that does not require a gradient"));
    }
    let mut results = [std::ptr::null_mut(); 2];
    // SAFETY: the tensor lives through the call; on success both places hold a fresh handle, adopted once.
    unsafe {
        check(OPERATION, te_two_uses(handle(tensor), results.as_mut_ptr()))?;
        Ok(results.map(|raw| adopt(raw)))
    }
}

/// What `forward` tells the graph.
///
/// ```
/// let x = tch::Tensor::from(2f32);
/// torch_ext::function::apply_function(
///     "Identity",
///     &[&x],
///     |context| {
///         assert!(!context.is_differentiated()); // x does not require a gradient
///         Ok(vec![x.shallow_clone()])
///     },
///     |_, gradients| Ok(gradients),
/// )?;
/// # Ok::<(), torch_ext::Error>(())
/// ```
#[derive(Debug)]
pub struct ForwardContext {
    differentiated: bool,
    saved: Vec<Tensor>,
    non_differentiable: Vec<Tensor>,
    is_once_differentiable: bool,
}

impl ForwardContext {
    /// Whether the backward closure can ever run: some input requires a gradient and gradients are recorded.
    pub fn is_differentiated(&self) -> bool {
        self.differentiated
    }

    /// Saves inputs, outputs or intermediate results for `backward`, in place of what was saved before.
    ///
    /// Saved-tensor hooks see them, and a change in place before the backward pass is an error there.
    pub fn save_for_backward(&mut self, tensors: &[&Tensor]) {
        self.saved = tensors.iter().map(|tensor| tensor.shallow_clone()).collect();
    }

    /// Says that what `backward` computes cannot be differentiated again (`torch.autograd.function.once_differentiable`): it changes tensors
    /// in place, or computes with what other processes have. A backward pass with `create_graph` that goes through it is an error then.
    ///
    /// ```
    /// use torch_ext::{autograd, function::apply_function};
    /// let x = tch::Tensor::from(3f32).set_requires_grad(true);
    /// let forward = |context: &mut torch_ext::function::ForwardContext| {
    ///     context.once_differentiable();
    ///     Ok(vec![&x * 2.0])
    /// };
    /// let y = apply_function("Double", &[&x], forward, |_, gradients| {
    ///     Ok(gradients.into_iter().map(|gradient| gradient.map(|gradient| gradient * 2.0)).collect())
    /// })?;
    /// let options = autograd::BackwardOptions { create_graph: true, ..Default::default() };
    /// let error = autograd::backward(&[&y[0]], None, options).unwrap_err();
    /// assert!(error.to_string().contains("`Double` can be differentiated once only"), "{error}");
    /// # Ok::<(), torch_ext::Error>(())
    /// ```
    pub fn once_differentiable(&mut self) {
        self.is_once_differentiable = true;
    }

    /// Says that an output does not depend on the inputs differentiably (an index, a mask).
    ///
    /// Outputs of integer and bool kinds are so by themselves.
    pub fn mark_non_differentiable(&mut self, output: &Tensor) {
        self.non_differentiable.push(output.shallow_clone());
    }
}

/// What `backward` can ask the graph; valid during its call.
///
/// ```
/// use torch_ext::{autograd, function::apply_function};
/// let x = tch::Tensor::from(2f32).set_requires_grad(true);
/// let factor = tch::Tensor::from(5f32);
/// let y = apply_function(
///     "Scale",
///     &[&x, &factor],
///     |_| Ok(vec![&x * &factor]),
///     |context, gradients| {
///         assert!(context.needs_input_grad(0) && !context.needs_input_grad(1));
///         Ok(vec![gradients[0].as_ref().map(|gradient| gradient * 5.0), None])
///     },
/// )?;
/// autograd::backward(&[&y[0]], None, Default::default())?;
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub struct BackwardContext<'a> {
    node: *mut c_void,
    /// The node is only valid during the call that lent it.
    lent: std::marker::PhantomData<&'a ()>,
}

impl BackwardContext<'_> {
    /// What `forward` saved, in the same order.
    ///
    /// # Errors
    /// A tensor was changed in place since, or a saved-tensor token could not be unpacked.
    pub fn saved_tensors(&self) -> Result<Vec<Tensor>> {
        // SAFETY: the node outlives the context; `results` has one place per saved tensor, each filled with a
        // fresh handle on success and adopted once.
        unsafe {
            let mut results = vec![std::ptr::null_mut(); te_function_num_saved(self.node)];
            check("saved_tensors", te_function_saved(self.node, results.as_mut_ptr()))?;
            Ok(results.into_iter().map(|raw| adopt(raw)).collect())
        }
    }

    /// Whether this pass may be made again (`retain_graph`): then what `backward` has computed with has to stay as it is.
    pub fn keeps_graph(&self) -> bool {
        // SAFETY: no arguments; a context exists only within a backward pass, to which the answer belongs.
        unsafe { te_function_keeps_graph() }
    }

    /// Whether the gradient of an input is used by anyone; others may be `None`.
    pub fn needs_input_grad(&self, input: usize) -> bool {
        // SAFETY: the node outlives the context, and the shim checks the index.
        unsafe { te_function_needs_input_grad(self.node, input) }
    }
}

impl fmt::Debug for BackwardContext<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BackwardContext").finish_non_exhaustive()
    }
}

/// Owns a `PendingFunction` of the shim.
struct Pending(*mut c_void);

impl Drop for Pending {
    fn drop(&mut self) {
        // SAFETY: made by `te_function_begin`, freed once.
        unsafe { te_function_free(self.0) }
    }
}

impl Pending {
    fn begin(name: &str, inputs: &[&Tensor]) -> Result<Self> {
        let inputs = handles(inputs.iter().copied());
        let mut pending = std::ptr::null_mut();
        // SAFETY: name and handles live through the call; the name is copied.
        let status =
            unsafe { te_function_begin(name.as_ptr().cast(), name.len(), inputs.as_ptr(), inputs.len(), &mut pending) };
        check("apply_function", status)?;
        Ok(Self(pending))
    }

    fn is_differentiated(&self) -> bool {
        // SAFETY: the pointer is valid while `self` lives.
        unsafe { te_function_is_differentiated(self.0) }
    }

    fn finish(self, outputs: &[Tensor], context: &ForwardContext, backward: Backward) -> Result<Vec<Tensor>> {
        let outputs = handles(outputs);
        let non_differentiable = handles(&context.non_differentiable);
        let saved = handles(&context.saved);
        let data = Box::into_raw(Box::new(backward)).cast();
        let mut results = vec![std::ptr::null_mut(); outputs.len()];
        // SAFETY: all handles live through the call; the shim takes `data` over in every case and drops it once;
        // `results` has one place per output.
        let status = unsafe {
            te_function_finish(
                self.0,
                outputs.as_ptr(),
                outputs.len(),
                non_differentiable.as_ptr(),
                non_differentiable.len(),
                saved.as_ptr(),
                saved.len(),
                data,
                call_backward,
                drop_backward,
                results.as_mut_ptr(),
            )
        };
        check("apply_function", status)?;
        // SAFETY: on success every place holds a fresh handle, adopted once.
        Ok(results.into_iter().map(|raw| unsafe { adopt(raw) }).collect())
    }
}

type BackwardClosure =
    dyn FnMut(&BackwardContext<'_>, Vec<Option<Tensor>>) -> CallbackResult<Vec<Option<Tensor>>> + Send;

struct Backward {
    name: String,
    is_once_differentiable: bool,
    closure: Box<BackwardClosure>,
}

unsafe extern "C" fn call_backward(
    data: *mut c_void,
    node: *mut c_void,
    gradients: *const Handle,
    num_gradients: usize,
    results: *mut Handle,
    num_results: usize,
) -> i32 {
    run_callback(|| {
        // SAFETY: C++ owns the closure and holds the node's lock, so nobody else runs it; the gradients are handed
        // over, each one adopted here once.
        let (backward, gradients) = unsafe {
            let list = if num_gradients == 0 { &[][..] } else { std::slice::from_raw_parts(gradients, num_gradients) };
            let gradients: Vec<_> = list.iter().map(|&raw| adopt_optional(raw)).collect();
            (&mut *data.cast::<Backward>(), gradients)
        };
        // libtorch records gradients in a backward pass with `create_graph` only.
        if backward.is_once_differentiable && is_grad_enabled() {
            return Err(format!(
                "`{}` can be differentiated once only, and this backward pass records its gradients (create_graph): gradients of them \
                 would be wrong",
                backward.name
            )
            .into());
        }
        let context = BackwardContext { node, lent: std::marker::PhantomData };
        let returned = (backward.closure)(&context, gradients)
            .map_err(|source| Failure::wrap(&backward.name, "backward", source))?;
        if returned.len() != num_results {
            return Err(format!(
                "the backward of the custom function `{}` returned {} gradients for {num_results} inputs; \
                 it must return one per input, None where there is no gradient",
                backward.name,
                returned.len(),
            )
            .into());
        }
        for (index, gradient) in returned.into_iter().enumerate() {
            if let Some(gradient) = gradient {
                // SAFETY: `results` has `num_results` places; the shim takes the tensors over.
                unsafe { *results.add(index) = give(gradient) };
            }
        }
        Ok(())
    })
}

unsafe extern "C" fn drop_backward(data: *mut c_void) {
    // SAFETY: the pointer came from `Box::into_raw` of this type, and C++ calls this once.
    drop_without_unwinding(|| drop(unsafe { Box::from_raw(data.cast::<Backward>()) }));
}

/// An error of a closure, with the function's name in front.
#[derive(Debug)]
struct Failure {
    message: String,
    source: Box<dyn std::error::Error + Send + Sync>,
}

impl Failure {
    fn wrap(
        name: &str,
        pass: &str,
        source: Box<dyn std::error::Error + Send + Sync>,
    ) -> Box<dyn std::error::Error + Send + Sync> {
        let message = format!("the {pass} of the custom function `{name}` failed: {source}");
        Box::new(Self { message, source })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(self.source.as_ref())
    }
}
