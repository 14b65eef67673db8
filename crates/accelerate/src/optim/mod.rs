//! Optimizers, learning-rate schedules, gradient clipping, and what `prepare` makes of them.
//!
//! [`AdamW`], [`Adam`], [`Sgd`] and (on the CPU) [`Adagrad`] compute with libtorch's fused kernels, [`RMSprop`] and
//! [`Lion`] with its operations over lists: one call per device and dtype, not one per parameter.
//! [`Adafactor`] and [`AdamW8bit`], which are there to save memory, go parameter by parameter. State has
//! PyTorch's names and shapes; that of parameters stepped together is one piece of memory. An optimizer and its schedulers share an
//! [`OptimizerHandle`], so a schedule keeps working after `prepare` has wrapped both.

#[macro_use]
mod settings;

mod adafactor;
mod adagrad;
mod adam;
mod adamw8bit;
mod batches;
mod clip;
mod deep_speed;
mod flat;
mod full_state;
mod grad_scaler;
mod handle;
mod lion;
mod offloaded;
mod prepared;
mod prepared_schedule;
mod quantized;
mod rmsprop;
pub mod schedule;
mod schedule_length;
mod sgd;
mod shared_object;
mod state;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

pub use adafactor::{Adafactor, AdafactorBuilder};
pub use adagrad::{Adagrad, AdagradBuilder};
pub use adam::{Adam, AdamBuilder, AdamW};
pub use adamw8bit::{AdamW8bit, AdamW8bitBuilder};
pub(crate) use batches::gradients;
pub(crate) use clip::clip_coefficient;
pub use clip::{ClipGradNorm, TotalNorm, clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm};
pub use deep_speed::{DummyOptim, DummyScheduler};
pub use grad_scaler::{GradScaler, GradScalerState};
pub use handle::{GroupDefaults, OptimizerHandle, ParamGroup, no_decay};
pub use lion::{Lion, LionBuilder};
pub use prepared::AcceleratedOptimizer;
pub use prepared_schedule::AcceleratedScheduler;
pub(crate) use prepared_schedule::SchedulerOptions;
pub use rmsprop::{RMSprop, RMSpropBuilder};
pub use schedule::{
    AnnealStrategy, ConstantWithWarmup, CosineAnnealingLr, CosineWithHardRestartsWithWarmup, CosineWithWarmup,
    DeepSpeedLr, ExponentialLr, InverseSqrtWithWarmup, LambdaLr, LinearLr, LinearWithWarmup, LrScheduler, MultiStepLr,
    OneCycle, OneCycleLr, Plateau, PlateauMode, PlateauState, PolynomialLr, PolynomialWithWarmup, ReduceLrOnPlateau,
    SchedulerState, StepLr, ThresholdMode, Warmup,
};
pub use sgd::{Sgd, SgdBuilder};
pub use shared_object::IntoInnerError;
pub use state::{GroupState, OptimizerState};

use crate::error::{OffloadError, Result};
use accelerate_core::config::OffloadTarget;
use std::collections::BTreeMap;
use tch::Tensor;
use torch_ext::foreach;

/// Changes parameters by their gradients.
///
/// Implement it for an optimizer of your own and `prepare` accepts it. It sees only what is stored on
/// this process ([`Param::local`](crate::nn::Param::local)): with sharded parameters that is the shard.
///
/// ```
/// use accelerate::{Result, nn::{Init, ParamStore}, tch::Device};
/// use accelerate::optim::{GroupDefaults, Optimizer, OptimizerHandle, OptimizerState, ParamGroup};
///
/// /// Moves every weight by the learning rate against the sign of its gradient.
/// struct SignSgd(OptimizerHandle);
///
/// impl Optimizer for SignSgd {
///     fn step(&mut self) -> Result<()> {
///         let _no_grad = accelerate::tch::no_grad_guard();
///         let lr = self.0.get_lr(0)?;
///         for param in self.0.params() {
///             let mut weight = param.local();
///             let _ = weight.f_sub_(&weight.f_grad()?.f_sign()?.f_mul_scalar(lr)?)?;
///         }
///         self.0.record_step();
///         Ok(())
///     }
///     fn handle(&self) -> &OptimizerHandle {
///         &self.0
///     }
///     fn state_dict(&self) -> Result<OptimizerState> {
///         Ok(OptimizerState::default())
///     }
///     fn load_state_dict(&mut self, _: &OptimizerState) -> Result<()> {
///         Ok(())
///     }
/// }
///
/// let store = ParamStore::new(Device::Cpu);
/// let weight = store.root().param("weight", ([1], Init::Zeros))?;
/// let defaults = GroupDefaults { lr: 0.1, weight_decay: 0.0, momentum: None };
/// let groups = vec![ParamGroup::new(store.trainable_parameters())];
/// let mut optimizer = SignSgd(OptimizerHandle::new("SignSgd", groups, defaults)?);
/// (weight.get()? * 3.0).sum(None).backward();
/// optimizer.step()?;
/// assert!((weight.get()?.double_value(&[0]) + 0.1).abs() < 1e-6);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an optimizer",
    label = "has no `Optimizer`",
    note = "take one of `accelerate::optim`, or implement `accelerate::optim::Optimizer`; those of `tch::nn` do not take part"
)]
pub trait Optimizer: Send + 'static {
    /// Updates every parameter that has a gradient. Gradients stay as they are.
    ///
    /// # Errors
    /// libtorch's own.
    fn step(&mut self) -> Result<()>;

    /// As [`step`](Self::step), but leaves parameters and state alone if `found_inf`, a float scalar
    /// (0 or 1) on the gradients' device, is not 0. Called in mixed precision with loss scaling.
    ///
    /// The default waits for the device to know; optimizers with fused kernels let the device decide.
    ///
    /// # Errors
    /// libtorch's own.
    fn step_unless(&mut self, found_inf: &Tensor) -> Result<()> {
        if found_inf.f_double_value(&[])? == 0.0 { self.step() } else { Ok(()) }
    }

    /// As [`step`](Self::step) with every gradient multiplied by `grad_factor`. What the gradients are afterwards is
    /// not defined: they must be dropped.
    ///
    /// The default multiplies them first; optimizers with kernels of their own do it on the way.
    ///
    /// ```
    /// use accelerate::{nn::{Init, ParamStore}, optim::{Optimizer, Sgd}, tch::Device};
    ///
    /// let store = ParamStore::new(Device::Cpu);
    /// let weight = store.root().param("weight", ([1], Init::Zeros))?;
    /// let mut optimizer = Sgd::new(&store, 1.0)?;
    /// (weight.get()? * 8.0).sum(None).backward();
    /// optimizer.step_with_factor(0.5)?;
    /// assert_eq!(weight.get()?.double_value(&[0]), -4.0);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// libtorch's own.
    fn step_with_factor(&mut self, grad_factor: f64) -> Result<()> {
        if grad_factor != 1.0 {
            for grads in gradients(self.handle().params())? {
                foreach::mul_scalar_(&grads.tensors, grad_factor)?;
            }
        }
        self.step()
    }

    /// Drops all gradients, so that the next backward pass starts from nothing. PyTorch's
    /// `zero_grad(set_to_none=True)`.
    ///
    /// # Errors
    /// libtorch's own.
    fn zero_grad(&mut self) -> Result<()> {
        self.handle().zero_grad()
    }

    /// Parameter groups and learning rates, shared with schedulers.
    fn handle(&self) -> &OptimizerHandle;

    /// Everything needed to go on later: tensors by parameter name, and the groups' settings.
    ///
    /// # Errors
    /// libtorch's own.
    fn state_dict(&self) -> Result<OptimizerState>;

    /// As [`state_dict`](Self::state_dict), but the tensors may be those of the optimizer itself, which the next step changes:
    /// checkpoints are written from them, without a copy of the whole state in memory.
    ///
    /// The default makes copies.
    ///
    /// # Errors
    /// As [`state_dict`](Self::state_dict).
    fn state_views(&self) -> Result<OptimizerState> {
        self.state_dict()
    }

    /// As [`state_views`](Self::state_views), but what is offloaded is there as tensors without memory, which have its sizes and
    /// types: [`read_state`](Self::read_state) has what is in them. So a checkpoint is written without all of it in memory.
    ///
    /// The default is [`state_views`](Self::state_views).
    ///
    /// ```
    /// use accelerate::{OffloadTarget, nn::{Init, ParamStore}, optim::{AdamW, Optimizer}, tch::{Device, Kind, Tensor}};
    ///
    /// let store = ParamStore::new(Device::Cpu);
    /// let weight = store.root().param("weight", ([2], Init::Zeros))?;
    /// let mut optimizer = AdamW::new(&store, 0.1)?;
    /// optimizer.offload_state(&OffloadTarget::Cpu)?;
    /// (weight.get()? * 5.0).sum(None).backward();
    /// optimizer.step()?;
    /// let outline = &optimizer.state_outline()?.tensors["exp_avg.weight"];
    /// assert_eq!((outline.size(), torch_ext::storage::is_allocated(outline)), (vec![2], false));
    /// let place = Tensor::zeros([2], (Kind::Float, Device::Cpu));
    /// optimizer.read_state(&[("exp_avg.weight", &place)])?;
    /// assert_eq!(place.double_value(&[1]), 0.5);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`state_dict`](Self::state_dict).
    fn state_outline(&self) -> Result<OptimizerState> {
        self.state_views()
    }

    /// Fills tensors on the CPU, by name, with those that are without memory in the [`state_outline`](Self::state_outline). The
    /// default does nothing: there are none.
    ///
    /// # Errors
    /// There is no such state; the disk that it is on.
    fn read_state(&self, _wanted: &[(&str, &Tensor)]) -> Result<()> {
        Ok(())
    }

    /// These tensors of a [`state_dict`](Self::state_dict) as numbers that go element by element: where they are codes in blocks
    /// that share a scale, the numbers that these stand for (float32, in the shape of the codes), under the same names and
    /// without the scales. [`load_state_dict`](Self::load_state_dict) takes either, and rounds numbers anew. So
    /// the state comes to processes that keep other elements than those which saved it.
    ///
    /// The default gives them back: most state has no blocks.
    ///
    /// ```
    /// use accelerate::{nn::{Init, ParamStore}, optim::{AdamW8bit, Optimizer}, tch::{Device, Kind}};
    ///
    /// let store = ParamStore::new(Device::Cpu);
    /// let weight = store.root().param("weight", ([64, 64], Init::Zeros))?;
    /// let mut optimizer = AdamW8bit::new(&store, 0.1)?;
    /// (weight.get()? * 5.0).sum(None).backward();
    /// optimizer.step()?;
    /// let numbers = optimizer.dequantized(optimizer.state_dict()?.tensors)?;
    /// assert_eq!(numbers["exp_avg.weight"].kind(), Kind::Float);
    /// assert!((numbers["exp_avg.weight"].double_value(&[0, 0]) - 0.5).abs() < 1e-6);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// Codes and scales that do not go together.
    fn dequantized(&self, tensors: BTreeMap<String, Tensor>) -> Result<BTreeMap<String, Tensor>> {
        Ok(tensors)
    }

    /// Takes over what [`state_dict`](Self::state_dict) returned. Tensors are copied to the devices of
    /// the parameters.
    ///
    /// # Errors
    /// Parameters, groups or shapes differ from the saved ones; all differences are listed.
    fn load_state_dict(&mut self, state: &OptimizerState) -> Result<()>;

    /// As [`load_state_dict`](Self::load_state_dict), but the optimizer may keep the tensors, which nobody else has.
    ///
    /// The default copies them.
    ///
    /// # Errors
    /// As [`load_state_dict`](Self::load_state_dict).
    fn take_state_dict(&mut self, state: OptimizerState) -> Result<()> {
        self.load_state_dict(&state)
    }

    /// Keeps the state off the device from now on, also what is there already: in the memory of the host, or in files of a
    /// folder, which must be there. A step then brings it into memory block by block, reading ahead and writing behind,
    /// and changes what it always changes, to the bit. The files have no names, take their room at the first step and are
    /// gone when the process ends; [`state_dict`](Self::state_dict) is what lasts. `prepare` calls it where a plugin asks
    /// for it.
    ///
    /// [`Adam`], [`AdamW`], [`Adagrad`] and [`Lion`] can. Method: Rajbhandari et al., "ZeRO-Infinity", SC 2021.
    ///
    /// ```
    /// use accelerate::{OffloadTarget, nn::{Init, ParamStore}, optim::{AdamW, Optimizer, Sgd}, tch::Device};
    ///
    /// let store = ParamStore::new(Device::Cpu);
    /// let weight = store.root().param("weight", ([1], Init::Zeros))?;
    /// let mut optimizer = AdamW::new(&store, 0.1)?;
    /// optimizer.offload_state(&OffloadTarget::Nvme(std::env::temp_dir()))?;
    /// assert!(optimizer.is_state_offloaded());
    /// (weight.get()? * 5.0).sum(None).backward();
    /// optimizer.step()?;
    /// assert!((weight.get()?.double_value(&[0]) + 0.1).abs() < 1e-6);
    /// assert!(optimizer.state_dict()?.tensors.contains_key("exp_avg.weight"));
    /// assert!(Sgd::new(&store, 0.1)?.offload_state(&OffloadTarget::Cpu).is_err());
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// An optimizer that has no such state; with state that is there already also those of
    /// [`load_state_dict`](Self::load_state_dict) and a disk without room.
    fn offload_state(&mut self, _target: &OffloadTarget) -> Result<()> {
        Err(OffloadError::NotElementwise { optimizer: self.handle().optimizer_name() }.into())
    }

    /// Does [`step`](Self::step) move state over a disk or a bus, where it can fail on one process only? For an example see
    /// [`offload_state`](Self::offload_state).
    fn is_state_offloaded(&self) -> bool {
        false
    }
}
