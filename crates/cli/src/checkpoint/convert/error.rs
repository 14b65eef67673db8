//! Why a checkpoint cannot be converted.

use std::io;
use std::path::PathBuf;

use accelerate_core::files::ShownPath;

use accelerate_core::weight_files::shown;

#[derive(Debug, thiserror::Error)]
pub(super) enum ConvertError {
    #[error(
        "{} is no checkpoint: it has neither checkpoint.manifest.json, which `save_state` of this library writes, nor \
         model.safetensors, pytorch_model.bin, optimizer.bin or another file that Python Accelerate's writes{}{}",
        folder.shown(),
        if *is_distributed { "; it is one of torch.distributed.checkpoint, which `accelerate merge-weights` makes a model of" } else { "" },
        newest.iter().map(|newest| format!("; it is a project, whose newest checkpoint is {}", newest.shown())).collect::<String>()
    )]
    NoCheckpoint { folder: PathBuf, is_distributed: bool, newest: Option<PathBuf> },
    #[error(
        "what would be made of {} could not be read again, so nothing is written: a name in it is one that no safetensors file may \
         have; rename it in Python", folder.shown()
    )]
    NotReadable { folder: PathBuf },
    #[error("{} has {found}, and {missing} is missing; copy all files of the checkpoint", folder.shown())]
    Gap { folder: PathBuf, found: String, missing: String },
    #[error("which files of {} are meant cannot be told", folder.shown())]
    Ambiguous { folder: PathBuf, source: accelerate_core::Error },
    #[error("{} cannot be converted", path.shown())]
    State { path: PathBuf, source: accelerate_core::Error },
    #[error("{} cannot be converted: {reason}", path.shown())]
    Values { path: PathBuf, reason: String },
    #[error("{} cannot be read: {reason}", path.shown())]
    Names { path: PathBuf, reason: String },
    #[error(
        "--parameter_names is there {found} times, and the checkpoint has {wanted} optimizers; one file for each is wanted"
    )]
    NameFiles { found: usize, wanted: usize },
    #[error("the flag --{flag} is for checkpoints of Python Accelerate, and {} is one of this library; leave it out", folder.shown())]
    ForPython { flag: &'static str, folder: PathBuf },
    #[error(
        "the files in {} are not as they were saved; `accelerate checkpoint verify` lists what is wrong", folder.shown()
    )]
    NotAsSaved { folder: PathBuf },
    #[error(
        "the checkpoint {} is said to be of {wanted} processes, and has state of {found} of them; Python would get a file for each, so \
         that it is not converted: save it again with a program of this library", folder.shown()
    )]
    Processes { folder: PathBuf, found: usize, wanted: usize },
    #[error("`{}` of the checkpoint {} cannot be converted: {reason}", shown(object), folder.shown())]
    Object { folder: PathBuf, object: String, reason: String },
    #[error("`{}` of the checkpoint {} cannot be converted", shown(object), folder.shown())]
    ObjectState { folder: PathBuf, object: String, source: accelerate_core::Error },
    #[error("{} is not the name of a folder that can be made; name the folder itself, and not `.`, `..` or a link", path.shown())]
    NoName { path: PathBuf },
    #[error("{} exists already, and stays as it is; remove it, or name another folder for the result", path.shown())]
    Exists { path: PathBuf },
    #[error("{} would be within {}, which is read; name a folder elsewhere", destination.shown(), source_folder.shown())]
    Within { destination: PathBuf, source_folder: PathBuf },
    #[error("{} cannot be written", path.shown())]
    Write { path: PathBuf, source: io::Error },
}
