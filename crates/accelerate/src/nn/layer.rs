//! What a model and what a layer promise.

use super::ParamStore;
use crate::TensorTree;
use crate::error::{Error, NnError, Result, without_frames};
use accelerate_core::config::Compilation;
use accelerate_core::tensor_parallel::TensorParallelPlan;
use tch::{TchError, Tensor};

/// A model: what [`Accelerator::prepare`](crate::Accelerator::prepare) takes and gives back ready for many
/// processes.
///
/// Everything inside is ordinary code over layers and tensors; there is no tree of modules to register.
///
/// ```
/// use accelerate::nn::{Linear, Module, ParamStore};
/// use accelerate::tch::{Device, Tensor};
///
/// struct Regression { store: ParamStore, linear: Linear }
///
/// impl Module for Regression {
///     type Input = Tensor;
///     type Output = Tensor;
///     fn forward(&self, input: &Tensor) -> accelerate::Result<Tensor> {
///         self.linear.forward(input)
///     }
///     fn params(&self) -> &ParamStore { &self.store }
/// }
///
/// let store = ParamStore::new(Device::Cpu);
/// let linear = Linear::new(store.root(), 1, 1, Default::default())?;
/// let model = Regression { store, linear };
/// assert_eq!(model.forward(&Tensor::from_slice(&[1.0f32]))?.size(), [1]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a model",
    label = "has no `Module`",
    note = "implement `accelerate::nn::Module` for a struct of layers, or make a model of a closure by `ModuleFn::new(&store, closure)`"
)]
pub trait Module {
    /// What a forward pass takes: a tensor, a batch struct, a tuple.
    type Input;
    /// What it gives: anything made of tensors.
    type Output: TensorTree;

    /// One forward pass. Gradients are recorded unless the caller switched them off.
    fn forward(&self, input: &Self::Input) -> Result<Self::Output>;

    /// All parameters and buffers of the model.
    fn params(&self) -> &ParamStore;

    /// The compiler that the model has been through. None, unless it is, or consists of, a
    /// [`ScriptModule`](super::ScriptModule), an [`ExportedModule`](super::ExportedModule), an
    /// [`AotInductorModule`](super::AotInductorModule) or a [`GraphedModule`](super::GraphedModule):
    /// [`Accelerator::prepare`](crate::Accelerator::prepare) compares it with what was asked for.
    fn compilation(&self) -> Compilation {
        Compilation::None
    }

    /// How ranks divide the layers of the model where they compute it together (`tp_plan` of Transformers): what tensor parallelism
    /// takes unless the program gives a plan of its own. None by default.
    fn tensor_parallel_plan(&self) -> Option<TensorParallelPlan> {
        None
    }
}

/// A step from one tensor to another, for [`Sequential`](crate::nn::Sequential).
///
/// ```
/// use accelerate::nn::{Layer, Relu};
/// use accelerate::tch::Tensor;
///
/// let layer: Box<dyn Layer> = Box::new(Relu);
/// assert_eq!(layer.forward(&Tensor::from_slice(&[-1.0f32, 1.0]))?, Tensor::from_slice(&[0.0f32, 1.0]));
/// # Ok::<(), accelerate::Error>(())
/// ```
pub trait Layer: Send + std::fmt::Debug {
    /// The layer's output for `input`.
    fn forward(&self, input: &Tensor) -> Result<Tensor>;
}

/// Says which layer refused which input; libtorch knows neither.
#[cold]
pub(crate) fn forward_error(
    layer: &'static str,
    name: &str,
    wanted: String,
    input: &Tensor,
    source: TchError,
) -> Error {
    let (name, source) = (name.to_owned(), without_frames(source));
    NnError::Forward { layer, name, wanted, found: input.size(), kind: input.f_kind().ok(), source }.into()
}

/// A layer's inherent `forward` as its [`Layer`] implementation.
macro_rules! impl_layer {
    ($($type:ty),* $(,)?) => {$(
        impl crate::nn::Layer for $type {
            fn forward(&self, input: &tch::Tensor) -> crate::Result<tch::Tensor> {
                <$type>::forward(self, input)
            }
        }
    )*};
}

pub(crate) use impl_layer;
