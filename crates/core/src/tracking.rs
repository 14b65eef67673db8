//! What a run tells of itself: the trackers it is told to, the values, and the files they are written into.
//!
//! Method: `tracking.py` of the reference; for event files `torch/utils/tensorboard`.

mod events;
mod json_lines;
mod options;
mod paths;
mod proto;
mod values;

pub use events::{Event, HPARAMS_FILE, ScalarStyle, event_file_name, hparams, hparams_yaml, scalar, text, timestamp};
pub use json_lines::{CONFIG_KEY, JSON_LINES_FILE, RESERVED_KEYS, STEP_KEY, TIME_KEY, config_line, line};
pub use options::{Options, numbers};
pub use paths::{run_folder, scalars_folder};
pub use values::Value;

use crate::error::tracking::TrackingErrorKind;
use crate::names::LoggerType;
use crate::{Error, Result};

/// The trackers that need no service.
pub const BUILT_IN: [LoggerType; 2] = [LoggerType::TensorBoard, LoggerType::Jsonl];

/// Which trackers are made for `log_with` (`filter_trackers` of the reference): each once, in the order in which they are named, and
/// all that are built in for [`LoggerType::All`]. All of these write files.
///
/// ```
/// use accelerate_core::names::LoggerType::{All, Jsonl, TensorBoard, Wandb};
/// use accelerate_core::tracking::filter_trackers;
///
/// assert_eq!(filter_trackers(&[Jsonl, TensorBoard, Jsonl], true)?, [Jsonl, TensorBoard]);
/// assert_eq!(filter_trackers(&[All], true)?, [TensorBoard, Jsonl]);
/// assert!(filter_trackers(&[TensorBoard], false).unwrap_err().to_string().contains("requires a logging_dir"));
/// assert!(filter_trackers(&[Wandb], true).is_err());
/// # Ok::<(), accelerate_core::Error>(())
/// ```
///
/// # Errors
/// Trackers of services; trackers that write files where there is no folder for them.
pub fn filter_trackers(log_with: &[LoggerType], has_logging_dir: bool) -> Result<Vec<LoggerType>> {
    let mut trackers = Vec::new();
    for &name in log_with {
        let meant: &[LoggerType] = if name == LoggerType::All { &BUILT_IN } else { &[name] };
        for &name in meant.iter() {
            if !BUILT_IN.contains(&name) {
                return Err(Error::new(TrackingErrorKind::Service { name }));
            }
            check_logging_dir(name.as_str(), true, has_logging_dir)?;
            if !trackers.contains(&name) {
                trackers.push(name);
            }
        }
    }
    Ok(trackers)
}

/// Is there a folder for a tracker that writes into one?
///
/// # Errors
/// There is none.
pub fn check_logging_dir(name: &str, requires_logging_directory: bool, has_logging_dir: bool) -> Result<()> {
    if requires_logging_directory && !has_logging_dir {
        return Err(Error::new(TrackingErrorKind::NoLoggingDir { name: name.to_owned() }));
    }
    Ok(())
}

/// Options and values are found by the name of a tracker, so each name is there once.
///
/// # Errors
/// A name that is there twice.
pub fn check_names<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<()> {
    let mut seen = std::collections::BTreeSet::new();
    match names.into_iter().find(|name| !seen.insert(*name)) {
        Some(name) => Err(Error::new(TrackingErrorKind::TwoOfOneName { name: name.to_owned() })),
        None => Ok(()),
    }
}
