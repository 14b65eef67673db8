//! Learning-rate schedules.
//!
//! A schedule holds a clone of its optimizer's [`OptimizerHandle`] and writes learning rates into it:
//! for step 0 when it is made, for the next one at each [`LrScheduler::step`]. Formulas and order of
//! arithmetic are PyTorch's and `transformers`', so rates agree to the last bits.

mod annealing;
mod decay;
mod deep_speed;
mod linear;
mod one_cycle;
mod plateau;
mod warmup;

pub use accelerate_core::schedule::{
    AnnealStrategy, OneCycle, Plateau, PlateauMode, PlateauState, SchedulerUnit, ThresholdMode,
};
pub use annealing::CosineAnnealingLr;
pub use decay::{ExponentialLr, LambdaLr, MultiStepLr, PolynomialLr, StepLr};
pub use deep_speed::DeepSpeedLr;
pub use linear::{LinearLr, Warmup};
pub use one_cycle::OneCycleLr;
pub use plateau::ReduceLrOnPlateau;
pub use warmup::{
    ConstantWithWarmup, CosineWithHardRestartsWithWarmup, CosineWithWarmup, InverseSqrtWithWarmup, LinearWithWarmup,
    PolynomialWithWarmup,
};

use super::OptimizerHandle;
use crate::error::{OptimError, Result};
use crate::messages;
use accelerate_core::checkpoint::MOST_STEPS;
use serde::{Deserialize, Serialize};

/// Changes an optimizer's learning rates as training goes on.
///
/// Call [`step`](Self::step) once after each step of the optimizer. Implement it for a schedule of your
/// own and `prepare` accepts it.
///
/// ```
/// use accelerate::nn::{Init, ParamStore};
/// use accelerate::optim::{LrScheduler, Optimizer, Sgd, StepLr};
/// use accelerate::tch::Device;
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([2], Init::Zeros))?;
/// let mut optimizer = Sgd::new(&store, 0.5)?;
/// let mut scheduler = StepLr::new(&optimizer, 2, 0.1)?;
/// for _ in 0..2 {
///     optimizer.step()?;
///     scheduler.step()?;
/// }
/// assert_eq!(scheduler.get_last_lr(), [0.05]);
/// assert_eq!(optimizer.handle().get_lr(0)?, 0.05);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a schedule of learning rates",
    label = "has no `LrScheduler`",
    note = "take one of `accelerate::optim`, or implement `accelerate::optim::LrScheduler`"
)]
pub trait LrScheduler: Send + 'static {
    /// Sets the learning rates for the optimizer's next step.
    ///
    /// # Errors
    /// The schedule has an end and it is passed.
    fn step(&mut self) -> Result<()>;

    /// The learning rates this scheduler set last, one for each parameter group.
    fn get_last_lr(&self) -> Vec<f64>;

    /// The optimizer whose learning rates it changes.
    fn handle(&self) -> &OptimizerHandle;

    /// Number of steps since the start, 0 for a new scheduler. PyTorch's name, though it counts calls
    /// of [`step`](Self::step) and not epochs.
    fn last_epoch(&self) -> usize;

    /// The last step the schedule answers, if it has an end.
    fn total_steps(&self) -> Option<usize> {
        None
    }

    /// The number of steps that the schedule is laid out for, if it is for any: after them its rate does not change any more.
    /// A prepared scheduler warns where they cannot end with the loop.
    fn num_training_steps(&self) -> Option<usize> {
        self.total_steps()
    }

    /// Everything needed to go on later.
    ///
    /// # Errors
    /// None in the schedules of this crate.
    fn state_dict(&self) -> Result<SchedulerState>;

    /// Takes over what [`state_dict`](Self::state_dict) returned. The learning rates themselves are part
    /// of the optimizer's state.
    ///
    /// # Errors
    /// The state is that of another kind of schedule; the number of parameter groups differs. Then nothing is changed.
    fn load_state_dict(&mut self, state: &SchedulerState) -> Result<()>;
}

/// Where a schedule stands; the fields are named in JSON as PyTorch names them.
///
/// ```
/// use accelerate::optim::SchedulerState;
///
/// let text = r#"{"last_epoch": 3, "_step_count": 4, "base_lrs": [0.1], "_last_lr": [0.05]}"#;
/// let state: SchedulerState = serde_json::from_str(text).unwrap();
/// assert_eq!((state.last_epoch, state.last_lr), (3, vec![0.05]));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SchedulerState {
    /// The type of the schedule, such as `StepLr`: no other one takes its state, since the same step would mean another rate. `None`
    /// in states of PyTorch's, which do not say it, and in those of earlier versions: whatever loads them has to know. A schedule
    /// of your own may set it to `None`.
    #[serde(rename = "_scheduler_type", default, skip_serializing_if = "Option::is_none")]
    pub scheduler_type: Option<String>,
    /// Steps since the start.
    pub last_epoch: usize,
    /// Calls of `step`, the one inside the constructor included.
    #[serde(rename = "_step_count")]
    pub step_count: usize,
    /// The rates that factors multiply, one for each parameter group.
    pub base_lrs: Vec<f64>,
    /// The rates set last.
    #[serde(rename = "_last_lr")]
    pub last_lr: Vec<f64>,
    /// Where the schedules within this one stand; only [`Warmup`] has any.
    #[serde(rename = "_schedulers", default, skip_serializing_if = "Vec::is_empty")]
    pub schedulers: Vec<SchedulerState>,
}

/// The moment for which a rate is asked.
struct Tick {
    group: usize,
    /// Steps since the start; 0 in the constructor.
    epoch: usize,
    /// The group's rate before any schedule.
    base_lr: f64,
    /// The group's rate now.
    lr: f64,
}

/// What all schedules have in common: where they stand, and for whom.
#[derive(Debug)]
struct Clock {
    handle: OptimizerHandle,
    last_epoch: usize,
    base_lrs: Vec<f64>,
    last_lr: Vec<f64>,
}

impl Clock {
    /// Starts at step 0 and sets the rates for it.
    fn start(handle: &OptimizerHandle, rule: impl FnMut(&Tick) -> f64) -> Self {
        let handle = handle.clone();
        let base_lrs = handle.initial_lrs();
        let mut clock = Self { handle, last_epoch: 0, base_lrs, last_lr: Vec::new() };
        clock.set(rule);
        clock
    }

    fn advance(&mut self, rule: impl FnMut(&Tick) -> f64) {
        if self.last_epoch == 0 && self.handle.num_steps() == 0 {
            messages::warning!(
                "a scheduler was stepped before its optimizer ({}); the first learning rate of the schedule \
                 is never used. Call optimizer.step() first, then scheduler.step()",
                self.handle.optimizer_name()
            );
        }
        self.last_epoch += 1;
        self.set(rule);
    }

    fn set(&mut self, mut rule: impl FnMut(&Tick) -> f64) {
        let (epoch, base_lrs) = (self.last_epoch, &self.base_lrs);
        self.last_lr = self.handle.map_lrs(|group, lr| {
            // One base rate for each group, by construction.
            let base_lr = base_lrs.get(group).copied().unwrap_or(lr);
            rule(&Tick { group, epoch, base_lr, lr })
        });
    }

    /// What a schedule of this type saves.
    fn state(&self, scheduler: &'static str) -> SchedulerState {
        SchedulerState {
            scheduler_type: Some(scheduler.to_owned()),
            last_epoch: self.last_epoch,
            step_count: self.last_epoch + 1,
            base_lrs: self.base_lrs.clone(),
            last_lr: self.last_lr.clone(),
            schedulers: Vec::new(),
        }
    }

    fn load(&mut self, scheduler: &'static str, state: &SchedulerState) -> Result<()> {
        self.check(scheduler, state)?;
        self.take(state);
        Ok(())
    }

    /// Whether a schedule of this type may take the state.
    fn check(&self, scheduler: &'static str, state: &SchedulerState) -> Result<()> {
        if let Some(found) = state.scheduler_type.as_ref().filter(|found| *found != scheduler) {
            return Err(OptimError::OtherScheduler { scheduler, found: found.clone() }.into());
        }
        let wanted = self.handle.num_groups();
        for (what, found) in
            [("saved base learning rates", state.base_lrs.len()), ("saved last learning rates", state.last_lr.len())]
        {
            if found != wanted {
                return Err(OptimError::GroupCount { scheduler, what, found, wanted }.into());
            }
        }
        if state.last_epoch > MOST_STEPS {
            return Err(OptimError::TooManySteps { scheduler, found: state.last_epoch }.into());
        }
        Ok(())
    }

    fn take(&mut self, state: &SchedulerState) {
        self.last_epoch = state.last_epoch;
        self.base_lrs.clone_from(&state.base_lrs);
        self.last_lr.clone_from(&state.last_lr);
    }
}

/// Implements [`LrScheduler`] for a struct of a `clock` and a `rule` with `rate(&self, &Tick) -> f64`.
/// `LrScheduler` for a clock with a rule. `length`, if there is one, is the field of the rule that says how long it is.
macro_rules! scheduler {
    ($type:ident $(, $length:ident)?) => {
        impl crate::optim::LrScheduler for $type {
            fn step(&mut self) -> crate::error::Result<()> {
                let Self { clock, rule } = self;
                clock.advance(|tick| rule.rate(tick));
                Ok(())
            }
            fn get_last_lr(&self) -> Vec<f64> {
                self.clock.last_lr.clone()
            }
            fn handle(&self) -> &crate::optim::OptimizerHandle {
                &self.clock.handle
            }
            fn last_epoch(&self) -> usize {
                self.clock.last_epoch
            }
            $(
                fn num_training_steps(&self) -> Option<usize> {
                    Option::from(self.rule.$length)
                }
            )?
            fn state_dict(&self) -> crate::error::Result<crate::optim::SchedulerState> {
                Ok(self.clock.state(stringify!($type)))
            }
            fn load_state_dict(&mut self, state: &crate::optim::SchedulerState) -> crate::error::Result<()> {
                self.clock.load(stringify!($type), state)
            }
        }
    };
}
use scheduler;
