//! Rows of a table by index.

use super::init::Init;
use super::layer::{forward_error, impl_layer};
use super::table::SharedTable;
use super::{Param, Path};
use crate::error::{NnError, Result};
use std::borrow::Borrow;
use tch::{Kind, Tensor};
use torch_ext::apply_function;
use torch_ext::autograd::is_grad_enabled;

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
        let shared = SharedTable::of(&self.weight)?;
        let makes_rows = shared.is_some() || self.weight.is_in_parts();
        let weight = shared.map_or_else(|| self.weight.get(), |table| table.rows);
        let padding_idx = self.padding_idx.unwrap_or(-1);
        let rows = || {
            Tensor::f_embedding(&weight, indices, padding_idx, false, false).map_err(|source| {
                let num_embeddings = self.weight.shape()[0];
                let wanted = format!("int64 or int32 indices from 0 to {}", num_embeddings - 1);
                forward_error("Embedding", self.weight.name(), wanted, indices, source)
            })
        };
        if !makes_rows || !weight.requires_grad() || !is_grad_enabled() {
            return rows();
        }
        with_sparse_gradient(&weight, indices, padding_idx, tch::no_grad(rows)?)
    }
}

/// Rows of a weight as an operation whose gradient has those rows only: a rank that keeps a part of a table needs no more
/// of it than it sends, and the gradient of a table's other use has room for them. It has the values, to the bit, of the gradient that libtorch makes.
fn with_sparse_gradient(weight: &Tensor, indices: &Tensor, padding_idx: i64, rows: Tensor) -> Result<Tensor> {
    let size = weight.size();
    let mut outputs = apply_function(
        "Embedding",
        &[weight],
        |context| {
            context.save_for_backward(&[indices]);
            Ok(vec![rows])
        },
        move |context, gradients| {
            let Some(Some(gradient)) = gradients.first() else { return Ok(vec![None]) };
            let indices = context.saved_tensors()?[0].f_reshape([-1])?.f_to_kind(Kind::Int64)?;
            let values = gradient.f_reshape([-1, size[1]])?;
            let counts = indices.f_ne(padding_idx)?.f_nonzero()?.f_squeeze_dim(1)?;
            let (indices, values) = (indices.f_index_select(0, &counts)?, values.f_index_select(0, &counts)?);
            let (rows, place, _) = indices.f_internal_unique2(true, true, false)?;
            let options = (values.f_kind()?, values.device());
            let sums = Tensor::f_zeros([rows.size()[0], size[1]], options)?.f_index_add_(0, &place, &values)?;
            let rows = rows.f_unsqueeze(0)?;
            Ok(vec![Some(Tensor::f_sparse_coo_tensor_indices_size(&rows, &sums, &size[..], options, true)?)])
        },
    )?;
    Ok(outputs.swap_remove(0))
}

impl_layer!(Embedding);
