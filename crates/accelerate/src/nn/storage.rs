//! How a parameter or buffer is stored: the strategy behind its handle.

use super::deferred::fill;
use super::sharded_state::copy_unless_there;
use super::{DeferWeightGrad, Float8Codes, Init, Param};
use crate::error::Result;
use crate::group::Group;
use accelerate_core::layout::Layout;
use tch::Tensor;

/// How a parameter is kept between uses.
///
/// Layers see [`materialize`](Storage::materialize), optimizers and checkpoints see
/// [`local`](Storage::local). The two are the same tensor while every rank holds all of it.
pub(crate) trait Storage: Send {
    /// The full tensor, fit to compute with; gradients flow from it to the local shard. Collective if ranks own shards of it.
    fn materialize(&self) -> Result<Tensor>;
    /// The tensor that a layer which several ranks compute together computes with on this rank, in the shape of its slice; elsewhere
    /// the full one.
    fn slice(&self) -> Result<Tensor> {
        self.materialize()
    }
    /// That tensor as a parameter of its own, flat, where it is a slice.
    fn slice_param(&self) -> Option<Param> {
        None
    }
    /// The same as FP8 codes, where ranks gather it as those. Collective if ranks own shards of it.
    fn codes(&self) -> Result<Option<Float8Codes>> {
        Ok(None)
    }
    /// What this rank owns.
    fn local(&self) -> Tensor;
    /// Which elements of the full tensor this rank owns.
    fn layout(&self) -> Layout {
        full_layout(&self.local())
    }
    /// The parameters whose tensors it is made from, where it is stored as several: a quantised one as its codes, and their
    /// scales. Files and state dicts have these in its place.
    fn stored_as(&self) -> Option<Vec<Param>> {
        None
    }
    /// How many elements of each of those belong together, where ranks may own pieces of it; 0 for one that each has whole.
    fn piece_sizes(&self) -> Vec<usize> {
        Vec::new()
    }
    /// The full tensor, detached. Collective if ranks own shards of it.
    fn full_tensor(&self) -> Result<Tensor> {
        Ok(self.local().f_detach()?)
    }
    /// Where ranks own shards: what the parameter is gathered with, and its place in that.
    fn unit(&self) -> Option<UnitMember> {
        None
    }
    /// All parameters of the unit in full, by member; they share the memory of the unit. Collective if ranks own shards.
    fn full_unit(&self) -> Result<Vec<Tensor>> {
        Ok(vec![self.full_tensor()?])
    }
    /// Overwrites what this rank owns with its shard of a tensor that has the full shape, or broadcasts to it.
    fn overwrite(&self, full: &Tensor) -> Result<()> {
        self.local().f_copy_(full)?;
        Ok(())
    }
    /// Overwrites what this rank owns with as many elements, in the order of its layout.
    fn overwrite_shard(&self, shard: &Tensor) -> Result<()> {
        copy_unless_there(&self.local(), shard)
    }
    /// Fills all of it, or one row.
    fn initialise(&self, row: Option<i64>, init: Init) -> Result<()> {
        fill(&self.local(), row, init)
    }
    /// Where what this rank owns is elsewhere between uses: loads it into memory, with that of the unit.
    fn load(&self) -> Result<Option<Box<dyn Resident>>> {
        Ok(None)
    }
    /// Does [`local`](Self::local) have memory only while somebody has [loaded](Self::load) it?
    fn is_offloaded(&self) -> bool {
        false
    }
    /// Is there no memory for it yet?
    fn is_deferred(&self) -> bool {
        false
    }
    /// Does a device map say where it is kept, or something that it is stored as?
    fn is_dispatched(&self) -> bool {
        self.stored_as().is_some_and(|parts| parts.iter().any(Param::is_dispatched))
    }
    /// Who takes the gradient of a matrix that has not been computed, if anyone does.
    fn defer_weight_grad(&self) -> Option<DeferWeightGrad> {
        None
    }
    /// Two names of the tensor to compute with whose gradients become one before they reach it, always the same ones.
    fn two_uses(&self) -> Result<Option<[Tensor; 2]>> {
        Ok(None)
    }
    /// Freezes or unfreezes it.
    fn set_requires_grad(&self, requires_grad: bool) -> Result<()> {
        let _ = self.local().f_set_requires_grad(requires_grad)?;
        Ok(())
    }
    /// Freezes or unfreezes it, at the latest where every rank holds all of it.
    fn set_trained_when_replicated(&self, is_trained: bool) -> Result<()> {
        self.set_requires_grad(is_trained)
    }
    /// Is it trained where every rank holds all of it? One that is kept elsewhere meanwhile is frozen.
    fn is_trained_when_replicated(&self) -> bool {
        self.local().requires_grad()
    }
    /// The ranks that own the other shards, if there are any.
    fn group(&self) -> Option<Group> {
        None
    }
}

/// What ranks own of a unit, in memory. Dropped, it goes, and changes with it.
pub(crate) trait Resident {
    /// Writes it back to where it was.
    fn store(self: Box<Self>) -> Result<()>;
}

/// The place of a parameter among those that are gathered together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UnitMember {
    pub(crate) unit: usize,
    pub(crate) member: usize,
}

/// All of a tensor.
pub(super) fn full_layout(tensor: &Tensor) -> Layout {
    Layout::full(tensor.size().iter().map(|&size| size.max(0) as usize).collect::<Vec<_>>())
}
