//! Transposed convolutions: the backward pass of a convolution as a layer.

use super::init::{self, Init};
use super::layer::impl_layer;
use super::{AnyLayer, Param, Path, functional};
use crate::error::{NnError, Result};
use std::borrow::Borrow;
use tch::Tensor;

/// What a transposed convolution over `N` dims may be told besides its sizes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConvTransposeConfig<const N: usize> {
    /// Step between the outputs of neighbouring inputs. PyTorch's default: 1.
    pub stride: [i64; N],
    /// Places that are cut off on both sides of the output. PyTorch's default: none.
    pub padding: [i64; N],
    /// Places that are added to one side of the output, less than `stride` or `dilation`. PyTorch's default: none.
    pub output_padding: [i64; N],
    /// Step between the outputs of one input. PyTorch's default: 1.
    pub dilation: [i64; N],
    /// Number of groups of channels that do not see each other. PyTorch's default: 1.
    pub groups: i64,
    /// Add a learned bias? PyTorch's default: true.
    pub bias: bool,
    /// How the weight begins. PyTorch's default: [`Init::default_weight`].
    pub weight_init: Init,
    /// How the bias begins. `None`, PyTorch's default: evenly within `±1/sqrt(fan_in)`, where the fan is that of the weight's
    /// second dim.
    pub bias_init: Option<Init>,
}

impl<const N: usize> Default for ConvTransposeConfig<N> {
    fn default() -> Self {
        Self {
            stride: [1; N],
            padding: [0; N],
            output_padding: [0; N],
            dilation: [1; N],
            groups: 1,
            bias: true,
            weight_init: Init::default_weight(),
            bias_init: None,
        }
    }
}

/// A transposed convolution over `N` dims; see [`ConvTranspose1d`] and [`ConvTranspose2d`].
///
/// Parameters `weight [in_channels, out_channels / groups, kernel..]` and `bias [out_channels]`.
#[derive(Clone, Debug)]
pub struct ConvTranspose<const N: usize> {
    /// `[in_channels, out_channels / groups, kernel..]`.
    pub weight: Param,
    /// `[out_channels]`.
    pub bias: Option<Param>,
    /// Stride, paddings, dilation and groups.
    pub config: ConvTransposeConfig<N>,
}

/// `torch.nn.ConvTranspose1d`: `[batch, in_channels, length]` to `[batch, out_channels, length']`.
///
/// ```
/// use accelerate::nn::{ConvTranspose1d, ConvTransposeConfig, ParamStore};
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let config = ConvTransposeConfig { stride: [2], ..Default::default() };
/// let conv = ConvTranspose1d::new(ParamStore::new(Device::Cpu).root(), 4, 6, [2], config)?;
/// assert_eq!(conv.forward(&Tensor::ones([1, 4, 9], (Kind::Float, Device::Cpu)))?.size(), [1, 6, 18]);
/// # Ok::<(), accelerate::Error>(())
/// ```
pub type ConvTranspose1d = ConvTranspose<1>;

/// `torch.nn.ConvTranspose2d`: `[batch, in_channels, height, width]` to `[batch, out_channels, height', width']`.
///
/// ```
/// use accelerate::nn::{ConvTranspose2d, ConvTransposeConfig, ParamStore};
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let config = ConvTransposeConfig { stride: [2, 2], padding: [1, 1], output_padding: [1, 1], ..Default::default() };
/// let conv = ConvTranspose2d::new(ParamStore::new(Device::Cpu).root(), 8, 3, [3, 3], config)?;
/// assert_eq!(conv.forward(&Tensor::ones([1, 8, 9, 5], (Kind::Float, Device::Cpu)))?.size(), [1, 3, 18, 10]);
/// # Ok::<(), accelerate::Error>(())
/// ```
pub type ConvTranspose2d = ConvTranspose<2>;

impl<const N: usize> ConvTranspose<N> {
    const NAME: &'static str = if N == 1 { "ConvTranspose1d" } else { "ConvTranspose2d" };

    /// Registers the parameters under `path`.
    ///
    /// # Errors
    /// The channels cannot be split evenly into groups; the names are taken.
    pub fn new(
        path: impl Borrow<Path>,
        in_channels: i64,
        out_channels: i64,
        kernel_size: [i64; N],
        config: ConvTransposeConfig<N>,
    ) -> Result<Self> {
        let path = path.borrow();
        let groups = config.groups;
        for (what, whole) in [("in_channels", in_channels), ("out_channels", out_channels)] {
            if groups <= 0 || whole % groups != 0 {
                let (layer, path) = (Self::NAME, path.name().to_owned());
                let (by, parts) = ("groups", groups);
                return Err(NnError::NotDivisible { layer, path, what, whole, by, parts }.into());
            }
        }
        let mut shape = vec![in_channels, out_channels / groups];
        shape.extend(kernel_size);
        let fan_in = shape[1..].iter().product();
        let weight = path.param("weight", (shape, config.weight_init))?;
        let bias_init = config.bias_init.unwrap_or_else(|| init::default_bias(fan_in));
        let bias = config.bias.then(|| path.param("bias", ([out_channels], bias_init))).transpose()?;
        path.register_layer(AnyLayer::other(Self::NAME, [&Some(weight.clone()), &bias]));
        Ok(Self { weight, bias, config })
    }
}

impl ConvTranspose<1> {
    /// `[batch, in_channels, length]` to `[batch, out_channels, length']`.
    ///
    /// # Errors
    /// Another number of channels; an `output_padding` that is too large.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        functional::conv_transpose1d(input, &self.weight, self.bias.as_ref(), self.config)
    }
}

impl ConvTranspose<2> {
    /// `[batch, in_channels, height, width]` to `[batch, out_channels, height', width']`.
    ///
    /// # Errors
    /// Another number of channels; an `output_padding` that is too large.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        functional::conv_transpose2d(input, &self.weight, self.bias.as_ref(), self.config)
    }
}

impl_layer!(ConvTranspose1d, ConvTranspose2d);
