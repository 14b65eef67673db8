//! What can go wrong with trackers while a run goes on.

use accelerate_core::weight_files::listed;
use std::io::{self, ErrorKind};
use std::path::PathBuf;

/// What a message has room for of a list of names.
const LIST_BYTES: usize = 400;

#[derive(Debug, thiserror::Error)]
pub(crate) enum TrackingError {
    #[error(
        "{call} comes before init_trackers, so the trackers have no project; call init_trackers first, or after end_training again"
    )]
    NotStarted { call: &'static str },
    #[error(
        "the trackers are at work for the project {project:?} already; end it by end_training before init_trackers is called again"
    )]
    Started { project: String },
    #[error(
        "there is no tracker \"{name}\"; log_with has {}. Name it there when the accelerator is built",
        listed(known, LIST_BYTES)
    )]
    NoTracker { name: String, known: Vec<String> },
    #[error(
        "{what} is for the tracker \"{name}\", and log_with has {}; leave it out, or name the tracker",
        listed(known, LIST_BYTES)
    )]
    NoTrackerForOptions { what: &'static str, name: String, known: Vec<String> },
    #[error("the tracker \"{name}\" is not a {wanted}; call with() for the type that it was made of")]
    OtherType { name: String, wanted: &'static str },
    #[error(
        "the value {name} is a tensor of shape {shape:?} and kind {kind}, and a tracker takes one number; log a mean, or one of its \
         elements"
    )]
    NotANumber { name: String, shape: Vec<i64>, kind: String },
    #[error("these values cannot be made from what was given: {source}; give a struct or a map with names")]
    NotValues { source: serde_json::Error },
    #[error("these values are {found}; give a struct or a map, whose fields have names")]
    NoNames { found: &'static str },
    #[error(
        "the tracker wants a folder, and there is none; give a logging_dir or a project_dir by ProjectConfiguration"
    )]
    NoLoggingDir,
    #[error("could not {action} {}: {source}; {}. {lost}", path.display(), cure(source))]
    Io { action: &'static str, path: PathBuf, source: io::Error, lost: &'static str },
}

fn cure(source: &io::Error) -> &'static str {
    match source.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "make room there, or choose a logging_dir on another disk",
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            "let this user write there, or choose another logging_dir"
        }
        ErrorKind::NotADirectory | ErrorKind::AlreadyExists | ErrorKind::IsADirectory => {
            "move what is in its place away, or choose another logging_dir or project_name"
        }
        _ => "look at that folder and its disk, or choose another logging_dir",
    }
}
