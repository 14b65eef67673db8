//! A layer of a stage: convolutions with a residual around them.

use super::conv_layer::ConvLayer;
use super::{ResNetConfig, ResNetLayerType};
use crate::Activation;
use accelerate::Result;
use accelerate::nn::{Layer, Path};
use accelerate::tch::Tensor;

/// How many times fewer channels there are within a bottleneck.
pub(super) const REDUCTION: i64 = 4;

#[derive(Debug)]
pub(super) struct Residual {
    /// Where the input has another shape than the output.
    shortcut: Option<ConvLayer>,
    layers: Vec<ConvLayer>,
    activation: Activation,
}

impl Residual {
    pub(super) fn new(
        path: &Path,
        (in_channels, out_channels): (i64, i64),
        stride: i64,
        config: &ResNetConfig,
    ) -> Result<Self> {
        let has_shortcut = in_channels != out_channels || stride != 1;
        let shortcut = || ConvLayer::new(path / "shortcut", (in_channels, out_channels), (1, stride), None);
        let inner = out_channels / REDUCTION;
        let (first_stride, second_stride) = if config.downsample_in_bottleneck { (stride, 1) } else { (1, stride) };
        let convolutions = match config.layer_type {
            ResNetLayerType::Basic => {
                vec![((in_channels, out_channels), (3, stride)), ((out_channels, out_channels), (3, 1))]
            }
            ResNetLayerType::Bottleneck => vec![
                ((in_channels, inner), (1, first_stride)),
                ((inner, inner), (3, second_stride)),
                ((inner, out_channels), (1, 1)),
            ],
        };
        let last = convolutions.len() - 1;
        let layer = |(index, (channels, kernel))| {
            ConvLayer::new(path / "layer" / index, channels, kernel, (index < last).then_some(Activation::Relu))
        };
        Ok(Self {
            shortcut: has_shortcut.then(shortcut).transpose()?,
            layers: convolutions.into_iter().enumerate().map(layer).collect::<Result<_>>()?,
            activation: config.hidden_act,
        })
    }
}

impl Layer for Residual {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let hidden = self.layers.iter().try_fold(input.shallow_clone(), |hidden, layer| layer.forward(&hidden))?;
        let hidden = match &self.shortcut {
            Some(shortcut) => hidden.f_add(&shortcut.forward(input)?)?,
            None => hidden.f_add(input)?,
        };
        self.activation.forward(&hidden)
    }
}
