//! The schedule of a DeepSpeed configuration.

use super::{Clock, Tick, scheduler};
use crate::optim::OptimizerHandle;
use accelerate_core::config::DeepSpeedSchedule;

/// The learning rate of a DeepSpeed configuration's `scheduler` section: `WarmupLR`, `WarmupDecayLR` or `WarmupCosineLR`.
/// `prepare` makes it of a [`DummyScheduler`](crate::optim::DummyScheduler), where there is an example.
#[derive(Debug)]
pub struct DeepSpeedLr {
    clock: Clock,
    rule: Rule,
}

#[derive(Debug)]
struct Rule {
    schedule: DeepSpeedSchedule,
    total: Option<usize>,
}

impl Rule {
    fn rate(&self, tick: &Tick) -> f64 {
        self.schedule.lr(tick.epoch as u64, tick.base_lr)
    }
}

impl DeepSpeedLr {
    pub(crate) fn new(handle: &OptimizerHandle, schedule: DeepSpeedSchedule) -> Self {
        let rule = Rule { total: schedule.total_num_steps().map(|total| total as usize), schedule };
        Self { clock: Clock::start(handle, |tick| rule.rate(tick)), rule }
    }
}

scheduler!(DeepSpeedLr, total);
