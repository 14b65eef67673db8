//! What `prepare` makes of an optimizer.

use super::shared_object::SharedObject;
use super::state::save_layouts;
use super::{
    GradScaler, IntoInnerError, Optimizer, OptimizerHandle, OptimizerState, TotalNorm, clip_coefficient,
    clip_grad_norm_, gradients,
};
use crate::error::{Error, Result};
use crate::messages;
use crate::nn::{Layout, Param};
use crate::session::{Object, ObjectState, PreparedOptimizer, Session, ShortStep, StateReader, Stateful};
use accelerate_core::names::counted;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::DerefMut;
use std::sync::Arc;
use tch::Tensor;
use torch_ext::foreach;

/// An optimizer that knows about gradient accumulation and loss scaling. Made by
/// [`Accelerator::prepare`](crate::Accelerator::prepare). The accelerator knows of it as long as it lives;
/// [`optimizer`](Self::optimizer) is your own.
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
    shared: Arc<Shared<O>>,
    session: Session,
    scaling: Option<Scaling>,
    /// The largest norm that a step lets gradients have.
    gradient_clipping: Option<f64>,
}

/// What the program and the session have of one optimizer.
struct Shared<O> {
    handle: OptimizerHandle,
    scaler: Option<GradScaler>,
    optimizer: SharedObject<O>,
}

fn object_state(OptimizerState { tensors, groups, layouts }: OptimizerState) -> ObjectState {
    ObjectState { tensors, layouts, values: serde_json::json!({ "param_groups": groups }) }
}

impl<O: Optimizer> Stateful for Shared<O> {
    fn state_dict(&self) -> Result<ObjectState> {
        Ok(object_state(self.optimizer.try_lock("state_dict")?.state_dict()?))
    }

    fn state_views(&self) -> Result<ObjectState> {
        Ok(object_state(self.optimizer.try_lock("state_views")?.state_outline()?))
    }

    fn state_places(&self) -> Result<BTreeMap<String, Tensor>> {
        let optimizer = self.optimizer.try_lock("state_places")?;
        if optimizer.is_state_offloaded() { Ok(BTreeMap::new()) } else { Ok(optimizer.state_views()?.tensors) }
    }

    fn load_state_dict(&self, state: &ObjectState) -> Result<()> {
        let tensors = state.tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect();
        let state = optimizer_state(tensors, state.layouts.clone(), &state.values)?;
        self.optimizer.try_lock("load_state_dict")?.load_state_dict(&state)
    }

    fn take_state_dict(&self, state: ObjectState) -> Result<()> {
        let state = optimizer_state(state.tensors, state.layouts, &state.values)?;
        self.optimizer.try_lock("load_state_dict")?.take_state_dict(state)
    }

    fn layouts(&self) -> BTreeMap<String, Layout> {
        save_layouts(&self.handle)
    }
}

impl<O: Optimizer> StateReader for Shared<O> {
    fn read_state(&self, wanted: &[(&str, &Tensor)]) -> Result<()> {
        self.optimizer.try_lock("read_state")?.read_state(wanted)
    }
}

fn optimizer_state(
    tensors: BTreeMap<String, Tensor>,
    layouts: BTreeMap<String, Layout>,
    values: &Value,
) -> Result<OptimizerState> {
    let groups = serde_json::from_value(values["param_groups"].clone()).map_err(Error::other)?;
    Ok(OptimizerState { tensors, groups, layouts })
}

impl<O: Optimizer> PreparedOptimizer for Shared<O> {
    fn name(&self) -> &'static str {
        self.handle.optimizer_name()
    }

    fn dequantized(&self, tensors: BTreeMap<String, Tensor>) -> Result<BTreeMap<String, Tensor>> {
        self.optimizer.try_lock("dequantized")?.dequantized(tensors)
    }

    fn trains_any_of(&self, params: &[Param]) -> bool {
        self.handle.trains_any_of(params)
    }

    fn gradients_made(&self) {
        self.handle.gradients_made();
    }

    fn are_gradients_used(&self) -> bool {
        self.handle.are_gradients_used()
    }

    fn has_fresh_gradients(&self) -> bool {
        self.handle.has_fresh_gradients()
    }

    fn unscale(&self) -> Result<()> {
        self.scaler.as_ref().map_or(Ok(()), |scaler| scaler.unscale_(&self.handle))
    }

    fn step_was_skipped(&self) -> bool {
        self.handle.step_was_skipped()
    }

    fn num_steps(&self) -> usize {
        self.handle.num_steps()
    }
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
    /// Registers the optimizer with the session.
    pub(crate) fn new(
        optimizer: O,
        session: Session,
        scaler: Option<GradScaler>,
        gradient_clipping: Option<f64>,
    ) -> Self {
        let handle = optimizer.handle().clone();
        let scaler = scaler.filter(GradScaler::is_enabled);
        let scaling = scaler.clone().map(|scaler| {
            scaler.expect(&handle);
            Scaling { scaler, handle: handle.clone() }
        });
        handle.set_prepared(true);
        let shared = Arc::new(Shared { handle, scaler, optimizer: SharedObject::new("optimizer", optimizer) });
        let registered = Arc::downgrade(&shared);
        session.register(Object::Optimizer(registered));
        Self { shared, session, scaling, gradient_clipping }
    }

    /// Your own optimizer (`AcceleratedOptimizer.optimizer` of the reference). As long as what this returns lives, the
    /// accelerator's `state_dict` and `load_state_dict` are errors.
    pub fn optimizer(&mut self) -> impl DerefMut<Target = O> + '_ {
        self.shared.optimizer.lock()
    }

    /// Parameter groups and learning rates.
    pub fn handle(&self) -> &OptimizerHandle {
        &self.shared.handle
    }

    /// Updates the parameters, unless gradients are still being accumulated.
    ///
    /// # Errors
    /// Those of the optimizer; with loss scaling also a step before any backward pass.
    #[track_caller]
    pub fn step(&mut self) -> Result<()> {
        let _called = crate::status::here();
        if !self.session.gradient_state.sync_gradients() {
            return Ok(());
        }
        self.begin_step()?;
        if let Some(max_norm) = self.gradient_clipping {
            let _norm = self.clip(max_norm)?;
        }
        let stepped = match &self.scaling {
            Some(scaling) => scaling.scaler.step_together(&mut *self.shared.optimizer.lock()),
            None => self.shared.optimizer.lock().step(),
        };
        self.check_step(stepped)?;
        self.has_stepped();
        Ok(())
    }

    /// What comes after every step.
    fn has_stepped(&self) {
        self.handle().gradients_used();
        self.session.gradient_state.optimizer_has_stepped(self.handle().num_steps());
    }

    /// What comes before every step.
    fn begin_step(&self) -> Result<()> {
        if let Some(ShortStep { num_passes, num_steps }) = self.session.gradient_state.optimizer_steps() {
            messages::warning!(
                "{} came before an optimizer's step, and each loss was divided by gradient_accumulation_steps, {num_steps}; run each \
                 batch inside of accelerator.accumulate(&model, || ..)",
                counted(num_passes, "backward pass")
            );
        }
        self.session.before_step()
    }

    /// A disk can fail on one rank only; then the others stop too, instead of waiting for it later. Collective if state is
    /// offloaded.
    fn check_step<T>(&self, stepped: Result<T>) -> Result<T> {
        let is_between_ranks = stepped.as_ref().is_err_and(|error| error.is_timeout() || error.is_peer_failure());
        let is_state_offloaded = self.shared.optimizer.lock().is_state_offloaded();
        match is_state_offloaded && !is_between_ranks {
            true => self.session.group.agree_on_success("the optimizer's step", stepped),
            false => stepped,
        }
    }

    /// Drops all gradients, unless they are still being accumulated.
    ///
    /// # Errors
    /// Those of the optimizer.
    #[track_caller]
    pub fn zero_grad(&mut self) -> Result<()> {
        let _called = crate::status::here();
        if !self.session.gradient_state.sync_gradients() {
            return Ok(());
        }
        if let Some(scaling) = &self.scaling {
            scaling.scaler.gradients_dropped(&scaling.handle);
        }
        let handle = self.handle();
        self.session.drop_unreduced(&|param| handle.trains(param))?;
        self.shared.optimizer.lock().zero_grad()
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
    /// accelerator.backward(&(weight.get()? * accelerate::tch::Tensor::from_slice(&[3f32, 4.0])).sum(None))?;
    /// let norm = optimizer.clip_step_and_zero_grad(1.0)?.unwrap();
    /// assert_eq!(norm.double_value(&[]), 5.0);
    /// assert!((weight.get()?.double_value(&[1]) + 0.8).abs() < 1e-6 && weight.grad().is_none());
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of the optimizer; with loss scaling also a step before any backward pass.
    #[track_caller]
    pub fn clip_step_and_zero_grad(&mut self, max_norm: f64) -> Result<Option<TotalNorm>> {
        let _called = crate::status::here();
        if !self.session.gradient_state.sync_gradients() {
            return Ok(None);
        }
        let handle = self.handle().clone();
        self.session.complete_gradients()?;
        let sum = match gradients(handle.params())?.as_slice() {
            [] => Some(0.0),
            [all] if all.group.is_none() => foreach::sum_of_squares(&all.tensors)?,
            // Not all of them are here, or float32 on the CPU.
            _ => None,
        };
        let norm = match sum {
            Some(sum) => {
                self.begin_step()?;
                let norm = match &self.scaling {
                    Some(scaling) => scaling.scaler.step_clipped(&mut *self.shared.optimizer.lock(), max_norm, sum),
                    None => {
                        let factor = clip_coefficient(max_norm, sum.sqrt());
                        self.shared.optimizer.lock().step_with_factor(factor).map(|()| sum.sqrt())
                    }
                };
                let norm = self.check_step(norm)?;
                self.has_stepped();
                Tensor::from(norm as f32).into()
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
    fn clip(&self, max_norm: f64) -> Result<TotalNorm> {
        let handle = self.handle();
        if let Some(scaling) = &self.scaling {
            scaling.scaler.unscale_(handle)?;
        }
        let params: Vec<Param> = handle.params().cloned().collect();
        clip_grad_norm_(&params, max_norm)
    }

    /// Did the last step leave the parameters alone because a gradient was infinite or not a number?
    ///
    /// Calls of [`step`](Self::step) that accumulation turned into nothing do not count.
    pub fn step_was_skipped(&self) -> bool {
        self.handle().step_was_skipped()
    }

    /// Everything needed to go on later; see [`Optimizer::state_dict`].
    ///
    /// # Errors
    /// Those of the optimizer.
    pub fn state_dict(&self) -> Result<OptimizerState> {
        self.shared.optimizer.lock().state_dict()
    }

    pub(super) fn dequantized(&self, tensors: BTreeMap<String, Tensor>) -> Result<BTreeMap<String, Tensor>> {
        self.shared.optimizer.lock().dequantized(tensors)
    }

    /// Takes over saved state; see [`Optimizer::load_state_dict`].
    ///
    /// # Errors
    /// Those of the optimizer.
    pub fn load_state_dict(&mut self, state: &OptimizerState) -> Result<()> {
        self.shared.optimizer.lock().load_state_dict(state)
    }

    /// Does a step move state over a disk or a bus? See [`Optimizer::is_state_offloaded`].
    pub fn is_state_offloaded(&self) -> bool {
        self.shared.optimizer.lock().is_state_offloaded()
    }

    /// The optimizer as it was before `prepare`. It is no longer one of a prepared model's, nor among the accelerator's.
    ///
    /// # Errors
    /// Another thread is just using it through the accelerator; the error gives the prepared one back.
    pub fn into_inner(self) -> Result<O, IntoInnerError<Self>> {
        let Self { shared, session, scaling, gradient_clipping } = self;
        match Arc::try_unwrap(shared) {
            Ok(Shared { handle, optimizer, .. }) => {
                handle.set_prepared(false);
                Ok(optimizer.into_inner())
            }
            Err(shared) => Err(IntoInnerError::new("optimizer", Self { shared, session, scaling, gradient_clipping })),
        }
    }
}

impl<O: fmt::Debug> fmt::Debug for AcceleratedOptimizer<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AcceleratedOptimizer")
            .field("optimizer", &*self.shared.optimizer.lock())
            .field("scaled", &self.scaling.is_some())
            .finish_non_exhaustive()
    }
}
