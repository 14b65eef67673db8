//! A linear layer whose weight is stored the other way round, as the first GPT was written with convolutions.

use super::init::Init;
use super::layer::{forward_error, impl_layer};
use super::linear::{AroundLinear, InnerPlace, LinearKernel};
use super::named_layers::{AnyLayer, SharedKernel};
use super::{Linear, Param, Path};
use crate::error::Result;
use std::borrow::Borrow;
use std::sync::Arc;
use tch::{TchError, Tensor};
use torch_ext::few_rows;

/// How a [`Conv1D`] begins.
///
/// ```
/// use accelerate::nn::{Conv1DConfig, Init};
/// assert_eq!(Conv1DConfig::default().weight_init, Init::Normal { mean: 0.0, std: 0.02 });
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Conv1DConfig {
    /// How the weight begins. Transformers' default: N(0, 0.02).
    pub weight_init: Init,
    /// How the bias begins. Transformers' default: zeros.
    pub bias_init: Init,
}

impl Default for Conv1DConfig {
    fn default() -> Self {
        Self { weight_init: Init::Normal { mean: 0.0, std: 0.02 }, bias_init: Init::Zeros }
    }
}

/// `transformers.pytorch_utils.Conv1D`: `[.., in_features]` to `[.., out_features]`, as GPT-2 has it. It is no convolution
/// ([`Conv1d`](super::Conv1d) is), but a [`Linear`] layer over a weight that is stored transposed.
///
/// Parameters `weight [in_features, out_features]` and `bias [out_features]`. As in Transformers, codes of 4 and 8 bits are made of the
/// transposed weight: a quantised layer has one of `[out_features, in_features]`.
///
/// ```
/// use accelerate::nn::{Conv1D, ParamStore};
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let store = ParamStore::new(Device::Cpu);
/// let layer = Conv1D::new(store.root() / "c_attn", 3, 2, Default::default())?;
/// assert_eq!(layer.weight.shape(), [3, 2]);
/// assert_eq!(layer.forward(&Tensor::ones([5, 3], (Kind::Float, Device::Cpu)))?.size(), [5, 2]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Conv1D {
    /// `[in_features, out_features]`; of a quantised layer `[out_features, in_features]`.
    pub weight: Param,
    /// `[out_features]`.
    pub bias: Param,
    kernel: SharedKernel<dyn LinearKernel, dyn AroundLinear>,
}

impl Conv1D {
    /// Registers the parameters under `path`.
    ///
    /// # Errors
    /// The names are taken.
    pub fn new(path: impl Borrow<Path>, in_features: i64, out_features: i64, config: Conv1DConfig) -> Result<Self> {
        let path = path.borrow();
        let weight = path.param("weight", ([in_features, out_features], config.weight_init))?;
        let bias = path.param("bias", ([out_features], config.bias_init))?;
        let layer = Self { weight, bias, kernel: SharedKernel::new(Arc::new(TransposedKernel)) };
        path.register_layer(AnyLayer::Conv1D(layer.clone()));
        Ok(layer)
    }

    /// `[.., in_features]` to `[.., out_features]`.
    ///
    /// # Errors
    /// Another last dim, or another element type than the weight's; a parameter that cannot be gathered.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        match self.kernel.both() {
            (kernel, None) => kernel.linear(input, &self.weight, Some(&self.bias)),
            (kernel, Some(around)) => around.linear(&*kernel, input, &self.weight, Some(&self.bias)),
        }
    }
}

impl_layer!(Conv1D);

/// A product with a weight `[in_features, out_features]`, unlike those of other kernels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransposedKernel;

impl LinearKernel for TransposedKernel {
    fn linear(&self, input: &Tensor, weight: &Param, bias: Option<&Param>) -> Result<Tensor> {
        let values = weight.get()?;
        let bias = bias.map(Param::get).transpose()?;
        product(input, &values, bias.as_ref()).map_err(|source| {
            let in_features = values.size().first().copied().unwrap_or_default();
            forward_error("Conv1D", weight.name(), format!("[.., {in_features}] of {:?}", weight.kind()), input, source)
        })
    }

    fn is_dense(&self) -> bool {
        true
    }
}

fn product(input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor, TchError> {
    let Some(bias) = bias else { return input.f_matmul(weight) };
    let (in_features, out_features) = weight.size2()?;
    let mut size = input.size();
    if let Some(last) = size.last_mut() {
        *last = out_features;
    }
    let rows = match input.size().last() == Some(&in_features) {
        true => input.f_reshape([-1, in_features])?,
        // Other rows are not to be cut out of it; libtorch says what does not fit.
        false => return bias.f_addmm(input, weight),
    };
    let product = match few_rows::addmm(bias, &rows, weight) {
        Ok(Some(product)) => product,
        _ => bias.f_addmm(&rows, weight)?,
    };
    product.f_view(&size[..])
}

/// A layer that multiplies with a weight, whichever way round that is stored.
#[derive(Clone, Debug)]
pub(crate) enum LinearLayer {
    Linear(Linear),
    Conv1D(Conv1D),
}

impl LinearLayer {
    pub(crate) fn weight(&self) -> &Param {
        match self {
            Self::Linear(linear) => &linear.weight,
            Self::Conv1D(conv) => &conv.weight,
        }
    }

    pub(crate) fn bias(&self) -> Option<&Param> {
        match self {
            Self::Linear(linear) => linear.bias.as_ref(),
            Self::Conv1D(conv) => Some(&conv.bias),
        }
    }

    /// Is it a layer of the other kind, whose weight is `[in_features, out_features]` unless it is codes?
    pub(crate) fn is_conv1d(&self) -> bool {
        matches!(self, Self::Conv1D(_))
    }

    /// Is its weight `[in_features, out_features]` now?
    pub(crate) fn is_transposed(&self) -> bool {
        self.is_conv1d() && !self.weight().is_stored_as_several()
    }

    /// `[out_features, in_features]`.
    pub(crate) fn sizes(&self) -> [i64; 2] {
        let shape = self.weight().shape();
        let [first, second] = [0, 1].map(|dim| shape.get(dim).copied().unwrap_or_default());
        if self.is_transposed() { [second, first] } else { [first, second] }
    }

    /// The layers of which its adapters consist; `None` if they are merged into a weight.
    pub(crate) fn inner_layers(&self) -> Option<Vec<(InnerPlace, Linear)>> {
        let around = match self {
            Self::Linear(linear) => linear.around(),
            Self::Conv1D(conv) => conv.kernel.both().1,
        };
        around.map_or_else(|| Some(Vec::new()), |around| around.inner_layers())
    }

    /// Is it computed by libtorch's own product?
    pub(crate) fn is_dense(&self) -> bool {
        match self {
            Self::Linear(linear) => linear.kernel().is_dense(),
            Self::Conv1D(conv) => conv.kernel.get().is_dense(),
        }
    }

    /// `kernel` gets the weight as it is stored.
    pub(crate) fn set_kernel(&self, kernel: Arc<dyn LinearKernel>) {
        match self {
            Self::Linear(linear) => linear.set_kernel(kernel),
            Self::Conv1D(conv) => conv.kernel.set(kernel),
        }
    }

    pub(crate) fn set_around(&self, around: Option<Arc<dyn AroundLinear>>) {
        match self {
            Self::Linear(linear) => linear.set_around(around),
            Self::Conv1D(conv) => conv.kernel.set_around(around),
        }
    }
}
