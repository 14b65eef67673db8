//! The one-cycle policy: up to the maximum, down below the start, with momentum the other way round.

use crate::Result;
use crate::error::config::ConfigErrorKind;
use serde::{Deserialize, Serialize};
use std::f64::consts::PI;

/// The curve between two points of [`OneCycle`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AnnealStrategy {
    /// Half a cosine. The default, as in PyTorch.
    #[default]
    #[serde(alias = "cosine")]
    Cos,
    /// A straight line.
    Linear,
}

impl AnnealStrategy {
    fn between(self, start: f64, end: f64, share: f64) -> f64 {
        match self {
            Self::Cos => end + (start - end) / 2.0 * (1.0 + (PI * share).cos()),
            Self::Linear => (end - start) * share + start,
        }
    }
}

/// The one-cycle policy of Smith and Topin, "Super-Convergence" (arXiv 1708.07120), with the fields and
/// formulas of PyTorch's `OneCycleLR`.
///
/// ```
/// use accelerate_core::schedule::OneCycle;
/// let cycle = OneCycle { total_steps: 101, ..OneCycle::default() };
/// let at = |step| cycle.at(step).unwrap().multiplier;
/// assert!((at(0) - 1.0 / 25.0).abs() < 1e-12);
/// assert!(at(29) > 0.99 && at(29) <= 1.0);
/// assert!((at(100) - 1.0 / 25.0 / 1e4).abs() < 1e-12);
/// assert!(cycle.at(101).is_ok() && cycle.at(102).is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OneCycle {
    /// Steps of the whole cycle, at least 1. Default 1; PyTorch has no default.
    pub total_steps: usize,
    /// Share of the cycle that goes up, from 0 to 1. Default 0.3.
    pub pct_start: f64,
    /// The curve. Default [`AnnealStrategy::Cos`].
    pub anneal_strategy: AnnealStrategy,
    /// Let momentum go down while the rate goes up. Default true.
    pub cycle_momentum: bool,
    /// Lowest momentum. Default 0.85.
    pub base_momentum: f64,
    /// Highest momentum. Default 0.95.
    pub max_momentum: f64,
    /// The rate starts at the maximum divided by this. Default 25.
    pub div_factor: f64,
    /// The rate ends at its start divided by this. Default 10,000.
    pub final_div_factor: f64,
    /// Come down as steeply as going up, then use the rest of the cycle to reach the end. Default false.
    pub three_phase: bool,
}

impl Default for OneCycle {
    fn default() -> Self {
        Self {
            total_steps: 1,
            pct_start: 0.3,
            anneal_strategy: AnnealStrategy::Cos,
            cycle_momentum: true,
            base_momentum: 0.85,
            max_momentum: 0.95,
            div_factor: 25.0,
            final_div_factor: 1e4,
            three_phase: false,
        }
    }
}

/// What is in force at one step of [`OneCycle`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OneCyclePoint {
    /// Multiplier of the **maximum** learning rate.
    pub multiplier: f64,
    /// The momentum (`betas[0]` of Adam). `None` without `cycle_momentum`.
    pub momentum: Option<f64>,
}

impl OneCycle {
    /// The point for `step`, counted from 0.
    ///
    /// The cycle ends at `total_steps - 1`. One step more is answered too, by continuing the curve: a loop
    /// that steps the schedule after each of its `total_steps` optimizer steps asks for it, and never uses it.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): `total_steps` is 0, `pct_start` is outside 0..=1, or
    /// the cycle is over (`step > total_steps`).
    pub fn at(&self, step: usize) -> Result<OneCyclePoint> {
        self.check(step)?;
        let start = 1.0 / self.div_factor;
        let end = start / self.final_div_factor;
        let (high, low) = (self.max_momentum, self.base_momentum);
        let total = self.total_steps as f64;
        let peak = self.pct_start * total - 1.0;
        let last = total - 1.0;
        // (end step of the phase, rate from, rate to, momentum from, momentum to)
        let phases: &[(f64, f64, f64, f64, f64)] = if self.three_phase {
            &[(peak, start, 1.0, high, low), (2.0 * peak, 1.0, start, low, high), (last, start, end, high, high)]
        } else {
            &[(peak, start, 1.0, high, low), (last, 1.0, end, low, high)]
        };

        let step = step as f64;
        let mut phase_start = 0.0;
        let mut point = OneCyclePoint { multiplier: end, momentum: Some(high) };
        for (number, &(phase_end, from, to, momentum_from, momentum_to)) in phases.iter().enumerate() {
            if step <= phase_end || number + 1 == phases.len() {
                let length = phase_end - phase_start;
                // A cycle of one step has phases of no length; it is at its end.
                let share = if length > 0.0 { (step - phase_start) / length } else { 1.0 };
                point.multiplier = self.anneal_strategy.between(from, to, share);
                point.momentum = Some(self.anneal_strategy.between(momentum_from, momentum_to, share));
                break;
            }
            phase_start = phase_end;
        }
        point.momentum = point.momentum.filter(|_| self.cycle_momentum);
        Ok(point)
    }

    fn check(&self, step: usize) -> Result<()> {
        if self.total_steps == 0 {
            return Err(ConfigErrorKind::MustBePositive { name: "total_steps" }.into());
        }
        if !(0.0..=1.0).contains(&self.pct_start) {
            let wanted = "a share between 0 and 1";
            let name = "pct_start";
            return Err(ConfigErrorKind::OutOfRange { name, found: self.pct_start, wanted }.into());
        }
        if step > self.total_steps {
            let wanted = "at most total_steps: the one-cycle schedule has been stepped more often than it \
                          has steps";
            let name = "the step";
            return Err(ConfigErrorKind::OutOfRange { name, found: step as f64, wanted }.into());
        }
        Ok(())
    }
}
