//! What a profiler does at each step of a loop, as pure functions of the step (method: `torch/profiler/profiler.py`).

use crate::config::ScheduleOption;

/// What a profiler does during one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ProfilerAction {
    /// Nothing.
    #[default]
    None,
    /// It is set up, without recording.
    Warmup,
    /// It records.
    Record,
    /// It records, and the cycle ends with this step.
    RecordAndSave,
}

impl ScheduleOption {
    /// What is done during step number `step`, counted from 0.
    pub fn action(&self, step: u64) -> ProfilerAction {
        let Self { wait, warmup, active, repeat, skip_first, skip_first_wait } = *self;
        let Some(step) = step.checked_sub(skip_first) else { return ProfilerAction::None };
        let step = if skip_first_wait { step.saturating_add(wait) } else { step };
        let cycle = wait.saturating_add(warmup).saturating_add(active).max(1);
        if repeat > 0 && step / cycle >= repeat {
            return ProfilerAction::None;
        }
        match step % cycle {
            step if step < wait => ProfilerAction::None,
            step if step < wait.saturating_add(warmup) => ProfilerAction::Warmup,
            step if step < cycle - 1 => ProfilerAction::Record,
            _ => ProfilerAction::RecordAndSave,
        }
    }
}

/// What has to be done between two steps, in the order of the fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProfilerTransition {
    /// Stop and hand the recording over.
    pub finish: bool,
    /// Stop and throw away what was set up or recorded.
    pub discard: bool,
    /// Set up.
    pub prepare: bool,
    /// Begin to record.
    pub record: bool,
}

/// What has to be done to go from one action to the next; `next` is `None` where the loop ends, which hands over a cycle
/// that the loop has cut short.
///
/// ```
/// use accelerate_core::profile::{ProfilerAction, transition};
/// let begin = transition(ProfilerAction::Warmup, Some(ProfilerAction::Record));
/// assert!(begin.record && !begin.prepare && !begin.finish);
/// assert!(transition(ProfilerAction::Record, None).finish);
/// ```
pub fn transition(current: ProfilerAction, next: Option<ProfilerAction>) -> ProfilerTransition {
    use ProfilerAction::{None as Idle, Record, RecordAndSave, Warmup};
    let records = |action| matches!(action, Record | RecordAndSave);
    let goes_on = match (current, next) {
        (Warmup, Some(Warmup)) => true,
        (Record, Some(next)) => records(next),
        _ => false,
    };
    let finish = current == RecordAndSave || (current == Record && !goes_on && next.is_none());
    let discard = match current {
        Warmup => !goes_on && !next.is_some_and(records),
        Record => !goes_on && !finish,
        Idle | RecordAndSave => false,
    };
    let prepared = goes_on || (current == Warmup && !discard);
    let next = next.unwrap_or(Idle);
    ProfilerTransition {
        finish,
        discard,
        prepare: next != Idle && !prepared,
        record: records(next) && !(goes_on && current == Record),
    }
}
