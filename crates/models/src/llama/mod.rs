//! Llama (Touvron et al. 2023, <https://arxiv.org/abs/2302.13971>), and the models that differ from it in their configuration
//! alone: Mistral (sliding windows) and Qwen2 (biases of queries, keys and values). The parameter names are those of Hugging Face
//! Transformers.

mod attention;
mod causal_lm;
mod config;
mod config_file;
mod decoder;
mod model;
mod rope;

pub use causal_lm::LlamaForCausalLM;
pub use config::{LlamaConfig, LlamaModelType, RopeScaling};
pub use model::LlamaModel;
