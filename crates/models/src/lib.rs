//! Models of today over `accelerate`: BERT, GPT-2, Llama (and with it Mistral and Qwen2), ViT and ResNet.
//!
//! Each is plain code over [`accelerate::nn`], with the sizes of Hugging Face's `config.json` and the parameter names of
//! Transformers, so that weight files are exchanged with it by name. [`PretrainedModel::from_pretrained`] reads a folder,
//! or a model of the Hub; [`Generation`] continues texts token by token.
//!
//! ```
//! use accelerate::nn::ParamStore;
//! use accelerate::tch::{Device, Tensor};
//! use accelerate_models::gpt2::{GPT2Config, GPT2LMHeadModel};
//! use accelerate_models::{GenerationConfig, generate};
//!
//! let config = GPT2Config { vocab_size: 40, n_embd: 8, n_layer: 2, n_head: 2, n_positions: 16, ..Default::default() };
//! let model = GPT2LMHeadModel::new(&ParamStore::new(Device::Cpu).root(), &config)?;
//! let prompt = Tensor::from_slice2(&[[3i64, 1, 4]]);
//! let tokens = generate(&model, &prompt, None, &GenerationConfig { max_new_tokens: 5, ..Default::default() })?;
//! assert_eq!(tokens.size(), [1, 8]);
//! # Ok::<(), accelerate::Error>(())
//! ```

mod activation;
mod attention;
pub mod bert;
mod causal_lm;
mod config;
#[cfg(doctest)]
mod documentation;
pub mod files;
mod generation;
pub mod gpt2;
pub mod hub;
mod image_classification;
mod key_value_cache;
pub mod llama;
mod pretrained;
mod problem;
pub mod resnet;
mod tensor_parallel;
pub mod vit;

pub use activation::Activation;
pub use causal_lm::{CausalLM, CausalLMInput, CausalLMOutput};
pub use config::{CONFIG_FILE, ConfigError, PretrainedConfig, WrongValue};
pub use generation::{Generation, GenerationConfig, GenerationError, generate};
pub use image_classification::{ImageClassificationInput, ImageClassifierOutput};
pub use key_value_cache::KeyValueCache;
pub use pretrained::{LoadOptions, LoadReport, PretrainedModel, load_weights};
pub use problem::ProblemType;
