//! Weights on disk, in the layout of Hugging Face models.
//!
//! # Format law
//! - One `model.safetensors`, or `model-00001-of-0000N.safetensors` with `model.safetensors.index.json`.
//! - A tied weight is written once, under its first name; a file may hold it under any of its names.
//! - The same weights give the same bytes: tensors by descending alignment, then by name, as every writer of
//!   safetensors has it; the only metadata are `{"format":"pt"}`. Of a sharded model, tensors of one alignment come in the
//!   order in which they are gathered, so that files can be written without a rank ever holding the whole model.
//! - A save is one: weights, index and the files of the user's own are written under temporary names and flushed to
//!   the disk. Then `model.manifest.json`, which lists them with sizes and checksums, appears in one rename, and the
//!   save counts. At last all files get their names, the index or the only weight file last. A crash before the manifest
//!   leaves the earlier save; after a crash behind it, the next load or save gives the files their names.
//! - Readers that know no manifest find whole files, and an index only while all its shards are of the same save.
//! - Loading compares samples of the weights and the content of all other files with the manifest, if there is one.
//! - Nothing is loaded before every name and shape has been compared with the model, and every header with
//!   the length of its file. Files may come from anywhere: only regular files are read, names and counts in headers and
//!   indexes have bounds, and an index names files of its own folder only.
//!
//! These functions know one process. With several, the main process saves, or each its files if the model is sharded,
//! and every process loads: [`Accelerator`](crate::Accelerator) sees to that. A process reads of a sharded parameter the
//! shard that it keeps.
//!
//! ```
//! use accelerate::checkpoint::{LoadOptions, SaveModelOptions, load_checkpoint_in_model, save_model_weights};
//! use accelerate::nn::{Linear, ParamStore};
//! use accelerate::tch::Device;
//!
//! let folder = std::env::temp_dir().join(format!("accelerate-doc-{}", std::process::id()));
//! let store = ParamStore::new(Device::Cpu);
//! Linear::new(store.root() / "classifier", 4, 2, Default::default())?;
//! let files = save_model_weights(&store, &folder, &SaveModelOptions::default())?;
//! assert_eq!(files[0].file_name().unwrap(), "model.safetensors");
//!
//! let report = load_checkpoint_in_model(&store, &folder, &LoadOptions::default())?;
//! assert!(report.missing_keys.is_empty());
//! # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
//! # Ok::<(), accelerate::Error>(())
//! ```

mod adapter;
mod atomic;
mod block_file;
mod dispatch;
mod dtype;
mod elsewhere;
mod fault;
mod folder;
mod host_copy;
mod load;
mod memory;
mod progress;
mod reader;
mod save;
mod saved_files;
mod sharded;
mod source;
mod state;
#[cfg(test)]
mod tests;
mod torch_files;
mod weight_source;
mod writer;

pub(crate) use block_file::IoMode;
pub(crate) use dispatch::PlannedDispatch;
pub use dispatch::{DeviceMapChoice, LoadAndDispatchOptions, LoadedAndDispatched, load_checkpoint_and_dispatch};
pub(crate) use load::check_ties;
pub use load::{LoadOptions, checkpoint_shapes, load_checkpoint_in_model, modern_layer_norm_names, refuse_codes};
pub(crate) use progress::SaveProgress;
pub use save::{SaveModelOptions, save_model_weights};
pub use saved_files::{check_save_directory, check_saved_files, read_saved_file, verify_saved_files};
pub(crate) use sharded::{Writers, save_sharded_model_weights};
pub use source::load_file;
pub(crate) use state::{
    EarlierFiles, FolderWriters, FoundCheckpoint, OpenCheckpoint, PlannedSave, RANDOM_STATES, RunState, checkpoints_in,
    differing_in, gather_whole, is_kept_elsewhere, keep_differing, kept_by_rank, make_checkpoint_folder, put_back,
    random_states, remove_outdated_checkpoints, restore_random_states,
};
pub(crate) use weight_source::WeightSource;
pub use writer::save_file;
