//! The model without a head: a stem, and stages of layers.

use super::ResNetConfig;
use super::conv_layer::ConvLayer;
use super::residual::Residual;
use crate::PretrainedConfig;
use accelerate::nn::{AdaptiveAvgPool2d, Checkpointed, MaxPool2d, Path};
use accelerate::tch::Tensor;
use accelerate::{Error, Result};

/// `transformers.ResNetModel`: an image with fewer places and more channels.
///
/// ```
/// use accelerate::nn::ParamStore;
/// use accelerate::tch::{Device, Kind, Tensor};
/// use accelerate_models::resnet::{ResNetConfig, ResNetModel};
///
/// let config = ResNetConfig { embedding_size: 8, hidden_sizes: vec![8, 16], depths: vec![1, 1], ..ResNetConfig::resnet18(10) };
/// let model = ResNetModel::new(&ParamStore::new(Device::Cpu).root(), &config)?;
/// let hidden = model.forward(&Tensor::ones([2, 3, 32, 32], (Kind::Float, Device::Cpu)))?;
/// assert_eq!(hidden.size(), [2, 16, 4, 4]);
/// assert_eq!(model.pooled(&hidden)?.size(), [2, 16]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct ResNetModel {
    stem: ConvLayer,
    pooler: MaxPool2d,
    layers: Vec<Checkpointed<Residual>>,
}

impl ResNetModel {
    /// Registers all parameters and running statistics under `path`, with the initial values of Transformers.
    ///
    /// # Errors
    /// Sizes that make no model; the names are taken.
    pub fn new(path: &Path, config: &ResNetConfig) -> Result<Self> {
        config.check().map_err(Error::other)?;
        let stem = (config.num_channels, config.embedding_size);
        let stem = ConvLayer::new(path / "embedder" / "embedder", stem, (7, 2), Some(config.hidden_act))?;
        let mut layers = Vec::new();
        let mut in_channels = config.embedding_size;
        for (stage, (&out_channels, &depth)) in config.hidden_sizes.iter().zip(&config.depths).enumerate() {
            for layer in 0..depth {
                let halves = layer == 0 && (stage > 0 || config.downsample_in_first_stage);
                let (channels, stride) = ((in_channels, out_channels), if halves { 2 } else { 1 });
                let path = path / "encoder" / "stages" / stage / "layers" / layer;
                layers.push(Checkpointed::new(path, |path| Residual::new(path, channels, stride, config))?);
                in_channels = out_channels;
            }
        }
        let pooler = MaxPool2d { stride: Some([2; 2]), padding: [1; 2], ..MaxPool2d::new([3; 2]) };
        Ok(Self { stem, pooler, layers })
    }

    /// `pixel_values [batch, num_channels, height, width]` to `[batch, channels of the last stage, height', width']`.
    ///
    /// # Errors
    /// Another number of channels; one value per channel while training.
    pub fn forward(&self, pixel_values: &Tensor) -> Result<Tensor> {
        let hidden = self.pooler.forward(&self.stem.forward(pixel_values)?)?;
        self.layers.iter().try_fold(hidden, |hidden, layer| layer.forward(&hidden))
    }

    /// What [`forward`](Self::forward) gave to the mean over all places, `[batch, channels]`.
    ///
    /// # Errors
    /// Another shape.
    pub fn pooled(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(AdaptiveAvgPool2d { output_size: [1, 1] }.forward(hidden)?.f_flatten(1, -1)?)
    }
}
