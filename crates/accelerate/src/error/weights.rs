//! What can go wrong when weights are written or read.

use super::Mismatch;
use accelerate_core::checkpoint::STEM;
use accelerate_core::weight_files::{SaveManifest, listed};
use std::path::{Path, PathBuf};
use tch::Kind;

/// What a message has room for of a list of names.
const LIST_BYTES: usize = 600;

/// Without its manifest, a checkpoint is none: nothing else says that it was completed.
fn is_checkpoint(manifest: &Path) -> bool {
    manifest.file_name().is_some_and(|name| *name == *SaveManifest::file_name(STEM))
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum WeightsError {
    #[error("cannot {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },

    #[error(
        "cannot create the folder {}: {} is {found}, where a folder is needed; move it away, or name another folder",
        folder.display(), in_the_way.display()
    )]
    NoRoomForFolder { folder: PathBuf, in_the_way: PathBuf, found: String },

    #[error(
        "the state dict does not fit the model: {mismatch}. Nothing was changed. Give LoadStateDictOptions {{ strict: false }} to load \
         what has the same name and shape"
    )]
    StateDict { mismatch: Mismatch },

    #[error(
        "the weights in {} do not fit the model: {mismatch}. Nothing was changed. Check that the model has the \
         configuration with which it was saved; LoadOptions has `key_map` for other names and `strict = \
         false` to load only what fits",
        path.display()
    )]
    DoesNotFit { path: PathBuf, mismatch: Mismatch },

    #[error(
        "{} has codes of 4 or 8 bits (`{name}` belongs to them), and this loads numbers; use load_and_quantize_model, or \
         quantization_config of from_pretrained, with the BnbQuantizationConfig that they were made with",
        path.display()
    )]
    Codes { path: PathBuf, name: String },

    #[error(
        "{} has `{first}` and `{second}` with other values, and in the model they are one parameter. Make the model with two \
         (`tie_word_embeddings: false` in config.json, for a head), or take the second out of the file; with `strict = false`, the first \
         is loaded",
        path.display()
    )]
    TiedApart { path: PathBuf, first: String, second: String },

    #[error(
        "{} is not a safetensors file, or it is damaged: {reason}; save or download it again",
        path.display()
    )]
    Header { path: PathBuf, reason: String },

    #[error("{} is {found}, and weights are read from files; name the file that has them", path.display())]
    NotAFile { path: PathBuf, found: &'static str },

    #[error(
        "the tensor `{name}` in {} takes {num_bytes} bytes, and the system is out of memory for them; use a machine with more \
         memory, or see to it that the file is what was saved",
        path.display()
    )]
    NoMemory { path: PathBuf, name: String, num_bytes: u64 },

    #[error(
        "the tensor `{name}` in {} has elements of type {dtype}, which libtorch 2.11 cannot hold here; convert it to a \
         type such as F32 or I64",
        path.display()
    )]
    UnknownDtype { path: PathBuf, name: String, dtype: String },

    #[error(
        "the tensor `{name}` cannot be written to {}: safetensors has no element type for {kind:?}; cast it first",
        path.display()
    )]
    KindNotWritable { path: PathBuf, name: String, kind: Kind },

    #[error("the model was not saved, because {failures}. {}", if *was_replacing {
        "If the new files are complete under their temporary names, the next load or save of the folder puts them in \
         place; free what is in the way"
    } else {
        "What was saved there before is as it was; see to it that every rank can write there, and save again"
    })]
    FailedRanks { failures: String, was_replacing: bool },

    #[error(
        "rank 0 writes into another folder than this rank: {} is not there. Each rank writes files of its own, so the \
         folder has to be on a file system that all share; where there is none, ProjectConfiguration.save_on_each_node \
         has one process of each machine write everything",
        path.display()
    )]
    NotShared { path: PathBuf },

    #[error("the index {} cannot be used: {source}", path.display())]
    Index { path: PathBuf, source: accelerate_core::Error },

    #[error(
        "the index {} has {found_bytes} bytes, and no index is longer than {most_bytes}; name the index of a model",
        path.display()
    )]
    LongIndex { path: PathBuf, found_bytes: u64, most_bytes: u64 },

    #[error(
        "the index {} names the file {file} for {num_tensors} tensors, but there is no such file beside it; \
         copy or download all shards into one folder",
        index.display()
    )]
    MissingShard { index: PathBuf, file: String, num_tensors: usize },

    #[error(
        "the index {} and its shards do not belong together; {} tensors are not where it says: {}. Save or \
         download the folder again",
        index.display(), absent.len(), listed(absent, LIST_BYTES)
    )]
    WrongIndex { index: PathBuf, absent: Vec<String> },

    #[error(
        "the tensor `{name}` is both in {} and in {}, and the index does not say which counts",
        paths[0].display(), paths[1].display()
    )]
    InTwoFiles { name: String, paths: [PathBuf; 2] },

    #[error(
        "{} holds no weights that can be told apart: there is neither model.safetensors nor \
         model.safetensors.index.json, nor a single other safetensors file or index, nor PyTorch's pytorch_model.bin or \
         .metadata; it holds {}",
        folder.display(),
        if names.is_empty() { "nothing".to_owned() } else { listed(names, LIST_BYTES) }
    )]
    NoWeights { folder: PathBuf, names: Vec<String> },

    #[error(
        "{} cannot be read: {source}. Of PyTorch's files those are read that hold tensors by name; save it again, or convert it with \
         Python: safetensors.torch.save_file(torch.load(\"in.bin\"), \"model.safetensors\")",
        path.display()
    )]
    TorchFile { path: PathBuf, source: accelerate_core::Error },

    #[error("{} cannot be written in PyTorch's format: {source}; cast it, or write safetensors", path.display())]
    NotInTorchFile { path: PathBuf, source: accelerate_core::Error },

    #[error("{} cannot be written in the format of safetensors: {source}", path.display())]
    NotInSafetensors { path: PathBuf, source: accelerate_core::Error },

    #[error("a part of `{name}` in {} cannot be read: {source}; save or copy the whole folder again", path.display())]
    TorchPart { path: PathBuf, name: String, source: accelerate_core::Error },

    #[error(
        "a part of `{name}` is in bytes {start}..{end} of {}, which has {found_bytes}; save or copy the whole folder again",
        path.display()
    )]
    BeyondFile { path: PathBuf, name: String, start: u64, end: u64, found_bytes: u64 },

    #[error(
        "the key map turns both `{first}` and `{second}` in {} into `{mapped}`; it has to keep names apart",
        path.display()
    )]
    SameName { path: PathBuf, first: String, second: String, mapped: String },

    #[error(
        "{} belongs to the save of {manifest} in the same folder, which would be lost; save into a folder of its own",
        path.display()
    )]
    OfAnotherSave { path: PathBuf, manifest: String },

    #[error(
        "{} was written by no save_state into this folder, and would be replaced, or be taken for a part of what is saved; \
         save into a folder of its own, or remove the file if it is not needed",
        path.display()
    )]
    OfNoSave { path: PathBuf },

    #[error(
        "{} is damaged: the checksum of bytes {start}..{end} is another one than the file says; get the file once more",
        path.display()
    )]
    StorageChecksum { path: PathBuf, start: u64, end: u64 },

    #[error("{} cannot be used: {source}. Remove it if it is not from a save of weights", path.display())]
    Manifest { path: PathBuf, source: accelerate_core::Error },

    #[error(
        "{} cannot get its new content: {source}. All files of the save are complete under temporary names beside it: \
         free what is in the way, or make the folder writable, and the next load or save of the folder puts them in place",
        path.display()
    )]
    InTheWay { path: PathBuf, source: std::io::Error },

    #[error(
        "a save into this folder was interrupted, and {} has been written since. To have the save finished, remove {}{}",
        path.display(),
        path.display(),
        match is_checkpoint(manifest) {
            true => ". Otherwise go on from another checkpoint".to_owned(),
            false => format!(". To keep what is there, remove {}", manifest.display()),
        }
    )]
    NewerThanSave { path: PathBuf, manifest: PathBuf },

    #[error(
        "{} is not as it was saved with the files beside it: {reason}. {}",
        path.display(),
        match is_checkpoint(Path::new(manifest)) {
            true => "Copy the whole folder again, or go on from another checkpoint".to_owned(),
            false => format!("Save or copy the whole folder again; or remove {manifest} there to accept all files as they are"),
        }
    )]
    NotAsSaved { path: PathBuf, reason: String, manifest: String },

    #[error(
        "{} would have {num_bytes} bytes for {num_files} files, more than is read again; save into larger files, of fewer \
         processes",
        path.display()
    )]
    LongManifest { path: PathBuf, num_bytes: usize, num_files: usize },

    #[error("{} has {found_bytes} bytes, and at most {most_bytes} are read", path.display())]
    NotASmallFile { path: PathBuf, found_bytes: u64, most_bytes: u64 },

    #[error(
        "`{weight}` is stored in {found} in {}, and the configuration asks for {wanted}; ask for what is stored, or load weights \
         of 16 or 32 bits",
        path.display()
    )]
    OtherWeight { path: PathBuf, weight: String, found: String, wanted: String },

    #[error("the codes of `{weight}` are in another order than row by row; save the model with a newer bitsandbytes")]
    WeightFormat { weight: String },

    #[error(transparent)]
    Quantized { source: accelerate_core::Error },

    #[error(
        "a part of the weight `{weight}` of 8 bits is {found}, and {wanted} is needed; the file was put together from parts of \
         others, or damaged. Save it again"
    )]
    Int8Part { weight: String, found: String, wanted: String },

    #[error("weights cannot be saved under the name {name:?}, or beside a file of that name: {reason}")]
    FileName { name: String, reason: &'static str },

    #[error(
        "there is no manifest in {}, so nothing is known about what was saved there; save_model writes one",
        folder.display()
    )]
    NoManifest { folder: PathBuf },
}
