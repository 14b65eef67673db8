//! What a parameter of which each rank has a slice is to layers, optimizers and checkpoints.

use super::region::{Region, gather};
use crate::error::{NnError, Result};
use crate::group::Group;
use crate::nn::{Init, Param, Resident, Role, Storage, flat_elements};
use accelerate_core::layout::Layout;
use std::ops::Range;
use std::sync::Arc;
use tch::Tensor;

/// Which slices of a dim the ranks have; the dim consists of equal parts.
#[derive(Clone, Debug)]
pub(super) struct Slices {
    pub(super) dim: usize,
    pub(super) parts: usize,
    /// Of each part, by rank.
    pub(super) ranges: Arc<[Range<usize>]>,
}

impl Slices {
    /// What rank `rank` has of a tensor of this shape.
    pub(super) fn layout(&self, shape: &[i64], rank: usize) -> Result<Layout> {
        let full = Layout::full(shape.iter().map(|&size| size.max(0) as usize).collect::<Vec<_>>());
        let range = self.ranges.get(rank).cloned().unwrap_or(0..0);
        Ok(full.slice_of_parts(self.dim, self.parts, range)?)
    }
}

/// The storage of such a parameter. The slice is a parameter of its own, which an engine may shard; it is flat, as shards are
/// everywhere.
pub(super) struct SliceStorage {
    name: String,
    own: Param,
    layout: Layout,
    slices: Slices,
    region: Region,
    /// The ranks that have the rest where the slice is sharded: those that divide the layer, and those that share its slices.
    group: Group,
}

impl SliceStorage {
    /// Keeps a copy of this rank's slice of `full`, the values of `param`. `group` are the ranks that hold one model together.
    pub(super) fn new(param: &Param, full: &Tensor, slices: Slices, region: &Region, group: Group) -> Result<Self> {
        let layout = slices.layout(&full.size(), region.rank())?;
        let slice = flat_elements(&full.f_detach()?, &layout)?.f_detach_copy()?;
        let slice = slice.f_set_requires_grad(param.requires_grad())?;
        let name = param.name().to_owned();
        let own = Param::new(name.clone(), Role::Parameter, slice);
        Ok(Self { name, own, layout, slices, region: region.clone(), group })
    }

    fn shape(&self) -> Vec<i64> {
        self.layout.shape().iter().map(|&size| size as i64).collect()
    }

    /// The slice in its shape, from all of its elements.
    fn shaped(&self, flat: &Tensor) -> Result<Tensor> {
        let shape: Vec<i64> = self.layout.local_shape().iter().map(|&size| size as i64).collect();
        Ok(flat.f_view(&shape[..])?)
    }

    /// Has the dim of parts as two: `[.., parts, features, ..]`.
    fn in_parts(&self, slice: &Tensor) -> Result<Tensor> {
        let (dim, parts) = (self.slices.dim, self.slices.parts as i64);
        let mut size = slice.size();
        size[dim] /= parts;
        size.insert(dim, parts);
        Ok(slice.f_reshape(&size)?)
    }
}

impl Storage for SliceStorage {
    fn materialize(&self) -> Result<Tensor> {
        let parts = self.in_parts(&self.slice()?)?;
        let all = self.region.gather(&parts, self.slices.dim as i64 + 1, &self.slices.ranges)?;
        Ok(all.f_reshape(self.shape())?)
    }

    fn slice(&self) -> Result<Tensor> {
        self.shaped(&self.own.get()?)
    }

    fn slice_param(&self) -> Option<Param> {
        Some(self.own.clone())
    }

    fn local(&self) -> Tensor {
        self.own.local()
    }

    fn layout(&self) -> Layout {
        let own = self.own.layout();
        // A slice that is sharded is in flat ranges.
        self.layout.clone().part(&own).unwrap_or(own)
    }

    fn full_tensor(&self) -> Result<Tensor> {
        let _no_grad = tch::no_grad_guard();
        let parts = self.in_parts(&self.shaped(&self.own.full_tensor()?)?)?;
        let all = gather(self.region.group(), &parts, self.slices.dim as i64 + 1, &self.slices.ranges)?;
        Ok(all.f_reshape(self.shape())?)
    }

    fn overwrite(&self, full: &Tensor) -> Result<()> {
        let full = full.f_expand(self.shape(), true)?;
        self.own.copy_(&flat_elements(&full, &self.layout)?)
    }

    fn overwrite_shard(&self, shard: &Tensor) -> Result<()> {
        self.own.copy_shard_(shard)
    }

    fn initialise(&self, _row: Option<i64>, _init: Init) -> Result<()> {
        Err(NnError::ShardedData { parameter: self.name.clone() }.into())
    }

    fn load(&self) -> Result<Option<Box<dyn Resident>>> {
        self.own.load()
    }

    fn is_offloaded(&self) -> bool {
        self.own.is_offloaded()
    }

    fn set_requires_grad(&self, requires_grad: bool) -> Result<()> {
        self.own.set_requires_grad(requires_grad)
    }

    fn group(&self) -> Option<Group> {
        // An engine may have left the slice whole.
        let is_sharded = self.own.shard_group().is_some();
        Some(if is_sharded { self.group.clone() } else { self.region.group().clone() })
    }
}

/// The storage of a parameter that each rank has whole, and of whose gradient it has a part. The tensor is a parameter of its own, which
/// an engine may shard.
pub(super) struct SummedGradientStorage {
    own: Param,
    region: Region,
}

impl SummedGradientStorage {
    /// Keeps the tensor of `param`.
    pub(super) fn new(param: &Param, region: &Region) -> Self {
        let own = Param::new(param.name().to_owned(), Role::Parameter, param.local());
        Self { own, region: region.clone() }
    }
}

impl Storage for SummedGradientStorage {
    fn materialize(&self) -> Result<Tensor> {
        self.region.sum_gradient(&self.own.get()?)
    }

    fn slice_param(&self) -> Option<Param> {
        Some(self.own.clone())
    }

    fn local(&self) -> Tensor {
        self.own.local()
    }

    fn layout(&self) -> Layout {
        self.own.layout()
    }

    fn full_tensor(&self) -> Result<Tensor> {
        self.own.full_tensor()
    }

    fn overwrite(&self, full: &Tensor) -> Result<()> {
        self.own.copy_(full)
    }

    fn overwrite_shard(&self, shard: &Tensor) -> Result<()> {
        self.own.copy_shard_(shard)
    }

    fn initialise(&self, row: Option<i64>, init: Init) -> Result<()> {
        self.own.initialise(row, init)
    }

    fn load(&self) -> Result<Option<Box<dyn Resident>>> {
        self.own.load()
    }

    fn is_offloaded(&self) -> bool {
        self.own.is_offloaded()
    }

    fn set_requires_grad(&self, requires_grad: bool) -> Result<()> {
        self.own.set_requires_grad(requires_grad)
    }

    fn group(&self) -> Option<Group> {
        self.own.shard_group()
    }
}
