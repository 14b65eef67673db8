//! A convolution, its norm, and perhaps an activation.

use crate::Activation;
use accelerate::Result;
use accelerate::nn::init::{FanMode, Nonlinearity};
use accelerate::nn::{BatchNorm2d, Conv2d, Conv2dConfig, Init, Padding, Path};
use accelerate::tch::Tensor;
use std::borrow::Borrow;

#[derive(Debug)]
pub(super) struct ConvLayer {
    convolution: Conv2d,
    normalization: BatchNorm2d,
    activation: Option<Activation>,
}

impl ConvLayer {
    /// The image is divided by `stride` along both dims.
    pub(super) fn new(
        path: impl Borrow<Path>,
        (in_channels, out_channels): (i64, i64),
        (kernel_size, stride): (i64, i64),
        activation: Option<Activation>,
    ) -> Result<Self> {
        let path = path.borrow();
        let config = Conv2dConfig {
            stride: [stride; 2],
            padding: Padding::Explicit([kernel_size / 2; 2]),
            bias: false,
            weight_init: Init::KaimingNormal { mode: FanMode::FanOut, nonlinearity: Nonlinearity::Relu },
            ..Default::default()
        };
        Ok(Self {
            convolution: Conv2d::new(path / "convolution", in_channels, out_channels, [kernel_size; 2], config)?,
            normalization: BatchNorm2d::new(path / "normalization", out_channels, Default::default())?,
            activation,
        })
    }

    pub(super) fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let hidden = self.normalization.forward(&self.convolution.forward(input)?)?;
        self.activation.map_or(Ok(hidden.shallow_clone()), |activation| activation.forward(&hidden))
    }
}
