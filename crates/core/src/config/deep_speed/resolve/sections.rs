//! Precision, optimizer and schedule.

use super::Filling;
use crate::Result;
use crate::config::deep_speed::scheduler::{DECAY_MAX_LR, WARMUP_NUM_STEPS};
use crate::config::{
    Auto, DeepSpeedOptimizer, DeepSpeedSchedule, DeepSpeedSchedulerType, GradScalerSettings, MixedPrecision,
    OptimizerInCode, SchedulerInCode,
};
use crate::error::config::ConfigErrorKind;

const NO_DUMMY_OPTIM: &str = "no DummyOptim was passed to prepare that would tell it";
const NO_DUMMY_SCHEDULER: &str = "no DummyScheduler was passed to prepare that would tell it";

impl Filling<'_> {
    /// What layers compute in, and how losses are scaled. fp8 keeps everything that is not in 8 bits in bfloat16.
    pub(super) fn precision(&mut self) -> Result<(MixedPrecision, Option<GradScalerSettings>)> {
        let asked = self.facts.mixed_precision;
        let wants = [asked == MixedPrecision::Fp16, matches!(asked, MixedPrecision::Bf16 | MixedPrecision::Fp8)];
        let written = [self.config.fp16.enabled, self.config.bf16.enabled].map(|enabled| enabled.and_then(Auto::value));
        if asked != MixedPrecision::No {
            for (key, (written, wanted)) in
                ["fp16.enabled", "bf16.enabled"].into_iter().zip(written.into_iter().zip(wants))
            {
                if written.is_some_and(|written| written != wanted) {
                    let (configured, given) = ((!wanted).to_string(), format!("\"{asked}\""));
                    let source = "mixed_precision of the program";
                    self.merge.conflicts.push(crate::error::deep_speed::Conflict {
                        key: key.to_owned(),
                        configured,
                        source,
                        given,
                    });
                }
            }
        }
        match (written[0].unwrap_or(wants[0]), written[1].unwrap_or(wants[1])) {
            (true, true) if self.merge.conflicts.is_empty() => Err(ConfigErrorKind::Contradiction {
                first: "fp16.enabled",
                second: "bf16.enabled",
                why: "layers compute in one of them; enable one, or write \"auto\" for both",
            }
            .into()),
            (true, _) => Ok((MixedPrecision::Fp16, Some(self.grad_scaler()))),
            (false, true) if asked == MixedPrecision::Fp8 => Ok((MixedPrecision::Fp8, None)),
            (false, true) => Ok((MixedPrecision::Bf16, None)),
            (false, false) => Ok((MixedPrecision::No, None)),
        }
    }

    fn grad_scaler(&self) -> GradScalerSettings {
        GradScalerSettings {
            init_scale: f64::from(self.config.fp16.initial_scale_power).exp2(),
            growth_interval: self.config.fp16.loss_scale_window,
            ..Default::default()
        }
    }

    pub(super) fn optimizer(&mut self) -> Option<DeepSpeedOptimizer> {
        let optimizer = self.config.optimizer?;
        let dummy = match self.facts.optimizer {
            Some(OptimizerInCode::Dummy { lr, weight_decay }) => Some((lr, weight_decay)),
            _ => None,
        };
        let (lr, weight_decay) = dummy.unwrap_or_default();
        let mut number = |key: &str, written: Option<Auto<f64>>, source, given: Option<f64>| {
            if written == Some(Auto::Auto) && dummy.is_none() {
                self.remains(key, NO_DUMMY_OPTIM);
            }
            let mut slot = written;
            self.merge.put(key, source, &mut slot, given);
            slot.and_then(Auto::value)
        };
        let lr = number("optimizer.params.lr", optimizer.lr, "lr of the DummyOptim", lr);
        let key = "optimizer.params.weight_decay";
        let weight_decay = number(key, optimizer.weight_decay, "weight_decay of the DummyOptim", weight_decay);
        Some(optimizer.with_numbers(lr, weight_decay))
    }

    pub(super) fn scheduler(&mut self, optimizer: Option<&DeepSpeedOptimizer>) -> Option<DeepSpeedSchedule> {
        let scheduler = self.config.scheduler?;
        let dummy = match self.facts.scheduler {
            Some(SchedulerInCode::Dummy { total_num_steps, warmup_num_steps, has_callable: false }) => {
                Some((total_num_steps, warmup_num_steps))
            }
            _ => None,
        };
        let (total, warmup) = dummy.unwrap_or_default();
        let base_lr = optimizer.map(|optimizer| optimizer.lr).or(self.facts.optimizer.and_then(|own| own.lr()));

        let mut warmup_num_steps = scheduler.warmup_num_steps;
        let warmup = warmup.map(|steps| steps.max(1));
        let (key, source) = ("scheduler.params.warmup_num_steps", "warmup_num_steps of the DummyScheduler");
        self.merge.put(key, source, &mut warmup_num_steps, warmup);
        let warmup_num_steps = match (warmup_num_steps, dummy) {
            (Some(Auto::Value(steps)), _) => steps,
            (Some(Auto::Auto), Some(_)) => 1,
            (Some(Auto::Auto), None) => {
                self.remains(key, NO_DUMMY_SCHEDULER);
                1
            }
            (None, _) => WARMUP_NUM_STEPS,
        } as u64;

        let mut rate = |key, written: Option<Auto<f64>>, auto: Option<f64>| {
            if written == Some(Auto::Auto) && (dummy.is_none() || auto.is_none()) {
                self.remains(
                    key,
                    if dummy.is_none() { NO_DUMMY_SCHEDULER } else { "the optimizer's rate is not known" },
                );
            }
            written.and_then(|written| written.value().or(auto))
        };
        let warmup_min_lr = rate("scheduler.params.warmup_min_lr", scheduler.warmup_min_lr, Some(0.0)).unwrap_or(0.0);
        let warmup_max_lr = rate("scheduler.params.warmup_max_lr", scheduler.warmup_max_lr, base_lr);
        let warmup_type = scheduler.warmup_type;
        Some(match scheduler.scheduler_type {
            DeepSpeedSchedulerType::WarmupLr => {
                let warmup_max_lr = warmup_max_lr.or(base_lr);
                DeepSpeedSchedule::WarmupLr { warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type }
            }
            DeepSpeedSchedulerType::WarmupDecayLr => DeepSpeedSchedule::WarmupDecayLr {
                warmup_min_lr,
                warmup_max_lr: warmup_max_lr.unwrap_or(DECAY_MAX_LR),
                warmup_num_steps,
                warmup_type,
                total_num_steps: self.total_num_steps(scheduler.total_num_steps, total),
            },
            DeepSpeedSchedulerType::WarmupCosineLr => DeepSpeedSchedule::WarmupCosineLr {
                warmup_min_ratio: scheduler.warmup_min_ratio,
                cos_min_ratio: scheduler.cos_min_ratio,
                warmup_num_steps,
                warmup_type,
                total_num_steps: self.total_num_steps(scheduler.total_num_steps, total),
            },
        })
    }

    /// Steps of all processes together count as one each, unless they share a batch.
    fn total_num_steps(&mut self, written: Option<Auto<u64>>, given: Option<u64>) -> u64 {
        let key = "scheduler.params.total_num_steps";
        let parts = if self.facts.split_batches { 1 } else { self.facts.world_size as u64 };
        let mut slot = written;
        let given = given.map(|steps| steps.div_ceil(parts));
        self.merge.put(key, "total_num_steps of the DummyScheduler, per process,", &mut slot, given);
        slot.and_then(Auto::value).unwrap_or_else(|| {
            self.remains(key, "no DummyScheduler with total_num_steps was passed to prepare that would tell it");
            0
        })
    }
}
