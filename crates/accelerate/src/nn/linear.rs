//! `y = x W^T + b`, with a slot for other ways to compute it.

use super::init::{self, Init};
use super::layer::{forward_error, impl_layer};
use super::table::SharedTable;
use super::{Param, Path, product};
use crate::error::Result;
use std::borrow::Borrow;
use std::fmt::Debug;
use std::sync::Arc;
use tch::{TchError, Tensor};

/// How a [`Linear`] layer multiplies: dense here; tensor-parallel, FP8 and int8 replace it.
///
/// ```
/// use accelerate::nn::{DenseKernel, LinearKernel};
/// use accelerate::tch::Tensor;
///
/// let (input, weight) = (Tensor::from_slice(&[1.0f32, 2.0]), Tensor::from_slice(&[3.0f32, 4.0]).view([1, 2]));
/// let output = DenseKernel.linear(&input, &weight, None)?;
/// assert_eq!(output.double_value(&[0]), 11.0);
/// # Ok::<(), accelerate::tch::TchError>(())
/// ```
pub trait LinearKernel: Send + Sync + Debug {
    /// `input [.., in_features]`, `weight [out_features, in_features]`, `bias [out_features]` to
    /// `[.., out_features]`, differentiable in all three.
    fn linear(&self, input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor, TchError>;

    /// Is it libtorch's own product, in both passes? Then the gradient of a weight of which each process has a part may
    /// be made in pieces, as they are sent.
    ///
    /// ```
    /// use accelerate::nn::{DenseKernel, LinearKernel};
    /// assert!(DenseKernel.is_dense());
    /// ```
    fn is_dense(&self) -> bool {
        false
    }
}

/// libtorch's own `linear`.
#[derive(Clone, Copy, Debug, Default)]
pub struct DenseKernel;

impl LinearKernel for DenseKernel {
    fn linear(&self, input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor, TchError> {
        input.f_linear(weight, bias)
    }

    fn is_dense(&self) -> bool {
        true
    }
}

/// What a [`Linear`] layer may be told besides its sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearConfig {
    /// Add a learned bias? PyTorch's default: true.
    pub bias: bool,
}

impl Default for LinearConfig {
    fn default() -> Self {
        Self { bias: true }
    }
}

/// `torch.nn.Linear`: `[.., in_features]` to `[.., out_features]`.
///
/// Parameters `weight [out_features, in_features]` and `bias [out_features]`, both drawn uniformly from
/// `±1/sqrt(in_features)`, weight first.
///
/// ```
/// use accelerate::nn::{Linear, LinearConfig, ParamStore};
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let store = ParamStore::new(Device::Cpu);
/// let layer = Linear::new(store.root() / "proj", 3, 2, LinearConfig { bias: false })?;
/// let output = layer.forward(&Tensor::ones([5, 3], (Kind::Float, Device::Cpu)))?;
/// assert_eq!(output.size(), [5, 2]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Linear {
    /// `[out_features, in_features]`.
    pub weight: Param,
    /// `[out_features]`.
    pub bias: Option<Param>,
    /// How the product is computed.
    pub kernel: Arc<dyn LinearKernel>,
}

impl Linear {
    /// Registers the parameters under `path`.
    ///
    /// # Errors
    /// The names are taken.
    pub fn new(path: impl Borrow<Path>, in_features: i64, out_features: i64, config: LinearConfig) -> Result<Self> {
        let path = path.borrow();
        let weight = path.param("weight", ([out_features, in_features], Init::default_weight()))?;
        let bias =
            config.bias.then(|| path.param("bias", ([out_features], init::default_bias(in_features)))).transpose()?;
        Ok(Self { weight, bias, kernel: Arc::new(DenseKernel) })
    }

    /// A layer over a parameter that exists already, such as an output layer tied to an embedding.
    ///
    /// ```
    /// use accelerate::nn::{Embedding, Linear, ParamStore};
    /// use accelerate::tch::Device;
    ///
    /// let store = ParamStore::new(Device::Cpu);
    /// let words = Embedding::new(store.root() / "words", 10, 4, Default::default())?;
    /// let decoder = Linear::tied((store.root() / "decoder").alias("weight", &words.weight)?, None);
    /// assert_eq!(decoder.out_features(), 10);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn tied(weight: Param, bias: Option<Param>) -> Self {
        Self { weight, bias, kernel: Arc::new(DenseKernel) }
    }

    /// Size of the last dim of the input.
    pub fn in_features(&self) -> i64 {
        self.weight.shape().get(1).copied().unwrap_or_default()
    }

    /// Size of the last dim of the output.
    pub fn out_features(&self) -> i64 {
        self.weight.shape().first().copied().unwrap_or_default()
    }

    /// `[.., in_features]` to `[.., out_features]`.
    ///
    /// # Errors
    /// Another last dim, or another element type than the weight's.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let bias = self.bias.as_ref().map(Param::get);
        if self.kernel.is_dense() && product::is_for_linear(&self.weight, input)? {
            if let Some(take) = product::taker(&self.weight, input)? {
                return product::linear(input, &self.weight.get(), bias.as_ref(), Some(take));
            }
            if let Some(table) = SharedTable::of(&self.weight)? {
                return product::linear(input, &table.whole, bias.as_ref(), None);
            }
        }
        self.kernel.linear(input, &self.weight.get(), bias.as_ref()).map_err(|source| {
            let wanted = format!("[.., {}] of {:?}", self.in_features(), self.weight.kind());
            forward_error("Linear", self.weight.name(), wanted, input, source)
        })
    }
}

impl_layer!(Linear);
