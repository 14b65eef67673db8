//! What `prepare` makes of an optimizer.

use super::{Optimizer, OptimizerHandle, OptimizerState};
use crate::amp::GradScaler;
use crate::context::Context;
use crate::error::Result;
use std::fmt;
use std::ops::Deref;

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
    context: Context,
    scaling: Option<Scaling>,
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
    pub(crate) fn new(optimizer: O, context: Context, scaler: Option<GradScaler>) -> Self {
        let scaling = scaler.filter(GradScaler::is_enabled).map(|scaler| {
            let handle = optimizer.handle().clone();
            scaler.expect(&handle);
            Scaling { scaler, handle }
        });
        Self { optimizer, context, scaling }
    }

    /// Updates the parameters, unless gradients are still being accumulated.
    ///
    /// # Errors
    /// Those of the optimizer; with loss scaling also a step before any backward pass.
    pub fn step(&mut self) -> Result<()> {
        if !self.context.gradient_state.sync_gradients() {
            return Ok(());
        }
        self.context.before_step()?;
        match &self.scaling {
            Some(scaling) => scaling.scaler.step_together(&mut self.optimizer),
            None => self.optimizer.step(),
        }
    }

    /// Drops all gradients, unless they are still being accumulated.
    ///
    /// # Errors
    /// Those of the optimizer.
    pub fn zero_grad(&mut self) -> Result<()> {
        if !self.context.gradient_state.sync_gradients() {
            return Ok(());
        }
        if let Some(scaling) = &self.scaling {
            scaling.scaler.gradients_dropped(&scaling.handle);
        }
        self.optimizer.zero_grad()
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

    /// The optimizer as it was before `prepare`.
    pub fn into_inner(self) -> O {
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
