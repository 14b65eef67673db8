//! Batch normalisation over the batches of several processes.

use super::functional::{Affine, BatchStatistics, get};
use crate::error::Result;
use crate::group::{Group, ReduceOp};
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};
use tch::{Kind, TchError, Tensor};
use torch_ext::autograd::{CallbackResult, is_grad_enabled};
use torch_ext::{apply_function, scalar};

/// The processes whose batches a layer normalises as one while it trains, shared by all clones of the layer. None until the layer is
/// converted.
#[derive(Clone, Default)]
pub(super) struct SyncGroup(Arc<RwLock<Option<Group>>>);

impl SyncGroup {
    // Replaced as a whole, so a panic elsewhere does not spoil it.
    pub(super) fn get(&self) -> Option<Group> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set(&self, group: Group) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Some(group);
    }
}

impl fmt::Debug for SyncGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.get() {
            Some(group) => write!(f, "SyncGroup({} processes)", group.world_size()),
            None => f.write_str("SyncGroup(none)"),
        }
    }
}

/// Mean and variance of each channel over all batches, float64.
struct Moments {
    mean: Tensor,
    /// Divided by the count, not by one less.
    variance: Tensor,
    /// Values of one channel in all batches.
    count: f64,
}

/// `torch.nn.SyncBatchNorm` in training mode: `[batch, num_features, ..]` to the same shape. A process may have an empty batch. `None`:
/// all batches together have one value per channel, or none. The inner error is libtorch's, for the layer to explain. Collective, and
/// so is its backward pass.
///
/// Each process sends mean, variance and count of its own batch, so one message is enough, and a large mean takes no digits from the
/// variance. How they are put together: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
/// variances" (1979). The gradient: Ioffe, Szegedy, arXiv 1502.03167, section 3, with sums over all batches.
pub(super) fn sync_batch_norm(
    group: &Group,
    input: &Tensor,
    affine: Affine<'_>,
    statistics: &BatchStatistics<'_>,
    eps: f64,
) -> Result<Option<Result<Tensor, TchError>>> {
    let moments = moments(group, input)?;
    if moments.count <= 1.0 {
        return Ok(None);
    }
    update_running(statistics, &moments)?;
    let kind = computed_kind(input)?;
    let [mean, variance] = [&moments.mean, &moments.variance].map(|moment| moment.f_to_kind(kind));
    let (mean, variance) = (mean?, variance?);
    let inverse_std = scalar::add(&moments.variance, eps)?.f_rsqrt()?.f_to_kind(kind)?;
    let (weight, bias) = (get(affine.0)?, get(affine.1)?);
    let normalise =
        || input.f_batch_norm(weight.as_ref(), bias.as_ref(), Some(&mean), Some(&variance), false, 0.0, eps, true);
    let inputs: Vec<&Tensor> = std::iter::once(input).chain(&weight).chain(&bias).collect();
    if !is_grad_enabled() || !inputs.iter().any(|input| input.requires_grad()) {
        return Ok(Some(normalise()));
    }
    let pass = BackwardPass {
        group: group.clone(),
        mean: mean.shallow_clone(),
        inverse_std,
        count: moments.count,
        has_weight: weight.is_some(),
        num_inputs: inputs.len(),
    };
    let outputs = apply_function(
        "SyncBatchNorm",
        &inputs,
        |context| {
            context.once_differentiable();
            let saved: Vec<&Tensor> = std::iter::once(input).chain(&weight).collect();
            context.save_for_backward(&saved);
            Ok(vec![normalise()?])
        },
        move |context, gradients| pass.gradients(&context.saved_tensors()?, gradients),
    )?;
    Ok(Some(Ok(outputs.into_iter().next().unwrap_or_else(Tensor::new))))
}

/// What the backward pass of a layer needs besides its input and its weight.
struct BackwardPass {
    group: Group,
    mean: Tensor,
    inverse_std: Tensor,
    count: f64,
    has_weight: bool,
    /// The input, the weight and the bias, as far as there are any.
    num_inputs: usize,
}

impl BackwardPass {
    /// Collective.
    fn gradients(&self, saved: &[Tensor], mut gradients: Vec<Option<Tensor>>) -> CallbackResult<Vec<Option<Tensor>>> {
        let Some(gradient) = gradients.pop().flatten() else {
            // The other processes wait for sums.
            let zeros = Tensor::f_zeros_like(&self.mean)?;
            drop(all_sums(&self.group, [&zeros, &zeros])?);
            return Ok((0..self.num_inputs).map(|_| None).collect());
        };
        let (gradient_kind, kind) = (gradient.f_kind()?, self.mean.f_kind()?);
        let gradient = gradient.f_to_kind(kind)?;
        let centred = saved[0].f_to_kind(kind)?.f_sub(&channels(&self.mean, &saved[0])?)?;
        let dims = other_dims(&gradient);
        let sum = gradient.f_sum_dim_intlist(&dims[..], false, None)?;
        let sum_centred = gradient.f_mul(&centred)?.f_sum_dim_intlist(&dims[..], false, None)?;
        let [all, all_centred] = all_sums(&self.group, [&sum, &sum_centred])?;
        let scale = match saved.get(1).filter(|_| self.has_weight) {
            Some(weight) => self.inverse_std.f_mul(&weight.f_to_kind(kind)?)?,
            None => self.inverse_std.shallow_clone(),
        };
        // (gradient - mean of gradients - centred / variance * mean of (gradient * centred)) * scale
        let mean_centred = scalar::mul(&all_centred, 1.0 / self.count)?;
        let slope = mean_centred.f_mul(&self.inverse_std)?.f_mul(&self.inverse_std)?;
        let shift = scalar::mul(&all, 1.0 / self.count)?;
        let of_input = gradient
            .f_sub(&channels(&shift, &gradient)?)?
            .f_sub(&centred.f_mul(&channels(&slope, &gradient)?)?)?
            .f_mul(&channels(&scale, &gradient)?)?
            .f_to_kind(gradient_kind)?;
        let of_weight = sum_centred.f_mul(&self.inverse_std)?;
        let mut results = vec![Some(of_input)];
        results.extend(self.has_weight.then_some(Some(of_weight)));
        results.resize_with(self.num_inputs, || Some(sum.shallow_clone()));
        Ok(results)
    }
}

/// Of all batches. Collective.
fn moments(group: &Group, input: &Tensor) -> Result<Moments> {
    let _no_grad = tch::no_grad_guard();
    let num_features = input.size()[1];
    let count = if num_features == 0 { 0.0 } else { input.numel() as f64 / num_features as f64 };
    let options = (Kind::Double, input.device());
    let (variance, mean) = match count > 0.0 {
        true => {
            let values = input.f_detach()?.f_to_kind(computed_kind(input)?)?;
            values.f_var_mean_dim(&other_dims(input)[..], false, false)?
        }
        false => (Tensor::f_zeros([num_features], options)?, Tensor::f_zeros([num_features], options)?),
    };
    let own = [mean.f_to_kind(Kind::Double)?, variance.f_to_kind(Kind::Double)?, scalar::full(&[1], count, options)?];
    let all = Tensor::f_stack(&group.all_gather(&Tensor::f_cat(&own, 0)?)?, 0)?;
    let means = all.f_narrow(1, 0, num_features)?;
    let variances = all.f_narrow(1, num_features, num_features)?;
    let counts = all.f_narrow(1, 2 * num_features, 1)?;
    let count = counts.f_sum(Kind::Double)?.f_double_value(&[])?;
    let over_batches = |values: Tensor| -> Result<Tensor> {
        let weighted = values.f_mul(&counts)?.f_sum_dim_intlist([0i64].as_slice(), false, None)?;
        Ok(scalar::mul(&weighted, if count > 0.0 { 1.0 / count } else { 0.0 })?)
    };
    let mean = over_batches(means.shallow_clone())?;
    let variance = over_batches(variances.f_add(&means.f_sub(&mean)?.f_square()?)?)?;
    Ok(Moments { mean, variance, count })
}

fn update_running(statistics: &BatchStatistics<'_>, moments: &Moments) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    let unbiased = scalar::mul(&moments.variance, moments.count / (moments.count - 1.0))?;
    for (running, moment) in [(statistics.running.0, &moments.mean), (statistics.running.1, &unbiased)] {
        if let Some(running) = get(running)? {
            scalar::lerp_(&running, &moment.f_to_kind(running.f_kind()?)?, statistics.momentum)?;
        }
    }
    Ok(())
}

/// The sums of all processes. Collective.
fn all_sums(group: &Group, own: [&Tensor; 2]) -> Result<[Tensor; 2]> {
    let _no_grad = tch::no_grad_guard();
    let sums = Tensor::f_stack(&own, 0)?;
    group.all_reduce(&sums, ReduceOp::Sum)?;
    Ok([sums.f_select(0, 0)?, sums.f_select(0, 1)?])
}

/// Statistics and gradients of types with few digits are computed in 32 bits.
fn computed_kind(input: &Tensor) -> Result<Kind> {
    Ok(if input.f_kind()? == Kind::Double { Kind::Double } else { Kind::Float })
}

/// All dims but that of the channels.
fn other_dims(input: &Tensor) -> Vec<i64> {
    (0..input.dim() as i64).filter(|&dim| dim != 1).collect()
}

/// `[num_features]`, so that it goes with `[batch, num_features, ..]`.
fn channels(values: &Tensor, like: &Tensor) -> Result<Tensor> {
    let mut shape = vec![1; like.dim()];
    if let Some(channels) = shape.get_mut(1) {
        *channels = -1;
    }
    Ok(values.f_reshape(shape)?)
}
