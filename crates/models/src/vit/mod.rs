//! ViT (Dosovitskiy et al. 2020, <https://arxiv.org/abs/2010.11929>) for classification of images, with the parameter names of
//! Hugging Face's files.

mod attention;
mod classification;
mod config;
mod embeddings;
mod layer;

pub use classification::{ViTForImageClassification, ViTModel};
pub use config::ViTConfig;
