//! `y = x W^T + b`, with a slot for other ways to compute it.

use super::init::{self, Init};
use super::layer::{forward_error, impl_layer};
use super::named_layers::{AnyLayer, SharedKernel};
use super::{Param, Path, ShardedOutput, functional};
use crate::error::Result;
use std::borrow::Borrow;
use std::fmt::Debug;
use std::sync::Arc;
use tch::Tensor;

/// How a [`Linear`] layer multiplies: dense here; tensor-parallel, FP8 and int8 products replace it.
///
/// A kernel gets parameters, not tensors, and so decides itself what it asks of them: the full weight, what this rank owns of
/// it, or what it is stored as.
///
/// ```
/// use accelerate::nn::{DenseKernel, Linear, LinearKernel, Param, ParamStore};
/// use accelerate::tch::{Device, Tensor};
/// use std::sync::Arc;
///
/// /// Counts how often it is asked.
/// #[derive(Debug, Default)]
/// struct Counted(std::sync::atomic::AtomicUsize);
///
/// impl LinearKernel for Counted {
///     fn linear(&self, input: &Tensor, weight: &Param, bias: Option<&Param>) -> accelerate::Result<Tensor> {
///         self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
///         DenseKernel.linear(input, weight, bias)
///     }
/// }
///
/// let store = ParamStore::new(Device::Cpu);
/// let counted = Arc::new(Counted::default());
/// let layer = Linear::new(store.root(), 2, 1, Default::default())?;
/// layer.set_kernel(counted.clone());
/// layer.forward(&Tensor::from_slice(&[1.0f32, 2.0]))?;
/// assert_eq!(counted.0.load(std::sync::atomic::Ordering::Relaxed), 1);
/// # Ok::<(), accelerate::Error>(())
/// ```
pub trait LinearKernel: Send + Sync + Debug {
    /// `input [.., in_features]`, `weight [out_features, in_features]`, `bias [out_features]` to
    /// `[.., out_features]`, differentiable in all three. Collective where [`Param::get`] is.
    ///
    /// # Errors
    /// Those of [`Param::get`]; an input with another last dim, or of another element type than the weight's.
    fn linear(&self, input: &Tensor, weight: &Param, bias: Option<&Param>) -> Result<Tensor>;

    /// Where each rank gets a slice of the output: which, and what is to be done with it. Default: all of the output is here.
    fn sharded_output(&self) -> Option<Arc<dyn ShardedOutput>> {
        None
    }

    /// Is it libtorch's own product, which another one may take the place of unasked?
    #[doc(hidden)]
    fn is_dense(&self) -> bool {
        false
    }

    /// Does it compute with FP8 codes of the weight that have one scale, which ranks with shards may gather in its place?
    #[doc(hidden)]
    fn gathers_codes(&self) -> bool {
        false
    }

    /// What it has taken the place of when the model was prepared, and what takes its place when the model is prepared anew.
    #[doc(hidden)]
    fn replaced(&self) -> Option<Arc<dyn LinearKernel>> {
        None
    }
}

/// Where a layer stands within what goes around another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InnerPlace {
    /// It gets the input of the layer.
    First,
    /// What it gives is added to the output of the layer.
    Last,
    /// It stands for the layer.
    Instead,
}

/// What goes around the kernel of a linear layer, whichever that is when the layer is used.
pub(crate) trait AroundLinear: Send + Sync + Debug {
    /// The layers that it consists of besides the kernel: who divides that over ranks divides them, too. `None` where the kernel is not
    /// what computes the layer.
    fn inner_layers(&self) -> Option<Vec<(InnerPlace, Linear)>>;

    /// As [`LinearKernel::linear`], with `kernel` for the layer's own product.
    fn linear(&self, kernel: &dyn LinearKernel, input: &Tensor, weight: &Param, bias: Option<&Param>)
    -> Result<Tensor>;
}

/// libtorch's own `linear`. The gradient of a large weight of which ranks own shards is made in pieces, as they are sent.
#[derive(Clone, Copy, Debug, Default)]
pub struct DenseKernel;

impl LinearKernel for DenseKernel {
    fn linear(&self, input: &Tensor, weight: &Param, bias: Option<&Param>) -> Result<Tensor> {
        functional::linear(input, weight, bias)?.map_err(|source| {
            let in_features = weight.shape().get(1).copied().unwrap_or_default();
            let wanted = format!("[.., {in_features}] of {:?}", weight.kind());
            forward_error("Linear", weight.name(), wanted, input, source)
        })
    }

    fn is_dense(&self) -> bool {
        true
    }
}

/// What a [`Linear`] layer may be told besides its sizes.
///
/// ```
/// use accelerate::nn::{Init, Linear, LinearConfig, ParamStore};
/// use accelerate::tch::Device;
///
/// // As BERT and GPT-2 begin: weights from N(0, 0.02), biases zero.
/// let normal = Init::Normal { mean: 0.0, std: 0.02 };
/// let config = LinearConfig { weight_init: normal, bias_init: Some(Init::Zeros), ..Default::default() };
/// let layer = Linear::new(ParamStore::new(Device::Cpu).root(), 4, 2, config)?;
/// assert_eq!(layer.bias.unwrap().get()?.abs().max().double_value(&[]), 0.0);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearConfig {
    /// Add a learned bias? PyTorch's default: true.
    pub bias: bool,
    /// How the weight begins. PyTorch's default: [`Init::default_weight`].
    pub weight_init: Init,
    /// How the bias begins. `None`, PyTorch's default: evenly within `±1/sqrt(in_features)`.
    pub bias_init: Option<Init>,
}

impl Default for LinearConfig {
    fn default() -> Self {
        Self { bias: true, weight_init: Init::default_weight(), bias_init: None }
    }
}

/// `torch.nn.Linear`: `[.., in_features]` to `[.., out_features]`.
///
/// Parameters `weight [out_features, in_features]` and `bias [out_features]`, both drawn uniformly from
/// `±1/sqrt(in_features)` unless the configuration says otherwise, weight first.
///
/// ```
/// use accelerate::nn::{Linear, LinearConfig, ParamStore};
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let store = ParamStore::new(Device::Cpu);
/// let layer = Linear::new(store.root() / "proj", 3, 2, LinearConfig { bias: false, ..Default::default() })?;
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
    kernel: SharedKernel<dyn LinearKernel, dyn AroundLinear>,
}

impl Linear {
    /// Registers the parameters under `path`.
    ///
    /// # Errors
    /// The names are taken.
    pub fn new(path: impl Borrow<Path>, in_features: i64, out_features: i64, config: LinearConfig) -> Result<Self> {
        let path = path.borrow();
        let weight = path.param("weight", ([out_features, in_features], config.weight_init))?;
        let bias_init = config.bias_init.unwrap_or_else(|| init::default_bias(in_features));
        let bias = config.bias.then(|| path.param("bias", ([out_features], bias_init))).transpose()?;
        Ok(Self::from_params(path, weight, bias))
    }

    /// A layer over parameters that exist already, such as an output layer tied to an embedding.
    ///
    /// ```
    /// use accelerate::nn::{Embedding, Linear, ParamStore};
    /// use accelerate::tch::Device;
    ///
    /// let store = ParamStore::new(Device::Cpu);
    /// let words = Embedding::new(store.root() / "words", 10, 4, Default::default())?;
    /// let path = store.root() / "decoder";
    /// let decoder = Linear::from_params(&path, path.alias("weight", &words.weight)?, None);
    /// assert_eq!(decoder.out_features(), 10);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn from_params(path: impl Borrow<Path>, weight: Param, bias: Option<Param>) -> Self {
        let layer = Self::within(weight, bias);
        path.borrow().register_layer(AnyLayer::Linear(layer.clone()));
        layer
    }

    /// A layer within another one: it is not among the layers of a model.
    pub(crate) fn within(weight: Param, bias: Option<Param>) -> Self {
        Self { weight, bias, kernel: SharedKernel::new(Arc::new(DenseKernel)) }
    }

    /// Computes the product in another way from now on, in all clones of the layer. Adapters that the layer has stay around it.
    pub fn set_kernel(&self, kernel: Arc<dyn LinearKernel>) {
        self.kernel.set(kernel);
    }

    /// How the product is computed, without adapters.
    pub fn kernel(&self) -> Arc<dyn LinearKernel> {
        self.kernel.get()
    }

    /// What each rank gets of the output, where ranks compute the layer together and nobody gathers it.
    pub fn sharded_output(&self) -> Option<Arc<dyn ShardedOutput>> {
        self.kernel.get().sharded_output()
    }

    pub(super) fn around(&self) -> Option<Arc<dyn AroundLinear>> {
        self.kernel.both().1
    }

    pub(crate) fn set_around(&self, around: Option<Arc<dyn AroundLinear>>) {
        self.kernel.set_around(around);
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
    /// Another last dim, or another element type than the weight's; a parameter that cannot be gathered.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        match self.kernel.both() {
            (kernel, None) => kernel.linear(input, &self.weight, self.bias.as_ref()),
            (kernel, Some(around)) => around.linear(&*kernel, input, &self.weight, self.bias.as_ref()),
        }
    }
}

impl_layer!(Linear);
