//! The schedules of `transformers`: a warmup, then something that falls or stays.

use super::{Clock, Tick, scheduler};
use crate::error::{OptimError, Result};
use crate::optim::Optimizer;
use accelerate_core::schedule as formula;

/// The rate rises straight from 0 in `warmup` steps, then falls straight to 0 at `total` steps.
///
/// `get_linear_schedule_with_warmup` of `transformers`. The first step has rate 0 (unless `warmup` is 0).
///
/// ```
/// use accelerate::nn::{Init, ParamStore};
/// use accelerate::optim::{LinearWithWarmup, LrScheduler, Optimizer, Sgd};
/// use accelerate::tch::Device;
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([2], Init::Zeros))?;
/// let mut optimizer = Sgd::new(&store, 1.0)?;
/// let mut scheduler = LinearWithWarmup::new(&optimizer, 2, 6);
/// let mut rates = scheduler.get_last_lr();
/// for _ in 0..6 {
///     optimizer.step()?;
///     scheduler.step()?;
///     rates.extend(scheduler.get_last_lr());
/// }
/// assert_eq!(rates, [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct LinearWithWarmup {
    clock: Clock,
    rule: Linear,
}

#[derive(Debug)]
struct Linear {
    warmup: usize,
    total: usize,
}

impl Linear {
    fn rate(&self, tick: &Tick) -> f64 {
        tick.base_lr * formula::linear_with_warmup(tick.epoch, self.warmup, self.total)
    }
}

impl LinearWithWarmup {
    /// Starts the schedule and sets the rates for the first step.
    pub fn new(optimizer: &impl Optimizer, warmup: usize, total: usize) -> Self {
        let rule = Linear { warmup, total };
        Self { clock: Clock::start(optimizer.handle(), |tick| rule.rate(tick)), rule }
    }
}

scheduler!(LinearWithWarmup, total);

/// The rate rises straight from 0 in `warmup` steps, then stays.
///
/// `get_constant_schedule_with_warmup` of `transformers`.
///
/// ```
/// use accelerate::nn::{Init, ParamStore};
/// use accelerate::optim::{ConstantWithWarmup, LrScheduler, Optimizer, Sgd};
/// use accelerate::tch::Device;
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([2], Init::Zeros))?;
/// let mut optimizer = Sgd::new(&store, 1.0)?;
/// let mut scheduler = ConstantWithWarmup::new(&optimizer, 4);
/// optimizer.step()?;
/// scheduler.step()?;
/// assert_eq!(scheduler.get_last_lr(), [0.25]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct ConstantWithWarmup {
    clock: Clock,
    rule: Constant,
}

#[derive(Debug)]
struct Constant {
    warmup: usize,
}

impl Constant {
    fn rate(&self, tick: &Tick) -> f64 {
        tick.base_lr * formula::constant_with_warmup(tick.epoch, self.warmup)
    }
}

impl ConstantWithWarmup {
    /// Starts the schedule and sets the rates for the first step.
    pub fn new(optimizer: &impl Optimizer, warmup: usize) -> Self {
        let rule = Constant { warmup };
        Self { clock: Clock::start(optimizer.handle(), |tick| rule.rate(tick)), rule }
    }
}

scheduler!(ConstantWithWarmup);

/// The rate rises straight from 0 in `warmup` steps, then falls along a cosine to 0 at `total` steps.
///
/// `get_cosine_schedule_with_warmup` of `transformers`.
///
/// ```
/// use accelerate::nn::{Init, ParamStore};
/// use accelerate::optim::{CosineWithWarmup, LrScheduler, Optimizer, Sgd};
/// use accelerate::tch::Device;
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([2], Init::Zeros))?;
/// let mut optimizer = Sgd::new(&store, 1.0)?;
/// let mut scheduler = CosineWithWarmup::new(&optimizer, 0, 2);
/// optimizer.step()?;
/// scheduler.step()?;
/// assert!((scheduler.get_last_lr()[0] - 0.5).abs() < 1e-12);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct CosineWithWarmup {
    clock: Clock,
    rule: Cosine,
}

#[derive(Debug)]
struct Cosine {
    warmup: usize,
    total: usize,
    num_cycles: f64,
}

impl Cosine {
    fn rate(&self, tick: &Tick) -> f64 {
        let Self { warmup, total, num_cycles } = *self;
        tick.base_lr * formula::cosine_with_warmup(tick.epoch, warmup, total, num_cycles)
    }
}

impl CosineWithWarmup {
    /// Falls once, along half a wave; sets the rates for the first step.
    pub fn new(optimizer: &impl Optimizer, warmup: usize, total: usize) -> Self {
        Self::with_num_cycles(optimizer, warmup, total, 0.5)
    }

    /// Follows `num_cycles` waves after the warmup; 0.5 falls from the full rate to 0 once.
    pub fn with_num_cycles(optimizer: &impl Optimizer, warmup: usize, total: usize, num_cycles: f64) -> Self {
        let rule = Cosine { warmup, total, num_cycles };
        Self { clock: Clock::start(optimizer.handle(), |tick| rule.rate(tick)), rule }
    }
}

scheduler!(CosineWithWarmup, total);

/// The rate rises straight from 0 in `warmup` steps, then falls `num_cycles` times along half a cosine from
/// full to 0, until `total` steps, and stays 0.
///
/// `get_cosine_with_hard_restarts_schedule_with_warmup` of `transformers`.
///
/// ```
/// use accelerate::nn::{Init, ParamStore};
/// use accelerate::optim::{CosineWithHardRestartsWithWarmup, LrScheduler, Optimizer, Sgd};
/// use accelerate::tch::Device;
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([2], Init::Zeros))?;
/// let mut optimizer = Sgd::new(&store, 1.0)?;
/// let mut scheduler = CosineWithHardRestartsWithWarmup::new(&optimizer, 0, 4, 2);
/// let mut rates = scheduler.get_last_lr();
/// for _ in 0..4 {
///     optimizer.step()?;
///     scheduler.step()?;
///     rates.extend(scheduler.get_last_lr());
/// }
/// for (found, wanted) in rates.iter().zip([1.0, 0.5, 1.0, 0.5, 0.0]) {
///     assert!((found - wanted).abs() < 1e-12);
/// }
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct CosineWithHardRestartsWithWarmup {
    clock: Clock,
    rule: Restarts,
}

#[derive(Debug)]
struct Restarts {
    warmup: usize,
    total: usize,
    num_cycles: usize,
}

impl Restarts {
    fn rate(&self, tick: &Tick) -> f64 {
        let Self { warmup, total, num_cycles } = *self;
        tick.base_lr * formula::cosine_with_hard_restarts_with_warmup(tick.epoch, warmup, total, num_cycles)
    }
}

impl CosineWithHardRestartsWithWarmup {
    /// Starts the schedule and sets the rates for the first step. The default of `transformers` for
    /// `num_cycles` is 1.
    pub fn new(optimizer: &impl Optimizer, warmup: usize, total: usize, num_cycles: usize) -> Self {
        let rule = Restarts { warmup, total, num_cycles };
        Self { clock: Clock::start(optimizer.handle(), |tick| rule.rate(tick)), rule }
    }
}

scheduler!(CosineWithHardRestartsWithWarmup, total);

/// The rate rises straight from 0 in `warmup` steps, then falls as the inverse square root of the step.
///
/// `get_inverse_sqrt_schedule` of `transformers`.
///
/// ```
/// use accelerate::nn::{Init, ParamStore};
/// use accelerate::optim::{InverseSqrtWithWarmup, LrScheduler, Optimizer, Sgd};
/// use accelerate::tch::Device;
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([2], Init::Zeros))?;
/// let mut optimizer = Sgd::new(&store, 1.0)?;
/// let mut scheduler = InverseSqrtWithWarmup::new(&optimizer, 1);
/// for _ in 0..4 {
///     optimizer.step()?;
///     scheduler.step()?;
/// }
/// assert_eq!(scheduler.get_last_lr(), [0.5]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct InverseSqrtWithWarmup {
    clock: Clock,
    rule: InverseSqrt,
}

#[derive(Debug)]
struct InverseSqrt {
    warmup: usize,
    timescale: usize,
}

impl InverseSqrt {
    fn rate(&self, tick: &Tick) -> f64 {
        tick.base_lr * formula::inverse_sqrt_with_warmup(tick.epoch, self.warmup, self.timescale)
    }
}

impl InverseSqrtWithWarmup {
    /// Starts the schedule and sets the rates for the first step. The root's unit is `warmup`, or
    /// 10,000 steps without any.
    pub fn new(optimizer: &impl Optimizer, warmup: usize) -> Self {
        Self::with_timescale(optimizer, warmup, if warmup == 0 { 10_000 } else { warmup })
    }

    /// Chooses the root's unit: `timescale` steps after the warmup, the rate is down to `1 / sqrt(2)`.
    pub fn with_timescale(optimizer: &impl Optimizer, warmup: usize, timescale: usize) -> Self {
        let rule = InverseSqrt { warmup, timescale };
        Self { clock: Clock::start(optimizer.handle(), |tick| rule.rate(tick)), rule }
    }
}

scheduler!(InverseSqrtWithWarmup);

/// The rate rises straight from 0 in `warmup` steps, then falls to `lr_end` at `total` steps along a power of a
/// straight line, and stays there.
///
/// `get_polynomial_decay_schedule_with_warmup` of `transformers`. There, `lr_end` is meant for groups with the optimizer's
/// own rate, and others end at their share of it; here every parameter group ends at `lr_end`.
///
/// ```
/// use accelerate::nn::{Init, ParamStore};
/// use accelerate::optim::{LrScheduler, Optimizer, PolynomialWithWarmup, Sgd};
/// use accelerate::tch::Device;
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([2], Init::Zeros))?;
/// let mut optimizer = Sgd::new(&store, 1.0)?;
/// let mut scheduler = PolynomialWithWarmup::with_settings(&optimizer, 2, 4, 0.5, 2.0)?;
/// let mut rates = scheduler.get_last_lr();
/// for _ in 0..5 {
///     optimizer.step()?;
///     scheduler.step()?;
///     rates.extend(scheduler.get_last_lr());
/// }
/// assert_eq!(rates, [0.0, 0.5, 1.0, 0.625, 0.5, 0.5]);
/// assert!(PolynomialWithWarmup::with_settings(&optimizer, 2, 4, 1.0, 2.0).is_err());
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct PolynomialWithWarmup {
    clock: Clock,
    rule: Polynomial,
}

#[derive(Debug)]
struct Polynomial {
    warmup: usize,
    total: usize,
    lr_end: f64,
    power: f64,
}

impl Polynomial {
    fn rate(&self, tick: &Tick) -> f64 {
        let Self { warmup, total, lr_end, power } = *self;
        tick.base_lr * formula::polynomial_with_warmup(tick.epoch, warmup, total, power, lr_end / tick.base_lr)
    }
}

impl PolynomialWithWarmup {
    /// Falls straight to a rate of 1e-7, the defaults of `transformers`.
    ///
    /// # Errors
    /// As [`with_settings`](Self::with_settings).
    pub fn new(optimizer: &impl Optimizer, warmup: usize, total: usize) -> Result<Self> {
        Self::with_settings(optimizer, warmup, total, 1e-7, 1.0)
    }

    /// Falls to `lr_end` along a straight line to the power of `power`.
    ///
    /// # Errors
    /// `lr_end` is negative, or not below the initial rate of every parameter group; `power` is not above 0.
    pub fn with_settings(
        optimizer: &impl Optimizer,
        warmup: usize,
        total: usize,
        lr_end: f64,
        power: f64,
    ) -> Result<Self> {
        let owner = "PolynomialWithWarmup";
        let is_below = |lr: &f64| lr_end < *lr;
        if !(0.0..f64::INFINITY).contains(&lr_end) || !optimizer.handle().initial_lrs().iter().all(is_below) {
            let wanted = "0 or more, and below the initial learning rate of every parameter group";
            return Err(OptimError::Setting { owner, name: "lr_end", found: lr_end, wanted }.into());
        }
        if !power.is_finite() || power <= 0.0 {
            return Err(OptimError::Setting { owner, name: "power", found: power, wanted: "above 0" }.into());
        }
        let rule = Polynomial { warmup, total, lr_end, power };
        Ok(Self { clock: Clock::start(optimizer.handle(), |tick| rule.rate(tick)), rule })
    }
}

scheduler!(PolynomialWithWarmup, total);
