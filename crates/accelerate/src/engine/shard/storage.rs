//! What a parameter of a sharded model is to layers, optimizers and checkpoints.

use super::gather::Released;
use super::{Phase, Shard};
use crate::error::{NnError, Result};
use crate::group::Group;
use crate::nn::{Init, Resident, Storage, TakeProduct, UnitMember};
use std::ops::Range;
use tch::Tensor;

/// The storage of one parameter of a sharded model.
pub(super) struct Part {
    pub(super) shard: Shard,
    pub(super) unit: usize,
    pub(super) member: usize,
}

impl Part {
    fn shape(&self) -> &[i64] {
        let position = self.shard.unit(self.unit).parameters[self.member];
        &self.shard.0.shapes[position]
    }
}

impl Storage for Part {
    fn materialize(&self) -> Result<Tensor> {
        self.shard.materialize(self.unit, self.member)
    }

    fn local(&self) -> Tensor {
        self.shard.lock().units[self.unit].locals[self.member].shallow_clone()
    }

    fn whole_shape(&self) -> Vec<i64> {
        self.shape().to_vec()
    }

    fn whole(&self) -> Result<Tensor> {
        Ok(self.whole_unit()?.swap_remove(self.member).f_detach_copy()?)
    }

    fn part(&self) -> Range<usize> {
        self.shard.unit(self.unit).part_of(self.member, self.shard.0.group.rank())
    }

    fn unit(&self) -> Option<UnitMember> {
        Some(UnitMember { unit: self.unit, member: self.member })
    }

    fn whole_unit(&self) -> Result<Vec<Tensor>> {
        let whole = self.shard.gather_exactly(self.unit)?;
        let views = self.shard.views(self.unit, &whole)?;
        let released = {
            let mut state = self.shard.lock();
            if state.phase == Phase::Other { state.release(self.unit) } else { Released::default() }
        };
        drop(released);
        Ok(views)
    }

    fn overwrite(&self, whole: &Tensor) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let part = self.part();
        let flat = whole.f_expand(self.shape(), true)?.f_reshape([-1])?;
        self.overwrite_part(&flat.f_narrow(0, part.start as i64, part.len() as i64)?)
    }

    fn overwrite_part(&self, part: &Tensor) -> Result<()> {
        self.shard.close_window()?;
        self.shard.receive_what_is_left()?;
        let resident = self.bring()?;
        self.local().f_copy_(part)?;
        self.shard.lock().units[self.unit].is_stale = true;
        resident.map_or(Ok(()), Resident::keep_changes)
    }

    fn bring(&self) -> Result<Option<Box<dyn Resident>>> {
        self.shard.bring(self.unit)
    }

    fn is_away(&self) -> bool {
        self.shard.0.home.is_disk()
    }

    fn initialise(&self, _row: Option<i64>, _init: Init) -> Result<()> {
        let position = self.shard.unit(self.unit).parameters[self.member];
        let parameter = self.shard.0.plan.inventory.parameters[position].name.clone();
        Err(NnError::ShardedData { parameter }.into())
    }

    fn product_taker(&self) -> Option<TakeProduct> {
        let (shard, unit, member) = (self.shard.clone(), self.unit, self.member);
        Some(Box::new(move |product| shard.take_product(unit, member, product)))
    }

    fn set_requires_grad(&self, requires_grad: bool) -> Result<()> {
        if requires_grad == self.shard.unit(self.unit).requires_grad {
            return Ok(());
        }
        let position = self.shard.unit(self.unit).parameters[self.member];
        let parameter = self.shard.0.plan.inventory.parameters[position].name.clone();
        Err(NnError::ShardedRequiresGrad { parameter }.into())
    }

    fn group(&self) -> Option<Group> {
        Some(self.shard.0.group.clone())
    }
}
