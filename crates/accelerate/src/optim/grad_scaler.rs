//! Dynamic loss scaling, as `torch.amp.GradScaler`.
//!
//! Gradients below 6e-8 become zero in fp16. So the loss is multiplied by a large scale before the
//! backward pass, and the gradients are divided by it before the step. The scale falls when a gradient
//! overflows (that step is skipped) and rises after a long time without overflow. (Micikevicius and
//! others, "Mixed Precision Training", 2018.)
//!
//! When the scale moves: a scale serves all optimizers of a training step, so it may move only between
//! training steps. Prepared optimizers announce themselves ([`GradScaler::expect`]), and the last of them to
//! step moves the scale. An optimizer that rests in some training steps does not block this: when
//! another one begins its next step, the old step is over and the scale moves. Gradients that the resting one has
//! already accumulated are then brought to the new scale.

use super::{Optimizer, OptimizerHandle, clip_coefficient, gradients};
use crate::error::{Error, OptimError, Result};
use crate::group::{Group, ReduceOp};
use crate::nn::Param;
use crate::session::{ObjectState, Stateful};
use accelerate_core::config::GradScalerSettings;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::{Kind, Tensor};
use torch_ext::{amp, foreach, scalar};

/// Scales losses so that gradients stay in the range of fp16. Clones share one scale.
///
/// [`Accelerator::backward`](crate::Accelerator) and prepared optimizers use one by themselves. By hand:
///
/// ```
/// use accelerate::GradScalerKwargs;
/// use accelerate::nn::{Init, ParamStore};
/// use accelerate::optim::{GradScaler, Optimizer, Sgd};
/// use accelerate::tch::{Device, Kind};
///
/// let store = ParamStore::new(Device::Cpu);
/// let weight = store.root().param("weight", ([1], Init::Zeros))?;
/// let mut optimizer = Sgd::new(&store, 0.1)?;
/// let scaler = GradScaler::new(GradScalerKwargs::default())?;
///
/// let loss = (weight.get()? * 2.0).sum(Kind::Float);
/// scaler.scale(&loss)?.backward();
/// scaler.step(&mut optimizer)?;
/// scaler.update()?;
/// assert!((weight.get()?.double_value(&[0]) + 0.2).abs() < 1e-6);
///
/// optimizer.zero_grad()?;
/// let loss = (weight.get()? * f64::INFINITY).sum(Kind::Float);
/// scaler.scale(&loss)?.backward();
/// scaler.step(&mut optimizer)?;
/// scaler.update()?;
/// assert!(optimizer.handle().step_was_skipped());
/// assert_eq!(scaler.get_scale()?, 32768.0);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone)]
pub struct GradScaler(Arc<Shared>);

struct Shared {
    /// What it was made with.
    kwargs: GradScalerSettings,
    inner: Mutex<Inner>,
}

struct Inner {
    kwargs: GradScalerSettings,
    growth_tracker: i64,
    /// Made on the device of the first loss. From then on it holds the scale and the tracker.
    on_device: Option<OnDevice>,
    /// The scale comes from a saved state. Then gradients may be scaled although no loss has been scaled in this process: they were saved, too.
    was_loaded: bool,
    entries: Vec<Entry>,
}

struct OnDevice {
    /// Float scalar.
    scale: Tensor,
    /// Int scalar: steps without overflow since the scale last changed.
    growth_tracker: Tensor,
}

/// One optimizer within the present training step.
struct Entry {
    handle: OptimizerHandle,
    /// Announced by a prepared optimizer; stays from step to step.
    expected: bool,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// Gradients are multiplied by the scale.
    Scaled,
    /// Gradients are true; the scalar is 1 if one of them is not finite, else 0.
    Unscaled(Tensor),
    /// The optimizer has made its step, or skipped it.
    Stepped(Tensor),
}

/// A saved scale; the fields are PyTorch's.
///
/// ```
/// use accelerate::GradScalerKwargs;
/// use accelerate::optim::{GradScaler, GradScalerState};
///
/// let scaler = GradScaler::new(GradScalerKwargs::default())?;
/// let state = GradScalerState { scale: 1024.0, ..scaler.state_dict()?.unwrap() };
/// scaler.load_state_dict(&state)?;
/// assert_eq!(scaler.get_scale()?, 1024.0);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GradScalerState {
    /// The present scale.
    pub scale: f64,
    /// Factor by which the scale grows.
    pub growth_factor: f64,
    /// Factor by which the scale falls.
    pub backoff_factor: f64,
    /// Steps without overflow after which the scale grows.
    pub growth_interval: u32,
    /// Steps without overflow since the scale last changed.
    #[serde(rename = "_growth_tracker")]
    pub growth_tracker: i64,
}

impl GradScaler {
    /// A scaler with `init_scale`; disabled ones leave everything alone.
    ///
    /// # Errors
    /// A factor or interval with which the scale could not grow or fall.
    pub fn new(kwargs: impl Into<GradScalerSettings>) -> Result<Self> {
        let kwargs = kwargs.into();
        kwargs.check()?;
        let inner = Inner {
            kwargs: kwargs.clone(),
            growth_tracker: 0,
            on_device: None,
            was_loaded: false,
            entries: Vec::new(),
        };
        Ok(Self(Arc::new(Shared { kwargs, inner: Mutex::new(inner) })))
    }

    // Every statement leaves the state whole, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does it scale at all?
    pub fn is_enabled(&self) -> bool {
        self.0.kwargs.enabled
    }

    /// The loss times the scale: run the backward pass on the result. Float32 even for an fp16 loss.
    ///
    /// # Errors
    /// libtorch's own.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        if !self.is_enabled() {
            return Ok(loss.shallow_clone());
        }
        let mut inner = self.lock();
        let scale = &inner.on_device(loss)?.scale;
        Ok(loss.f_mul(&scale.f_to_device(loss.device())?)?)
    }

    /// Divides the optimizer's gradients by the scale and looks for overflow, without waiting for the
    /// device. Once in a training step: further calls do nothing, and `step` then does not do it again.
    ///
    /// # Errors
    /// No loss was scaled yet; a gradient is itself in fp16; the optimizer has already stepped (unless it
    /// is prepared: then its next step begins).
    pub fn unscale_(&self, optimizer: &OptimizerHandle) -> Result<()> {
        if !self.is_enabled() {
            return Ok(());
        }
        self.lock().unscale(optimizer, "unscale_").map(drop)
    }

    /// Unscales if that has not happened, then steps, unless a gradient was infinite or not a number.
    ///
    /// # Errors
    /// Those of [`unscale_`](Self::unscale_) and of the optimizer.
    pub fn step(&self, optimizer: &mut impl Optimizer) -> Result<()> {
        if !self.is_enabled() {
            return optimizer.step();
        }
        let handle = optimizer.handle().clone();
        let found_inf = self.lock().unscale(&handle, "step")?;
        // Not under the lock: the optimizer may be the user's and use this scaler.
        optimizer.step_unless(&found_inf)?;
        handle.record_found_inf(found_inf.shallow_clone());
        if let Some(entry) = self.lock().entry(&handle) {
            entry.stage = Stage::Stepped(found_inf);
        }
        Ok(())
    }

    /// Ends the training step: the scale falls if any optimizer found an overflow, and grows after
    /// `growth_interval` steps in a row without. Prepared optimizers do this by themselves.
    ///
    /// # Errors
    /// No optimizer was unscaled or stepped since the last update.
    pub fn update(&self) -> Result<()> {
        if !self.is_enabled() {
            return Ok(());
        }
        let mut inner = self.lock();
        let found_infs = inner.take_found_infs(|stage| !matches!(stage, Stage::Scaled));
        if found_infs.is_empty() {
            return Err(OptimError::NothingToUpdate.into());
        }
        inner.update(&found_infs)
    }

    /// The present scale, 1 if disabled. Waits for the device.
    ///
    /// # Errors
    /// libtorch's own.
    pub fn get_scale(&self) -> Result<f64> {
        if self.is_enabled() { self.lock().scale() } else { Ok(1.0) }
    }

    /// What is needed to go on later; `None` if disabled. Waits for the device.
    ///
    /// # Errors
    /// libtorch's own.
    pub fn state_dict(&self) -> Result<Option<GradScalerState>> {
        if !self.is_enabled() {
            return Ok(None);
        }
        let inner = self.lock();
        Ok(Some(GradScalerState {
            scale: inner.scale()?,
            growth_factor: inner.kwargs.growth_factor,
            backoff_factor: inner.kwargs.backoff_factor,
            growth_interval: inner.kwargs.growth_interval,
            growth_tracker: match &inner.on_device {
                Some(on_device) => on_device.growth_tracker.f_int64_value(&[])?,
                None => inner.growth_tracker,
            },
        }))
    }

    /// Takes over a saved scale; nothing happens if disabled.
    ///
    /// # Errors
    /// A factor or interval with which the scale could not grow or fall.
    pub fn load_state_dict(&self, state: &GradScalerState) -> Result<()> {
        if !self.is_enabled() {
            return Ok(());
        }
        let kwargs = GradScalerSettings {
            init_scale: state.scale,
            growth_factor: state.growth_factor,
            backoff_factor: state.backoff_factor,
            growth_interval: state.growth_interval,
            enabled: true,
        };
        kwargs.check()?;
        let mut inner = self.lock();
        inner.kwargs = kwargs;
        inner.growth_tracker = state.growth_tracker;
        // Made again from these values at the next loss.
        inner.on_device = None;
        inner.was_loaded = true;
        Ok(())
    }

    /// Announces an optimizer whose step the scale waits for.
    pub(crate) fn expect(&self, optimizer: &OptimizerHandle) {
        let mut inner = self.lock();
        inner.forget(optimizer);
        let (handle, stage) = (optimizer.clone(), Stage::Scaled);
        inner.entries.push(Entry { handle, expected: true, stage });
    }

    /// Takes an announcement back.
    pub(crate) fn forget(&self, optimizer: &OptimizerHandle) {
        self.lock().forget(optimizer);
    }

    /// The optimizer's gradients are gone, so those that come next are scaled again. Without this, an
    /// optimizer that was unscaled for clipping but then rested would take scaled gradients for true ones.
    pub(crate) fn gradients_dropped(&self, optimizer: &OptimizerHandle) {
        if let Some(entry) = self.lock().entry(optimizer)
            && matches!(entry.stage, Stage::Unscaled(_))
        {
            entry.stage = Stage::Scaled;
        }
    }

    /// Are there optimizers whose gradients have been divided by the scale already, and not used?
    pub(crate) fn has_unscaled(&self) -> bool {
        let is_unscaled = |entry: &Entry| matches!(entry.stage, Stage::Unscaled(_));
        self.lock().entries.iter().any(is_unscaled)
    }

    /// [`step`](Self::step), and [`update`](Self::update) once all announced optimizers have stepped.
    pub(crate) fn step_together(&self, optimizer: &mut impl Optimizer) -> Result<()> {
        self.step(optimizer)?;
        self.lock().end_step_if_all_stepped()
    }

    /// [`step_together`](Self::step_together) with gradients clipped on the way, given the sum of the squares of the
    /// gradients as they are. Returns the norm of the true ones. They must be dropped afterwards.
    pub(crate) fn step_clipped(
        &self,
        optimizer: &mut impl Optimizer,
        max_norm: f64,
        sum_of_squares: f64,
    ) -> Result<f64> {
        let handle = optimizer.handle().clone();
        let inv_scale = {
            let mut inner = self.lock();
            let (is_unscaled, ends_step) = match inner.entry(&handle).map(|entry| &entry.stage) {
                Some(Stage::Unscaled(_)) => (true, false),
                Some(Stage::Stepped(_)) => (false, true),
                Some(Stage::Scaled) | None => (false, false),
            };
            // These gradients were made with the present scale, so it must not move before.
            inner.take_loaded_scale(&handle)?;
            let scale = inner.scaled("step")?.scale.f_double_value(&[])?;
            if ends_step {
                inner.end_step()?;
            }
            if is_unscaled { 1.0 } else { scale.recip() }
        };
        let norm = sum_of_squares.sqrt() * inv_scale;
        let found_inf = Tensor::from(if norm.is_finite() { 0f32 } else { 1.0 });
        if norm.is_finite() {
            optimizer.step_with_factor(inv_scale * clip_coefficient(max_norm, norm))?;
        }
        handle.record_found_inf(found_inf.shallow_clone());
        let mut inner = self.lock();
        if let Some(entry) = inner.entry(&handle) {
            entry.stage = Stage::Stepped(found_inf);
        }
        inner.end_step_if_all_stepped()?;
        Ok(norm)
    }
}

/// A disabled one has no state: `null`.
impl Stateful for GradScaler {
    fn state_dict(&self) -> Result<ObjectState> {
        let values = serde_json::to_value(GradScaler::state_dict(self)?).map_err(Error::other)?;
        Ok(ObjectState { values, ..Default::default() })
    }

    fn load_state_dict(&self, state: &ObjectState) -> Result<()> {
        let state: Option<GradScalerState> = serde_json::from_value(state.values.clone()).map_err(Error::other)?;
        state.map_or(Ok(()), |state| GradScaler::load_state_dict(self, &state))?;
        // The gradients that the run goes on with are scaled, whatever those before them were.
        self.lock().entries.iter_mut().for_each(|entry| entry.stage = Stage::Scaled);
        Ok(())
    }
}

impl Inner {
    fn on_device(&mut self, like: &Tensor) -> Result<&OnDevice> {
        if self.on_device.is_none() {
            let number = |value: f64, kind| scalar::full(&[], value, (kind, like.device()));
            let scale = number(self.kwargs.init_scale, Kind::Float)?;
            let growth_tracker = number(self.growth_tracker as f64, Kind::Int)?;
            self.on_device = Some(OnDevice { scale, growth_tracker });
        }
        self.scaled("scale")
    }

    /// Before the first loss, makes a loaded scale on the device of the gradients, if a checkpoint has brought some.
    fn take_loaded_scale(&mut self, optimizer: &OptimizerHandle) -> Result<()> {
        let gradient = optimizer.params().find_map(Param::grad);
        if let Some(gradient) = gradient.filter(|_| self.was_loaded && self.on_device.is_none()) {
            self.on_device(&gradient)?;
        }
        Ok(())
    }

    fn scaled(&self, call: &'static str) -> Result<&OnDevice> {
        self.on_device.as_ref().ok_or_else(|| OptimError::NothingScaled { call }.into())
    }

    fn scale(&self) -> Result<f64> {
        match &self.on_device {
            Some(on_device) => Ok(on_device.scale.f_double_value(&[])?),
            None => Ok(self.kwargs.init_scale),
        }
    }

    fn entry(&mut self, optimizer: &OptimizerHandle) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.handle == *optimizer)
    }

    fn expected(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|entry| entry.expected)
    }

    fn forget(&mut self, optimizer: &OptimizerHandle) {
        self.entries.retain(|entry| entry.handle != *optimizer);
    }

    /// Makes the optimizer's gradients true ones and returns whether one of them is not finite.
    fn unscale(&mut self, optimizer: &OptimizerHandle, call: &'static str) -> Result<Tensor> {
        let ends_step = match self.entry(optimizer) {
            Some(Entry { stage: Stage::Unscaled(found_inf), .. }) => return Ok(found_inf.shallow_clone()),
            Some(Entry { stage: Stage::Stepped(_), expected: true, .. }) => true,
            Some(Entry { stage: Stage::Stepped(_), .. }) => {
                return Err(OptimError::AlreadyStepped { call }.into());
            }
            Some(Entry { stage: Stage::Scaled, .. }) | None => false,
        };
        self.take_loaded_scale(optimizer)?;
        // These gradients were made with the present scale, so it must not move before.
        let found_inf = self.divide_gradients(optimizer, call)?;
        if ends_step {
            self.end_step()?;
        }
        let stage = Stage::Unscaled(found_inf.shallow_clone());
        match self.entry(optimizer) {
            Some(entry) => entry.stage = stage,
            None => self.entries.push(Entry { handle: optimizer.clone(), expected: false, stage }),
        }
        Ok(found_inf)
    }

    fn divide_gradients(&self, optimizer: &OptimizerHandle, call: &'static str) -> Result<Tensor> {
        let _no_grad = tch::no_grad_guard();
        let scale = &self.scaled(call)?.scale;
        // As PyTorch: in double precision, then rounded, so that the quotient is the nearest float.
        let inv_scale = scale.f_to_kind(Kind::Double)?.f_reciprocal()?.f_to_kind(Kind::Float)?;
        let found_inf = scale.f_zeros_like()?;
        let lists = gradients(optimizer.params())?;
        for grads in &lists {
            let device = grads.device;
            if grads.kind == Kind::Half {
                return Err(half_gradient(optimizer));
            }
            if device == found_inf.device() {
                amp::non_finite_check_and_unscale_(&grads.tensors, &found_inf, &inv_scale)?;
            } else {
                let found_here = found_inf.f_zeros_like()?.f_to_device(device)?;
                let inv_scale = inv_scale.f_to_device(device)?;
                amp::non_finite_check_and_unscale_(&grads.tensors, &found_here, &inv_scale)?;
                let found_here = found_here.f_to_device(found_inf.device())?;
                found_inf.shallow_clone().f_copy_(&found_inf.f_maximum(&found_here)?)?;
            }
        }
        // A rank sees its shard only, and all have to skip the step or none.
        let mut groups: Vec<&Group> = lists.iter().filter_map(|list| list.group.as_ref()).collect();
        groups.dedup();
        groups.iter().try_for_each(|group| group.all_reduce(&found_inf, ReduceOp::Max))?;
        Ok(found_inf)
    }

    fn end_step_if_all_stepped(&mut self) -> Result<()> {
        let all_stepped = self.expected().all(|entry| matches!(entry.stage, Stage::Stepped(_)));
        if all_stepped { self.end_step() } else { Ok(()) }
    }

    /// Ends the training step of the prepared optimizers.
    fn end_step(&mut self) -> Result<()> {
        let resting: Vec<OptimizerHandle> = self
            .expected()
            .filter(|entry| matches!(entry.stage, Stage::Scaled))
            .map(|entry| entry.handle.clone())
            .collect();
        let found_infs = self.take_found_infs(|stage| matches!(stage, Stage::Stepped(_)));
        if resting.is_empty() {
            return self.update(&found_infs);
        }
        let old_scale = self.scaled("update")?.scale.f_detach_copy()?;
        self.update(&found_infs)?;
        let _no_grad = tch::no_grad_guard();
        let factor = self.scaled("update")?.scale.f_div(&old_scale)?;
        // Whoever unscales or steps has completed gradients before, so none are left that ranks have not reduced.
        for optimizer in &resting {
            for grads in gradients(optimizer.params())? {
                foreach::mul_tensor_(&grads.tensors, &factor.f_to_device(grads.device)?)?;
            }
        }
        Ok(())
    }

    /// Takes the findings out of the chosen entries. Announced optimizers begin again, others are
    /// forgotten.
    fn take_found_infs(&mut self, chosen: impl Fn(&Stage) -> bool) -> Vec<Tensor> {
        let mut found_infs = Vec::new();
        self.entries.retain_mut(|entry| {
            if !chosen(&entry.stage) {
                return true;
            }
            if let Stage::Unscaled(found_inf) | Stage::Stepped(found_inf) =
                std::mem::replace(&mut entry.stage, Stage::Scaled)
            {
                found_infs.push(found_inf);
            }
            entry.expected
        });
        found_infs
    }

    fn update(&self, found_infs: &[Tensor]) -> Result<()> {
        let OnDevice { scale, growth_tracker } = self.scaled("update")?;
        // The kernel knows 0 and 1, so findings are not added up.
        let found_inf = match found_infs {
            [] => return Ok(()),
            [one] => one.shallow_clone(),
            all => Tensor::f_stack(all, 0)?.f_max()?,
        };
        let rule = amp::ScaleUpdate {
            growth_factor: self.kwargs.growth_factor,
            backoff_factor: self.kwargs.backoff_factor,
            growth_interval: i64::from(self.kwargs.growth_interval),
        };
        Ok(amp::update_scale_(scale, growth_tracker, &found_inf, &rule)?)
    }
}

#[cold]
fn half_gradient(optimizer: &OptimizerHandle) -> crate::Error {
    let is_half = |grad: Tensor| grad.f_kind().is_ok_and(|kind| kind == Kind::Half);
    let parameter = optimizer.params().find(|param| param.grad().is_some_and(is_half));
    let parameter = parameter.map_or_else(String::new, |param| param.name().to_string());
    OptimError::HalfGradient { parameter }.into()
}

impl fmt::Debug for GradScaler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = self.lock();
        f.debug_struct("GradScaler")
            .field("enabled", &self.is_enabled())
            .field("kwargs", &inner.kwargs)
            .field("num_optimizers", &inner.entries.len())
            .finish_non_exhaustive()
    }
}
