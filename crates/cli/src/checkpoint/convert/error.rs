//! Why a checkpoint cannot be converted.

use std::io;
use std::path::PathBuf;

use accelerate_core::weight_files::shown;

#[derive(Debug, thiserror::Error)]
pub(super) enum ConvertError {
    #[error(
        "{} is no checkpoint: it has neither checkpoint.manifest.json, which `save_state` of this library writes, nor \
         model.safetensors, pytorch_model.bin, optimizer.bin or another file that Python Accelerate's writes{}",
        folder.display(),
        if *is_distributed { "; it is one of torch.distributed.checkpoint, which `accelerate merge-weights` makes a model of" } else { "" }
    )]
    NoCheckpoint { folder: PathBuf, is_distributed: bool },
    #[error("{} has {found}, and {missing} is missing; copy all files of the checkpoint", folder.display())]
    Gap { folder: PathBuf, found: String, missing: String },
    #[error("{} cannot be converted", path.display())]
    State { path: PathBuf, source: accelerate_core::Error },
    #[error("{} cannot be converted: {reason}", path.display())]
    Values { path: PathBuf, reason: String },
    #[error("{} cannot be read: {reason}", path.display())]
    Names { path: PathBuf, reason: String },
    #[error("--parameter_names is there {found} times, and the checkpoint has {wanted} optimizers; one file for each is wanted")]
    NameFiles { found: usize, wanted: usize },
    #[error("the flag --{flag} is for checkpoints of Python Accelerate, and {} is one of this library; leave it out", folder.display())]
    ForPython { flag: &'static str, folder: PathBuf },
    #[error(
        "the files in {} are not as they were saved; `accelerate checkpoint verify` lists what is wrong", folder.display()
    )]
    NotAsSaved { folder: PathBuf },
    #[error("`{}` of the checkpoint {} cannot be converted: {reason}", shown(object), folder.display())]
    Object { folder: PathBuf, object: String, reason: String },
    #[error("`{}` of the checkpoint {} cannot be converted", shown(object), folder.display())]
    ObjectState { folder: PathBuf, object: String, source: accelerate_core::Error },
    #[error("{} exists already, and stays as it is; remove it, or name another folder for the result", path.display())]
    Exists { path: PathBuf },
    #[error("{} would be within {}, which is read; name a folder elsewhere", destination.display(), source_folder.display())]
    Within { destination: PathBuf, source_folder: PathBuf },
    #[error("{} cannot be written", path.display())]
    Write { path: PathBuf, source: io::Error },
}
