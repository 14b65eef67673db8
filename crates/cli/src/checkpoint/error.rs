//! What can be wrong with the files of a checkpoint, and with what is asked about it.

use std::io;
use std::ops::Range;
use std::path::PathBuf;

use accelerate_core::files::ShownPath;
use accelerate_core::weight_files::{listed, shown};
use safetensors::Dtype;
use serde::Serialize;

use super::conversions::Conversion;

/// What is wrong with one file. The file is named by [`Fault`].
#[derive(Debug, thiserror::Error)]
pub(super) enum Problem {
    #[error("it is missing")]
    Missing,
    #[error("it is {found}, and a file is wanted")]
    NotAFile { found: &'static str },
    #[error("it cannot be read: {0}")]
    Unreadable(io::Error),
    #[error(
        "it cannot be read, as this user may not: {0}; run the command as a user who may, or ask whoever owns the file for the right to"
    )]
    NotPermitted(io::Error),
    #[error("it has {found_bytes} bytes, and {wanted_bytes} were saved")]
    Size { found_bytes: u64, wanted_bytes: u64 },
    #[error("it has {found_bytes} bytes, and no such file is longer than {most_bytes}")]
    Large { found_bytes: u64, most_bytes: u64 },
    #[error("its content has changed: its checksum is {found}, and {wanted} was saved")]
    Content { found: String, wanted: String },
    #[error("its content is as it was saved, but the sample in the manifest is of another file")]
    Sample,
    /// Of its header, or of what it says as JSON.
    #[error("{0}")]
    Format(accelerate_core::Error),
    #[error("it is missing, so that the save was not completed")]
    NotCompleted,
    #[error("not all files that it lists could be verified, which is a fault of this program")]
    NotVerified,
    #[error("the manifest does not list it, so that nothing says what the checkpoint holds")]
    NoDescription,
    #[error("the manifest does not list it, and {by} does")]
    NotListed { by: &'static str },
    #[error("the manifest lists it, and the description does not say what is in it")]
    NotDescribed,
    #[error("it is of rank {rank} of {of}, and the description is of a run of {world_size} processes")]
    OtherWorld { rank: usize, of: usize, world_size: usize },
    #[error("it has no tensor `{}`, which {by} says is in it", shown(name))]
    NoSuchTensor { name: String, by: &'static str },
    #[error("it has tensors that the description does not list: {}", listed(names, 300))]
    OtherTensors { names: Vec<String> },
    #[error("`{}` has elements of type {found} in it, and {wanted} was saved", shown(name))]
    OtherDtype { name: String, found: Dtype, wanted: Dtype },
    #[error("`{}` has shape {found:?} in it, and {wanted} was saved", shown(name))]
    OtherShape { name: String, found: Vec<usize>, wanted: String },
    #[error("elements {}..{} of `{}` of `{}` are in no file", missing.start, missing.end, shown(name), shown(object))]
    NotCovered { object: String, name: String, missing: Range<usize> },
    #[error(
        "the state `{}` of `{}` is in blocks, which only the same number of processes can put together",
        shown(name),
        shown(object)
    )]
    InBlocks { object: String, name: String },
    #[error("some elements of `{}` of `{}` are in more than one file", shown(name), shown(object))]
    Twice { object: String, name: String },
}

impl Problem {
    pub(super) fn of(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Self::Missing,
            io::ErrorKind::PermissionDenied => Self::NotPermitted(error),
            _ => Self::Unreadable(error),
        }
    }

    pub(super) fn verdict(&self) -> Verdict {
        match self {
            Self::NotPermitted(_) => Verdict::NotReadable,
            Self::Format(error) if error.is_newer_version() => Verdict::NewerVersion,
            _ => Verdict::Damaged,
        }
    }

    pub(super) fn at(self, file: impl Into<String>) -> Fault {
        Fault { file: file.into(), problem: self }
    }
}

/// What a problem says of the save that it is in. The worst first: what cannot be looked at may be whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Verdict {
    Damaged,
    NewerVersion,
    NotReadable,
}

impl Verdict {
    /// Of several problems.
    pub(super) fn of(faults: &[Fault]) -> Option<Self> {
        faults.iter().map(|fault| fault.problem.verdict()).min()
    }

    /// In a list.
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Damaged => "damaged",
            Self::NewerVersion => "of a newer version",
            Self::NotReadable => "not readable",
        }
    }
}

/// A file of a folder that is not as it has to be.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", shown(file))]
pub(super) struct Fault {
    /// Its name in the folder.
    pub(super) file: String,
    pub(super) problem: Problem,
}

/// Why nothing can be shown.
#[derive(Debug, thiserror::Error)]
pub(super) enum CheckpointError {
    #[error("there is no folder {}; name that of a checkpoint, or one that has checkpoints in it", folder.shown())]
    NoFolder { folder: PathBuf },
    #[error("{} cannot be listed", folder.shown())]
    Unlistable { folder: PathBuf, source: io::Error },
    #[error(
        "{} is no checkpoint: there is no checkpoint.manifest.json in it, nor a folder checkpoint_0, checkpoint_1 or so, nor \
         checkpoints with such folders; name a folder that `save_state` wrote, or the project's{}{}",
        folder.shown(),
        match (is_of_python, has_weights) {
            (true, _) => ". It has a checkpoint of Python Accelerate; `accelerate checkpoint convert` makes one of this library of it",
            (false, true) => ". It has saved weights, which `accelerate checkpoint verify` looks at",
            (false, false) => "",
        },
        conversions.iter().map(|conversion| format!(". {conversion}")).collect::<String>(),
    )]
    NoCheckpoint { folder: PathBuf, has_weights: bool, is_of_python: bool, conversions: Vec<Conversion> },
    #[error(
        "none of the checkpoints in {} is complete and whole; `accelerate checkpoint ls` says of each what it lacks",
        folder.shown()
    )]
    NoneCompleted { folder: PathBuf },
    #[error(
        "the save into {} was not completed: there is no checkpoint.manifest.json in it; take another checkpoint",
        folder.shown()
    )]
    NotCompleted { folder: PathBuf },
    #[error("the checkpoint {} is {}; `accelerate checkpoint verify` lists all that is in its way", folder.shown(), source.problem.verdict().word())]
    Unusable { folder: PathBuf, source: Fault },
    #[error("neither checkpoint has an object `{}`; there are {}", shown(object), listed(names, 600))]
    NoSuchObject { object: String, names: Vec<String> },
    #[error("the checkpoint {} has no model; there are {}", folder.shown(), listed(names, 600))]
    NoModel { folder: PathBuf, names: Vec<String> },
    #[error("a tolerance is a number from 0 on, and {found:?} is none")]
    Tolerance { found: String },
}
