//! Functions applied to each element, as layers.

use super::layer::impl_layer;
use crate::error::Result;
use tch::Tensor;

/// `torch.nn.ReLU`: `max(x, 0)`.
///
/// ```
/// use accelerate::{nn::Relu, tch::Tensor};
/// assert_eq!(Relu.forward(&Tensor::from_slice(&[-2.0f32]))?.double_value(&[0]), 0.0);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Relu;

impl Relu {
    /// Any shape to the same shape.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        Ok(input.f_relu()?)
    }
}

/// `torch.nn.GELU`: `x` times the normal distribution function of `x` (<https://arxiv.org/abs/1606.08415>).
///
/// ```
/// use accelerate::{nn::Gelu, tch::Tensor};
/// let x = Tensor::from_slice(&[1.0f32]);
/// assert!((Gelu::Erf.forward(&x)?.double_value(&[0]) - 0.841345).abs() < 1e-6);
/// assert!((Gelu::Tanh.forward(&x)?.double_value(&[0]) - 0.841192).abs() < 1e-6);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gelu {
    /// Exact, by the error function: PyTorch's default and BERT's `gelu`.
    #[default]
    Erf,
    /// Approximated by the hyperbolic tangent: GPT-2's `gelu_new`.
    Tanh,
}

impl Gelu {
    /// Any shape to the same shape.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let approximate = match self {
            Self::Erf => "none",
            Self::Tanh => "tanh",
        };
        Ok(input.f_gelu(approximate)?)
    }
}

/// `torch.nn.SiLU`, also called swish: `x` times the logistic function of `x`.
///
/// ```
/// use accelerate::{nn::Silu, tch::Tensor};
/// assert_eq!(Silu.forward(&Tensor::from_slice(&[0.0f32]))?.double_value(&[0]), 0.0);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Silu;

impl Silu {
    /// Any shape to the same shape.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        Ok(input.f_silu()?)
    }
}

/// `torch.nn.Tanh`: the hyperbolic tangent.
///
/// ```
/// use accelerate::{nn::Tanh, tch::Tensor};
/// assert_eq!(Tanh.forward(&Tensor::from_slice(&[0.0f32]))?.double_value(&[0]), 0.0);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Tanh;

impl Tanh {
    /// Any shape to the same shape.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        Ok(input.f_tanh()?)
    }
}

/// `torch.nn.Sigmoid`: the logistic function.
///
/// ```
/// use accelerate::{nn::Sigmoid, tch::Tensor};
/// assert_eq!(Sigmoid.forward(&Tensor::from_slice(&[0.0f32]))?.double_value(&[0]), 0.5);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Sigmoid;

impl Sigmoid {
    /// Any shape to the same shape.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        Ok(input.f_sigmoid()?)
    }
}

/// `torch.nn.Softmax`: positive numbers that add up to 1 along a dim.
///
/// ```
/// use accelerate::{nn::Softmax, tch::Tensor};
/// let probabilities = Softmax { dim: -1 }.forward(&Tensor::from_slice2(&[[1f32, 1.0]]))?;
/// assert_eq!(probabilities, Tensor::from_slice2(&[[0.5f32, 0.5]]));
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Softmax {
    /// The dim; a negative number counts from the last, which is -1.
    pub dim: i64,
}

impl Softmax {
    /// Any shape to the same shape.
    ///
    /// # Errors
    /// A dim that the input does not have.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        Ok(input.f_softmax(self.dim, None)?)
    }
}

/// `torch.nn.LogSoftmax`: the logarithm of [`Softmax`], without its rounding.
///
/// ```
/// use accelerate::{nn::LogSoftmax, tch::Tensor};
/// let logarithms = LogSoftmax { dim: 0 }.forward(&Tensor::from_slice(&[1f32, 1.0]))?;
/// assert!((logarithms.double_value(&[0]) + 2f64.ln()).abs() < 1e-6);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogSoftmax {
    /// The dim; a negative number counts from the last, which is -1.
    pub dim: i64,
}

impl LogSoftmax {
    /// Any shape to the same shape.
    ///
    /// # Errors
    /// A dim that the input does not have.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        Ok(input.f_log_softmax(self.dim, None)?)
    }
}

impl_layer!(Relu, Gelu, Silu, Tanh, Sigmoid, Softmax, LogSoftmax);
