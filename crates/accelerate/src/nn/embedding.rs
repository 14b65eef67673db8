//! Rows of a table by index.

use super::init::Init;
use super::layer::impl_layer;
use super::named_layers::{AnyLayer, SharedKernel};
use super::{Param, Path, functional};
use crate::error::{NnError, Result};
use std::borrow::Borrow;
use std::fmt::Debug;
use std::sync::Arc;
use tch::Tensor;

/// How an [`Embedding`] looks rows up: in a dense table here; quantised tables, and tables of which each rank has some rows,
/// replace it. It gets the parameter, not a tensor, as a [`LinearKernel`](super::LinearKernel) does.
pub trait EmbeddingKernel: Send + Sync + Debug {
    /// `indices [..]` (int64 or int32) and `weight [num_embeddings, embedding_dim]` to `[.., embedding_dim]`, differentiable in
    /// the weight. The row `padding_idx`, which counts from the last one where it is negative, gets no gradient. Collective
    /// where [`Param::get`] is.
    ///
    /// # Errors
    /// Those of [`Param::get`]; an index or a `padding_idx` outside of the table.
    fn embedding(&self, indices: &Tensor, weight: &Param, padding_idx: Option<i64>) -> Result<Tensor>;

    /// Is it libtorch's own lookup, which another one may take the place of unasked?
    #[doc(hidden)]
    fn is_dense(&self) -> bool {
        false
    }
}

/// What goes around the kernel of an embedding, whichever that is when the layer is used.
pub(crate) trait AroundEmbedding: Send + Sync + Debug {
    /// As [`EmbeddingKernel::embedding`], with `kernel` for the layer's own lookup.
    fn embedding(
        &self,
        kernel: &dyn EmbeddingKernel,
        indices: &Tensor,
        weight: &Param,
        padding_idx: Option<i64>,
    ) -> Result<Tensor>;
}

/// libtorch's own `embedding`. The gradient of a table of which ranks own shards has the rows that were used alone.
#[derive(Clone, Copy, Debug, Default)]
pub struct DenseEmbeddingKernel;

impl EmbeddingKernel for DenseEmbeddingKernel {
    fn embedding(&self, indices: &Tensor, weight: &Param, padding_idx: Option<i64>) -> Result<Tensor> {
        functional::embedding(indices, weight, padding_idx)
    }

    fn is_dense(&self) -> bool {
        true
    }
}

/// What an [`Embedding`] may be told besides its sizes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbeddingConfig {
    /// The row that stands for "nothing": zero at first and without gradient. A negative number counts from the last row, which
    /// is -1.
    pub padding_idx: Option<i64>,
    /// How the table begins, but for the padding row. PyTorch's default: the standard normal distribution.
    pub weight_init: Init,
}

impl Default for EmbeddingConfig {
    fn default() -> Self {
        Self { padding_idx: None, weight_init: Init::Normal { mean: 0.0, std: 1.0 } }
    }
}

/// `torch.nn.Embedding`: indices `[..]` (int64 or int32) to rows `[.., embedding_dim]`.
///
/// Parameter `weight [num_embeddings, embedding_dim]`, drawn from the standard normal distribution.
///
/// ```
/// use accelerate::nn::{Embedding, EmbeddingConfig, ParamStore};
/// use accelerate::tch::{Device, Tensor};
///
/// let store = ParamStore::new(Device::Cpu);
/// let config = EmbeddingConfig { padding_idx: Some(0), ..Default::default() };
/// let words = Embedding::new(store.root() / "word_embeddings", 100, 8, config)?;
/// let rows = words.forward(&Tensor::from_slice(&[0i64, 7]))?;
/// assert_eq!(rows.size(), [2, 8]);
/// assert_eq!(rows.double_value(&[0, 3]), 0.0);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Embedding {
    /// `[num_embeddings, embedding_dim]`.
    pub weight: Param,
    /// The row without gradient. A negative number counts from the last one.
    pub padding_idx: Option<i64>,
    kernel: SharedKernel<dyn EmbeddingKernel, dyn AroundEmbedding>,
}

impl Embedding {
    /// Registers the parameter under `path`.
    ///
    /// # Errors
    /// The name is taken; `padding_idx` is not a row.
    pub fn new(
        path: impl Borrow<Path>,
        num_embeddings: i64,
        embedding_dim: i64,
        config: EmbeddingConfig,
    ) -> Result<Self> {
        let path = path.borrow();
        padding_row(config.padding_idx, num_embeddings, path.name())?;
        let weight = path.param("weight", ([num_embeddings, embedding_dim], config.weight_init))?;
        let layer = Self::from_params(path, weight, config);
        layer.zero_padding_row()?;
        Ok(layer)
    }

    /// A layer over a table that exists already. Its padding row is left as it is.
    pub fn from_params(path: impl Borrow<Path>, weight: Param, config: EmbeddingConfig) -> Self {
        let kernel = SharedKernel::<dyn EmbeddingKernel, dyn AroundEmbedding>::new(Arc::new(DenseEmbeddingKernel));
        let layer = Self { weight, padding_idx: config.padding_idx, kernel };
        path.borrow().register_layer(AnyLayer::Embedding(layer.clone()));
        layer
    }

    /// Looks rows up in another way from now on, in all clones of the layer. Adapters that the layer has stay around it.
    pub fn set_kernel(&self, kernel: Arc<dyn EmbeddingKernel>) {
        self.kernel.set(kernel);
    }

    /// How rows are looked up, without adapters.
    pub fn kernel(&self) -> Arc<dyn EmbeddingKernel> {
        self.kernel.get()
    }

    pub(crate) fn set_around(&self, around: Option<Arc<dyn AroundEmbedding>>) {
        self.kernel.set_around(around);
    }

    pub(crate) fn has_adapters(&self) -> bool {
        self.kernel.both().1.is_some()
    }

    /// Sets the padding row to zero, as after an initialisation of one's own.
    pub fn zero_padding_row(&self) -> Result<()> {
        let num_embeddings = self.weight.shape().first().copied().unwrap_or_default();
        if let Some(index) = padding_row(self.padding_idx, num_embeddings, self.weight.name())? {
            self.weight.initialise(Some(index), Init::Zeros)?;
        }
        Ok(())
    }

    /// Indices `[..]` to rows `[.., embedding_dim]`.
    ///
    /// # Errors
    /// An index outside of the table; indices that are not int64 or int32.
    pub fn forward(&self, indices: &Tensor) -> Result<Tensor> {
        match self.kernel.both() {
            (kernel, None) => kernel.embedding(indices, &self.weight, self.padding_idx),
            (kernel, Some(around)) => around.embedding(&*kernel, indices, &self.weight, self.padding_idx),
        }
    }
}

/// The row that `padding_idx` says, counted from the first; `name` is for the error.
pub(crate) fn padding_row(padding_idx: Option<i64>, num_embeddings: i64, name: &str) -> Result<Option<i64>> {
    let Some(index) = padding_idx else { return Ok(None) };
    if !(-num_embeddings..num_embeddings).contains(&index) {
        return Err(NnError::PaddingIndex { path: name.to_owned(), index, num_embeddings }.into());
    }
    Ok(Some(if index < 0 { index + num_embeddings } else { index }))
}

impl_layer!(Embedding);
