//! What lies between the two linear layers of a feed-forward block, by Hugging Face's names.

use accelerate::Result;
use accelerate::tch::Tensor;
use serde::{Deserialize, Serialize};

/// A function that is applied to each element; the names are those of `ACT2FN` in Transformers.
///
/// ```
/// use accelerate::tch::Tensor;
/// use accelerate_models::Activation;
/// let half = Activation::Silu.forward(&Tensor::from_slice(&[0f32, 1.0]))?;
/// assert!((half.double_value(&[1]) - 0.731059).abs() < 1e-6);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Activation {
    /// The exact Gaussian error linear unit.
    #[serde(rename = "gelu")]
    Gelu,
    /// Its approximation by a hyperbolic tangent.
    #[serde(rename = "gelu_new", alias = "gelu_pytorch_tanh")]
    GeluTanh,
    /// The rectifier.
    #[serde(rename = "relu")]
    Relu,
    /// The sigmoid linear unit.
    #[serde(rename = "silu", alias = "swish")]
    Silu,
    /// The hyperbolic tangent.
    #[serde(rename = "tanh")]
    Tanh,
}

impl Activation {
    /// Any shape to the same shape.
    ///
    /// # Errors
    /// libtorch's own, as for integers.
    pub fn forward(self, input: &Tensor) -> Result<Tensor> {
        Ok(match self {
            Self::Gelu => input.f_gelu("none")?,
            Self::GeluTanh => input.f_gelu("tanh")?,
            Self::Relu => input.f_relu()?,
            Self::Silu => input.f_silu()?,
            Self::Tanh => input.f_tanh()?,
        })
    }
}
