//! Cosine annealing.

use super::decay::positive;
use super::{Clock, Tick, scheduler};
use crate::error::Result;
use crate::optim::Optimizer;
use std::f64::consts::PI;

/// The rate falls along a cosine to `eta_min` in `t_max` steps, and rises again after. PyTorch's
/// `CosineAnnealingLR`.
///
/// After Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017, without the
/// restarts. As PyTorch's, it changes the *present* rate: a rate set by hand in between is kept.
///
/// ```
/// use accelerate::nn::{Init, ParamStore};
/// use accelerate::optim::{CosineAnnealingLr, LrScheduler, Optimizer, Sgd};
/// use accelerate::tch::Device;
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([2], Init::Zeros))?;
/// let mut optimizer = Sgd::new(&store, 1.0)?;
/// let mut scheduler = CosineAnnealingLr::new(&optimizer, 2, 0.2)?;
/// optimizer.step()?;
/// scheduler.step()?;
/// assert!((scheduler.get_last_lr()[0] - 0.6).abs() < 1e-12);
/// assert!(CosineAnnealingLr::new(&optimizer, 0, 0.2).is_err());
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct CosineAnnealingLr {
    clock: Clock,
    rule: Annealing,
}

#[derive(Debug)]
struct Annealing {
    t_max: usize,
    eta_min: f64,
}

impl Annealing {
    fn rate(&self, tick: &Tick) -> f64 {
        let Self { t_max, eta_min } = *self;
        if tick.epoch == 0 {
            return tick.lr;
        }
        let (before, length) = ((tick.epoch - 1) as f64, t_max as f64);
        // At the lowest point there is nothing left to multiply: the way up starts from the initial rate.
        if (tick.epoch - 1 + t_max).is_multiple_of(2 * t_max) {
            return tick.lr + (tick.base_lr - eta_min) * (1.0 - (PI / length).cos()) / 2.0;
        }
        let factor = (1.0 + (PI * tick.epoch as f64 / length).cos()) / (1.0 + (PI * before / length).cos());
        factor * (tick.lr - eta_min) + eta_min
    }
}

impl CosineAnnealingLr {
    /// Starts the schedule. PyTorch's default for `eta_min` is 0.
    ///
    /// # Errors
    /// `t_max` is 0.
    pub fn new(optimizer: &impl Optimizer, t_max: usize, eta_min: f64) -> Result<Self> {
        positive("CosineAnnealingLr", "t_max", t_max)?;
        let rule = Annealing { t_max, eta_min };
        Ok(Self { clock: Clock::start(optimizer.handle(), |tick| rule.rate(tick)), rule })
    }
}

scheduler!(CosineAnnealingLr);
