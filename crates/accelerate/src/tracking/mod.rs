//! Where the values of a run are written: trackers (`tracking.py` of the reference).
//!
//! [`AcceleratorBuilder::log_with`](crate::AcceleratorBuilder::log_with) says which there are: built-in ones by name
//! ([`TensorBoardTracker`], [`JsonLinesTracker`]), or types of the program's own that implement [`GeneralTracker`].
//! [`Accelerator::init_trackers`](crate::Accelerator::init_trackers) starts them,
//! [`Accelerator::log`](crate::Accelerator::log) hands values to them, and
//! [`Accelerator::end_training`](crate::Accelerator::end_training) finishes them.

mod append;
mod general;
mod json_lines;
mod log_with;
mod running;
mod tensorboard;
mod values;

pub use accelerate_core::names::LoggerType;
pub use accelerate_core::tracking::Value;
pub use general::{GeneralTracker, TrackerHandle, TrackerRun};
pub use json_lines::JsonLinesTracker;
pub use log_with::LogWith;
pub use running::{InitTrackersOptions, LogOptions, TrackerKwargs};
pub use tensorboard::TensorBoardTracker;
pub use values::{IntoValue, LogValue, Values};

pub(crate) use log_with::Wanted;
pub(crate) use running::{Process, Trackers};

use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds since 1970, as Python's `time.time()`.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |elapsed| elapsed.as_secs_f64())
}

/// A step as files have it.
fn as_i64(step: Option<usize>) -> Option<i64> {
    step.map(|step| i64::try_from(step).unwrap_or(i64::MAX))
}
