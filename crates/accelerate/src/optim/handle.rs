//! Parameter groups, and the handle by which optimizer, schedulers and accelerator share them.

use super::batches::storage_version;
use crate::error::{OptimError, Result};
use crate::messages;
use crate::nn::{Param, ParamStore};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::Tensor;
use torch_ext::TensorVec;

/// Parameters that are trained alike. What is `None` follows the optimizer's own setting.
///
/// ```
/// use accelerate::{nn::{Init, ParamStore}, optim::{AdamW, Optimizer, ParamGroup}, tch::Device};
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([2], Init::Zeros))?;
/// let group = ParamGroup::new(store.trainable_parameters()).lr(1e-4).name("all");
/// let optimizer = AdamW::builder(&store).lr(1e-3).param_groups(vec![group]).build()?;
/// assert_eq!(optimizer.handle().learning_rates(), [1e-4]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct ParamGroup {
    /// The parameters, each in exactly one group of the optimizer.
    pub params: Vec<Param>,
    /// Learning rate.
    pub lr: Option<f64>,
    /// Weight decay: added to the gradient (L2) in SGD, Adam, Adagrad and RMSprop, apart from it
    /// (decoupled) in the others.
    pub weight_decay: Option<f64>,
    /// Momentum of SGD and RMSprop, first beta of Adam, AdamW, AdamW8bit and Lion.
    pub momentum: Option<f64>,
    /// A name for logs and saved state.
    pub name: Option<String>,
}

impl ParamGroup {
    /// A group that follows the optimizer's settings in everything.
    pub fn new(params: Vec<Param>) -> Self {
        Self { params, ..Self::default() }
    }

    /// Sets the group's own learning rate.
    #[must_use]
    pub fn lr(self, lr: f64) -> Self {
        Self { lr: Some(lr), ..self }
    }

    /// Sets the group's own weight decay.
    #[must_use]
    pub fn weight_decay(self, weight_decay: f64) -> Self {
        Self { weight_decay: Some(weight_decay), ..self }
    }

    /// Sets the group's own momentum (SGD, RMSprop) or first beta (Adam, AdamW, Lion).
    #[must_use]
    pub fn momentum(self, momentum: f64) -> Self {
        Self { momentum: Some(momentum), ..self }
    }

    /// Names the group.
    #[must_use]
    pub fn name(self, name: impl Into<String>) -> Self {
        Self { name: Some(name.into()), ..self }
    }
}

/// Two groups as the BERT recipes use them: parameters whose name contains one of `patterns` get no
/// weight decay, all others follow the optimizer.
///
/// A group without members is left out. Only parameters that require gradients take part.
///
/// ```
/// use accelerate::{nn::{Init, ParamStore}, optim::no_decay, tch::Device};
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([2, 2], Init::Zeros))?;
/// store.root().param("bias", ([2], Init::Zeros))?;
/// let groups = no_decay(&store, &["bias", "LayerNorm.weight"]);
/// assert_eq!(groups[0].params[0].name(), "weight");
/// assert_eq!((groups[1].params[0].name(), groups[1].weight_decay), ("bias", Some(0.0)));
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn no_decay(store: &ParamStore, patterns: &[&str]) -> Vec<ParamGroup> {
    let (without, with): (Vec<_>, Vec<_>) = store
        .trainable_parameters()
        .into_iter()
        .partition(|param| patterns.iter().any(|pattern| param.name().contains(pattern)));
    [ParamGroup::new(with).name("decay"), ParamGroup::new(without).weight_decay(0.0).name("no_decay")]
        .into_iter()
        .filter(|group| !group.params.is_empty())
        .collect()
}

/// What a [`ParamGroup`] falls back to where it says nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupDefaults {
    /// Learning rate.
    pub lr: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Momentum of SGD and RMSprop, first beta of the Adams and Lion; `None` for optimizers that have neither.
    pub momentum: Option<f64>,
}

/// The present settings of one group. Schedulers change them between steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct GroupSettings {
    pub(crate) lr: f64,
    /// Set by the first scheduler: the learning rate that its factors multiply.
    pub(crate) initial_lr: Option<f64>,
    pub(crate) weight_decay: f64,
    pub(crate) momentum: f64,
}

impl GroupSettings {
    /// Refuses settings that no optimizer can step with and no file can hold. A learning rate may be below 0 here, because schedules of
    /// the user's own and rounding may make it so.
    pub(super) fn check(&self, optimizer: &'static str) -> Result<()> {
        for lr in std::iter::once(self.lr).chain(self.initial_lr) {
            if !lr.is_finite() {
                let (found, wanted) = (lr, "a finite number");
                return Err(OptimError::Setting { owner: optimizer, name: "lr", found, wanted }.into());
            }
        }
        at_least_zero(optimizer, "weight_decay", self.weight_decay)?;
        at_least_zero(optimizer, "momentum", self.momentum)
    }
}

/// A shared view of an optimizer: its parameter groups, learning rates and last step.
///
/// The optimizer, its schedulers and the accelerator hold clones of one handle, so a learning rate
/// set through one is seen by all. Clones compare equal by identity, never by content.
///
/// ```
/// use accelerate::{nn::{Init, ParamStore}, optim::{Optimizer, Sgd}, tch::Device};
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([2], Init::Zeros))?;
/// let optimizer = Sgd::new(&store, 0.1)?;
/// let handle = optimizer.handle().clone();
/// handle.set_lr(0, 0.05)?;
/// assert_eq!(optimizer.handle().get_lr(0)?, 0.05);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone)]
pub struct OptimizerHandle(Arc<Shared>);

struct Shared {
    optimizer: &'static str,
    has_momentum: bool,
    groups: Vec<(Option<String>, Vec<Param>)>,
    state: Mutex<State>,
}

struct State {
    settings: Vec<GroupSettings>,
    num_steps: usize,
    last_step: LastStep,
    /// `prepare` has wrapped the optimizer.
    is_prepared: bool,
    /// [`storage_version`] of the parameters that the optimizer's state is for; `None` before the first step.
    state_version: Option<u64>,
    gradients: Gradients,
    /// All parameters in one list, with the version of where they are stored.
    tensors: Option<(u64, TensorVec)>,
}

/// What a prepared optimizer knows about its gradients.
#[derive(Clone, Copy, PartialEq)]
enum Gradients {
    /// No backward pass of the accelerator's has run.
    Unknown,
    /// Of a backward pass since the last step.
    Fresh,
    /// The last step has used them.
    Used,
}

/// Whether the last step changed the parameters.
enum LastStep {
    Taken,
    Skipped,
    /// Not yet looked at, because the answer is on the device: a scalar, not zero if skipped.
    Unknown(Tensor),
}

impl OptimizerHandle {
    /// Checks the groups and makes the handle; for your own implementations of
    /// [`Optimizer`](super::Optimizer). `optimizer` is the name that error messages show.
    ///
    /// # Errors
    /// No parameter at all, a parameter in two groups, two parameters of the same name (state is
    /// saved by name), or a setting that is negative or not finite.
    pub fn new(optimizer: &'static str, groups: Vec<ParamGroup>, defaults: GroupDefaults) -> Result<Self> {
        check_members(optimizer, &groups)?;
        let mut settings = Vec::with_capacity(groups.len());
        for group in &groups {
            let group = GroupSettings {
                lr: group.lr.unwrap_or(defaults.lr),
                initial_lr: None,
                weight_decay: group.weight_decay.unwrap_or(defaults.weight_decay),
                momentum: group.momentum.or(defaults.momentum).unwrap_or(0.0),
            };
            at_least_zero(optimizer, "lr", group.lr)?;
            group.check(optimizer)?;
            settings.push(group);
        }
        let groups = groups.into_iter().map(|group| (group.name, group.params)).collect();
        let state = State {
            settings,
            num_steps: 0,
            last_step: LastStep::Taken,
            is_prepared: false,
            state_version: None,
            gradients: Gradients::Unknown,
            tensors: None,
        };
        let has_momentum = defaults.momentum.is_some();
        Ok(Self(Arc::new(Shared { optimizer, has_momentum, groups, state: Mutex::new(state) })))
    }

    // Every statement leaves the state whole, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The optimizer's type, as error messages show it.
    pub fn optimizer_name(&self) -> &'static str {
        self.0.optimizer
    }

    /// Number of parameter groups.
    pub fn num_groups(&self) -> usize {
        self.0.groups.len()
    }

    /// The name the group was given, if any.
    pub fn group_name(&self, group: usize) -> Option<&str> {
        self.0.groups.get(group).and_then(|(name, _)| name.as_deref())
    }

    /// The parameters of one group; empty if there is no such group.
    pub fn group_params(&self, group: usize) -> &[Param] {
        self.0.groups.get(group).map_or(&[], |(_, params)| params)
    }

    /// All parameters, group by group.
    pub fn params(&self) -> impl Iterator<Item = &Param> {
        self.0.groups.iter().flat_map(|(_, params)| params)
    }

    /// Does the optimizer train this parameter?
    pub(crate) fn trains(&self, param: &Param) -> bool {
        self.params().any(|own| own.is_same(param))
    }

    /// Does the optimizer train any of these parameters?
    pub fn trains_any_of(&self, params: &[Param]) -> bool {
        self.params().any(|own| params.iter().any(|param| own.is_same(param)))
    }

    /// The learning rate of every group.
    pub fn learning_rates(&self) -> Vec<f64> {
        self.lock().settings.iter().map(|group| group.lr).collect()
    }

    /// The learning rate of one group.
    ///
    /// # Errors
    /// There is no such group.
    pub fn get_lr(&self, group: usize) -> Result<f64> {
        Ok(self.settings(group)?.lr)
    }

    /// Sets the learning rate of one group, from the next step on.
    ///
    /// # Errors
    /// There is no such group.
    pub fn set_lr(&self, group: usize, lr: f64) -> Result<()> {
        self.update(group, |settings| settings.lr = lr)
    }

    /// The momentum (SGD, RMSprop) or first beta (Adam, AdamW, Lion) of one group.
    ///
    /// # Errors
    /// There is no such group.
    pub fn get_momentum(&self, group: usize) -> Result<f64> {
        Ok(self.settings(group)?.momentum)
    }

    /// Sets the momentum (SGD, RMSprop) or first beta (Adam, AdamW, Lion) of one group, from the next step on.
    ///
    /// # Errors
    /// There is no such group.
    pub fn set_momentum(&self, group: usize, momentum: f64) -> Result<()> {
        self.update(group, |settings| settings.momentum = momentum)
    }

    /// Drops the gradient of every parameter, as `zero_grad(set_to_none=True)` in PyTorch. What backward passes of a sharded
    /// model have left to be reduced goes by [`AcceleratedOptimizer::zero_grad`](super::AcceleratedOptimizer::zero_grad).
    ///
    /// # Errors
    /// libtorch's own.
    pub fn zero_grad(&self) -> Result<()> {
        let version = storage_version(self.params());
        let mut state = self.lock();
        let is_current = state.tensors.as_ref().is_some_and(|tensors| tensors.0 == version);
        if !is_current {
            let mut tensors = TensorVec::with_capacity(0);
            self.params().for_each(|param| tensors.push(&param.local()));
            state.tensors = Some((version, tensors));
        }
        match &state.tensors {
            Some((_, tensors)) => Ok(tensors.drop_gradients()?),
            None => Ok(()),
        }
    }

    /// Did the last step leave the parameters alone because a gradient was infinite or not a number?
    ///
    /// Only steps through a [`GradScaler`](crate::optim::GradScaler) are ever skipped. Asking waits for
    /// the device if its answer is not there yet.
    pub fn step_was_skipped(&self) -> bool {
        let mut state = self.lock();
        let skipped = match &state.last_step {
            LastStep::Taken => false,
            LastStep::Skipped => true,
            LastStep::Unknown(found_inf) => match found_inf.f_double_value(&[]) {
                Ok(found) => found != 0.0,
                Err(error) => {
                    // The device failed; the next call on it reports that. Until then nothing may
                    // go on as if the step had been taken.
                    messages::error!("cannot read whether the optimizer step was skipped: {error}");
                    true
                }
            },
        };
        state.last_step = if skipped { LastStep::Skipped } else { LastStep::Taken };
        skipped
    }

    /// Number of times [`Optimizer::step`](super::Optimizer::step) ran, skipped steps included.
    pub fn num_steps(&self) -> usize {
        self.lock().num_steps
    }

    /// Notes a step; for your own implementations of [`Optimizer`](super::Optimizer), at the end of `step`.
    pub fn record_step(&self) {
        let mut state = self.lock();
        state.num_steps += 1;
        state.last_step = LastStep::Taken;
    }

    pub(crate) fn set_prepared(&self, is_prepared: bool) {
        self.lock().is_prepared = is_prepared;
    }

    /// Refuses a step that would go wrong unseen: of an optimizer that does not know about accumulation and loss scaling,
    /// although its model does; with state of full parameters, although only shards of them are left; and with settings that
    /// a program or its schedule has since made no numbers.
    ///
    /// Returns the [`storage_version`] of the parameters.
    pub(super) fn check_step(&self) -> Result<u64> {
        let optimizer = self.optimizer_name();
        if !self.is_prepared()
            && let Some(param) = self.params().find(|param| param.is_of_prepared_model())
        {
            let parameter = param.name().to_string();
            return Err(OptimError::SteppedUnprepared { optimizer, parameter }.into());
        }
        let version = storage_version(self.params());
        if *self.lock().state_version.get_or_insert(version) != version {
            return Err(OptimError::StateFromBeforeSharding { optimizer }.into());
        }
        self.lock().settings.iter().try_for_each(|group| group.check(optimizer))?;
        Ok(version)
    }

    /// All state is as the parameters are stored now.
    pub(super) fn state_loaded(&self) {
        self.lock().state_version = Some(storage_version(self.params()));
    }

    pub(crate) fn is_prepared(&self) -> bool {
        self.lock().is_prepared
    }

    /// A backward pass of the accelerator's has run.
    pub(crate) fn gradients_made(&self) {
        self.lock().gradients = Gradients::Fresh;
    }

    /// The prepared optimizer has stepped.
    pub(crate) fn gradients_used(&self) {
        let mut state = self.lock();
        if state.gradients == Gradients::Fresh {
            state.gradients = Gradients::Used;
        }
    }

    /// Are there gradients of a backward pass that no step has used?
    pub(crate) fn has_fresh_gradients(&self) -> bool {
        self.lock().gradients == Gradients::Fresh
    }

    /// Has a step used the gradients, and no backward pass made new ones since?
    pub(crate) fn are_gradients_used(&self) -> bool {
        self.lock().gradients == Gradients::Used
    }

    /// Notes that the step counted only if this scalar, which may still be in flight, is zero.
    pub(crate) fn record_found_inf(&self, found_inf: Tensor) {
        self.lock().last_step = LastStep::Unknown(found_inf);
    }

    pub(crate) fn settings(&self, group: usize) -> Result<GroupSettings> {
        let state = self.lock();
        state.settings.get(group).copied().ok_or_else(|| self.no_such(group))
    }

    /// Changes one group's settings under the lock.
    pub(crate) fn update(&self, group: usize, change: impl FnOnce(&mut GroupSettings)) -> Result<()> {
        let mut state = self.lock();
        let settings = state.settings.get_mut(group).ok_or_else(|| self.no_such(group))?;
        change(settings);
        Ok(())
    }

    /// The learning rates that schedules multiply: those in force when the first scheduler was made.
    pub(crate) fn initial_lrs(&self) -> Vec<f64> {
        let mut state = self.lock();
        state.settings.iter_mut().map(|group| *group.initial_lr.get_or_insert(group.lr)).collect()
    }

    /// Replaces every group's learning rate by what `rule` makes of the group's number and present
    /// rate; returns the new ones.
    pub(crate) fn map_lrs(&self, mut rule: impl FnMut(usize, f64) -> f64) -> Vec<f64> {
        // The rule may be the user's, and must be free to look at this handle: no lock meanwhile.
        let lrs: Vec<f64> = self.learning_rates().into_iter().enumerate().map(|(group, lr)| rule(group, lr)).collect();
        for (settings, &lr) in self.lock().settings.iter_mut().zip(&lrs) {
            settings.lr = lr;
        }
        lrs
    }

    /// Does the optimizer have a momentum or first beta at all?
    pub(crate) fn has_momentum(&self) -> bool {
        self.0.has_momentum
    }

    fn no_such(&self, group: usize) -> crate::Error {
        OptimError::NoSuchGroup { group, num_groups: self.num_groups() }.into()
    }
}

impl PartialEq for OptimizerHandle {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for OptimizerHandle {}

impl fmt::Debug for OptimizerHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OptimizerHandle")
            .field("optimizer", &self.0.optimizer)
            .field("num_params", &self.params().count())
            .field("settings", &self.lock().settings)
            .finish()
    }
}

fn check_members(optimizer: &'static str, groups: &[ParamGroup]) -> Result<()> {
    let mut group_of = HashMap::new();
    for (second, group) in groups.iter().enumerate() {
        for param in &group.params {
            if let Some(first) = group_of.insert(param.name().to_string(), second) {
                let parameter = param.name().to_string();
                return Err(OptimError::DuplicateParameter { optimizer, parameter, first, second }.into());
            }
        }
    }
    if group_of.is_empty() {
        return Err(OptimError::NoParameters { optimizer }.into());
    }
    Ok(())
}

/// Refuses settings that PyTorch refuses: negative ones, and those that are not numbers.
pub(super) fn at_least_zero(owner: &'static str, name: &'static str, found: f64) -> Result<()> {
    if found.is_finite() && 0.0 <= found {
        return Ok(());
    }
    Err(OptimError::Setting { owner, name, found, wanted: "a finite number, 0 or more" }.into())
}

/// The first betas of an optimizer and of those groups that have one for themselves.
pub(super) fn beta1s(default: f64, groups: &[ParamGroup]) -> Vec<f64> {
    std::iter::once(default).chain(groups.iter().filter_map(|group| group.momentum)).collect()
}

/// Refuses betas outside of `[0, 1)`. The first beta is a setting of each group, the second one of the optimizer.
pub(super) fn check_betas(owner: &'static str, beta1s: &[f64], beta2: f64) -> Result<()> {
    beta1s.iter().try_for_each(|&beta1| check_beta(owner, "beta1", beta1))?;
    check_beta(owner, "beta2", beta2)
}

fn check_beta(owner: &'static str, name: &'static str, found: f64) -> Result<()> {
    if (0.0..1.0).contains(&found) {
        return Ok(());
    }
    Err(OptimError::Setting { owner, name, found, wanted: "0 or more, and less than 1" }.into())
}
