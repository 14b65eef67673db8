//! Normalisation over the features of one example: no state, the same in training and evaluation.

use super::layer::impl_layer;
use super::{AnyLayer, Init, Param, Path, TokenWise, functional};
use crate::error::{NnError, Result};
use std::borrow::Borrow;
use tch::Tensor;

/// What a [`LayerNorm`] may be told besides its shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerNormConfig {
    /// Added to the variance. PyTorch's default: 1e-5; BERT uses 1e-12.
    pub eps: f64,
    /// Learn a scale (and a bias)?
    pub elementwise_affine: bool,
    /// Learn a bias, where there is a scale?
    pub bias: bool,
}

impl Default for LayerNormConfig {
    fn default() -> Self {
        Self { eps: 1e-5, elementwise_affine: true, bias: true }
    }
}

/// `torch.nn.LayerNorm`: mean 0 and variance 1 over the last dims, then a learned scale and bias.
///
/// Parameters `weight` (ones) and `bias` (zeros) of shape `normalized_shape`.
///
/// ```
/// use accelerate::nn::{LayerNorm, ParamStore};
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let store = ParamStore::new(Device::Cpu);
/// let norm = LayerNorm::new(store.root() / "LayerNorm", [4], Default::default())?;
/// let output = norm.forward(&Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0]))?;
/// assert!(output.mean(Kind::Float).double_value(&[]).abs() < 1e-6);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct LayerNorm {
    /// Scale of shape `normalized_shape`.
    pub weight: Option<Param>,
    /// Bias of shape `normalized_shape`.
    pub bias: Option<Param>,
    /// Sizes of the dims normalised over, the last ones of the input.
    pub normalized_shape: Vec<i64>,
    /// Added to the variance.
    pub eps: f64,
    token_wise: TokenWise,
}

impl LayerNorm {
    /// Registers the parameters under `path`.
    ///
    /// # Errors
    /// The names are taken.
    pub fn new(
        path: impl Borrow<Path>,
        normalized_shape: impl Into<Vec<i64>>,
        config: LayerNormConfig,
    ) -> Result<Self> {
        let (path, normalized_shape) = (path.borrow(), normalized_shape.into());
        let (weight, bias) = affine(path, &normalized_shape, config.elementwise_affine, config.bias)?;
        let token_wise = TokenWise::new("LayerNorm", [&weight, &bias]);
        path.register_layer(AnyLayer::TokenWise(token_wise.clone()));
        Ok(Self { weight, bias, normalized_shape, eps: config.eps, token_wise })
    }

    /// `[.., normalized_shape]` to the same shape.
    ///
    /// # Errors
    /// The input's last dims are not `normalized_shape`.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let affine = (self.weight.as_ref(), self.bias.as_ref());
        let norm = |input: &Tensor| functional::layer_norm(input, &self.normalized_shape, affine, self.eps);
        self.token_wise.forward(input, norm)
    }
}

/// What an [`RMSNorm`] may be told besides its shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RMSNormConfig {
    /// Added to the mean square. `None`: the smallest step of the element type, PyTorch's default.
    pub eps: Option<f64>,
    /// Learn a scale?
    pub elementwise_affine: bool,
}

impl Default for RMSNormConfig {
    fn default() -> Self {
        Self { eps: None, elementwise_affine: true }
    }
}

/// `torch.nn.RMSNorm`: division by the root of the mean square over the last dims, then a learned scale
/// (<https://arxiv.org/abs/1910.07467>).
///
/// Parameter `weight` (ones) of shape `normalized_shape`.
///
/// ```
/// use accelerate::nn::{ParamStore, RMSNorm};
/// use accelerate::tch::{Device, Tensor};
///
/// let norm = RMSNorm::new(ParamStore::new(Device::Cpu).root(), [2], Default::default())?;
/// let output = norm.forward(&Tensor::from_slice(&[3.0f32, 3.0]))?;
/// assert!((output.double_value(&[0]) - 1.0).abs() < 1e-6);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct RMSNorm {
    /// Scale of shape `normalized_shape`.
    pub weight: Option<Param>,
    /// Sizes of the dims normalised over, the last ones of the input.
    pub normalized_shape: Vec<i64>,
    /// Added to the mean square.
    pub eps: Option<f64>,
    token_wise: TokenWise,
}

impl RMSNorm {
    /// Registers the parameter under `path`.
    ///
    /// # Errors
    /// The name is taken.
    pub fn new(path: impl Borrow<Path>, normalized_shape: impl Into<Vec<i64>>, config: RMSNormConfig) -> Result<Self> {
        let (path, normalized_shape) = (path.borrow(), normalized_shape.into());
        let (weight, _) = affine(path, &normalized_shape, config.elementwise_affine, false)?;
        let token_wise = TokenWise::new("RMSNorm", [&weight]);
        path.register_layer(AnyLayer::TokenWise(token_wise.clone()));
        Ok(Self { weight, normalized_shape, eps: config.eps, token_wise })
    }

    /// `[.., normalized_shape]` to the same shape.
    ///
    /// # Errors
    /// The input's last dims are not `normalized_shape`.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let norm = |input: &Tensor| functional::rms_norm(input, &self.normalized_shape, self.weight.as_ref(), self.eps);
        self.token_wise.forward(input, norm)
    }
}

/// What a [`GroupNorm`] may be told besides its sizes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupNormConfig {
    /// Added to the variance. PyTorch's default: 1e-5.
    pub eps: f64,
    /// Learn a scale and a bias per channel?
    pub affine: bool,
}

impl Default for GroupNormConfig {
    fn default() -> Self {
        Self { eps: 1e-5, affine: true }
    }
}

/// `torch.nn.GroupNorm`: mean 0 and variance 1 over each group of channels of one example.
///
/// Parameters `weight` (ones) and `bias` (zeros) of shape `[num_channels]`.
///
/// ```
/// use accelerate::nn::{GroupNorm, ParamStore};
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let norm = GroupNorm::new(ParamStore::new(Device::Cpu).root(), 2, 4, Default::default())?;
/// let image = Tensor::ones([1, 4, 3, 3], (Kind::Float, Device::Cpu));
/// assert_eq!(norm.forward(&image)?.size(), [1, 4, 3, 3]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct GroupNorm {
    /// Scale `[num_channels]`.
    pub weight: Option<Param>,
    /// Bias `[num_channels]`.
    pub bias: Option<Param>,
    /// Number of groups the channels are split into.
    pub num_groups: i64,
    /// Number of channels, the second dim of the input.
    pub num_channels: i64,
    /// Added to the variance.
    pub eps: f64,
}

impl GroupNorm {
    /// Registers the parameters under `path`.
    ///
    /// # Errors
    /// The channels cannot be split evenly; the names are taken.
    pub fn new(path: impl Borrow<Path>, num_groups: i64, num_channels: i64, config: GroupNormConfig) -> Result<Self> {
        let path = path.borrow();
        if num_groups <= 0 || num_channels % num_groups != 0 {
            let (layer, path) = ("GroupNorm", path.name().to_owned());
            let (whole, parts) = (num_channels, num_groups);
            return Err(
                NnError::NotDivisible { layer, path, what: "num_channels", whole, by: "num_groups", parts }.into()
            );
        }
        let (weight, bias) = affine(path, &[num_channels], config.affine, config.affine)?;
        path.register_layer(AnyLayer::other("GroupNorm", [&weight, &bias]));
        Ok(Self { weight, bias, num_groups, num_channels, eps: config.eps })
    }

    /// `[batch, num_channels, ..]` to the same shape.
    ///
    /// # Errors
    /// Another number of channels.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let affine = (self.weight.as_ref(), self.bias.as_ref());
        functional::group_norm(input, (self.num_groups, self.num_channels), affine, self.eps)
    }
}

fn affine(path: &Path, shape: &[i64], scale: bool, bias: bool) -> Result<(Option<Param>, Option<Param>)> {
    let weight = scale.then(|| path.param("weight", (shape, Init::Ones))).transpose()?;
    let bias = (scale && bias).then(|| path.param("bias", (shape, Init::Zeros))).transpose()?;
    Ok((weight, bias))
}

impl_layer!(LayerNorm, RMSNorm, GroupNorm);
