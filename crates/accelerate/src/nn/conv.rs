//! Convolutions.

use super::init::{self, Init};
use super::layer::impl_layer;
use super::{AnyLayer, Param, Path, functional};
use crate::error::{NnError, Result};
use std::borrow::Borrow;
use tch::Tensor;

/// What is put around the input of a convolution, in zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Padding<const N: usize> {
    /// This many on both sides of each dim.
    Explicit([i64; N]),
    /// As many as keep the sizes; needs stride 1.
    Same,
}

/// What a convolution over `N` dims may be told besides its sizes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConvConfig<const N: usize> {
    /// Step between outputs. PyTorch's default: 1.
    pub stride: [i64; N],
    /// Zeros around the input. PyTorch's default: none.
    pub padding: Padding<N>,
    /// Step between the inputs of one output. PyTorch's default: 1.
    pub dilation: [i64; N],
    /// Number of groups of channels that do not see each other. PyTorch's default: 1.
    pub groups: i64,
    /// Add a learned bias? PyTorch's default: true.
    pub bias: bool,
    /// How the weight begins. PyTorch's default: [`Init::default_weight`].
    pub weight_init: Init,
    /// How the bias begins. `None`, PyTorch's default: evenly within `±1/sqrt(fan_in)`.
    pub bias_init: Option<Init>,
}

impl<const N: usize> Default for ConvConfig<N> {
    fn default() -> Self {
        Self {
            stride: [1; N],
            padding: Padding::Explicit([0; N]),
            dilation: [1; N],
            groups: 1,
            bias: true,
            weight_init: Init::default_weight(),
            bias_init: None,
        }
    }
}

/// [`ConvConfig`] of a [`Conv1d`].
pub type Conv1dConfig = ConvConfig<1>;
/// [`ConvConfig`] of a [`Conv2d`].
pub type Conv2dConfig = ConvConfig<2>;

/// A convolution over `N` dims; see [`Conv1d`] and [`Conv2d`].
///
/// Parameters `weight [out_channels, in_channels / groups, kernel..]` and `bias [out_channels]`, drawn as
/// those of a [`Linear`](super::Linear) layer.
#[derive(Clone, Debug)]
pub struct Conv<const N: usize> {
    /// `[out_channels, in_channels / groups, kernel..]`.
    pub weight: Param,
    /// `[out_channels]`.
    pub bias: Option<Param>,
    /// Stride, padding, dilation and groups.
    pub config: ConvConfig<N>,
}

/// `torch.nn.Conv1d`: `[batch, in_channels, length]` to `[batch, out_channels, length']`.
///
/// ```
/// use accelerate::nn::{Conv1d, Conv1dConfig, ParamStore, Padding};
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let config = Conv1dConfig { padding: Padding::Explicit([1]), ..Default::default() };
/// let conv = Conv1d::new(ParamStore::new(Device::Cpu).root(), 4, 6, [3], config)?;
/// assert_eq!(conv.forward(&Tensor::ones([2, 4, 9], (Kind::Float, Device::Cpu)))?.size(), [2, 6, 9]);
/// # Ok::<(), accelerate::Error>(())
/// ```
pub type Conv1d = Conv<1>;

/// `torch.nn.Conv2d`: `[batch, in_channels, height, width]` to `[batch, out_channels, height', width']`.
///
/// ```
/// use accelerate::nn::{Conv2d, ParamStore};
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let conv = Conv2d::new(ParamStore::new(Device::Cpu).root(), 3, 8, [3, 3], Default::default())?;
/// assert_eq!(conv.forward(&Tensor::ones([1, 3, 9, 9], (Kind::Float, Device::Cpu)))?.size(), [1, 8, 7, 7]);
/// # Ok::<(), accelerate::Error>(())
/// ```
pub type Conv2d = Conv<2>;

impl<const N: usize> Conv<N> {
    /// Registers the parameters under `path`.
    ///
    /// # Errors
    /// The channels cannot be split evenly into groups; the names are taken.
    pub fn new(
        path: impl Borrow<Path>,
        in_channels: i64,
        out_channels: i64,
        kernel_size: [i64; N],
        config: ConvConfig<N>,
    ) -> Result<Self> {
        let path = path.borrow();
        let groups = config.groups;
        for (what, whole) in [("in_channels", in_channels), ("out_channels", out_channels)] {
            if groups <= 0 || whole % groups != 0 {
                let (layer, path) = ("Conv", path.name().to_owned());
                let (by, parts) = ("groups", groups);
                return Err(NnError::NotDivisible { layer, path, what, whole, by, parts }.into());
            }
        }
        let mut shape = vec![out_channels, in_channels / groups];
        shape.extend(kernel_size);
        let fan_in = shape[1..].iter().product();
        let weight = path.param("weight", (shape, config.weight_init))?;
        let bias_init = config.bias_init.unwrap_or_else(|| init::default_bias(fan_in));
        let bias = config.bias.then(|| path.param("bias", ([out_channels], bias_init))).transpose()?;
        let kind = if N == 1 { "Conv1d" } else { "Conv2d" };
        path.register_layer(AnyLayer::other(kind, [&Some(weight.clone()), &bias]));
        Ok(Self { weight, bias, config })
    }
}

impl Conv<1> {
    /// `[batch, in_channels, length]` to `[batch, out_channels, length']`.
    ///
    /// # Errors
    /// Another number of channels; an input shorter than the kernel.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        functional::conv1d(input, &self.weight, self.bias.as_ref(), self.config)
    }
}

impl Conv<2> {
    /// `[batch, in_channels, height, width]` to `[batch, out_channels, height', width']`.
    ///
    /// # Errors
    /// Another number of channels; an input smaller than the kernel.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        functional::conv2d(input, &self.weight, self.bias.as_ref(), self.config)
    }
}

impl_layer!(Conv1d, Conv2d);
