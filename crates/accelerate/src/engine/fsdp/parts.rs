//! Weights that are stored as several tensors, such as codes and their scales: each rank keeps a piece of each tensor, cut at the borders of
//! blocks, and the pieces are gathered as bytes whenever the weight is used.
//!
//! Nothing is gathered ahead. The gathers have connections of their own, so they do not come between those of units.

use crate::error::Result;
use crate::group::Group;
use crate::nn::{Param, ParamStore, Storage};
use accelerate_core::layout::Layout;
use std::ops::Range;
use tch::{Kind, Tensor};

/// Divides the parts of such weights over the ranks of a group. Collective.
pub(super) fn shard_parts(group: &Group, store: &ParamStore) -> Result<()> {
    let several: Vec<Param> = store.parameters().into_iter().filter(Param::is_stored_as_several).collect();
    if several.is_empty() || group.world_size() == 1 {
        return Ok(());
    }
    let group = group.fork()?;
    for param in several {
        for (part, piece) in param.stored_as().into_iter().zip(param.piece_sizes()) {
            if piece > 0 {
                let storage = ShardedPart::of(&group, &part, piece)?;
                drop(part.replace_storage(Box::new(storage)));
            }
        }
    }
    Ok(())
}

/// A tensor of which each rank has a piece.
struct ShardedPart {
    group: Group,
    shape: Vec<i64>,
    kind: Kind,
    /// Elements that are not divided.
    piece: usize,
    /// This rank's elements of the flat tensor.
    range: Range<usize>,
    /// They, and as much behind them as the largest shard has.
    padded: Tensor,
}

impl ShardedPart {
    fn of(group: &Group, part: &Param, piece: usize) -> Result<Self> {
        let full = part.full_tensor()?.f_reshape([-1])?;
        let (numel, kind) = (full.numel(), full.f_kind()?);
        let most = numel.div_ceil(piece).div_ceil(group.world_size()) * piece;
        let start = (group.rank() * most).min(numel);
        let range = start..(start + most).min(numel);
        let padded = Tensor::f_zeros([most as i64], (kind, full.device()))?;
        let storage = Self { group: group.clone(), shape: part.shape(), kind, piece, range, padded };
        tch::no_grad(|| storage.local().f_copy_(&full.f_narrow(0, start as i64, storage.len())?))?;
        Ok(storage)
    }

    fn len(&self) -> i64 {
        self.range.len() as i64
    }
}

impl Storage for ShardedPart {
    fn materialize(&self) -> Result<Tensor> {
        let bytes = self.padded.f_view_dtype(Kind::Uint8)?;
        let all = self.group.all_gather_into_tensor(&bytes)?.f_view_dtype(self.kind)?;
        let numel = self.shape.iter().product::<i64>();
        Ok(all.f_narrow(0, 0, numel)?.f_reshape(&self.shape)?)
    }

    fn local(&self) -> Tensor {
        let whole = || self.padded.shallow_clone();
        self.padded.f_narrow(0, 0, self.len()).unwrap_or_else(|_| whole())
    }

    fn layout(&self) -> Layout {
        let full = Layout::full(self.shape.iter().map(|&size| size.max(0) as usize).collect::<Vec<_>>());
        full.clone().blocks(self.piece).and_then(|blocks| blocks.flat(self.range.clone())).unwrap_or(full)
    }

    fn full_tensor(&self) -> Result<Tensor> {
        self.materialize()
    }

    fn overwrite(&self, full: &Tensor) -> Result<()> {
        let full = full.f_expand(&self.shape, false)?.f_reshape([-1])?;
        self.overwrite_shard(&full.f_narrow(0, self.range.start as i64, self.len())?)
    }

    fn group(&self) -> Option<Group> {
        Some(self.group.clone())
    }
}
