//! Adafactor.

use super::Optimizer;
use super::batches::step_each;
use super::handle::{GroupDefaults, GroupSettings, OptimizerHandle, ParamGroup, at_least_zero};
use super::state::{Loading, OptimizerState, SharedOptions, Wanted, save_groups, save_layouts, save_tensor};
use crate::error::{OptimError, Result};
use crate::nn::ParamStore;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tch::{Device, Kind, Tensor};
use torch_ext::scalar;

/// Adafactor, as `torch.optim.Adafactor`: Adam-like steps with almost no state.
///
/// The squared gradients of a matrix are kept as their means over rows and over columns, from whose
/// product an estimate for each entry is made (Shazeer and Stern, "Adafactor: Adaptive Learning Rates
/// with Sublinear Memory Cost", 2018). The step's length follows the parameter's own size: `lr` (the
/// default 0.01, or less from step 10,000 on, as `1 / sqrt(step)`) is relative to the root mean square of
/// the parameter, at least `eps2`. An update whose root mean square exceeds `d` is shortened to it. Weight decay
/// is decoupled and multiplied by `lr`.
///
/// State is made at a parameter's first step with a gradient. With two dimensions or more: `row_var` and
/// `col_var`, of the parameter's shape but for a last, or last but one, dimension of 1. With fewer:
/// `variance` of its shape. All have its dtype; `step` is a float scalar. Each step reads two norms of
/// every parameter on the host, as PyTorch's does, so on a GPU it waits for the device.
///
/// A gradient that is zero but for rounding, such as that of a bias in front of batch norm, becomes a step of full length, in
/// PyTorch as here; since the rounding is another one, such biases differ from PyTorch's (by up to 2.5e-3 where it was measured).
///
/// ```
/// use accelerate::{nn::{Init, ParamStore}, optim::{Adafactor, Optimizer}, tch::Device};
///
/// let store = ParamStore::new(Device::Cpu);
/// let weight = store.root().param("weight", ([4, 3], Init::Ones))?;
/// let mut optimizer = Adafactor::new(&store, 0.01)?;
/// (weight.get()? * 5.0).sum(None).backward();
/// optimizer.step()?;
/// assert!((weight.get()?.double_value(&[0, 0]) - 0.99).abs() < 1e-6);
/// assert_eq!(optimizer.state_dict()?.tensors["row_var.weight"].size(), [4, 1]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct Adafactor {
    handle: OptimizerHandle,
    options: Options,
    /// Group by group, in the order of the parameters.
    variances: Vec<Option<Variances>>,
}

/// Settings that all groups share, under the names PyTorch saves them by.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Options {
    beta2_decay: f64,
    eps: (Option<f64>, f64),
    d: f64,
    maximize: bool,
}

impl SharedOptions for Options {
    fn check(&self, owner: &'static str, _momenta: &[f64]) -> Result<()> {
        let &Self { beta2_decay, eps: (eps1, eps2), d, .. } = self;
        let refuse = |name, found, wanted| Err(OptimError::Setting { owner, name, found, wanted }.into());
        if !(beta2_decay.is_finite() && beta2_decay <= 0.0) {
            return refuse("beta2_decay", beta2_decay, "a finite number, 0 or less");
        }
        if !(d.is_finite() && 1.0 <= d) {
            return refuse("d", d, "a finite number, 1 or more");
        }
        at_least_zero(owner, "eps1", eps1.unwrap_or(0.0))?;
        at_least_zero(owner, "eps2", eps2)
    }
}

#[derive(Debug)]
struct Variances {
    step: Tensor,
    squares: Squares,
}

/// Means of squared gradients.
#[derive(Debug)]
enum Squares {
    Factored { row_var: Tensor, col_var: Tensor },
    Whole { variance: Tensor },
}

/// The shapes of `row_var` and `col_var`, for parameters of two dimensions or more.
fn factor_shapes(shape: &[i64]) -> Option<(Vec<i64>, Vec<i64>)> {
    let (last, rows) = shape.split_last()?;
    let (_, batch) = rows.split_last()?;
    Some(([rows, &[1]].concat(), [batch, &[1, *last]].concat()))
}

impl Variances {
    fn zeros(param: &Tensor) -> Result<Self> {
        let options = (param.f_kind()?, param.device());
        let squares = match factor_shapes(&param.size()) {
            Some((row_shape, col_shape)) => Squares::Factored {
                row_var: Tensor::f_zeros(row_shape, options)?,
                col_var: Tensor::f_zeros(col_shape, options)?,
            },
            None => Squares::Whole { variance: param.f_zeros_like()? },
        };
        Ok(Self { step: Tensor::f_zeros([0i64; 0], (Kind::Float, Device::Cpu))?, squares })
    }

    /// What is saved for such a parameter, by name.
    fn wanted(param: &Tensor) -> Result<Vec<Wanted>> {
        let (kind, device) = (param.f_kind()?, param.device());
        let wanted = |name, shape| Wanted { name, shape, kind, device };
        let step = Wanted::step(Device::Cpu);
        Ok(match factor_shapes(&param.size()) {
            Some((row_shape, col_shape)) => vec![step, wanted("row_var", row_shape), wanted("col_var", col_shape)],
            None => vec![step, wanted("variance", param.size())],
        })
    }

    /// Takes the tensors in the order of [`wanted`](Self::wanted).
    fn from_saved(tensors: Vec<Tensor>) -> Option<Self> {
        let mut tensors = tensors.into_iter();
        let (step, first) = (tensors.next()?, tensors.next()?);
        let squares = match tensors.next() {
            Some(col_var) => Squares::Factored { row_var: first, col_var },
            None => Squares::Whole { variance: first },
        };
        Some(Self { step, squares })
    }
}

impl Squares {
    /// Takes in a gradient and returns the estimate of each entry's mean square, in memory of its own.
    fn estimate(&mut self, grad: &Tensor, weight: f64, eps1: f64) -> Result<Tensor> {
        match self {
            Self::Factored { row_var, col_var } => {
                scalar::lerp_(row_var, &mean_of_squares(grad, -1)?, weight)?;
                scalar::lerp_(col_var, &mean_of_squares(grad, -2)?, weight)?;
                let mean = row_var.f_mean_dim(&[-2i64][..], true, None)?;
                scalar::clamp_min_(&mean, eps1)?;
                Ok(row_var.f_matmul(col_var)?.f_div_(&mean)?)
            }
            Self::Whole { variance } => {
                scalar::lerp_(variance, &grad.f_mul(grad)?, weight)?;
                Ok(variance.f_detach_copy()?)
            }
        }
    }
}

/// Over one dimension that stays, of size 1, without a tensor of all squares.
fn mean_of_squares(grad: &Tensor, dim: i64) -> Result<Tensor> {
    let mut norms = scalar::norm(grad, 2.0, dim, true)?;
    let count = grad.numel() / norms.numel().max(1);
    let squares = norms.f_square_()?;
    scalar::div_(&squares, count as f64)?;
    Ok(squares)
}

/// Of all entries; 0 of an empty tensor.
fn root_mean_square(tensor: &Tensor) -> Result<f64> {
    let num_entries = tensor.numel().max(1) as f64;
    Ok(tensor.f_norm()?.f_double_value(&[])? / num_entries.sqrt())
}

/// The distance from 1 to the next number, Python's `torch.finfo(dtype).eps`.
fn epsilon(kind: Kind) -> f64 {
    match kind {
        Kind::Half => 2f64.powi(-10),
        Kind::BFloat16 => 2f64.powi(-7),
        Kind::Double => f64::EPSILON,
        _ => f64::from(f32::EPSILON),
    }
}

impl Adafactor {
    /// Trains every parameter of the store that requires a gradient. PyTorch's default rate is 0.01.
    ///
    /// # Errors
    /// There is none, or `lr` is negative or not finite.
    pub fn new(store: &ParamStore, lr: f64) -> Result<Self> {
        Self::builder(store).lr(lr).build()
    }

    /// Chooses other settings than PyTorch's defaults; see [`AdafactorBuilder`].
    pub fn builder(store: &ParamStore) -> AdafactorBuilder {
        AdafactorBuilder {
            groups: vec![ParamGroup::new(store.trainable_parameters())],
            lr: 1e-2,
            weight_decay: 0.0,
            options: Options { beta2_decay: -0.8, eps: (None, 1e-3), d: 1.0, maximize: false },
        }
    }

    fn step_one(&mut self, slot: usize, param: &Tensor, grad: &Tensor, settings: GroupSettings) -> Result<()> {
        let Options { beta2_decay, eps: (eps1, eps2), d, maximize } = self.options;
        if self.variances[slot].is_none() {
            self.variances[slot] = Some(Variances::zeros(param)?);
        }
        let Some(Variances { step, squares }) = &mut self.variances[slot] else { return Ok(()) };
        let mut param = param.shallow_clone();
        let grad = if maximize { grad.f_neg()? } else { grad.shallow_clone() };
        let eps1 = eps1.unwrap_or(epsilon(param.f_kind()?));
        scalar::add_(step, 1.0)?;
        let step = step.f_double_value(&[])?;

        let rho = settings.lr.min(1.0 / step.sqrt());
        let alpha = eps2.max(root_mean_square(&param)?) * rho;
        if settings.weight_decay != 0.0 {
            scalar::mul_(&param, 1.0 - settings.lr * settings.weight_decay)?;
        }
        let mut estimate = squares.estimate(&grad, step.powf(beta2_decay), eps1)?;
        // The root comes after, so the square of the bound keeps its size.
        scalar::clamp_min_(&estimate, eps1 * eps1)?;
        let update = estimate.f_rsqrt_()?.f_mul_(&grad)?;
        let denominator = (root_mean_square(&update)? / d).max(1.0);
        let _ = param.f_add_(&scalar::mul(&update, -alpha / denominator)?)?;
        Ok(())
    }
}

impl Optimizer for Adafactor {
    fn step(&mut self) -> Result<()> {
        let handle = self.handle.clone();
        if let Some(param) = handle.params().find(|param| param.shard_group().is_some()) {
            return Err(
                OptimError::NeedsWholeParameters { optimizer: "Adafactor", parameter: param.name().into() }.into()
            );
        }
        step_each(&handle, |slot, param, grad, settings| self.step_one(slot, param, grad, settings))
    }

    fn handle(&self) -> &OptimizerHandle {
        &self.handle
    }

    fn state_dict(&self) -> Result<OptimizerState> {
        self.state_views()?.into_copies()
    }

    fn state_views(&self) -> Result<OptimizerState> {
        let mut tensors = BTreeMap::new();
        for (param, variances) in self.handle.params().zip(&self.variances) {
            let Some(Variances { step, squares }) = variances else { continue };
            save_tensor(&mut tensors, "step", param, step)?;
            match squares {
                Squares::Factored { row_var, col_var } => {
                    save_tensor(&mut tensors, "row_var", param, row_var)?;
                    save_tensor(&mut tensors, "col_var", param, col_var)?;
                }
                Squares::Whole { variance } => save_tensor(&mut tensors, "variance", param, variance)?,
            }
        }
        let groups = save_groups(&self.handle, &self.options)?;
        Ok(OptimizerState { tensors, groups, layouts: save_layouts(&self.handle) })
    }

    fn load_state_dict(&mut self, state: &OptimizerState) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let mut loading = Loading::new(&self.handle, state);
        let options = loading.options(self.options.clone());
        let mut variances = Vec::with_capacity(self.variances.len());
        for param in self.handle.params() {
            let saved = loading.tensors_as(param, &Variances::wanted(&param.local())?)?;
            variances.push(saved.and_then(Variances::from_saved));
        }
        loading.finish()?;
        self.options = options;
        self.variances = variances;
        Ok(())
    }
}

/// Settings of [`Adafactor`].
///
/// ```
/// use accelerate::{nn::{Init, ParamStore}, optim::Adafactor, tch::Device};
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([2, 2], Init::Zeros))?;
/// let optimizer = Adafactor::builder(&store).lr(0.02).eps((Some(1e-15), 1e-3)).weight_decay(0.1).build()?;
/// let error = Adafactor::builder(&store).d(0.5).build().unwrap_err();
/// assert!(error.to_string().contains("d is 0.5"));
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct AdafactorBuilder {
    groups: Vec<ParamGroup>,
    lr: f64,
    weight_decay: f64,
    options: Options,
}

impl AdafactorBuilder {
    settings! {
        /// Learning rate, relative to the size of each parameter (default 0.01).
        lr: f64 => lr;
        /// The squared gradient of step `t` enters the mean with weight `t` to this power (default -0.8).
        beta2_decay: f64 => options.beta2_decay;
        /// The smallest root of a mean square to divide by, and the smallest size a parameter counts as
        /// having (default `(None, 0.001)`; `None` is the dtype's epsilon).
        eps: (Option<f64>, f64) => options.eps;
        /// The largest root mean square of an update, before its length is chosen (default 1).
        d: f64 => options.d;
        /// Weight decay, apart from the gradient (default 0).
        weight_decay: f64 => weight_decay;
        /// Go up the gradient instead of down (default `false`).
        maximize: bool => options.maximize;
        /// Train these groups instead of all parameters of the store.
        param_groups: Vec<ParamGroup> => groups;
    }

    /// Checks the settings and makes the optimizer.
    ///
    /// # Errors
    /// A setting out of range, no parameters, or a parameter in two groups.
    pub fn build(self) -> Result<Adafactor> {
        self.options.check("Adafactor", &[])?;
        let defaults = GroupDefaults { lr: self.lr, weight_decay: self.weight_decay, momentum: None };
        let handle = OptimizerHandle::new("Adafactor", self.groups, defaults)?;
        let variances = handle.params().map(|_| None).collect();
        Ok(Adafactor { handle, options: self.options, variances })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn optim_epsilon_is_the_distance_from_1_to_the_next_number() {
        for kind in [Kind::Half, Kind::BFloat16, Kind::Float, Kind::Double] {
            let one = Tensor::ones([1], (kind, Device::Cpu));
            assert_ne!(&one + epsilon(kind), one, "{kind:?}");
            assert_eq!(&one + epsilon(kind) / 2.0, one, "{kind:?}");
        }
    }
}
