//! GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"), with the parameter names of Hugging Face
//! Transformers.

mod attention;
mod block;
mod config;
mod lm_head;
mod model;

pub use config::GPT2Config;
pub use lm_head::GPT2LMHeadModel;
pub use model::GPT2Model;
