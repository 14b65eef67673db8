//! A large table that an embedding and a linear layer share: its gradient takes the memory of one table and not of three.
//!
//! libtorch keeps the linear layer's gradient through the backward pass, makes one of the same size for the embedding, and a
//! third that is their sum. Here the embedding's has its rows only and is added in place, to the bit the same sum.

use super::Param;
use crate::error::Result;
use tch::{Device, Tensor};
use torch_ext::autograd::is_grad_enabled;

/// Smaller ones are not worth while.
const LARGE_BYTES: usize = 4 << 20;

/// The names under which the uses of a table reach the graph.
#[derive(Debug)]
pub(super) struct TiedEmbedding {
    /// For a linear layer, whose gradient is as large as the table.
    pub(super) dense: Tensor,
    /// For an embedding, whose gradient may have some rows only.
    pub(super) rows: Tensor,
}

impl TiedEmbedding {
    /// Of a parameter that is such a table, while gradients are recorded. On a GPU it is not worth while: to find out which
    /// rows there are, the host would wait for it.
    pub(super) fn of(weight: &Param) -> Result<Option<Self>> {
        if !weight.is_tied() || !is_grad_enabled() || weight.is_sharded() {
            return Ok(None);
        }
        let local = weight.local();
        let num_bytes = local.numel() * local.f_kind()?.elt_size_in_bytes();
        if num_bytes < LARGE_BYTES || !local.requires_grad() || local.device() != Device::Cpu {
            return Ok(None);
        }
        Ok(weight.two_uses()?.map(|[dense, rows]| Self { dense, rows }))
    }
}
