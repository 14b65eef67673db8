//! Schedules of `torch.optim.lr_scheduler` without an end.
//!
//! All but `LambdaLr` multiply the *present* rate, as PyTorch's do: a rate set by hand in between is
//! kept, and two schedules on one optimizer work together.

use super::{Clock, Tick, scheduler};
use crate::error::{OptimError, Result};
use crate::optim::Optimizer;
use std::fmt;

/// The initial rate times whatever a function of the step says. PyTorch's `LambdaLR`.
///
/// ```
/// use accelerate::nn::{Init, ParamStore};
/// use accelerate::optim::{LambdaLr, LrScheduler, Optimizer, Sgd};
/// use accelerate::tch::Device;
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([2], Init::Zeros))?;
/// let mut optimizer = Sgd::new(&store, 1.0)?;
/// let mut scheduler = LambdaLr::new(&optimizer, |step| 1.0 - step as f64 / 10.0);
/// optimizer.step()?;
/// scheduler.step()?;
/// assert_eq!(scheduler.get_last_lr(), [0.9]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct LambdaLr {
    clock: Clock,
    rule: Lambdas,
}

/// A multiplier of the initial rate for each step, counted from 0.
type Lambda = Box<dyn Fn(usize) -> f64 + Send>;

/// One function for all groups, or one for each.
struct Lambdas(Vec<Lambda>);

impl Lambdas {
    fn rate(&self, tick: &Tick) -> f64 {
        let lambda = self.0.get(tick.group).or_else(|| self.0.first());
        tick.base_lr * lambda.map_or(1.0, |lambda| lambda(tick.epoch))
    }
}

impl fmt::Debug for Lambdas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} functions", self.0.len())
    }
}

impl LambdaLr {
    /// Uses one function for all parameter groups; sets the rates for the first step.
    pub fn new(optimizer: &impl Optimizer, lambda: impl Fn(usize) -> f64 + Send + 'static) -> Self {
        Self::start(optimizer, Lambdas(vec![Box::new(lambda)]))
    }

    /// Uses one function for each parameter group, in order.
    ///
    /// # Errors
    /// There are more or fewer functions than groups.
    pub fn per_group(optimizer: &impl Optimizer, lambdas: Vec<Lambda>) -> Result<Self> {
        let (found, wanted) = (lambdas.len(), optimizer.handle().num_groups());
        if found != wanted {
            let (scheduler, what) = ("LambdaLr", "functions");
            return Err(OptimError::GroupCount { scheduler, what, found, wanted }.into());
        }
        Ok(Self::start(optimizer, Lambdas(lambdas)))
    }

    fn start(optimizer: &impl Optimizer, rule: Lambdas) -> Self {
        Self { clock: Clock::start(optimizer.handle(), |tick| rule.rate(tick)), rule }
    }
}

scheduler!(LambdaLr);

/// The rate is multiplied by `gamma` every `step_size` steps. PyTorch's `StepLR`.
///
/// ```
/// use accelerate::nn::{Init, ParamStore};
/// use accelerate::optim::{LrScheduler, Optimizer, Sgd, StepLr};
/// use accelerate::tch::Device;
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([2], Init::Zeros))?;
/// let mut optimizer = Sgd::new(&store, 1.0)?;
/// let mut scheduler = StepLr::new(&optimizer, 1, 0.5)?;
/// optimizer.step()?;
/// scheduler.step()?;
/// assert_eq!(scheduler.get_last_lr(), [0.5]);
/// assert!(StepLr::new(&optimizer, 0, 0.5).is_err());
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct StepLr {
    clock: Clock,
    rule: Stairs,
}

#[derive(Debug)]
struct Stairs {
    step_size: usize,
    gamma: f64,
}

impl Stairs {
    fn rate(&self, tick: &Tick) -> f64 {
        let stays = tick.epoch == 0 || !tick.epoch.is_multiple_of(self.step_size);
        if stays { tick.lr } else { tick.lr * self.gamma }
    }
}

impl StepLr {
    /// Starts the schedule. PyTorch's default for `gamma` is 0.1.
    ///
    /// # Errors
    /// `step_size` is 0.
    pub fn new(optimizer: &impl Optimizer, step_size: usize, gamma: f64) -> Result<Self> {
        positive("StepLr", "step_size", step_size)?;
        let rule = Stairs { step_size, gamma };
        Ok(Self { clock: Clock::start(optimizer.handle(), |tick| rule.rate(tick)), rule })
    }
}

scheduler!(StepLr);

/// The rate is multiplied by `gamma` at each of some steps. PyTorch's `MultiStepLR`.
///
/// ```
/// use accelerate::nn::{Init, ParamStore};
/// use accelerate::optim::{LrScheduler, MultiStepLr, Optimizer, Sgd};
/// use accelerate::tch::Device;
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([2], Init::Zeros))?;
/// let mut optimizer = Sgd::new(&store, 1.0)?;
/// let mut scheduler = MultiStepLr::new(&optimizer, &[2, 3], 0.5);
/// let mut rates = scheduler.get_last_lr();
/// for _ in 0..4 {
///     optimizer.step()?;
///     scheduler.step()?;
///     rates.extend(scheduler.get_last_lr());
/// }
/// assert_eq!(rates, [1.0, 1.0, 0.5, 0.25, 0.25]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct MultiStepLr {
    clock: Clock,
    rule: Milestones,
}

#[derive(Debug)]
struct Milestones {
    milestones: Vec<usize>,
    gamma: f64,
}

impl Milestones {
    fn rate(&self, tick: &Tick) -> f64 {
        let reached = self.milestones.iter().filter(|&&milestone| milestone == tick.epoch).count();
        if reached == 0 { tick.lr } else { tick.lr * self.gamma.powf(reached as f64) }
    }
}

impl MultiStepLr {
    /// Starts the schedule. Steps in any order; one that is listed twice counts twice. PyTorch's default
    /// for `gamma` is 0.1.
    pub fn new(optimizer: &impl Optimizer, milestones: &[usize], gamma: f64) -> Self {
        let milestones = milestones.to_vec();
        let rule = Milestones { milestones, gamma };
        Self { clock: Clock::start(optimizer.handle(), |tick| rule.rate(tick)), rule }
    }
}

scheduler!(MultiStepLr);

/// The rate is multiplied by `gamma` at every step. PyTorch's `ExponentialLR`.
///
/// ```
/// use accelerate::nn::{Init, ParamStore};
/// use accelerate::optim::{ExponentialLr, LrScheduler, Optimizer, Sgd};
/// use accelerate::tch::Device;
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([2], Init::Zeros))?;
/// let mut optimizer = Sgd::new(&store, 1.0)?;
/// let mut scheduler = ExponentialLr::new(&optimizer, 0.9);
/// optimizer.step()?;
/// scheduler.step()?;
/// assert_eq!(scheduler.get_last_lr(), [0.9]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct ExponentialLr {
    clock: Clock,
    rule: Exponential,
}

#[derive(Debug)]
struct Exponential {
    gamma: f64,
}

impl Exponential {
    fn rate(&self, tick: &Tick) -> f64 {
        if tick.epoch == 0 { tick.lr } else { tick.lr * self.gamma }
    }
}

impl ExponentialLr {
    /// Starts the schedule.
    pub fn new(optimizer: &impl Optimizer, gamma: f64) -> Self {
        let rule = Exponential { gamma };
        Self { clock: Clock::start(optimizer.handle(), |tick| rule.rate(tick)), rule }
    }
}

scheduler!(ExponentialLr);

/// The rate falls to 0 in `total_iters` steps along a power of a straight line. PyTorch's `PolynomialLR`.
///
/// ```
/// use accelerate::nn::{Init, ParamStore};
/// use accelerate::optim::{LrScheduler, Optimizer, PolynomialLr, Sgd};
/// use accelerate::tch::Device;
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([2], Init::Zeros))?;
/// let mut optimizer = Sgd::new(&store, 1.0)?;
/// let mut scheduler = PolynomialLr::new(&optimizer, 4, 2.0)?;
/// optimizer.step()?;
/// scheduler.step()?;
/// assert_eq!(scheduler.get_last_lr(), [0.5625]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct PolynomialLr {
    clock: Clock,
    rule: Polynomial,
}

#[derive(Debug)]
struct Polynomial {
    total_iters: usize,
    power: f64,
}

impl Polynomial {
    fn rate(&self, tick: &Tick) -> f64 {
        if tick.epoch == 0 || self.total_iters < tick.epoch {
            return tick.lr;
        }
        let (epoch, total) = (tick.epoch as f64, self.total_iters as f64);
        let factor = (1.0 - epoch / total) / (1.0 - (epoch - 1.0) / total);
        tick.lr * factor.powf(self.power)
    }
}

impl PolynomialLr {
    /// Starts the schedule. PyTorch's defaults are 5 steps and power 1.
    ///
    /// # Errors
    /// `total_iters` is 0.
    pub fn new(optimizer: &impl Optimizer, total_iters: usize, power: f64) -> Result<Self> {
        positive("PolynomialLr", "total_iters", total_iters)?;
        let rule = Polynomial { total_iters, power };
        Ok(Self { clock: Clock::start(optimizer.handle(), |tick| rule.rate(tick)), rule })
    }
}

scheduler!(PolynomialLr, total_iters);

pub(super) fn positive(owner: &'static str, name: &'static str, found: usize) -> Result<()> {
    if 0 < found {
        return Ok(());
    }
    Err(OptimError::Setting { owner, name, found: found as f64, wanted: "1 or more" }.into())
}
