//! The section `scheduler`.

use super::Auto;
use super::reader::{COUNT, NOT_NEGATIVE, POSITIVE, RATIO, Section};
use crate::names::spelled_enum;
use std::f64::consts::PI;
use std::fmt;

spelled_enum! {
    /// Which schedule a configuration asks for (`scheduler.type`; DeepSpeed's `runtime/lr_schedules.py`). Others are
    /// refused.
    ///
    /// ```
    /// use accelerate_core::config::DeepSpeedSchedulerType;
    /// assert_eq!("WarmupLR".parse::<DeepSpeedSchedulerType>()?, DeepSpeedSchedulerType::WarmupLr);
    /// assert!("OneCycle".parse::<DeepSpeedSchedulerType>().unwrap_err().to_string().contains("\"WarmupCosineLR\""));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    DeepSpeedSchedulerType, "DeepSpeed scheduler that is available" {
        /// Up, then level.
        WarmupLr = "WarmupLR",
        /// Up, then in a line down to 0.
        WarmupDecayLr = "WarmupDecayLR",
        /// Up, then down along half a cosine.
        WarmupCosineLr = "WarmupCosineLR",
    }
}

spelled_enum! {
    /// How the rate rises (`scheduler.params.warmup_type`).
    ///
    /// ```
    /// use accelerate_core::config::WarmupType;
    /// assert_eq!(WarmupType::default().to_string(), "log");
    /// ```
    #[derive(Default)]
    WarmupType, "warmup type" {
        /// With the logarithm of the number of steps. The default.
        #[default]
        Log = "log",
        /// With the number of steps.
        Linear = "linear",
    }
}

/// `scheduler`, as written; `None` is a key that is absent. Rates are numbers, one for all parameter groups.
///
/// ```
/// use accelerate_core::config::{Auto, DeepSpeedConfig, DeepSpeedSchedulerType};
/// let json = r#"{"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": 0.01}}}"#;
/// let scheduler = DeepSpeedConfig::from_json(json)?.scheduler.unwrap();
/// assert_eq!(scheduler.scheduler_type, DeepSpeedSchedulerType::WarmupLr);
/// assert_eq!((scheduler.warmup_num_steps, scheduler.warmup_max_lr), (Some(Auto::Auto), Some(Auto::Value(0.01))));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeepSpeedScheduler {
    /// Its name.
    pub scheduler_type: DeepSpeedSchedulerType,
    /// Rate at the beginning. Default 0. Not for `WarmupCosineLR`.
    pub warmup_min_lr: Option<Auto<f64>>,
    /// Rate after the rise. Default: the optimizer's; 0.001 for `WarmupDecayLR`. Not for `WarmupCosineLR`.
    pub warmup_max_lr: Option<Auto<f64>>,
    /// Steps of the rise, at least 1; below 2 they count as 2. Default 1000.
    pub warmup_num_steps: Option<Auto<usize>>,
    /// Steps until the end of the fall. `WarmupDecayLR` and `WarmupCosineLR` need it.
    pub total_num_steps: Option<Auto<u64>>,
    /// How the rate rises. Default by logarithm.
    pub warmup_type: WarmupType,
    /// `WarmupCosineLR`: rate at the beginning, as a share of the optimizer's. Default 0.
    pub warmup_min_ratio: f64,
    /// `WarmupCosineLR`: rate at the end, as a share of the optimizer's. Default 0.0001.
    pub cos_min_ratio: f64,
}

impl DeepSpeedScheduler {
    pub(super) fn read(mut section: Section<'_>) -> Option<Self> {
        if !section.has("type") {
            section.missing("type", "name one, such as \"WarmupLR\"");
        }
        let scheduler_type = section.name::<DeepSpeedSchedulerType>("type");
        let scheduler = scheduler_type.map(|scheduler_type| {
            let needs_total = scheduler_type != DeepSpeedSchedulerType::WarmupLr;
            match section.section("params") {
                Some(params) => Self::read_params(scheduler_type, params),
                None => {
                    if needs_total {
                        section.missing("params.total_num_steps", TOTAL_NEEDED);
                    }
                    Self::of_defaults(scheduler_type)
                }
            }
        });
        if scheduler.is_none() {
            // Without a type there is nothing to hold the parameters against.
            section.discard("params");
        }
        section.finish(None);
        scheduler
    }

    const fn of_defaults(scheduler_type: DeepSpeedSchedulerType) -> Self {
        Self {
            scheduler_type,
            warmup_min_lr: None,
            warmup_max_lr: None,
            warmup_num_steps: None,
            total_num_steps: None,
            warmup_type: WarmupType::Log,
            warmup_min_ratio: 0.0,
            cos_min_ratio: 1e-4,
        }
    }

    fn read_params(scheduler_type: DeepSpeedSchedulerType, mut params: Section<'_>) -> Self {
        let mut scheduler = Self::of_defaults(scheduler_type);
        scheduler.warmup_num_steps = params.auto("warmup_num_steps", &POSITIVE);
        if params.has("warmup_type") {
            scheduler.warmup_type = params.name("warmup_type").unwrap_or_default();
        }
        if scheduler_type == DeepSpeedSchedulerType::WarmupCosineLr {
            scheduler.warmup_min_ratio = params.plain("warmup_min_ratio", &RATIO).unwrap_or(scheduler.warmup_min_ratio);
            scheduler.cos_min_ratio = params.plain("cos_min_ratio", &RATIO).unwrap_or(scheduler.cos_min_ratio);
        } else {
            scheduler.warmup_min_lr = params.auto("warmup_min_lr", &NOT_NEGATIVE);
            scheduler.warmup_max_lr = params.auto("warmup_max_lr", &NOT_NEGATIVE);
        }
        if scheduler_type != DeepSpeedSchedulerType::WarmupLr {
            if !params.has("total_num_steps") {
                params.missing("total_num_steps", TOTAL_NEEDED);
            }
            scheduler.total_num_steps = params.auto("total_num_steps", &COUNT);
        }
        params.finish(Some(scheduler_type.as_str()));
        scheduler
    }
}

const TOTAL_NEEDED: &str = "the rate falls until then; write the number of steps, or \"auto\"";

/// A schedule with all its numbers: the learning rate as a function of the steps made (DeepSpeed's
/// `runtime/lr_schedules.py`).
///
/// ```
/// use accelerate_core::config::{DeepSpeedSchedule, WarmupType};
/// let schedule = DeepSpeedSchedule::WarmupLr {
///     warmup_min_lr: 0.0,
///     warmup_max_lr: Some(0.1),
///     warmup_num_steps: 4,
///     warmup_type: WarmupType::Linear,
/// };
/// let rates: Vec<f64> = (0..7).map(|step| schedule.lr(step, 0.0)).collect();
/// assert_eq!(rates, [0.0, 0.0, 0.025, 0.05, 0.1 * 0.75, 0.1, 0.1]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DeepSpeedSchedule {
    /// Up, then level.
    WarmupLr {
        /// Rate at the beginning.
        warmup_min_lr: f64,
        /// Rate after the rise; `None`: the optimizer's.
        warmup_max_lr: Option<f64>,
        /// Steps of the rise.
        warmup_num_steps: u64,
        /// How it rises.
        warmup_type: WarmupType,
    },
    /// Up, then in a line down to 0.
    WarmupDecayLr {
        /// Rate at the beginning.
        warmup_min_lr: f64,
        /// Rate after the rise.
        warmup_max_lr: f64,
        /// Steps of the rise.
        warmup_num_steps: u64,
        /// How it rises.
        warmup_type: WarmupType,
        /// Steps until 0.
        total_num_steps: u64,
    },
    /// Up, then down along half a cosine; in shares of the optimizer's rate.
    WarmupCosineLr {
        /// Share at the beginning.
        warmup_min_ratio: f64,
        /// Share at the end.
        cos_min_ratio: f64,
        /// Steps of the rise.
        warmup_num_steps: u64,
        /// How it rises.
        warmup_type: WarmupType,
        /// Steps until the end of the fall.
        total_num_steps: u64,
    },
}

impl DeepSpeedSchedule {
    /// Steps until the end of the fall; `None` for a schedule that stays level.
    ///
    /// ```
    /// use accelerate_core::config::{DeepSpeedSchedule, WarmupType};
    /// let (warmup_num_steps, warmup_type) = (2, WarmupType::Linear);
    /// let level =
    ///     DeepSpeedSchedule::WarmupLr { warmup_min_lr: 0.0, warmup_max_lr: None, warmup_num_steps, warmup_type };
    /// assert_eq!(level.total_num_steps(), None);
    /// ```
    pub const fn total_num_steps(&self) -> Option<u64> {
        match *self {
            Self::WarmupLr { .. } => None,
            Self::WarmupDecayLr { total_num_steps, .. } | Self::WarmupCosineLr { total_num_steps, .. } => {
                Some(total_num_steps)
            }
        }
    }

    /// The learning rate after the schedule has been stepped `num_steps` times; `base_lr` is the optimizer's own.
    ///
    /// As in DeepSpeed, the first step of a schedule leads to its beginning: before it, `WarmupCosineLR` is at rate 0 and
    /// the others are at their lowest. A rise of fewer than two steps takes two.
    ///
    /// ```
    /// use accelerate_core::config::{DeepSpeedSchedule, WarmupType};
    /// let schedule = DeepSpeedSchedule::WarmupDecayLr {
    ///     warmup_min_lr: 0.0,
    ///     warmup_max_lr: 1.0,
    ///     warmup_num_steps: 2,
    ///     warmup_type: WarmupType::Log,
    ///     total_num_steps: 6,
    /// };
    /// let rates: Vec<f64> = (0..9).map(|step| schedule.lr(step, 0.0)).collect();
    /// assert_eq!(rates, [0.0, 0.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);
    /// ```
    pub fn lr(&self, num_steps: u64, base_lr: f64) -> f64 {
        let Some(iteration) = num_steps.checked_sub(1) else {
            return match *self {
                Self::WarmupLr { warmup_min_lr, .. } | Self::WarmupDecayLr { warmup_min_lr, .. } => warmup_min_lr,
                Self::WarmupCosineLr { .. } => 0.0,
            };
        };
        match *self {
            Self::WarmupLr { warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type } => {
                let share = warmup_share(iteration, warmup_num_steps, warmup_type).unwrap_or(1.0);
                warmup_min_lr + (warmup_max_lr.unwrap_or(base_lr) - warmup_min_lr) * share
            }
            Self::WarmupDecayLr { warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, total_num_steps } => {
                let share = warmup_share(iteration, warmup_num_steps, warmup_type).unwrap_or_else(|| {
                    let length = total_num_steps.saturating_sub(warmup_num_steps.max(2)).max(1);
                    total_num_steps.saturating_sub(iteration) as f64 / length as f64
                });
                warmup_min_lr + (warmup_max_lr - warmup_min_lr) * share
            }
            Self::WarmupCosineLr {
                warmup_min_ratio,
                cos_min_ratio,
                warmup_num_steps,
                warmup_type,
                total_num_steps,
            } => {
                let ratio = match warmup_share(iteration, warmup_num_steps, warmup_type) {
                    Some(share) => warmup_min_ratio + share * (1.0 - warmup_min_ratio),
                    None => {
                        let length = total_num_steps.saturating_sub(warmup_num_steps.max(2)).max(1);
                        let fallen = (iteration + 1).saturating_sub(warmup_num_steps.max(2));
                        let progress = (fallen as f64 / length as f64).min(1.0);
                        cos_min_ratio + (1.0 - cos_min_ratio) * (1.0 + (PI * progress).cos()) / 2.0
                    }
                };
                base_lr * ratio
            }
        }
    }
}

impl fmt::Display for DeepSpeedSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WarmupLr { warmup_max_lr, warmup_num_steps, .. } => {
                let of_optimizer = || "the optimizer's rate".to_owned();
                let warmup_max_lr = warmup_max_lr.map_or_else(of_optimizer, |rate| rate.to_string());
                write!(f, "WarmupLR with warmup_max_lr {warmup_max_lr} and warmup_num_steps {warmup_num_steps}")
            }
            Self::WarmupDecayLr { warmup_max_lr, warmup_num_steps, total_num_steps, .. } => write!(
                f,
                "WarmupDecayLR with warmup_max_lr {warmup_max_lr}, warmup_num_steps {warmup_num_steps} and total_num_steps \
                 {total_num_steps}"
            ),
            Self::WarmupCosineLr { warmup_num_steps, total_num_steps, .. } => write!(
                f,
                "WarmupCosineLR with warmup_num_steps {warmup_num_steps} and total_num_steps {total_num_steps}"
            ),
        }
    }
}

/// How far the rise has come, from 0 to 1; `None` after its end.
fn warmup_share(iteration: u64, warmup_num_steps: u64, warmup_type: WarmupType) -> Option<f64> {
    let length = warmup_num_steps.max(2);
    if iteration >= length {
        return None;
    }
    Some(match warmup_type {
        WarmupType::Log => (iteration as f64 + 1.0).ln() / (length as f64).ln(),
        WarmupType::Linear => iteration as f64 / length as f64,
    })
}

pub(super) const WARMUP_NUM_STEPS: usize = 1000;
pub(super) const DECAY_MAX_LR: f64 = 1e-3;
