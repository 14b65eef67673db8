//! The one-cycle policy.

use super::{Clock, LrScheduler, SchedulerState};
use crate::error::{OptimError, Result};
use crate::optim::{Optimizer, OptimizerHandle};
use accelerate_core::schedule::OneCycle;

/// The rate rises to a maximum and falls far below its start, while momentum does the opposite.
///
/// PyTorch's `OneCycleLR` with its fields and defaults, after Smith and Topin, "Super-Convergence"
/// (arXiv 1708.07120). It changes the momentum of `Sgd` and `RMSprop` and the first beta of the Adams and
/// `Lion` unless `cycle_momentum` is off. Steps beyond `total_steps` are an error.
///
/// ```
/// use accelerate::nn::{Init, ParamStore};
/// use accelerate::optim::{LrScheduler, OneCycleLr, Optimizer, Sgd};
/// use accelerate::tch::Device;
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([2], Init::Zeros))?;
/// let mut optimizer = Sgd::builder(&store).lr(0.1).momentum(0.9).build()?;
/// let mut scheduler = OneCycleLr::new(&optimizer, 1.0, 10)?;
/// assert!((scheduler.get_last_lr()[0] - 1.0 / 25.0).abs() < 1e-12);
/// for _ in 0..10 {
///     optimizer.step()?;
///     scheduler.step()?;
/// }
/// assert!(scheduler.step().unwrap_err().to_string().contains("only 10 steps"));
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct OneCycleLr {
    clock: Clock,
    max_lrs: Vec<f64>,
    cycle: OneCycle,
}

impl OneCycleLr {
    /// One cycle of `total_steps` optimizer steps with PyTorch's other defaults.
    ///
    /// # Errors
    /// As [`with_settings`](Self::with_settings).
    pub fn new(optimizer: &impl Optimizer, max_lr: f64, total_steps: usize) -> Result<Self> {
        let settings = OneCycle { total_steps, ..OneCycle::default() };
        Self::with_settings(optimizer, &[max_lr], settings)
    }

    /// Chooses every setting. `max_lrs` has one rate for all parameter groups or one for each.
    ///
    /// # Errors
    /// `total_steps` is 0, `pct_start` is not a share, the number of rates is neither 1 nor that of the
    /// groups, or `cycle_momentum` is on and the optimizer has no momentum.
    pub fn with_settings(optimizer: &impl Optimizer, max_lrs: &[f64], settings: OneCycle) -> Result<Self> {
        let handle = optimizer.handle();
        let wanted = handle.num_groups();
        let max_lrs = match max_lrs {
            [all] => vec![*all; wanted],
            _ if max_lrs.len() == wanted => max_lrs.to_vec(),
            _ => {
                let (scheduler, what, found) = ("OneCycleLr", "maximal rates", max_lrs.len());
                return Err(OptimError::GroupCount { scheduler, what, found, wanted }.into());
            }
        };
        if settings.cycle_momentum && !handle.has_momentum() {
            return Err(OptimError::NoMomentum { optimizer: handle.optimizer_name() }.into());
        }
        let start = settings.at(0)?;
        for (group, max_lr) in max_lrs.iter().enumerate() {
            handle.update(group, |group| {
                group.initial_lr = Some(max_lr / settings.div_factor);
                group.momentum = start.momentum.unwrap_or(group.momentum);
            })?;
        }
        let clock = Clock::start(handle, |tick| max_lrs[tick.group] * start.multiplier);
        Ok(Self { clock, max_lrs, cycle: settings })
    }
}

impl LrScheduler for OneCycleLr {
    fn step(&mut self) -> Result<()> {
        let (steps, total_steps) = (self.clock.last_epoch + 1, self.cycle.total_steps);
        if total_steps < steps {
            return Err(OptimError::ScheduleFinished { scheduler: "OneCycleLr", steps, total_steps }.into());
        }
        let point = self.cycle.at(steps)?;
        let Self { clock, max_lrs, .. } = self;
        clock.advance(|tick| max_lrs.get(tick.group).map_or(tick.lr, |max| max * point.multiplier));
        if let Some(momentum) = point.momentum {
            for group in 0..clock.handle.num_groups() {
                clock.handle.set_momentum(group, momentum)?;
            }
        }
        Ok(())
    }

    fn get_last_lr(&self) -> Vec<f64> {
        self.clock.last_lr.clone()
    }

    fn handle(&self) -> &OptimizerHandle {
        &self.clock.handle
    }

    fn last_epoch(&self) -> usize {
        self.clock.last_epoch
    }

    fn total_steps(&self) -> Option<usize> {
        Some(self.cycle.total_steps)
    }

    fn state_dict(&self) -> Result<SchedulerState> {
        Ok(self.clock.state("OneCycleLr"))
    }

    fn load_state_dict(&mut self, state: &SchedulerState) -> Result<()> {
        self.clock.load("OneCycleLr", state)
    }
}
