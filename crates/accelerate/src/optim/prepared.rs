//! What `prepare` makes of an optimizer.

use super::{GradScaler, Optimizer, OptimizerHandle, OptimizerState, clip_coefficient, clip_grad_norm_, gradients};
use crate::error::Result;
use crate::nn::Param;
use crate::session::Session;
use std::fmt;
use std::ops::Deref;
use tch::Tensor;
use torch_ext::foreach;

/// An optimizer that knows about gradient accumulation and loss scaling. Made by
/// [`Accelerator::prepare`](crate::Accelerator::prepare); derefs to your own.
///
/// - While gradients are being accumulated, [`step`](Self::step) and [`zero_grad`](Self::zero_grad) do
///   nothing, so the training loop needs no `if`.
/// - In fp16 training, `step` undoes the loss scaling, and leaves the parameters alone if a gradient is
///   infinite or not a number; [`step_was_skipped`](Self::step_was_skipped) tells. The scale moves once
///   per training step, after the last of all prepared optimizers has stepped. (Python Accelerate moves
///   it once per optimizer.)
///
/// ```
/// use accelerate::{Accelerator, nn::{Init, ParamStore}, optim::Sgd};
///
/// let accelerator = Accelerator::builder().cpu(true).build()?;
/// let store = ParamStore::new(accelerator.device());
/// store.root().param("weight", ([2], Init::Zeros))?;
/// let mut optimizer = accelerator.prepare(Sgd::new(&store, 0.1)?)?;
/// optimizer.step()?;
/// assert!(!optimizer.step_was_skipped());
/// # Ok::<(), accelerate::Error>(())
/// ```
pub struct AcceleratedOptimizer<O> {
    optimizer: O,
    session: Session,
    scaling: Option<Scaling>,
    /// The largest norm that a step lets gradients have.
    gradient_clipping: Option<f64>,
}

/// The scaler waits for this optimizer as long as this value lives.
struct Scaling {
    scaler: GradScaler,
    handle: OptimizerHandle,
}

impl Drop for Scaling {
    fn drop(&mut self) {
        self.scaler.forget(&self.handle);
    }
}

impl<O: Optimizer> AcceleratedOptimizer<O> {
    pub(crate) fn new(
        optimizer: O,
        session: Session,
        scaler: Option<GradScaler>,
        gradient_clipping: Option<f64>,
    ) -> Self {
        let scaling = scaler.filter(GradScaler::is_enabled).map(|scaler| {
            let handle = optimizer.handle().clone();
            scaler.expect(&handle);
            Scaling { scaler, handle }
        });
        optimizer.handle().set_prepared(true);
        Self { optimizer, session, scaling, gradient_clipping }
    }

    /// Updates the parameters, unless gradients are still being accumulated.
    ///
    /// # Errors
    /// Those of the optimizer; with loss scaling also a step before any backward pass.
    pub fn step(&mut self) -> Result<()> {
        if !self.session.gradient_state.sync_gradients() {
            return Ok(());
        }
        self.session.before_step()?;
        if let Some(max_norm) = self.gradient_clipping {
            let _norm = self.clip(max_norm)?;
        }
        let stepped = match &self.scaling {
            Some(scaling) => scaling.scaler.step_together(&mut self.optimizer),
            None => self.optimizer.step(),
        };
        self.check_step(stepped)?;
        self.optimizer.handle().gradients_used();
        Ok(())
    }

    /// A disk can fail on one rank only; then the others stop too, instead of waiting for it later. Collective if state is
    /// offloaded.
    fn check_step<T>(&self, stepped: Result<T>) -> Result<T> {
        let is_between_ranks = stepped.as_ref().is_err_and(|error| error.is_timeout() || error.is_peer_failure());
        if self.optimizer.is_state_offloaded() && !is_between_ranks {
            let failure = stepped.as_ref().err().map(ToString::to_string);
            self.session.group.check_others("the optimizer's step", failure.as_deref())?;
        }
        stepped
    }

    /// Drops all gradients, unless they are still being accumulated.
    ///
    /// # Errors
    /// Those of the optimizer.
    pub fn zero_grad(&mut self) -> Result<()> {
        if !self.session.gradient_state.sync_gradients() {
            return Ok(());
        }
        if let Some(scaling) = &self.scaling {
            scaling.scaler.gradients_dropped(&scaling.handle);
        }
        self.optimizer.zero_grad()
    }

    /// `clip_grad_norm_`, [`step`](Self::step) and [`zero_grad`](Self::zero_grad) in one: clips this optimizer's gradients
    /// together to the 2-norm `max_norm`, updates the parameters, drops the gradients. Returns the norm before clipping
    /// (0-d, float, of the true gradients); `None`, with nothing done, while gradients are still being accumulated.
    ///
    /// The same as the three calls up to the last bit of the factor, and faster where gradients are large float32 tensors
    /// on the CPU: they are read once for the norm, which also tells whether one of them is not finite, and once for
    /// the step, which undoes the loss scaling and clips on the way. Nothing is written back to them.
    ///
    /// ```
    /// use accelerate::{Accelerator, nn::{Init, ParamStore}, optim::Sgd};
    ///
    /// let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let store = ParamStore::new(accelerator.device());
    /// let weight = store.root().param("weight", ([2], Init::Zeros))?;
    /// let mut optimizer = accelerator.prepare(Sgd::new(&store, 1.0)?)?;
    /// accelerator.backward(&(weight.get() * accelerate::tch::Tensor::from_slice(&[3f32, 4.0])).sum(None))?;
    /// let norm = optimizer.clip_step_and_zero_grad(1.0)?.unwrap();
    /// assert_eq!(norm.double_value(&[]), 5.0);
    /// assert!((weight.get().double_value(&[1]) + 0.8).abs() < 1e-6 && weight.grad().is_none());
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of the optimizer; with loss scaling also a step before any backward pass.
    pub fn clip_step_and_zero_grad(&mut self, max_norm: f64) -> Result<Option<Tensor>> {
        if !self.session.gradient_state.sync_gradients() {
            return Ok(None);
        }
        let handle = self.optimizer.handle().clone();
        self.session.complete_gradients()?;
        let sum = match gradients(handle.params())?.as_slice() {
            [] => Some(0.0),
            [all] if all.group.is_none() => foreach::sum_of_squares(&all.tensors)?,
            // Not all of them are here, or float32 on the CPU.
            _ => None,
        };
        let norm = match sum {
            Some(sum) => {
                self.session.before_step()?;
                let norm = match &self.scaling {
                    Some(scaling) => scaling.scaler.step_clipped(&mut self.optimizer, max_norm, sum),
                    None => {
                        let factor = clip_coefficient(max_norm, sum.sqrt());
                        self.optimizer.step_with_factor(factor).map(|()| sum.sqrt())
                    }
                };
                let norm = self.check_step(norm)?;
                handle.gradients_used();
                Tensor::from(norm as f32)
            }
            None => {
                let norm = self.clip(max_norm)?;
                self.step()?;
                norm
            }
        };
        self.zero_grad()?;
        Ok(Some(norm))
    }

    /// Returns the 2-norm before.
    fn clip(&self, max_norm: f64) -> Result<Tensor> {
        let handle = self.optimizer.handle();
        if let Some(scaling) = &self.scaling {
            scaling.scaler.unscale_(handle)?;
        }
        let params: Vec<Param> = handle.params().cloned().collect();
        clip_grad_norm_(&params, max_norm, 2.0)
    }

    /// Did the last step leave the parameters alone because a gradient was infinite or not a number?
    ///
    /// Calls of [`step`](Self::step) that accumulation turned into nothing do not count.
    pub fn step_was_skipped(&self) -> bool {
        self.optimizer.handle().step_was_skipped()
    }

    /// Everything needed to go on later; see [`Optimizer::state_dict`].
    ///
    /// # Errors
    /// Those of the optimizer.
    pub fn state_dict(&self) -> Result<OptimizerState> {
        self.optimizer.state_dict()
    }

    /// Takes over saved state; see [`Optimizer::load_state_dict`].
    ///
    /// # Errors
    /// Those of the optimizer.
    pub fn load_state_dict(&mut self, state: &OptimizerState) -> Result<()> {
        self.optimizer.load_state_dict(state)
    }

    /// The optimizer as it was before `prepare`. It is no longer one of a prepared model's.
    pub fn into_inner(self) -> O {
        self.optimizer.handle().set_prepared(false);
        self.optimizer
    }
}

impl<O> Deref for AcceleratedOptimizer<O> {
    type Target = O;
    fn deref(&self) -> &O {
        &self.optimizer
    }
}

impl<O: fmt::Debug> fmt::Debug for AcceleratedOptimizer<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AcceleratedOptimizer")
            .field("optimizer", &self.optimizer)
            .field("scaled", &self.scaling.is_some())
            .finish_non_exhaustive()
    }
}
