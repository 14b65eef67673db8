//! A launch whose `stop_at` has passed.

use std::time::SystemTime;

use accelerate_core::config::{Lookup, PassedEnd, RunConfig};
use accelerate_core::environment::started_again_by;

/// Nothing could be done in such a run.
#[derive(Debug, thiserror::Error)]
#[error("{end}; name a later moment, or leave it out")]
pub(super) struct Over {
    end: PassedEnd,
}

/// What is told where the launch goes on. A job that is queued again, and pods that start again, come with the words of their first
/// start: the program then saves and ends well, and the job is done, whereas an error would start it once more.
///
/// # Errors
///
/// The moment has passed, and this is the first start.
pub(super) fn check(run: &RunConfig, now: SystemTime, lookup: Lookup<'_>) -> Result<Option<String>, Over> {
    match (run.passed_end(now), started_again_by(lookup)) {
        (None, _) => Ok(None),
        (Some(end), None) => Err(Over { end }),
        (Some(end), Some(variable)) => Ok(Some(format!(
            "{end}; {variable} says that this may be a start after the first, so the program is started, and is told to end as soon as \
             it asks `should_stop`"
        ))),
    }
}
