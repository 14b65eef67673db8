//! When a learning rate is lowered because a metric has stopped improving.

use crate::Result;
use crate::error::config::ConfigErrorKind;
use serde::{Deserialize, Serialize};

/// Which way a metric of [`Plateau`] gets better.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PlateauMode {
    /// Lower is better, as with a loss. The default, as in PyTorch.
    #[default]
    Min,
    /// Higher is better, as with an accuracy.
    Max,
}

/// How [`Plateau::threshold`] is meant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ThresholdMode {
    /// As a share of the best metric. The default, as in PyTorch.
    #[default]
    Rel,
    /// As a difference.
    Abs,
}

/// Lower the learning rate when a metric has stopped improving, with the fields, defaults and rule of PyTorch's
/// `ReduceLROnPlateau`.
///
/// ```
/// use accelerate_core::schedule::{Plateau, PlateauState};
/// let plateau = Plateau { patience: 1, ..Plateau::default() };
/// let mut state = PlateauState::default();
/// let lowered = [3.0, 2.0, 2.0, 2.0, 1.0].map(|loss| plateau.observe(&mut state, loss));
/// assert_eq!(lowered, [false, false, false, true, false]);
/// assert_eq!((state.best, plateau.lowered(0.5, 0.0)), (Some(1.0), 0.05));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Plateau {
    /// Which way is better. Default [`PlateauMode::Min`].
    pub mode: PlateauMode,
    /// What a rate is multiplied by, from 0 to less than 1. Default 0.1.
    pub factor: f64,
    /// Metrics without improvement that are borne; one more lowers the rate. Default 10.
    pub patience: usize,
    /// By how much a metric has to beat the best one to count as better. Default 0.0001.
    pub threshold: f64,
    /// How the threshold is meant. Default [`ThresholdMode::Rel`].
    pub threshold_mode: ThresholdMode,
    /// Metrics after a lowered rate that are not counted as bad. Default 0.
    pub cooldown: usize,
    /// The rates are never lowered below these: one for all parameter groups, or one for each. Default 0 for all.
    pub min_lr: Vec<f64>,
    /// A change of the rate that is no larger than this is not made. Default 1e-8.
    pub eps: f64,
}

impl Default for Plateau {
    fn default() -> Self {
        Self {
            mode: PlateauMode::Min,
            factor: 0.1,
            patience: 10,
            threshold: 1e-4,
            threshold_mode: ThresholdMode::Rel,
            cooldown: 0,
            min_lr: vec![0.0],
            eps: 1e-8,
        }
    }
}

/// What [`Plateau`] remembers; the fields are PyTorch's.
///
/// ```
/// use accelerate_core::schedule::PlateauState;
/// let text = r#"{"best": 0.5, "cooldown_counter": 0, "num_bad_epochs": 2, "last_epoch": 7}"#;
/// assert_eq!(serde_json::from_str::<PlateauState>(text).unwrap().num_bad_epochs, 2);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlateauState {
    /// The best metric; `None` before the first that is a number (PyTorch has an infinity there, for which JSON
    /// has no word).
    pub best: Option<f64>,
    /// Metrics that still are not counted as bad.
    pub cooldown_counter: usize,
    /// Metrics without improvement in a row.
    pub num_bad_epochs: usize,
    /// Metrics seen.
    pub last_epoch: usize,
}

impl Plateau {
    /// Takes in a metric and says whether the rates are to be lowered. What is not a number is never better.
    pub fn observe(&self, state: &mut PlateauState, metric: f64) -> bool {
        state.last_epoch += 1;
        if self.is_better(metric, state.best) {
            state.best = Some(metric);
            state.num_bad_epochs = 0;
        } else {
            state.num_bad_epochs += 1;
        }
        if 0 < state.cooldown_counter {
            state.cooldown_counter -= 1;
            state.num_bad_epochs = 0;
        }
        if state.num_bad_epochs <= self.patience {
            return false;
        }
        state.cooldown_counter = self.cooldown;
        state.num_bad_epochs = 0;
        true
    }

    fn is_better(&self, metric: f64, best: Option<f64>) -> bool {
        match (self.mode, self.threshold_mode) {
            (PlateauMode::Min, ThresholdMode::Rel) => metric < best.unwrap_or(f64::INFINITY) * (1.0 - self.threshold),
            (PlateauMode::Min, ThresholdMode::Abs) => metric < best.unwrap_or(f64::INFINITY) - self.threshold,
            (PlateauMode::Max, ThresholdMode::Rel) => {
                metric > best.unwrap_or(f64::NEG_INFINITY) * (self.threshold + 1.0)
            }
            (PlateauMode::Max, ThresholdMode::Abs) => metric > best.unwrap_or(f64::NEG_INFINITY) + self.threshold,
        }
    }

    /// The rate that follows `lr`.
    pub fn lowered(&self, lr: f64, min_lr: f64) -> f64 {
        let lowered = (lr * self.factor).max(min_lr);
        if lr - lowered > self.eps { lowered } else { lr }
    }

    /// Refuses what PyTorch refuses, and a factor or threshold that is no number or below 0.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): `factor` is not from 0 to less than 1, or `threshold` is
    /// negative or not finite.
    pub fn check(&self) -> Result<()> {
        if !(0.0..1.0).contains(&self.factor) {
            let wanted = "0 or more, and less than 1";
            return Err(ConfigErrorKind::OutOfRange { name: "factor", found: self.factor, wanted }.into());
        }
        if !(self.threshold.is_finite() && 0.0 <= self.threshold) {
            let wanted = "a finite number, 0 or more";
            return Err(ConfigErrorKind::OutOfRange { name: "threshold", found: self.threshold, wanted }.into());
        }
        Ok(())
    }
}
