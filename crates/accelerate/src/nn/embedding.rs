//! Rows of a table by index.

use super::init::Init;
use super::layer::impl_layer;
use super::{Param, Path, functional};
use crate::error::{NnError, Result};
use std::borrow::Borrow;
use tch::Tensor;

/// What an [`Embedding`] may be told besides its sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EmbeddingConfig {
    /// The row that stands for "nothing": zero at first and without gradient.
    pub padding_idx: Option<i64>,
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
/// let config = EmbeddingConfig { padding_idx: Some(0) };
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
    /// The row without gradient.
    pub padding_idx: Option<i64>,
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
        if let Some(index) = config.padding_idx
            && !(0..num_embeddings).contains(&index)
        {
            let path = path.name().to_owned();
            return Err(NnError::PaddingIndex { path, index, num_embeddings }.into());
        }
        let standard_normal = Init::Normal { mean: 0.0, std: 1.0 };
        let weight = path.param("weight", ([num_embeddings, embedding_dim], standard_normal))?;
        let layer = Self { weight, padding_idx: config.padding_idx };
        layer.zero_padding_row()?;
        Ok(layer)
    }

    /// Sets the padding row to zero, as after an initialisation of one's own.
    pub fn zero_padding_row(&self) -> Result<()> {
        if let Some(index) = self.padding_idx {
            self.weight.initialise(Some(index), Init::Zeros)?;
        }
        Ok(())
    }

    /// Indices `[..]` to rows `[.., embedding_dim]`.
    ///
    /// # Errors
    /// An index outside of the table; indices that are not int64 or int32.
    pub fn forward(&self, indices: &Tensor) -> Result<Tensor> {
        functional::embedding(indices, &self.weight, self.padding_idx)
    }
}

impl_layer!(Embedding);
