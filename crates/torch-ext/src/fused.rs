//! Fused optimizer steps: one kernel over all parameters.
//!
//! All lists hold one tensor per parameter. Within one call the parameters must share device and kind. The
//! updates happen in place and are not recorded by autograd. Each function is one call over the border.
//!
//! `grad_scale` is the loss scale that gradients are divided by on the fly; with `found_inf` equal to one the whole
//! step is skipped, without the host having to look. Both are what [`amp`](crate::amp) computes with, single
//! values on the parameters' device. Python subtracts `found_inf` from the steps afterwards; so must a caller here
//! ([`foreach::add_`](crate::foreach::add_)).

use crate::border::{Handle, check, handle};
use crate::error::Result;
use crate::kinds::check_lengths;
use crate::tensor_vec::{NO_TENSORS, TensorList};
use tch::Tensor;

unsafe extern "C" {
    fn te_fused_adam(
        decoupled: bool,
        params: Handle,
        grads: Handle,
        exp_avgs: Handle,
        exp_avg_sqs: Handle,
        max_exp_avg_sqs: Handle,
        state_steps: Handle,
        lr: f64,
        beta1: f64,
        beta2: f64,
        weight_decay: f64,
        eps: f64,
        amsgrad: bool,
        maximize: bool,
        grad_factor: f64,
        grad_scale: Handle,
        found_inf: Handle,
        demote_averages: bool,
    ) -> i32;
    fn te_fused_sgd(
        params: Handle,
        grads: Handle,
        momentum_buffers: Handle,
        weight_decay: f64,
        momentum: f64,
        lr: f64,
        dampening: f64,
        nesterov: bool,
        maximize: bool,
        is_first_step: bool,
        grad_scale: Handle,
        found_inf: Handle,
    ) -> i32;
    fn te_fused_adagrad(
        params: Handle,
        grads: Handle,
        state_sums: Handle,
        state_steps: Handle,
        lr: f64,
        lr_decay: f64,
        weight_decay: f64,
        eps: f64,
        maximize: bool,
        grad_scale: Handle,
        found_inf: Handle,
    ) -> i32;
}

/// Numbers of Adam and AdamW, named as in `torch.optim`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FusedAdam {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the mean of gradients; Python's default is 0.9.
    pub beta1: f64,
    /// Decay of the mean of squared gradients; Python's default is 0.999.
    pub beta2: f64,
    /// Weight decay: added to the gradient by Adam, taken off the parameter by AdamW.
    pub weight_decay: f64,
    /// Added to the denominator; Python's default is 1e-8.
    pub eps: f64,
    /// Use the largest mean of squared gradients seen; needs `max_exp_avg_sqs`.
    pub amsgrad: bool,
    /// Go up the gradient instead of down.
    pub maximize: bool,
}

/// Tensors of Adam and AdamW.
#[derive(Clone, Copy, Debug)]
pub struct AdamTensors<'a> {
    /// Parameters, updated.
    pub params: &'a dyn TensorList,
    /// Their gradients; divided in place by `grad_scale` when that is given.
    pub grads: &'a dyn TensorList,
    /// Means of gradients, updated.
    pub exp_avgs: &'a dyn TensorList,
    /// Means of squared gradients, updated.
    pub exp_avg_sqs: &'a dyn TensorList,
    /// Largest means of squared gradients, updated; empty without `amsgrad`.
    pub max_exp_avg_sqs: &'a dyn TensorList,
    /// Steps taken including this one, one float scalar per parameter. The caller adds one *before* the call.
    pub state_steps: &'a dyn TensorList,
    /// Multiplies the gradients on the way into the step; in memory they stay as they are.
    pub grad_factor: Option<f64>,
    /// Loss scale to divide the gradients by.
    pub grad_scale: Option<&'a Tensor>,
    /// One if the step is to be skipped, else zero.
    pub found_inf: Option<&'a Tensor>,
    /// A disk, or another core, reads the averages next: the processor is told to move them to the cache that all cores share
    /// (Intel's CLDEMOTE). A hint, which changes no value.
    pub demote_averages: bool,
}

impl Default for AdamTensors<'_> {
    fn default() -> Self {
        Self {
            params: NO_TENSORS,
            grads: NO_TENSORS,
            exp_avgs: NO_TENSORS,
            exp_avg_sqs: NO_TENSORS,
            max_exp_avg_sqs: NO_TENSORS,
            state_steps: NO_TENSORS,
            grad_factor: None,
            grad_scale: None,
            found_inf: None,
            demote_averages: false,
        }
    }
}

/// One AdamW step (Loshchilov & Hutter 2019: decoupled weight decay), `torch._fused_adamw_`.
///
/// # Errors
/// Lists of unequal length; tensors of mixed device, kind or shape.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use torch_ext::fused::{AdamTensors, FusedAdam, fused_adamw_};
/// let float = (Kind::Float, Device::Cpu);
/// let (param, grad) = (Tensor::ones([3], float), Tensor::ones([3], float));
/// let (mean, square, step) = (grad.zeros_like(), grad.zeros_like(), Tensor::ones([0i64; 0], float));
/// let config = FusedAdam {
///     lr: 0.1, beta1: 0.9, beta2: 0.999, weight_decay: 0.0, eps: 1e-8, amsgrad: false, maximize: false,
/// };
/// fused_adamw_(&config, &AdamTensors {
///     params: &[&param], grads: &[&grad], exp_avgs: &[&mean], exp_avg_sqs: &[&square], state_steps: &[&step],
///     ..AdamTensors::default()
/// })?;
/// assert!((param.double_value(&[0]) - 0.9).abs() < 1e-6);
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn fused_adamw_(config: &FusedAdam, tensors: &AdamTensors<'_>) -> Result<()> {
    fused_adam("fused_adamw_", true, config, tensors)
}

/// One Adam step (Kingma & Ba 2015; weight decay is added to the gradient), `torch._fused_adam_`.
///
/// # Errors
/// As for [`fused_adamw_`], where there also is an example.
///
/// ```
/// use torch_ext::fused::{AdamTensors, FusedAdam, fused_adam_};
/// let config = FusedAdam {
///     lr: 0.1, beta1: 0.9, beta2: 0.999, weight_decay: 0.0, eps: 1e-8, amsgrad: false, maximize: false,
/// };
/// fused_adam_(&config, &AdamTensors::default())?; // no parameters: nothing to do
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn fused_adam_(config: &FusedAdam, tensors: &AdamTensors<'_>) -> Result<()> {
    fused_adam("fused_adam_", false, config, tensors)
}

fn fused_adam(operation: &'static str, decoupled: bool, config: &FusedAdam, tensors: &AdamTensors<'_>) -> Result<()> {
    let [params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps] = [
        tensors.params,
        tensors.grads,
        tensors.exp_avgs,
        tensors.exp_avg_sqs,
        tensors.max_exp_avg_sqs,
        tensors.state_steps,
    ]
    .map(TensorList::lend);
    let count = params.len();
    check_lengths(
        operation,
        ("params", count),
        &[
            ("grads", grads.len()),
            ("exp_avgs", exp_avgs.len()),
            ("exp_avg_sqs", exp_avg_sqs.len()),
            ("state_steps", state_steps.len()),
        ],
    )?;
    check_lengths(
        operation,
        if config.amsgrad { ("params", count) } else { ("max_exp_avg_sqs without amsgrad", 0) },
        &[("max_exp_avg_sqs", max_exp_avg_sqs.len())],
    )?;
    if count == 0 {
        return Ok(());
    }
    // SAFETY: the lists, and the tensors apart from them, live through the call.
    let status = unsafe {
        te_fused_adam(
            decoupled,
            params.raw(),
            grads.raw(),
            exp_avgs.raw(),
            exp_avg_sqs.raw(),
            max_exp_avg_sqs.raw(),
            state_steps.raw(),
            config.lr,
            config.beta1,
            config.beta2,
            config.weight_decay,
            config.eps,
            config.amsgrad,
            config.maximize,
            tensors.grad_factor.unwrap_or(1.0),
            optional(tensors.grad_scale),
            optional(tensors.found_inf),
            tensors.demote_averages,
        )
    };
    check(operation, status)
}

/// Numbers of SGD, named as in `torch.optim`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FusedSgd {
    /// Learning rate.
    pub lr: f64,
    /// Momentum factor; Python's default is 0.
    pub momentum: f64,
    /// Part of the gradient that momentum does not take up; Python's default is 0.
    pub dampening: f64,
    /// Weight decay, added to the gradient.
    pub weight_decay: f64,
    /// Nesterov momentum.
    pub nesterov: bool,
    /// Go up the gradient instead of down.
    pub maximize: bool,
}

/// Tensors of SGD.
#[derive(Clone, Copy, Debug)]
pub struct SgdTensors<'a> {
    /// Parameters, updated.
    pub params: &'a dyn TensorList,
    /// Their gradients; divided in place by `grad_scale` when that is given.
    pub grads: &'a dyn TensorList,
    /// Momentum, updated; empty without momentum.
    pub momentum_buffers: &'a dyn TensorList,
    /// The momentum buffers hold nothing yet (they may be uninitialised): they become the gradients.
    pub is_first_step: bool,
    /// Loss scale to divide the gradients by.
    pub grad_scale: Option<&'a Tensor>,
    /// One if the step is to be skipped, else zero.
    pub found_inf: Option<&'a Tensor>,
}

impl Default for SgdTensors<'_> {
    fn default() -> Self {
        Self {
            params: NO_TENSORS,
            grads: NO_TENSORS,
            momentum_buffers: NO_TENSORS,
            is_first_step: false,
            grad_scale: None,
            found_inf: None,
        }
    }
}

/// One step of stochastic gradient descent, `torch._fused_sgd_`.
///
/// # Errors
/// Lists of unequal length, momentum without buffers; tensors of mixed device, kind or shape.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use torch_ext::fused::{FusedSgd, SgdTensors, fused_sgd_};
/// let (param, grad) = (Tensor::ones([3], (Kind::Float, Device::Cpu)), Tensor::ones([3], (Kind::Float, Device::Cpu)));
/// let config = FusedSgd {
///     lr: 0.5, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false,
/// };
/// fused_sgd_(&config, &SgdTensors { params: &[&param], grads: &[&grad], ..SgdTensors::default() })?;
/// assert_eq!(param.double_value(&[0]), 0.5);
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn fused_sgd_(config: &FusedSgd, tensors: &SgdTensors<'_>) -> Result<()> {
    const OPERATION: &str = "fused_sgd_";
    let [params, grads, momentum_buffers] =
        [tensors.params, tensors.grads, tensors.momentum_buffers].map(TensorList::lend);
    let count = params.len();
    check_lengths(OPERATION, ("params", count), &[("grads", grads.len())])?;
    check_lengths(
        OPERATION,
        if config.momentum == 0.0 { ("momentum_buffers without momentum", 0) } else { ("params", count) },
        &[("momentum_buffers", momentum_buffers.len())],
    )?;
    if count == 0 {
        return Ok(());
    }
    // SAFETY: the lists, and the tensors apart from them, live through the call.
    let status = unsafe {
        te_fused_sgd(
            params.raw(),
            grads.raw(),
            momentum_buffers.raw(),
            config.weight_decay,
            config.momentum,
            config.lr,
            config.dampening,
            config.nesterov,
            config.maximize,
            tensors.is_first_step,
            optional(tensors.grad_scale),
            optional(tensors.found_inf),
        )
    };
    check(OPERATION, status)
}

/// Numbers of Adagrad, named as in `torch.optim`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FusedAdagrad {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the learning rate with the steps; Python's default is 0.
    pub lr_decay: f64,
    /// Weight decay, added to the gradient.
    pub weight_decay: f64,
    /// Added to the denominator; Python's default is 1e-10.
    pub eps: f64,
    /// Go up the gradient instead of down.
    pub maximize: bool,
}

/// Tensors of Adagrad.
#[derive(Clone, Copy, Debug)]
pub struct AdagradTensors<'a> {
    /// Parameters, updated.
    pub params: &'a dyn TensorList,
    /// Their gradients; divided in place by `grad_scale` when that is given.
    pub grads: &'a dyn TensorList,
    /// Sums of squared gradients, updated.
    pub state_sums: &'a dyn TensorList,
    /// Steps taken including this one, one float scalar per parameter. The caller adds one *before* the call.
    pub state_steps: &'a dyn TensorList,
    /// Loss scale to divide the gradients by.
    pub grad_scale: Option<&'a Tensor>,
    /// One if the step is to be skipped, else zero.
    pub found_inf: Option<&'a Tensor>,
}

impl Default for AdagradTensors<'_> {
    fn default() -> Self {
        Self {
            params: NO_TENSORS,
            grads: NO_TENSORS,
            state_sums: NO_TENSORS,
            state_steps: NO_TENSORS,
            grad_scale: None,
            found_inf: None,
        }
    }
}

/// One Adagrad step (Duchi et al. 2011), `torch._fused_adagrad_`.
///
/// # Errors
/// Lists of unequal length; tensors of mixed device, kind or shape.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use torch_ext::fused::{AdagradTensors, FusedAdagrad, fused_adagrad_};
/// let float = (Kind::Float, Device::Cpu);
/// let (param, grad) = (Tensor::ones([3], float), Tensor::ones([3], float));
/// let (sum, step) = (grad.zeros_like(), Tensor::ones([0i64; 0], float));
/// let config = FusedAdagrad { lr: 0.5, lr_decay: 0.0, weight_decay: 0.0, eps: 1e-10, maximize: false };
/// fused_adagrad_(&config, &AdagradTensors {
///     params: &[&param], grads: &[&grad], state_sums: &[&sum], state_steps: &[&step],
///     ..AdagradTensors::default()
/// })?;
/// assert!((param.double_value(&[0]) - 0.5).abs() < 1e-6);
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn fused_adagrad_(config: &FusedAdagrad, tensors: &AdagradTensors<'_>) -> Result<()> {
    const OPERATION: &str = "fused_adagrad_";
    let [params, grads, state_sums, state_steps] =
        [tensors.params, tensors.grads, tensors.state_sums, tensors.state_steps].map(TensorList::lend);
    check_lengths(
        OPERATION,
        ("params", params.len()),
        &[("grads", grads.len()), ("state_sums", state_sums.len()), ("state_steps", state_steps.len())],
    )?;
    if params.is_empty() {
        return Ok(());
    }
    // SAFETY: the lists, and the tensors apart from them, live through the call.
    let status = unsafe {
        te_fused_adagrad(
            params.raw(),
            grads.raw(),
            state_sums.raw(),
            state_steps.raw(),
            config.lr,
            config.lr_decay,
            config.weight_decay,
            config.eps,
            config.maximize,
            optional(tensors.grad_scale),
            optional(tensors.found_inf),
        )
    };
    check(OPERATION, status)
}

fn optional(tensor: Option<&Tensor>) -> Handle {
    tensor.map_or(std::ptr::null_mut(), handle)
}
