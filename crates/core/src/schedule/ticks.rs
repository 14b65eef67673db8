//! How many ticks of a schedule one call of `scheduler.step()` is.

use crate::names::spelled_enum;

spelled_enum! {
    /// What a schedule counts.
    ///
    /// The reference ticks once per process at every optimizer step, so that schedules written for a single
    /// process come out at the same number of samples. That is the default here too, because programs are
    /// ported with their step counts; whoever counts optimizer steps chooses
    /// [`SchedulerUnit::OptimizerStep`].
    ///
    /// ```
    /// use accelerate_core::schedule::SchedulerUnit;
    /// assert_eq!("optimizer_step".parse::<SchedulerUnit>()?, SchedulerUnit::OptimizerStep);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    SchedulerUnit, "scheduler unit" {
        /// As the reference: one tick per process, one with `split_batches`.
        Reference = "reference",
        /// One tick per optimizer step, whatever the number of processes.
        OptimizerStep = "optimizer_step",
    }
}

/// Ticks of the schedule per optimizer step (`AcceleratedScheduler.step` of the reference, `scheduler.py`).
///
/// ```
/// use accelerate_core::schedule::{SchedulerUnit, ticks_per_step};
/// assert_eq!(ticks_per_step(4, false, true, SchedulerUnit::Reference), 4);
/// assert_eq!(ticks_per_step(4, true, true, SchedulerUnit::Reference), 1);
/// assert_eq!(ticks_per_step(4, false, true, SchedulerUnit::OptimizerStep), 1);
/// ```
pub const fn ticks_per_step(
    num_processes: usize,
    split_batches: bool,
    step_with_optimizer: bool,
    unit: SchedulerUnit,
) -> usize {
    match unit {
        SchedulerUnit::Reference if step_with_optimizer && !split_batches => num_processes,
        _ => 1,
    }
}

/// When and how far a prepared scheduler moves.
///
/// ```
/// use accelerate_core::schedule::{SchedulerRule, SchedulerUnit};
/// let rule = SchedulerRule {
///     num_processes: 2,
///     split_batches: false,
///     step_with_optimizer: true,
///     unit: SchedulerUnit::Reference,
/// };
/// assert_eq!(rule.ticks(true, false), 2);
/// assert_eq!(rule.ticks(false, false), 0); // gradients are still accumulating
/// assert_eq!(rule.ticks(true, true), 0); // the optimizer skipped its step
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerRule {
    /// Number of ranks that train together.
    pub num_processes: usize,
    /// The data loader's batch counts all ranks together.
    pub split_batches: bool,
    /// The scheduler moves with the optimizer. False: every call is one tick, whatever the optimizer does.
    pub step_with_optimizer: bool,
    /// What the schedule counts.
    pub unit: SchedulerUnit,
}

impl SchedulerRule {
    /// Ticks for one call of `scheduler.step()`.
    ///
    /// `sync_gradients`: the window of accumulation ends here. `step_was_skipped`: any of the scheduler's
    /// optimizers skipped its last step because of an overflow.
    pub const fn ticks(&self, sync_gradients: bool, step_was_skipped: bool) -> usize {
        if self.step_with_optimizer && (!sync_gradients || step_was_skipped) {
            return 0;
        }
        ticks_per_step(self.num_processes, self.split_batches, self.step_with_optimizer, self.unit)
    }
}

/// `ticks`, but never past the last of `total_steps` for a schedule that ends (such as
/// [`OneCycle`](super::OneCycle)) and stands at step `step`, counted from 0.
///
/// The reference allows one tick more (`AcceleratedScheduler.step`), which takes a one-cycle schedule past its
/// end, where the curve goes up again.
///
/// ```
/// use accelerate_core::schedule::capped_ticks;
/// assert_eq!(capped_ticks(4, 97, Some(100)), 2); // steps 98 and 99 are the last
/// assert_eq!(capped_ticks(4, 97, None), 4);
/// ```
pub const fn capped_ticks(ticks: usize, step: usize, total_steps: Option<usize>) -> usize {
    let Some(total_steps) = total_steps else {
        return ticks;
    };
    let left = total_steps.saturating_sub(step.saturating_add(1));
    if left < ticks { left } else { ticks }
}
