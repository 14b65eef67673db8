//! What can go wrong with a model that is spread over devices and a disk.

use accelerate_core::device_map::MapDevice;
use accelerate_core::names::counted;
use accelerate_core::weight_files::listed;
use std::path::PathBuf;
use tch::Kind;

/// What a message has room for of a list of names.
const LIST_BYTES: usize = 600;

#[derive(Debug, thiserror::Error)]
pub(crate) enum BigModelError {
    #[error(
        "the device map puts modules on the device {device}, and this process has {}; name devices that there are in the map, or in \
         max_memory",
        if *num_devices == 0 { "no accelerator".to_owned() } else { format!("those up to {}", num_devices - 1) }
    )]
    NoSuchDevice { device: MapDevice, num_devices: usize },

    #[error("device maps have no name for the device {device:?}; make the model on the CPU or on a GPU")]
    NoName { device: tch::Device },

    #[error("the model cannot be computed on a disk; name an accelerator or \"cpu\" as the device to compute on")]
    ComputesOnDisk,

    #[error(
        "the device map puts {} on the disk ({}), and there is no folder to keep them in; name one (DispatchOptions::offload_dir, `offload_folder` in Python)",
        counted(names.len(), "tensor"), listed(names, LIST_BYTES)
    )]
    NoFolder { names: Vec<String> },

    #[error(
        "the parameter {parameter} has no value yet, so that it cannot be put anywhere: the model was made by \
         init_empty_weights. Load a checkpoint into it with the device map (load_checkpoint_and_dispatch), or materialize() it first"
    )]
    WithoutValue { parameter: String },

    #[error(
        "the device map keeps all linear layers elsewhere than where the model is computed, and llm_int8_enable_fp32_cpu_offload has them \
         keep their numbers, so that none is quantised; give the device that computes more memory, or leave that setting out"
    )]
    NothingToQuantize,

    #[error(
        "the parameter {parameter} belongs to a model that has been prepared, or is sharded; dispatch a model in place of preparing it"
    )]
    Prepared { parameter: String },

    #[error(
        "{parameter} is kept where a device map says, and such a model is not prepared for several processes or sharded; use it as it is \
         in each process, or prepare a model that has been loaded without a device map"
    )]
    Dispatched { parameter: String },

    #[error(
        "{parameter} is kept elsewhere than where the model is computed, by a device map, and cannot be {action} there. \
         Bring it back by dispatch_model with a map that has it where the model is computed, or make the model without a map"
    )]
    Kept { parameter: String, action: &'static str },

    #[error(
        "{buffer} is a buffer that is kept on {device}, and the model is in training mode, in which what is written into it would be \
         lost; call eval() on the model, or leave buffers where it is computed (offload_buffers = false)"
    )]
    TrainingBuffer { buffer: String, device: MapDevice },

    #[error("cannot {action} {} of the offloaded weights: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },

    #[error("{} is {found}, and offloaded weights are in files", path.display())]
    NotAFile { path: PathBuf, found: &'static str },

    #[error("the index {} of offloaded weights cannot be used: {source}", path.display())]
    Index { path: PathBuf, source: accelerate_core::Error },

    #[error(
        "the index {} of offloaded weights has {found_bytes} bytes, and no index is longer than {most_bytes}",
        path.display()
    )]
    LongIndex { path: PathBuf, found_bytes: u64, most_bytes: u64 },

    #[error(
        "the index of the offloaded weights in {} has no `{name}`; offload the model into this folder again",
        folder.display()
    )]
    NotInIndex { folder: PathBuf, name: String },

    #[error(
        "the index in {} says that `{name}` has elements of type {dtype}, which libtorch 2.11 cannot hold here",
        folder.display()
    )]
    UnknownDtype { folder: PathBuf, name: String, dtype: String },

    #[error(
        "the offloaded `{name}` in {} has the shape {found:?}, and the model wants {wanted:?}; offload this model, or name its folder",
        folder.display()
    )]
    Shape { folder: PathBuf, name: String, found: Vec<i64>, wanted: Vec<i64> },

    #[error(
        "{} has {found_bytes} bytes, where its index promises {wanted_bytes}; offload the model into this folder again",
        path.display()
    )]
    Length { path: PathBuf, found_bytes: u64, wanted_bytes: u64 },

    #[error(
        "{} was changed since the model has it in use; nobody may write offloaded weights while a model uses them. Offload the \
         model again",
        path.display()
    )]
    Changed { path: PathBuf },

    #[error(
        "the weight of {} was written to in place, where it is mapped: a device map keeps it on the disk, where nothing would keep what \
         was written. Bring it back by dispatch_model before it is written to, and offload the model again",
        path.display()
    )]
    WrittenTo { path: PathBuf },

    #[error("{} cannot be mapped into memory: {source}", path.display())]
    Map { path: PathBuf, source: tch::TchError },

    #[error("{} has no tensor `{name}` that can be used: {reason}", path.display())]
    Safetensors { path: PathBuf, name: String, reason: String },

    #[error("`{name}` cannot be offloaded: no file of offloaded weights has elements of type {kind:?}; cast it first")]
    KindNotWritable { name: String, kind: Kind },
}
