//! Low-rank adapters: what a configuration means for the layers of a model, and how their weights are named in files.
//!
//! Method: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685. Fields, defaults, rules of matching
//! and names are those of Hugging Face PEFT, version 0.21.2, whose files are exchanged.

mod config;
mod file;
mod names;
mod pattern;
mod targets;

pub use config::{InitLoraWeights, LoraBias, LoraConfig, Modules, TaskType};
pub use names::{AdapterTensor, AdapterTensorKind, check_adapter_name, file_key};
pub use targets::{AdaptedLayer, LayerEntry, LayerKind, Resolved};

/// The file in which PEFT keeps an adapter's configuration.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";
/// What the names of the files with an adapter's weights begin with: `adapter_model.safetensors`.
pub const ADAPTER_STEM: &str = "adapter_model";
