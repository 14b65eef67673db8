//! What a parameter of a sharded model is to layers, optimizers and checkpoints.

use super::FullyShard;
use crate::error::{NnError, Result};
use crate::group::Group;
use crate::nn::{DeferWeightGrad, Float8Codes, Init, Resident, Storage, UnitMember, flat_elements};
use accelerate_core::layout::Layout;
use tch::Tensor;

/// The storage of one parameter of a sharded model.
pub(super) struct ShardedStorage {
    pub(super) engine: FullyShard,
    pub(super) unit: usize,
    pub(super) member: usize,
}

impl ShardedStorage {
    fn name(&self) -> String {
        self.engine.0.units.name(self.unit, self.member).to_owned()
    }
}

impl Storage for ShardedStorage {
    fn materialize(&self) -> Result<Tensor> {
        self.engine.materialize(self.unit, self.member)
    }

    fn codes(&self) -> Result<Option<Float8Codes>> {
        self.engine.codes(self.unit, self.member)
    }

    fn local(&self) -> Tensor {
        self.engine.0.units.local(self.unit, self.member)
    }

    fn layout(&self) -> Layout {
        self.engine.0.units.layout(self.unit, self.member)
    }

    fn full_tensor(&self) -> Result<Tensor> {
        Ok(self.full_unit()?.swap_remove(self.member).f_detach_copy()?)
    }

    fn unit(&self) -> Option<UnitMember> {
        Some(UnitMember { unit: self.unit, member: self.member })
    }

    fn full_unit(&self) -> Result<Vec<Tensor>> {
        self.engine.gather_exactly(self.unit)
    }

    fn overwrite(&self, full: &Tensor) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let full = full.f_expand(self.engine.0.units.shape(self.unit, self.member), true)?;
        self.overwrite_shard(&flat_elements(&full, &self.layout())?)
    }

    fn overwrite_shard(&self, shard: &Tensor) -> Result<()> {
        self.engine.before_change()?;
        let resident = self.load()?;
        self.local().f_copy_(shard)?;
        self.engine.0.units.set_unit_stale(self.unit);
        resident.map_or(Ok(()), Resident::store)
    }

    fn load(&self) -> Result<Option<Box<dyn Resident>>> {
        self.engine.0.offloader.load(self.unit)
    }

    fn is_offloaded(&self) -> bool {
        self.engine.0.offloader.is_on_disk()
    }

    fn initialise(&self, _row: Option<i64>, _init: Init) -> Result<()> {
        Err(NnError::ShardedData { parameter: self.name() }.into())
    }

    fn defer_weight_grad(&self) -> Option<DeferWeightGrad> {
        let (engine, unit, member) = (self.engine.clone(), self.unit, self.member);
        Some(Box::new(move |gradient| engine.0.reducer.defer(unit, member, gradient)))
    }

    fn set_requires_grad(&self, requires_grad: bool) -> Result<()> {
        if requires_grad == self.engine.0.units.content(self.unit).requires_grad {
            return Ok(());
        }
        Err(NnError::ShardedRequiresGrad { parameter: self.name() }.into())
    }

    fn group(&self) -> Option<Group> {
        Some(self.engine.0.transport.group().clone())
    }
}
