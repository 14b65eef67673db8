//! How a model's weights are laid out in files: sizes, shards, names and the index.
//!
//! The layout is that of Hugging Face models: one `model.safetensors`, or
//! `model-00001-of-00003.safetensors` and so on with `model.safetensors.index.json`. Rules are those of
//! `huggingface_hub.serialization` and `save_model` of the reference.

mod checksum;
mod folder;
mod header;
mod index;
mod json;
mod manifest;
mod notes;
mod offload_index;
mod parallel;
mod pytorch;
mod shards;
mod shown;
mod size;
mod version;

pub use checksum::Checksum;
pub use folder::{choose_torch_file, choose_weight_file};
pub use header::{Header, HeaderEntry, check_saved_name};
pub use index::{Index, IndexMetadata};
pub use manifest::{
    SaveManifest, SavedFile, TEMPORARY_SUFFIX, is_saved_file_name, is_temporary_file_of, sample_blocks,
    temporary_prefix,
};
pub use notes::Notes;
pub use offload_index::{OffloadIndex, OffloadedWeight};
pub use parallel::{ParallelFiles, TensorEntry};
pub use pytorch::{
    Chunk, DistributedCheckpoint, DistributedItem, DistributedTensor, MAX_PICKLE_BYTES, Pickled, Plain, Run,
    StoredBytes, StoredTensor, TorchArchive, TorchFile, TorchTensor, check_tensor_name,
};
pub use shards::{WeightFiles, is_weight_file_of, plan_shards, shard_file_names};
pub(crate) use shown::shortened_reason;
pub use shown::{listed, shown};
pub use size::{format_size, parse_size};
pub(crate) use version::{newer_version, other_format};

/// What weight files are called when nothing else is said: `model`.
pub const DEFAULT_STEM: &str = "model";

/// The extension of weight files.
pub const EXTENSION: &str = "safetensors";

/// What weight files in PyTorch's format are called: `pytorch_model.bin`. No others have this stem.
pub const TORCH_STEM: &str = "pytorch_model";

/// The extension of weight files in PyTorch's format.
pub const TORCH_EXTENSION: &str = "bin";

/// The extension of weight files called `stem`.
fn extension_of(stem: &str) -> &'static str {
    if stem == TORCH_STEM { TORCH_EXTENSION } else { EXTENSION }
}

/// The shard size when nothing else is said: 10 GB. Python Accelerate has the same.
pub const DEFAULT_MAX_SHARD_BYTES: u64 = 10_000_000_000;
