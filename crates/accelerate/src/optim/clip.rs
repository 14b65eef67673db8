//! Gradient clipping, as `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_`.

use super::batches::{Gradients, gradients};
use crate::error::{OptimError, Result};
use crate::group::{Group, ReduceOp};
use crate::nn::Param;
use std::ops::Deref;
use tch::{Device, Kind, Tensor};
use torch_ext::{foreach, scalar};

/// How [`clip_grad_norm_`] clips.
///
/// ```
/// let settings = accelerate::optim::ClipGradNorm { max_norm: 1.0, ..Default::default() };
/// assert_eq!((settings.norm_type, settings.error_if_nonfinite), (2.0, false));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClipGradNorm {
    /// The largest total norm that is left alone (default 1).
    pub max_norm: f64,
    /// Order of the norm; `f64::INFINITY` for the largest absolute value (default 2).
    pub norm_type: f64,
    /// Make a total norm that is infinite or not a number an error (default `false`: the gradients
    /// are then scaled by it and are of no use). Asking for it waits for the device.
    pub error_if_nonfinite: bool,
}

impl Default for ClipGradNorm {
    fn default() -> Self {
        Self { max_norm: 1.0, norm_type: 2.0, error_if_nonfinite: false }
    }
}

/// A norm of order 2.
impl From<f64> for ClipGradNorm {
    fn from(max_norm: f64) -> Self {
        Self { max_norm, ..Self::default() }
    }
}

/// The norm of all gradients before they were clipped: a 0-d float tensor, which may be left unused, as a tensor by itself may
/// not.
///
/// ```
/// use accelerate::optim::TotalNorm;
/// let norm = TotalNorm::from(accelerate::tch::Tensor::from(2.0f32));
/// assert_eq!((norm.double_value(&[]), f64::try_from(&*norm)?), (2.0, 2.0));
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct TotalNorm(Tensor);

impl From<Tensor> for TotalNorm {
    fn from(norm: Tensor) -> Self {
        Self(norm)
    }
}

impl From<TotalNorm> for Tensor {
    fn from(norm: TotalNorm) -> Self {
        norm.0
    }
}

impl Deref for TotalNorm {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.0
    }
}

/// Scales all gradients by one factor, so that their total norm is at most a largest one; returns the norm before, a scalar on
/// the device of the first gradient. `clipping` is the largest 2-norm, or a [`ClipGradNorm`] with all settings.
///
/// The norm is that of one vector made of all gradients stored on this process. With parameters
/// prepared by an accelerator use its `clip_grad_norm_`, which also undoes loss scaling.
///
/// ```
/// use accelerate::{nn::{Init, ParamStore}, optim::{ClipGradNorm, clip_grad_norm_}, tch::{Device, Tensor}};
///
/// let store = ParamStore::new(Device::Cpu);
/// let weight = store.root().param("weight", ([2], Init::Zeros))?;
/// (weight.get()? * Tensor::from_slice(&[3.0f32, 4.0])).sum(None).backward();
/// let norm = clip_grad_norm_(&store.trainable_parameters(), 1.0)?;
/// assert_eq!(norm.double_value(&[]), 5.0);
/// assert!((weight.get()?.grad().double_value(&[1]) - 0.8).abs() < 1e-6);
///
/// (weight.get()? * f64::NAN).sum(None).backward();
/// let strict = ClipGradNorm { error_if_nonfinite: true, ..Default::default() };
/// assert!(clip_grad_norm_(&store.trainable_parameters(), strict).is_err());
/// # Ok::<(), accelerate::Error>(())
/// ```
///
/// # Errors
/// The norm is not finite and `error_if_nonfinite` is set.
pub fn clip_grad_norm_(params: &[Param], clipping: impl Into<ClipGradNorm>) -> Result<TotalNorm> {
    let ClipGradNorm { max_norm, norm_type, error_if_nonfinite } = clipping.into();
    let grads = gradients(params)?;
    let total_norm = total_norm(&grads, norm_type)?;
    if error_if_nonfinite {
        let norm = total_norm.f_double_value(&[])?;
        if !norm.is_finite() {
            return Err(OptimError::NonFiniteNorm { norm_type, norm }.into());
        }
    }
    clip(&grads, max_norm, &total_norm)?;
    Ok(total_norm.into())
}

/// The norm of one vector made of all gradients, a scalar; zero if there are none.
///
/// ```
/// use accelerate::{nn::{Init, ParamStore}, optim::get_total_norm, tch::Device};
///
/// let store = ParamStore::new(Device::Cpu);
/// let weight = store.root().param("weight", ([3], Init::Zeros))?;
/// weight.get()?.sum(None).backward();
/// let params = store.trainable_parameters();
/// assert_eq!(get_total_norm(&params, 1.0)?.double_value(&[]), 3.0);
/// assert_eq!(get_total_norm(&params, f64::INFINITY)?.double_value(&[]), 1.0);
/// # Ok::<(), accelerate::Error>(())
/// ```
///
/// # Errors
/// libtorch's own.
pub fn get_total_norm(params: &[Param], norm_type: f64) -> Result<Tensor> {
    total_norm(&gradients(params)?, norm_type)
}

/// Scales all gradients by `max_norm / (total_norm + 1e-6)` if that is less than 1.
///
/// ```
/// use accelerate::{nn::{Init, ParamStore}, optim::clip_grads_with_norm_, tch::{Device, Tensor}};
///
/// let store = ParamStore::new(Device::Cpu);
/// let weight = store.root().param("weight", ([1], Init::Zeros))?;
/// (weight.get()? * 8.0).sum(None).backward();
/// clip_grads_with_norm_(&store.trainable_parameters(), 1.0, &Tensor::from(4.0f32))?;
/// assert!((weight.get()?.grad().double_value(&[0]) - 2.0).abs() < 1e-5);
/// # Ok::<(), accelerate::Error>(())
/// ```
///
/// # Errors
/// libtorch's own.
pub fn clip_grads_with_norm_(params: &[Param], max_norm: f64, total_norm: &Tensor) -> Result<()> {
    clip(&gradients(params)?, max_norm, total_norm)
}

/// Moves every element of every gradient into `-clip_value ..= clip_value`.
///
/// ```
/// use accelerate::{nn::{Init, ParamStore}, optim::clip_grad_value_, tch::Device};
///
/// let store = ParamStore::new(Device::Cpu);
/// let weight = store.root().param("weight", ([1], Init::Zeros))?;
/// (weight.get()? * -8.0).sum(None).backward();
/// clip_grad_value_(&store.trainable_parameters(), 0.5)?;
/// assert_eq!(weight.get()?.grad().double_value(&[0]), -0.5);
/// # Ok::<(), accelerate::Error>(())
/// ```
///
/// # Errors
/// libtorch's own.
pub fn clip_grad_value_(params: &[Param], clip_value: f64) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    for grads in gradients(params)? {
        for grad in grads.tensors.iter() {
            scalar::clamp_(&grad, -clip_value, clip_value)?;
        }
    }
    Ok(())
}

/// The norm of the norms, in the order and with the kernels PyTorch uses.
fn total_norm(grads: &[Gradients], norm_type: f64) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let Some(&Gradients { device, .. }) = grads.first() else {
        return Ok(Tensor::f_zeros([0i64; 0], (Kind::Float, Device::Cpu))?);
    };
    let mut norms = Vec::new();
    for list in grads {
        match &list.group {
            None => {
                for norm in foreach::norm(&list.tensors, norm_type)?.iter() {
                    norms.push(norm.f_to_device(device)?);
                }
            }
            Some(group) => norms.push(norm_over_ranks(list, group, norm_type)?.f_to_device(device)?),
        }
    }
    Ok(foreach::norm(&[&Tensor::f_stack(&norms, 0)?], norm_type)?.get(0)?)
}

/// The norm of gradients of which each rank of the group holds a shard. Collective.
fn norm_over_ranks(list: &Gradients, group: &Group, norm_type: f64) -> Result<Tensor> {
    // The largest of no elements is not defined, and a rank may hold no element of a parameter.
    let shards: Vec<Tensor> = list.tensors.iter().filter(|shard| shard.numel() > 0).collect();
    let own = if shards.is_empty() {
        Tensor::f_zeros([0i64; 0], (list.kind, list.device))?
    } else {
        let norms: Vec<Tensor> = foreach::norm(&shards.iter().collect::<Vec<_>>(), norm_type)?.iter().collect();
        foreach::norm(&[&Tensor::f_stack(&norms, 0)?], norm_type)?.get(0)?
    };
    if norm_type.is_infinite() {
        group.all_reduce(&own, ReduceOp::Max)?;
        return Ok(own);
    }
    let power = scalar::pow(&own, norm_type)?;
    group.all_reduce(&power, ReduceOp::Sum)?;
    Ok(scalar::pow(&power, norm_type.recip())?)
}

/// What gradients of norm `total_norm` are multiplied by so that their norm is at most `max_norm`.
pub(crate) fn clip_coefficient(max_norm: f64, total_norm: f64) -> f64 {
    // Written so that a norm that is not a number stays one.
    let coefficient = max_norm / (total_norm + 1e-6);
    if coefficient > 1.0 { 1.0 } else { coefficient }
}

fn clip(grads: &[Gradients], max_norm: f64, total_norm: &Tensor) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    // Multiplying by 1 where nothing is to be clipped is cheaper than asking the device.
    let factor = scalar::mul(&scalar::add(total_norm, 1e-6)?.f_reciprocal()?, max_norm)?;
    let factor = scalar::clamp_max(&factor, 1.0)?;
    for list in grads {
        foreach::mul_tensor_(&list.tensors, &factor.f_to_device(list.device)?)?;
    }
    Ok(())
}
