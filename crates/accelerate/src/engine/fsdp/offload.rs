//! Shards that are kept elsewhere while nobody computes with them: on a disk, or in the memory of the host.

use super::units::Units;
use crate::error::{OffloadError, Result};
use crate::group::Group;
use crate::messages;
use crate::nn::Resident;
use crate::offload::{Access, Blocks};
use accelerate_core::config::OffloadTarget;
use accelerate_core::offload::{Block, BlockLayout, Member};
use accelerate_core::plan::{Plan, Unit};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use tch::{Device, Kind, Tensor};
use torch_ext::storage::{allocate_storage, free_storage};

/// Where this rank's shards are while they are not in use.
#[derive(Debug)]
pub(super) enum OffloadPlacement {
    /// Where they are computed with.
    Device,
    /// In the memory of the host, where optimizers step.
    Host,
    /// On a disk, block by block; in memory for the length of a step.
    Disk(Blocks),
}

impl OffloadPlacement {
    /// Makes room for the shards of all units. Collective: fails on all ranks if there is none for one.
    pub(super) fn new(job: &Group, target: Option<&OffloadTarget>, plan: &Plan, device: Device) -> Result<Self> {
        match target {
            Some(OffloadTarget::Cpu) if device != Device::Cpu => Ok(Self::Host),
            Some(OffloadTarget::Cpu) | None => Ok(Self::Device),
            Some(target) => {
                let member = |(unit, content): (usize, &Unit)| {
                    let first = &plan.inventory.parameters[content.parameters[0]];
                    Member { num_elements: content.shard_elements, element_bytes: first.element_bytes, unit }
                };
                let members: Vec<Member> = plan.units.iter().enumerate().map(member).collect();
                let layout = BlockLayout::new(&members, 1);
                let blocks = Blocks::new(layout, target, Device::Cpu);
                Ok(Self::Disk(job.agree_on_success("offloading parameters", blocks)?))
            }
        }
    }

    /// Where shards are that are computed with on `device`, and their gradients.
    pub(super) fn device(&self, device: Device) -> Device {
        match self {
            Self::Host => Device::Cpu,
            Self::Device | Self::Disk(_) => device,
        }
    }
}

/// Brings shards from where they are kept, and back.
pub(super) struct Offloader {
    placement: OffloadPlacement,
    units: Arc<Units>,
    state: Mutex<State>,
}

struct State {
    read_ahead: Option<ReadAhead>,
    /// How many need the shard of each unit in memory.
    num_users: Vec<usize>,
}

/// A shard on its way from the disk.
struct ReadAhead {
    unit: usize,
    /// `[shard_elements]` on the CPU.
    shard: JoinHandle<Result<Tensor>>,
}

impl Offloader {
    pub(super) fn new(placement: OffloadPlacement, units: Arc<Units>) -> Self {
        let num_users = vec![0; units.len()];
        Self { placement, units, state: Mutex::new(State { read_ahead: None, num_users }) }
    }

    // Every statement leaves the state whole, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn disk(&self) -> Option<&Blocks> {
        match &self.placement {
            OffloadPlacement::Disk(blocks) => Some(blocks),
            OffloadPlacement::Device | OffloadPlacement::Host => None,
        }
    }

    /// Have shards memory only while somebody has [loaded](Self::load) them?
    pub(super) fn is_on_disk(&self) -> bool {
        self.disk().is_some()
    }

    /// This rank's shard of a unit, in its place in memory for the unsharded unit.
    pub(super) fn place_shard(&self, unit: usize, full: &Tensor) -> Result<Tensor> {
        let mut own = self.units.place_of_shard(unit, full)?;
        if let Some(blocks) = self.disk() {
            self.read_to(&mut own, blocks, unit)?;
            return Ok(own);
        }
        let shard = self.units.shard(unit);
        if own.data_ptr() != shard.data_ptr() {
            own.f_copy_(&shard)?;
        }
        Ok(own)
    }

    /// This rank's shard of a unit where it is in memory, or a copy of what is on the disk.
    pub(super) fn shard_in_memory(&self, unit: usize) -> Result<Tensor> {
        let shard = self.units.shard(unit);
        let Some(blocks) = self.disk() else { return Ok(shard) };
        let mut copy = Tensor::f_empty([shard.numel() as i64], (shard.f_kind()?, Device::Cpu))?;
        self.read_to(&mut copy, blocks, unit)?;
        Ok(copy)
    }

    /// Fills `own` with this rank's shard of a unit, which may have been read ahead.
    fn read_to(&self, own: &mut Tensor, blocks: &Blocks, unit: usize) -> Result<()> {
        let ahead = self.lock().read_ahead.take_if(|ahead| ahead.unit == unit);
        match ahead {
            Some(ReadAhead { shard, .. }) => own.f_copy_(&shard.join().map_err(|_| OffloadError::ThreadGone)??)?,
            None => self.read(blocks, unit, own)?,
        }
        Ok(())
    }

    /// Begins to read this rank's shard of a unit that will be gathered next, beside what is computed meanwhile.
    pub(super) fn read_ahead(self: &Arc<Self>, unit: usize) {
        let mut state = self.lock();
        if !self.is_on_disk() || state.read_ahead.as_ref().is_some_and(|ahead| ahead.unit == unit) {
            return;
        }
        let offloader = Arc::clone(self);
        let builder = thread::Builder::new().name("offload".to_owned());
        let shard = builder.spawn(move || {
            let Some(blocks) = offloader.disk() else { return Ok(Tensor::new()) };
            let like = offloader.units.shard(unit);
            let shard = Tensor::f_empty([like.numel() as i64], (like.f_kind()?, Device::Cpu))?;
            offloader.read(blocks, unit, &shard)?;
            Ok(shard)
        });
        // Without a thread the shard is read when it is needed.
        state.read_ahead = shard.ok().map(|shard| ReadAhead { unit, shard });
    }

    /// Fills `place`, as many elements of any type, with this rank's shard of a unit.
    fn read(&self, blocks: &Blocks, unit: usize, place: &Tensor) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        self.each_block(blocks, unit, Access::Read, |plane, start| {
            place.f_narrow(0, start, plane.numel() as i64)?.f_copy_(plane)?;
            Ok(())
        })
    }

    /// Keeps this rank's shard of a unit, which is in memory.
    fn write(&self, blocks: &Blocks, unit: usize) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        // It may have read what is there now.
        let outdated = self.lock().read_ahead.take_if(|ahead| ahead.unit == unit);
        drop(outdated);
        let shard = self.units.shard(unit).f_detach()?;
        self.each_block(blocks, unit, Access::Write, |plane, start| {
            plane.shallow_clone().f_copy_(&shard.f_narrow(0, start, plane.numel() as i64)?)?;
            Ok(())
        })
    }

    /// Calls `visit` with the elements of each block of a unit, and where they begin.
    fn each_block(
        &self,
        blocks: &Blocks,
        unit: usize,
        access: Access,
        mut visit: impl FnMut(&Tensor, i64) -> Result<()>,
    ) -> Result<()> {
        let options: (Kind, Device) = (self.units.shard(unit).f_kind()?, Device::Cpu);
        let visit = |block: &Block, planes: &[Tensor]| {
            block
                .segments
                .iter()
                .try_for_each(|own| visit(&planes[0].f_narrow(0, own.at as i64, own.len as i64)?, own.start as i64))
        };
        blocks.run(access, |block| block.unit == unit, |_| options, visit)
    }

    /// Loads this rank's shard of a unit into memory, unless it always is there.
    pub(super) fn load(self: &Arc<Self>, unit: usize) -> Result<Option<Box<dyn Resident>>> {
        let Some(blocks) = self.disk() else { return Ok(None) };
        let is_first_user = {
            let num_users = &mut self.lock().num_users[unit];
            *num_users += 1;
            *num_users == 1
        };
        // From here on it goes when this value does.
        let resident = Box::new(ResidentShard { offloader: Arc::clone(self), unit });
        if is_first_user {
            let shard = self.units.shard(unit);
            allocate_storage(&shard, shard.numel() * shard.f_kind()?.elt_size_in_bytes())?;
            self.read(blocks, unit, &shard.f_detach()?)?;
        }
        Ok(Some(resident))
    }

    /// A unit's shard is complete and goes where it is kept.
    pub(super) fn store(&self, unit: usize) -> Result<()> {
        let Some(blocks) = self.disk() else { return Ok(()) };
        self.write(blocks, unit)?;
        Ok(free_storage(&self.units.shard(unit))?)
    }
}

/// A unit's shard in memory.
struct ResidentShard {
    offloader: Arc<Offloader>,
    unit: usize,
}

impl Resident for ResidentShard {
    fn store(self: Box<Self>) -> Result<()> {
        self.offloader.disk().map_or(Ok(()), |blocks| self.offloader.write(blocks, self.unit))
    }
}

impl Drop for ResidentShard {
    fn drop(&mut self) {
        let mut state = self.offloader.lock();
        let num_users = &mut state.num_users[self.unit];
        *num_users -= 1;
        // Under the lock, so that nobody loads it meanwhile.
        if *num_users == 0
            && let Err(error) = free_storage(&self.offloader.units.shard(self.unit))
        {
            messages::error!("memory of an offloaded shard stays: {error}");
        }
    }
}
