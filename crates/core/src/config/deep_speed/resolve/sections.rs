//! Precision, optimizer and schedule.

use super::Filling;
use crate::Result;
use crate::config::deep_speed::merge::Source;
use crate::config::deep_speed::scheduler::{DECAY_MAX_LR, WARMUP_NUM_STEPS};
use crate::config::{
    Auto, DeepSpeedOptimizer, DeepSpeedSchedule, DeepSpeedScheduler, DeepSpeedSchedulerType, GradScalerSettings,
    MixedPrecision, OptimizerInCode, SchedulerInCode,
};
use crate::error::deep_speed::DeepSpeedErrorKind;

const RATE_UNKNOWN: &str =
    "the optimizer's rate is not known; pass the optimizer to the same call of prepare, or to an earlier one";

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
                    let source = Source::setting("mixed_precision of the program", "mixed_precision");
                    self.merge.conflicts.push(source.conflict(key, configured, given));
                }
            }
        }
        match (written[0].unwrap_or(wants[0]), written[1].unwrap_or(wants[1])) {
            (true, true) if self.merge.conflicts.is_empty() => Err(DeepSpeedErrorKind::TwoPrecisions.into()),
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

    /// What the dummies become; `None` before there is one.
    pub(super) fn optimizer(&mut self) -> Result<Option<DeepSpeedOptimizer>> {
        let Some(written) = self.config.optimizer else { return Ok(None) };
        let mut made = None;
        for optimizer in &self.facts.objects.optimizers {
            if let OptimizerInCode::Dummy { lr, weight_decay } = *optimizer {
                let optimizer = self.optimizer_of(written, lr, weight_decay);
                same("DummyOptim", *made.get_or_insert(optimizer), optimizer)?;
            }
        }
        Ok(made)
    }

    fn optimizer_of(
        &mut self,
        written: DeepSpeedOptimizer<Option<Auto<f64>>>,
        lr: Option<f64>,
        weight_decay: Option<f64>,
    ) -> DeepSpeedOptimizer {
        let mut number = |key, source, written: Option<Auto<f64>>, given| {
            let mut slot = written;
            self.merge.put(key, Source::object(source), &mut slot, given);
            slot.and_then(Auto::value)
        };
        let lr = number("optimizer.params.lr", "lr of the DummyOptim", written.lr, lr);
        let (key, source) = ("optimizer.params.weight_decay", "weight_decay of the DummyOptim");
        let weight_decay = number(key, source, written.weight_decay, weight_decay);
        written.with_numbers(lr, weight_decay)
    }

    /// What the dummies become; `None` before there is one.
    pub(super) fn scheduler(&mut self, optimizer: Option<&DeepSpeedOptimizer>) -> Result<Option<DeepSpeedSchedule>> {
        let Some(written) = self.config.scheduler else { return Ok(None) };
        let base_lr = optimizer.map(|optimizer| optimizer.lr).or_else(|| self.lr_of_own());
        let mut made = None;
        for scheduler in &self.facts.objects.schedulers {
            if let SchedulerInCode::Dummy { total_num_steps, warmup_num_steps, has_callable: false } = *scheduler {
                let schedule = self.schedule_of(written, base_lr, total_num_steps, warmup_num_steps);
                same("DummyScheduler", *made.get_or_insert(schedule), schedule)?;
            }
        }
        Ok(made)
    }

    /// The rate of the program's own optimizers, where they have one rate.
    fn lr_of_own(&self) -> Option<f64> {
        let mut rates = self.facts.objects.optimizers.iter().filter_map(OptimizerInCode::lr);
        let first = rates.next()?;
        rates.all(|rate| rate == first).then_some(first)
    }

    fn schedule_of(
        &mut self,
        written: DeepSpeedScheduler,
        base_lr: Option<f64>,
        total: Option<u64>,
        warmup: Option<usize>,
    ) -> DeepSpeedSchedule {
        let mut warmup_num_steps = written.warmup_num_steps;
        let (key, source) = ("scheduler.params.warmup_num_steps", "warmup_num_steps of the DummyScheduler");
        self.merge.put(key, Source::object(source), &mut warmup_num_steps, warmup.map(|steps| steps.max(1)));
        let warmup_num_steps = match warmup_num_steps {
            Some(Auto::Value(steps)) => steps,
            Some(Auto::Auto) => 1,
            None => WARMUP_NUM_STEPS,
        } as u64;
        let warmup_min_lr = written.warmup_min_lr.and_then(Auto::value).unwrap_or(0.0);
        let key = "scheduler.params.warmup_max_lr";
        if written.warmup_max_lr == Some(Auto::Auto) && base_lr.is_none() {
            self.remains(key, RATE_UNKNOWN);
        }
        let warmup_max_lr = written.warmup_max_lr.and_then(|rate| rate.value().or(base_lr));
        let warmup_type = written.warmup_type;
        match written.scheduler_type {
            DeepSpeedSchedulerType::WarmupLr => {
                let warmup_max_lr = warmup_max_lr.or(base_lr);
                DeepSpeedSchedule::WarmupLr { warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type }
            }
            DeepSpeedSchedulerType::WarmupDecayLr => DeepSpeedSchedule::WarmupDecayLr {
                warmup_min_lr,
                warmup_max_lr: warmup_max_lr.unwrap_or(DECAY_MAX_LR),
                warmup_num_steps,
                warmup_type,
                total_num_steps: self.total_num_steps(written.total_num_steps, total),
            },
            DeepSpeedSchedulerType::WarmupCosineLr => DeepSpeedSchedule::WarmupCosineLr {
                warmup_min_ratio: written.warmup_min_ratio,
                cos_min_ratio: written.cos_min_ratio,
                warmup_num_steps,
                warmup_type,
                total_num_steps: self.total_num_steps(written.total_num_steps, total),
            },
        }
    }

    /// Steps of all processes together count as one each, unless they share a batch.
    fn total_num_steps(&mut self, written: Option<Auto<u64>>, given: Option<u64>) -> u64 {
        let key = "scheduler.params.total_num_steps";
        let parts = if self.facts.split_batches { 1 } else { self.facts.world_size as u64 };
        let mut slot = written;
        let given = given.map(|steps| steps.div_ceil(parts));
        let source = Source::object("total_num_steps of the DummyScheduler, per process,");
        self.merge.put(key, source, &mut slot, given);
        slot.and_then(Auto::value).unwrap_or_else(|| {
            self.remains(key, "the DummyScheduler that was passed to prepare has no total_num_steps");
            0
        })
    }
}

/// One configuration describes one optimizer and one schedule, so all dummies become the same.
fn same<T: PartialEq + std::fmt::Display>(dummy: &'static str, first: T, second: T) -> Result<()> {
    if first == second {
        return Ok(());
    }
    let (first, second) = (first.to_string(), second.to_string());
    Err(DeepSpeedErrorKind::TwoDummies { dummy, first, second }.into())
}
