//! ResNet (He et al. 2015, <https://arxiv.org/abs/1512.03385>) for classification of images, with the parameter names of Hugging
//! Face Transformers.

mod classification;
mod config;
mod conv_layer;
mod model;
mod residual;

pub use classification::ResNetForImageClassification;
pub use config::{ResNetConfig, ResNetLayerType};
pub use model::ResNetModel;
