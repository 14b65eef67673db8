//! The layers of a model by path: how others reach them, whatever struct of the program holds them.

use super::{AnyBatchNorm, Conv1D, Embedding, Linear, LinearLayer, Param, ParamStore, TokenWise};
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

/// A layer that has parameters, or a dropout, as [`ParamStore::named_layers`] finds it. It shares its parameters, and the kernel that computes
/// it, with the layer that the model holds.
///
/// ```
/// use accelerate::nn::{AnyLayer, LayerNorm, Linear, ParamStore};
/// use accelerate::tch::Device;
///
/// let store = ParamStore::new(Device::Cpu);
/// Linear::new(store.root() / "proj", 4, 2, Default::default())?;
/// LayerNorm::new(store.root() / "norm", [2], Default::default())?;
/// let kinds: Vec<_> = store.named_layers().iter().map(|(path, layer)| (path.clone(), layer.kind())).collect();
/// assert_eq!(kinds, [("proj".to_owned(), "Linear"), ("norm".to_owned(), "LayerNorm")]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum AnyLayer {
    /// Its product can be replaced: [`Linear::set_kernel`].
    Linear(Linear),
    /// Its lookup can be replaced: [`Embedding::set_kernel`].
    Embedding(Embedding),
    /// A linear layer whose weight is stored transposed.
    Conv1D(Conv1D),
    /// It may normalise by the batches of several processes.
    BatchNorm(AnyBatchNorm),
    /// A norm over features, or a dropout: ranks may divide the tokens that it computes.
    TokenWise(TokenWise),
    /// A layer that is always computed in the same way.
    Other {
        /// PyTorch's name of it, such as `LayerNorm`.
        kind: &'static str,
        /// Parameters and buffers.
        params: Vec<Param>,
    },
}

impl AnyLayer {
    pub(super) fn other<'a>(kind: &'static str, params: impl IntoIterator<Item = &'a Option<Param>>) -> Self {
        Self::Other { kind, params: params.into_iter().flatten().cloned().collect() }
    }

    /// PyTorch's name of it, such as `Linear`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Linear(_) => "Linear",
            Self::Embedding(_) => "Embedding",
            Self::Conv1D(_) => "Conv1D",
            Self::BatchNorm(norm) => norm.kind(),
            Self::TokenWise(layer) => layer.kind,
            Self::Other { kind, .. } => kind,
        }
    }

    /// The layer, if it multiplies with a weight.
    pub(crate) fn linear(&self) -> Option<LinearLayer> {
        match self {
            Self::Linear(linear) => Some(LinearLayer::Linear(linear.clone())),
            Self::Conv1D(conv) => Some(LinearLayer::Conv1D(conv.clone())),
            Self::Embedding(_) | Self::BatchNorm(_) | Self::TokenWise(_) | Self::Other { .. } => None,
        }
    }

    /// Its parameters and buffers.
    pub fn params(&self) -> Vec<Param> {
        match self {
            Self::Linear(linear) => std::iter::once(&linear.weight).chain(&linear.bias).cloned().collect(),
            Self::Embedding(embedding) => vec![embedding.weight.clone()],
            Self::Conv1D(conv) => vec![conv.weight.clone(), conv.bias.clone()],
            Self::BatchNorm(norm) => norm.params().to_vec(),
            Self::TokenWise(layer) => layer.params.clone(),
            Self::Other { params, .. } => params.clone(),
        }
    }
}

impl ParamStore {
    /// All layers that have parameters and all dropouts, with their paths, in the order in which they were made: `named_modules` of
    /// PyTorch, of layers alone. To go on from a trained model without writing it anew, replace kernels: for low-rank adapters, quantised
    /// weights, products over several devices. A kernel must not hold the store, which would never be freed.
    ///
    /// ```
    /// use accelerate::nn::{AnyLayer, DenseKernel, Init, Linear, LinearKernel, Param, ParamStore};
    /// use accelerate::tch::{Device, Tensor};
    /// use std::sync::Arc;
    ///
    /// /// A low-rank adapter (LoRA, arXiv 2106.09685): `x W^T + b + x A^T B^T`.
    /// #[derive(Debug)]
    /// struct Adapter { a: Param, b: Param }
    ///
    /// impl LinearKernel for Adapter {
    ///     fn linear(&self, input: &Tensor, weight: &Param, bias: Option<&Param>) -> accelerate::Result<Tensor> {
    ///         let low_rank = input.f_linear(&self.a.get()?, None::<Tensor>)?.f_linear(&self.b.get()?, None::<Tensor>)?;
    ///         Ok(DenseKernel.linear(input, weight, bias)? + low_rank)
    ///     }
    /// }
    ///
    /// let store = ParamStore::new(Device::Cpu);
    /// let model = Linear::new(store.root() / "layers" / 0 / "q_proj", 8, 8, Default::default())?;
    /// for (path, layer) in store.named_layers() {
    ///     let AnyLayer::Linear(linear) = layer else { continue };
    ///     linear.weight.set_requires_grad(false)?;
    ///     let path = store.root() / &path;
    ///     let a = path.param("lora_A.weight", ([2, linear.in_features()], Init::Normal { mean: 0.0, std: 0.02 }))?;
    ///     let b = path.param("lora_B.weight", ([linear.out_features(), 2], Init::Zeros))?;
    ///     linear.set_kernel(Arc::new(Adapter { a, b }));
    /// }
    /// model.forward(&Tensor::from_slice(&[1f32; 8]))?.sum(None).backward();
    /// assert!(store.get("layers.0.q_proj.lora_B.weight").unwrap().grad().is_some());
    /// assert!(model.weight.grad().is_none());
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn named_layers(&self) -> Vec<(String, AnyLayer)> {
        self.state().layers.clone()
    }
}

/// What computes a layer, shared by all clones of it: a kernel, and what goes around it. Whoever sets another kernel leaves the
/// latter in place, so adapters are not lost.
pub(super) struct SharedKernel<K: ?Sized, A: ?Sized>(Arc<RwLock<Kernels<K, A>>>);

struct Kernels<K: ?Sized, A: ?Sized> {
    kernel: Arc<K>,
    around: Option<Arc<A>>,
}

impl<K: ?Sized, A: ?Sized> SharedKernel<K, A> {
    pub(super) fn new(kernel: Arc<K>) -> Self {
        Self(Arc::new(RwLock::new(Kernels { kernel, around: None })))
    }

    // Shared pointers: whole after every statement, also where another thread panicked.
    pub(super) fn get(&self) -> Arc<K> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner).kernel)
    }

    pub(super) fn both(&self) -> (Arc<K>, Option<Arc<A>>) {
        let kernels = self.0.read().unwrap_or_else(PoisonError::into_inner);
        (Arc::clone(&kernels.kernel), kernels.around.clone())
    }

    pub(super) fn set(&self, kernel: Arc<K>) {
        let mut kernels = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let replaced = std::mem::replace(&mut kernels.kernel, kernel);
        drop(kernels);
        drop(replaced);
    }

    pub(super) fn set_around(&self, around: Option<Arc<A>>) {
        let mut kernels = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let replaced = std::mem::replace(&mut kernels.around, around);
        drop(kernels);
        drop(replaced);
    }
}

impl<K: ?Sized, A: ?Sized> Clone for SharedKernel<K, A> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<K: ?Sized + fmt::Debug, A: ?Sized + fmt::Debug> fmt::Debug for SharedKernel<K, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.both() {
            (kernel, None) => kernel.fmt(f),
            (kernel, Some(around)) => f.debug_tuple("Around").field(&around).field(&kernel).finish(),
        }
    }
}
