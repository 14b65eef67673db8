//! Straight lines: between two factors of the rate, and before any other schedule.

use super::decay::positive;
use super::{Clock, LrScheduler, SchedulerState, Tick, scheduler};
use crate::error::{OptimError, Result};
use crate::optim::{Optimizer, OptimizerHandle};

/// The rate goes straight from `start_factor` to `end_factor` times itself in `total_iters` steps, and stays.
/// PyTorch's `LinearLR`.
///
/// As PyTorch's, it changes the *present* rate: a rate set by hand in between is kept. For a line that
/// another schedule follows, take [`Warmup`].
///
/// ```
/// use accelerate::nn::{Init, ParamStore};
/// use accelerate::optim::{LinearLr, LrScheduler, Optimizer, Sgd};
/// use accelerate::tch::Device;
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([2], Init::Zeros))?;
/// let mut optimizer = Sgd::new(&store, 1.0)?;
/// let mut scheduler = LinearLr::new(&optimizer, 0.5, 1.0, 2)?;
/// let mut rates = scheduler.get_last_lr();
/// for _ in 0..3 {
///     optimizer.step()?;
///     scheduler.step()?;
///     rates.extend(scheduler.get_last_lr());
/// }
/// assert_eq!(rates, [0.5, 0.75, 1.0, 1.0]);
/// assert!(LinearLr::new(&optimizer, 0.0, 1.0, 2).is_err());
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct LinearLr {
    clock: Clock,
    rule: Line,
}

#[derive(Debug)]
struct Line {
    start_factor: f64,
    end_factor: f64,
    total_iters: usize,
}

impl Line {
    fn rate(&self, tick: &Tick) -> f64 {
        let Self { start_factor, end_factor, total_iters } = *self;
        if tick.epoch == 0 {
            return tick.lr * start_factor;
        }
        if total_iters < tick.epoch {
            return tick.lr;
        }
        let rise = end_factor - start_factor;
        tick.lr * (1.0 + rise / (total_iters as f64 * start_factor + (tick.epoch - 1) as f64 * rise))
    }
}

impl LinearLr {
    /// Starts the schedule. PyTorch's defaults are a third, 1 and 5 steps.
    ///
    /// # Errors
    /// `start_factor` is not above 0 (the rate would be lost), a factor is above 1 or negative, or `total_iters` is 0.
    pub fn new(optimizer: &impl Optimizer, start_factor: f64, end_factor: f64, total_iters: usize) -> Result<Self> {
        if start_factor == 0.0 {
            let wanted = "above 0, because later rates are multiples of the first; Warmup begins at 0 as well";
            return Err(OptimError::Setting { owner: "LinearLr", name: "start_factor", found: 0.0, wanted }.into());
        }
        share("LinearLr", "start_factor", start_factor)?;
        share("LinearLr", "end_factor", end_factor)?;
        positive("LinearLr", "total_iters", total_iters)?;
        let rule = Line { start_factor, end_factor, total_iters };
        Ok(Self { clock: Clock::start(optimizer.handle(), |tick| rule.rate(tick)), rule })
    }
}

scheduler!(LinearLr);

/// The rate rises straight from a share of another schedule's first rate to all of it, and then that schedule begins.
///
/// At step `s` below `warmup` the rate is the first rate of `scheduler` times
/// `start_factor + (1 - start_factor) * s / warmup`, at step `warmup + s` what `scheduler` gives for its step `s`. These are
/// the rates of PyTorch's `SequentialLR([LinearLR(optimizer, start_factor, total_iters=warmup), scheduler], [warmup])`.
/// Unlike that, it may begin at 0, and where the function of a `LambdaLr` does not begin with 1, the warmup ends at the rate
/// with which it begins. A rate set by hand during the warmup is overwritten.
///
/// ```
/// use accelerate::nn::{Init, ParamStore};
/// use accelerate::optim::{ExponentialLr, LrScheduler, Optimizer, Sgd, Warmup};
/// use accelerate::tch::Device;
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([2], Init::Zeros))?;
/// let mut optimizer = Sgd::new(&store, 1.0)?;
/// let mut scheduler = Warmup::new(ExponentialLr::new(&optimizer, 0.5), 2, 0.0)?;
/// let mut rates = scheduler.get_last_lr();
/// for _ in 0..4 {
///     optimizer.step()?;
///     scheduler.step()?;
///     rates.extend(scheduler.get_last_lr());
/// }
/// assert_eq!(rates, [0.0, 0.5, 1.0, 0.5, 0.25]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct Warmup<S> {
    /// Stands at its step 0 throughout the warmup.
    scheduler: S,
    clock: Clock,
    warmup: usize,
    start_factor: f64,
}

impl<S: LrScheduler> Warmup<S> {
    /// Puts `warmup` steps before a schedule that has not been stepped yet.
    ///
    /// # Errors
    /// `start_factor` is not between 0 and 1; `scheduler` has been stepped.
    pub fn new(scheduler: S, warmup: usize, start_factor: f64) -> Result<Self> {
        share("Warmup", "start_factor", start_factor)?;
        if scheduler.last_epoch() != 0 {
            let (name, found) = ("last_epoch of the schedule to warm up", scheduler.last_epoch() as f64);
            return Err(OptimError::Setting { owner: "Warmup", name, found, wanted: "0, before any step" }.into());
        }
        let first = scheduler.get_last_lr();
        let clock = Clock::start(scheduler.handle(), |tick| warm(tick, &first, warmup, start_factor));
        Ok(Self { scheduler, clock, warmup, start_factor })
    }

    /// The schedule that follows the warmup.
    pub fn inner(&self) -> &S {
        &self.scheduler
    }
}

/// The rate in the warmup towards the `first` rates of the schedule that follows.
fn warm(tick: &Tick, first: &[f64], warmup: usize, start_factor: f64) -> f64 {
    // One rate for each group, by construction.
    let goal = first.get(tick.group).copied().unwrap_or(tick.base_lr);
    if warmup <= tick.epoch {
        return goal;
    }
    goal * (start_factor + (1.0 - start_factor) * tick.epoch as f64 / warmup as f64)
}

impl<S: LrScheduler> LrScheduler for Warmup<S> {
    fn step(&mut self) -> Result<()> {
        let Self { scheduler, clock, warmup, start_factor } = self;
        if clock.last_epoch < *warmup {
            let first = scheduler.get_last_lr();
            clock.advance(|tick| warm(tick, &first, *warmup, *start_factor));
            return Ok(());
        }
        scheduler.step()?;
        clock.last_epoch += 1;
        clock.last_lr = scheduler.get_last_lr();
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
        self.scheduler.total_steps().map(|steps| steps.saturating_add(self.warmup))
    }

    fn num_training_steps(&self) -> Option<usize> {
        self.scheduler.num_training_steps().map(|steps| steps.saturating_add(self.warmup))
    }

    fn state_dict(&self) -> Result<SchedulerState> {
        Ok(SchedulerState { schedulers: vec![self.scheduler.state_dict()?], ..self.clock.state("Warmup") })
    }

    fn load_state_dict(&mut self, state: &SchedulerState) -> Result<()> {
        let [inner] = &state.schedulers[..] else {
            let (of, found) = (state.scheduler_type.clone(), state.schedulers.len());
            return Err(OptimError::InnerSchedules { scheduler: "Warmup", of, found, wanted: 1 }.into());
        };
        // The inner one may be of another kind than that which was saved. Nothing has changed then.
        self.clock.check("Warmup", state)?;
        self.scheduler.load_state_dict(inner)?;
        self.clock.take(state);
        Ok(())
    }
}

fn share(owner: &'static str, name: &'static str, found: f64) -> Result<()> {
    if (0.0..=1.0).contains(&found) {
        return Ok(());
    }
    Err(OptimError::Setting { owner, name, found, wanted: "between 0 and 1" }.into())
}
