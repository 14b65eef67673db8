//! Weights on disk, in the layout of Hugging Face models.
//!
//! # Format law
//! - One `model.safetensors`, or `model-00001-of-0000N.safetensors` with `model.safetensors.index.json`.
//! - A tied weight is written once, under its first name; a file may hold it under any of its names.
//! - The same weights give the same bytes: tensors by descending alignment, then by name, as every writer of
//!   safetensors has it; the only metadata are `{"format":"pt"}`. Of a sharded model, tensors of one alignment come in the
//!   order in which they are gathered, so that files can be written without a rank ever holding the whole model.
//! - A file is written beside its place, flushed to the disk and renamed; the index comes last, and older
//!   files of the same model go after that. Whoever reads meanwhile, or after a crash, finds whole files; and an
//!   index exists only while all its shards are of the same save.
//! - Nothing is loaded before every name and shape has been compared with the model, and every header with
//!   the length of its file.
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

mod atomic;
mod dtype;
mod load;
mod reader;
mod save;
mod sharded;
mod source;
mod writer;

pub use load::{LoadOptions, load_checkpoint_in_model, modern_layer_norm_names};
pub use reader::load_file;
pub use save::{SaveModelOptions, save_model_weights};
pub(crate) use sharded::{Writers, save_sharded_model_weights};
pub use writer::save_file;
