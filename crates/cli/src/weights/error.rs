//! What can be wrong with files of weights, and with the place for others.

use std::io;
use std::path::PathBuf;

use accelerate_core::files::ShownPath;
use accelerate_core::weight_files::listed;
use safetensors::Dtype;

#[derive(Debug, thiserror::Error)]
pub(crate) enum WeightsError {
    #[error("there is no folder {}; name the folder of a checkpoint", folder.shown())]
    NoFolder { folder: PathBuf },
    #[error("{} cannot be read", path.shown())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{} is another file than it was at the beginning: somebody has saved into its folder meanwhile; try again", path.shown())]
    Replaced { path: PathBuf },
    #[error("{} is {found}, and {wanted} is wanted; name another one", path.shown())]
    Kind { path: PathBuf, found: &'static str, wanted: &'static str },
    #[error(
        "the folder {} has no checkpoint: .metadata of torch.distributed.checkpoint, safetensors files with an index, \
         pytorch_model.bin or pytorch_model_fsdp.bin is wanted{}", folder.shown(), cure(within)
    )]
    NoCheckpoint { folder: PathBuf, within: Vec<PathBuf> },
    #[error(
        "the folder {} has several weight files and no index that says which belong together: {}; leave only those of one \
         model in it, with their index",
        folder.shown(), listed(files, 300)
    )]
    NoIndex { folder: PathBuf, files: Vec<String> },
    #[error("which weights of {} are meant cannot be told", folder.shown())]
    Ambiguous { folder: PathBuf, source: accelerate_core::Error },
    #[error("{} is one of several files by its name, and no index says which; fetch all files of the checkpoint", path.shown())]
    OneOfSeveral { path: PathBuf },
    #[error("{} has {found_bytes} bytes, and no such file is longer than {most_bytes}", path.shown())]
    Large { path: PathBuf, found_bytes: u64, most_bytes: u64 },
    #[error("{} cannot be understood", path.shown())]
    Damaged { path: PathBuf, source: accelerate_core::Error },
    #[error("{} cannot be understood where `{key}` is said to be, from byte {start} to {end}", path.shown())]
    DamagedPart { path: PathBuf, key: String, start: u64, end: u64, source: accelerate_core::Error },
    #[error(
        "{} has {found_bytes} bytes, and `{key}` is said to be from byte {start} to {end}; the file was cut off, or is of \
         another checkpoint", path.shown()
    )]
    BeyondFile { path: PathBuf, key: String, start: u64, end: u64, found_bytes: u64 },
    #[error("{} is missing, and `{key}` is said to be in it; fetch all files of the checkpoint", path.shown())]
    MissingFile { path: PathBuf, key: String },
    #[error("{} has no tensor `{key}`, and the index says that it has; fetch all files from one place", path.shown())]
    WrongIndex { path: PathBuf, key: String },
    #[error(
        "the tensors of {} take {tensor_bytes} bytes, and its files have only {file_bytes}: parts are said to be in the same \
         place", folder.shown()
    )]
    Repeated { folder: PathBuf, tensor_bytes: u64, file_bytes: u64 },
    #[error(
        "{} holds no tensors{}; name the folder of a model's weights", path.shown(),
        if others.is_empty() { String::new() } else { format!(": {} are of other types", listed(others, 300)) }
    )]
    NoTensors { path: PathBuf, others: Vec<String> },
    #[error("the data of `{key}` in {} have changed since they were written: their checksum is another one", path.shown())]
    Checksum { path: PathBuf, key: String },
    #[error("elements {start}..{end} of `{key}` are in no file")]
    Incomplete { key: String, start: u64, end: u64 },
    #[error("the tensor `{key}` with {num_bytes} bytes does not fit into the memory of this machine")]
    Memory { key: String, num_bytes: u64 },
    #[error("{} exists already, and stays as it is; remove it, or name another folder for the result", path.shown())]
    Exists { path: PathBuf },
    #[error(
        "another command is writing weights into {}; wait until it has ended, or name another folder for the result",
        folder.shown()
    )]
    Busy { folder: PathBuf },
    #[error("{} cannot be written", path.shown())]
    Write { path: PathBuf, source: io::Error },
    #[error("{} cannot be written", path.shown())]
    NotWritable { path: PathBuf, source: accelerate_core::Error },
    #[error(
        "{} cannot be written: the elements of `{key}` are {dtype}, which take less than a byte each, and such tensors are only \
         verified and compared; take the file that has it as it is", path.shown()
    )]
    PartsOfBytes { path: PathBuf, key: String, dtype: Dtype },
    #[error("{} could not be read again, so nothing is written; rename its tensors with the program that wrote them", path.shown())]
    NotReadable { path: PathBuf, source: accelerate_core::Error },
    #[error("{} cannot be written: {reason}", path.shown())]
    Header { path: PathBuf, reason: String },
}

/// The folders below that would have been the right ones.
fn cure(within: &[PathBuf]) -> String {
    let listed: Vec<_> = within.iter().map(|folder| folder.shown()).collect();
    if listed.is_empty() { String::new() } else { format!("; there is one in {}", listed.join(", and one in ")) }
}
