//! PyTorch's initialisations (`torch.nn.init`): the same seed gives the same bits.
//!
//! Bounds are computed in double precision in PyTorch's order of operations, and random numbers come from
//! the same generator kernels, so a model built after [`tch::manual_seed`] equals its Python twin bit for bit.
//!
//! ```
//! use accelerate::nn::init;
//! use accelerate::tch::{self, Device, Kind, Tensor};
//!
//! tch::manual_seed(0);
//! let weight = Tensor::zeros([4, 3], (Kind::Float, Device::Cpu));
//! init::xavier_uniform_(&weight, 1.0)?;
//! assert!(weight.abs().max().double_value(&[]) <= (6.0f64 / 7.0).sqrt());
//! # Ok::<(), accelerate::Error>(())
//! ```

use crate::error::{NnError, Result};
use tch::{Kind, Tensor};
use torch_ext::scalar;

/// How a new parameter is filled; the names of `torch.nn.init`.
///
/// ```
/// use accelerate::nn::{Init, ParamStore, init::{FanMode, Nonlinearity}};
/// use accelerate::tch::Device;
///
/// let he = Init::KaimingNormal { mode: FanMode::FanOut, nonlinearity: Nonlinearity::Relu };
/// let weight = ParamStore::new(Device::Cpu).root().param("weight", ([8, 3, 3, 3], he))?;
/// assert_eq!(weight.numel(), 216);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Init {
    /// All zeros.
    Zeros,
    /// All ones.
    Ones,
    /// All equal to the number.
    Constant(f64),
    /// Evenly from `low` (included) to `high` (excluded).
    Uniform {
        /// Smallest value.
        low: f64,
        /// Bound of the values.
        high: f64,
    },
    /// From the normal distribution.
    Normal {
        /// Mean.
        mean: f64,
        /// Standard deviation.
        std: f64,
    },
    /// From the normal distribution, redrawn inside of `low..=high`; see [`trunc_normal_`].
    TruncNormal {
        /// Mean before truncation.
        mean: f64,
        /// Standard deviation before truncation.
        std: f64,
        /// Smallest value.
        low: f64,
        /// Largest value.
        high: f64,
    },
    /// See [`xavier_uniform_`].
    XavierUniform {
        /// Factor on the bound, from [`calculate_gain`].
        gain: f64,
    },
    /// See [`xavier_normal_`].
    XavierNormal {
        /// Factor on the standard deviation, from [`calculate_gain`].
        gain: f64,
    },
    /// See [`kaiming_uniform_`].
    KaimingUniform {
        /// Which fan the variance is kept for.
        mode: FanMode,
        /// What follows the layer.
        nonlinearity: Nonlinearity,
    },
    /// See [`kaiming_normal_`].
    KaimingNormal {
        /// Which fan the variance is kept for.
        mode: FanMode,
        /// What follows the layer.
        nonlinearity: Nonlinearity,
    },
}

impl Init {
    /// What `torch.nn.Linear` and the convolutions do with their weight: `kaiming_uniform_(a=sqrt(5))`,
    /// that is evenly within `±1/sqrt(fan_in)`.
    pub fn default_weight() -> Self {
        Self::KaimingUniform {
            mode: FanMode::FanIn,
            nonlinearity: Nonlinearity::LeakyRelu { negative_slope: 5f64.sqrt() },
        }
    }

    /// Overwrites `tensor`. No gradient is recorded.
    ///
    /// # Errors
    /// A fan is asked of a tensor with fewer than two dims.
    pub fn apply(self, tensor: &Tensor) -> Result<()> {
        match self {
            Self::Zeros => zeros_(tensor),
            Self::Ones => ones_(tensor),
            Self::Constant(value) => constant_(tensor, value),
            Self::Uniform { low, high } => uniform_(tensor, low, high),
            Self::Normal { mean, std } => normal_(tensor, mean, std),
            Self::TruncNormal { mean, std, low, high } => trunc_normal_(tensor, mean, std, low, high),
            Self::XavierUniform { gain } => xavier_uniform_(tensor, gain),
            Self::XavierNormal { gain } => xavier_normal_(tensor, gain),
            Self::KaimingUniform { mode, nonlinearity } => kaiming_uniform_(tensor, mode, nonlinearity),
            Self::KaimingNormal { mode, nonlinearity } => kaiming_normal_(tensor, mode, nonlinearity),
        }
    }
}

/// The bias that goes with [`Init::default_weight`].
pub(crate) fn default_bias(fan_in: i64) -> Init {
    let bound = if fan_in > 0 { 1.0 / (fan_in as f64).sqrt() } else { 0.0 };
    Init::Uniform { low: -bound, high: bound }
}

/// Whether the variance is kept in the forward or in the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FanMode {
    /// Number of inputs of an output: forward pass.
    FanIn,
    /// Number of outputs of an input: backward pass.
    FanOut,
}

/// What follows a layer; decides the gain.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Nonlinearity {
    /// Nothing.
    Linear,
    /// Logistic function.
    Sigmoid,
    /// Hyperbolic tangent.
    Tanh,
    /// Rectifier.
    Relu,
    /// Rectifier with a slope below zero.
    LeakyRelu {
        /// PyTorch's `a`; 0.01 unless said otherwise.
        negative_slope: f64,
    },
    /// Scaled exponential unit.
    Selu,
}

/// The recommended factor on the standard deviation.
///
/// ```
/// use accelerate::nn::init::{Nonlinearity, calculate_gain};
/// assert_eq!(calculate_gain(Nonlinearity::Tanh), 5.0 / 3.0);
/// ```
pub fn calculate_gain(nonlinearity: Nonlinearity) -> f64 {
    match nonlinearity {
        Nonlinearity::Linear | Nonlinearity::Sigmoid => 1.0,
        Nonlinearity::Tanh => 5.0 / 3.0,
        Nonlinearity::Relu => 2f64.sqrt(),
        Nonlinearity::LeakyRelu { negative_slope } => (2.0 / (1.0 + negative_slope * negative_slope)).sqrt(),
        Nonlinearity::Selu => 3.0 / 4.0,
    }
}

/// Runs an in-place operation on a tensor held by reference, without recording a gradient.
fn fill(tensor: &Tensor, f: impl FnOnce(&mut Tensor) -> Result<Tensor, tch::TchError>) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    let _ = f(&mut tensor.shallow_clone())?;
    Ok(())
}

/// Fills with zeros.
pub fn zeros_(tensor: &Tensor) -> Result<()> {
    fill(tensor, |tensor| tensor.f_zero_())
}

/// Fills with ones.
pub fn ones_(tensor: &Tensor) -> Result<()> {
    constant_(tensor, 1.0)
}

/// Fills with one number.
pub fn constant_(tensor: &Tensor, value: f64) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    Ok(scalar::fill_(tensor, value)?)
}

/// Fills evenly from `low` (included) to `high` (excluded).
pub fn uniform_(tensor: &Tensor, low: f64, high: f64) -> Result<()> {
    fill(tensor, |tensor| tensor.f_uniform_(low, high))
}

/// Fills from the normal distribution.
pub fn normal_(tensor: &Tensor, mean: f64, std: f64) -> Result<()> {
    fill(tensor, |tensor| tensor.f_normal_(mean, std))
}

/// Fills from the normal distribution restricted to `low..=high`, by inverting the cumulative
/// distribution of uniform draws, as PyTorch does.
pub fn trunc_normal_(tensor: &Tensor, mean: f64, std: f64, low: f64, high: f64) -> Result<()> {
    let cumulative = |x: f64| (1.0 + libm::erf(x / 2f64.sqrt())) / 2.0;
    let (from, to) = (cumulative((low - mean) / std), cumulative((high - mean) / std));
    fill(tensor, |tensor| {
        let _ = tensor.f_uniform_(2.0 * from - 1.0, 2.0 * to - 1.0)?;
        tensor.f_erfinv_()
    })?;
    let _no_grad = tch::no_grad_guard();
    scalar::mul_(tensor, std * 2f64.sqrt())?;
    scalar::add_(tensor, mean)?;
    Ok(scalar::clamp_(tensor, low, high)?)
}

/// Evenly within `±gain*sqrt(6/(fan_in+fan_out))`
/// (Glorot and Bengio 2010, <https://proceedings.mlr.press/v9/glorot10a.html>).
///
/// # Errors
/// Fewer than two dims.
pub fn xavier_uniform_(tensor: &Tensor, gain: f64) -> Result<()> {
    let (fan_in, fan_out) = fans(tensor)?;
    let bound = 3f64.sqrt() * (gain * (2.0 / (fan_in + fan_out)).sqrt());
    uniform_(tensor, -bound, bound)
}

/// Normal with standard deviation `gain*sqrt(2/(fan_in+fan_out))`.
///
/// # Errors
/// Fewer than two dims.
pub fn xavier_normal_(tensor: &Tensor, gain: f64) -> Result<()> {
    let (fan_in, fan_out) = fans(tensor)?;
    normal_(tensor, 0.0, gain * (2.0 / (fan_in + fan_out)).sqrt())
}

/// Evenly within `±gain*sqrt(3/fan)` (He et al. 2015, <https://arxiv.org/abs/1502.01852>).
///
/// # Errors
/// Fewer than two dims.
pub fn kaiming_uniform_(tensor: &Tensor, mode: FanMode, nonlinearity: Nonlinearity) -> Result<()> {
    let bound = 3f64.sqrt() * kaiming_std(tensor, mode, nonlinearity)?;
    uniform_(tensor, -bound, bound)
}

/// Normal with standard deviation `gain/sqrt(fan)`.
///
/// # Errors
/// Fewer than two dims.
pub fn kaiming_normal_(tensor: &Tensor, mode: FanMode, nonlinearity: Nonlinearity) -> Result<()> {
    normal_(tensor, 0.0, kaiming_std(tensor, mode, nonlinearity)?)
}

fn kaiming_std(tensor: &Tensor, mode: FanMode, nonlinearity: Nonlinearity) -> Result<f64> {
    let (fan_in, fan_out) = fans(tensor)?;
    let fan = match mode {
        FanMode::FanIn => fan_in,
        FanMode::FanOut => fan_out,
    };
    Ok(calculate_gain(nonlinearity) / fan.sqrt())
}

/// Numbers of inputs per output and of outputs per input of a weight `[out, in, kernel..]`.
fn fans(tensor: &Tensor) -> Result<(f64, f64)> {
    match tensor.size().as_slice() {
        [outputs, inputs, kernel @ ..] => {
            let receptive_field: i64 = kernel.iter().product();
            Ok(((inputs * receptive_field) as f64, (outputs * receptive_field) as f64))
        }
        shape => Err(NnError::NoFan { shape: shape.to_vec() }.into()),
    }
}

/// Can the element type have gradients?
pub(crate) fn is_floating(kind: Kind) -> bool {
    !matches!(
        kind,
        Kind::Uint8
            | Kind::Int8
            | Kind::Int16
            | Kind::Int
            | Kind::Int64
            | Kind::Bool
            | Kind::QInt8
            | Kind::QUInt8
            | Kind::QInt32
    )
}
