//! Parts that are kept elsewhere while nobody computes with them: on a disk, or in the memory of the host.

use super::Shard;
use crate::error::{OffloadError, Result};
use crate::group::Group;
use crate::nn::Resident;
use crate::offload::{Blocks, Pass};
use accelerate_core::config::OffloadTarget;
use accelerate_core::offload::{Block, BlockLayout, Member};
use accelerate_core::plan::{Plan, Unit};
use std::thread::{self, JoinHandle};
use tch::{Device, Kind, Tensor};
use torch_ext::storage::{allocate_storage, free_storage};

/// Where this rank's parts are while they are not in use.
#[derive(Debug)]
pub(super) enum Home {
    /// Where they are computed with.
    Device,
    /// In the memory of the host, where optimizers step.
    Host,
    /// On a disk, block by block; in memory for the length of a step.
    Disk(Blocks),
}

impl Home {
    /// Makes room for the parts of all units. Collective: fails on all ranks if there is none for one.
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
                let failure = blocks.as_ref().err().map(ToString::to_string);
                job.check_others("offloading parameters", failure.as_deref())?;
                Ok(Self::Disk(blocks?))
            }
        }
    }

    /// Where parts are that are computed with on `device`, and their gradients.
    pub(super) fn device(&self, device: Device) -> Device {
        match self {
            Self::Host => Device::Cpu,
            Self::Device | Self::Disk(_) => device,
        }
    }

    pub(super) fn is_disk(&self) -> bool {
        matches!(self, Self::Disk(_))
    }
}

impl Shard {
    /// This rank's part of a unit, in its place in memory for the whole unit.
    pub(super) fn own_part(&self, unit: usize, whole: &Tensor) -> Result<Tensor> {
        let size = self.unit(unit).shard_elements as i64;
        let mut own = whole.f_narrow(0, size * self.0.group.rank() as i64, size)?;
        let Home::Disk(blocks) = &self.0.home else {
            let shard = self.lock().units[unit].shard.shallow_clone();
            if own.data_ptr() != shard.data_ptr() {
                own.f_copy_(&shard)?;
            }
            return Ok(own);
        };
        let ahead = self.lock().read_ahead.take_if(|ahead| ahead.unit == unit);
        match ahead {
            Some(ReadAhead { part, .. }) => own.f_copy_(&part.join().map_err(|_| OffloadError::ThreadGone)??)?,
            None => self.read_part(blocks, unit, &own)?,
        }
        Ok(own)
    }

    /// Begins to read this rank's part of a unit that will be gathered next, beside what is computed meanwhile.
    pub(super) fn read_ahead(&self, unit: usize) {
        let mut state = self.lock();
        if !self.0.home.is_disk() || state.read_ahead.as_ref().is_some_and(|ahead| ahead.unit == unit) {
            return;
        }
        let shard = self.clone();
        let builder = thread::Builder::new().name("offload".to_owned());
        let part = builder.spawn(move || {
            let Home::Disk(blocks) = &shard.0.home else { return Ok(Tensor::new()) };
            let kind = shard.lock().units[unit].shard.f_kind()?;
            let part = Tensor::f_empty([shard.unit(unit).shard_elements as i64], (kind, Device::Cpu))?;
            shard.read_part(blocks, unit, &part)?;
            Ok(part)
        });
        // Without a thread the part is read when it is needed.
        state.read_ahead = part.ok().map(|part| ReadAhead { unit, part });
    }

    /// Fills `place`, as many elements of any type, with this rank's part of a unit.
    fn read_part(&self, blocks: &Blocks, unit: usize, place: &Tensor) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        self.each_block(blocks, unit, Pass::Read, |plane, start| {
            place.f_narrow(0, start, plane.numel() as i64)?.f_copy_(plane)?;
            Ok(())
        })
    }

    /// Keeps this rank's part of a unit, which is in memory.
    fn write_part(&self, blocks: &Blocks, unit: usize) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let shard = {
            let mut state = self.lock();
            // It may have read what is there now.
            drop(state.read_ahead.take_if(|ahead| ahead.unit == unit));
            state.units[unit].shard.f_detach()?
        };
        self.each_block(blocks, unit, Pass::Write, |plane, start| {
            plane.shallow_clone().f_copy_(&shard.f_narrow(0, start, plane.numel() as i64)?)?;
            Ok(())
        })
    }

    /// Calls `visit` with the elements of each block of a unit, and where they begin.
    fn each_block(
        &self,
        blocks: &Blocks,
        unit: usize,
        pass: Pass,
        mut visit: impl FnMut(&Tensor, i64) -> Result<()>,
    ) -> Result<()> {
        let kind = self.lock().units[unit].shard.f_kind()?;
        let options: (Kind, Device) = (kind, Device::Cpu);
        let visit = |block: &Block, planes: &[Tensor]| {
            block
                .segments
                .iter()
                .try_for_each(|own| visit(&planes[0].f_narrow(0, own.at as i64, own.len as i64)?, own.start as i64))
        };
        blocks.run(pass, |block| block.unit == unit, |_| options, visit)
    }

    /// Brings this rank's part of a unit into memory, unless it always is there.
    pub(super) fn bring(&self, unit: usize) -> Result<Option<Box<dyn Resident>>> {
        let Home::Disk(blocks) = &self.0.home else { return Ok(None) };
        let (shard, is_first_user) = {
            let mut state = self.lock();
            state.units[unit].num_users += 1;
            (state.units[unit].shard.shallow_clone(), state.units[unit].num_users == 1)
        };
        // From here on it goes when this value does.
        let resident = Box::new(ResidentPart { shard: self.clone(), unit });
        if is_first_user {
            allocate_storage(&shard, self.unit(unit).shard_elements * shard.f_kind()?.elt_size_in_bytes())?;
            self.read_part(blocks, unit, &shard.f_detach()?)?;
        }
        Ok(Some(resident))
    }

    /// A unit's part is complete and goes where it is kept.
    pub(super) fn put_away(&self, unit: usize) -> Result<()> {
        let Home::Disk(blocks) = &self.0.home else { return Ok(()) };
        self.write_part(blocks, unit)?;
        let shard = self.lock().units[unit].shard.shallow_clone();
        Ok(free_storage(&shard)?)
    }
}

/// A unit's part on its way from the disk.
pub(super) struct ReadAhead {
    unit: usize,
    /// `[shard_elements]` on the CPU.
    part: JoinHandle<Result<Tensor>>,
}

/// A unit's part in memory.
struct ResidentPart {
    shard: Shard,
    unit: usize,
}

impl Resident for ResidentPart {
    fn keep_changes(self: Box<Self>) -> Result<()> {
        match &self.shard.0.home {
            Home::Disk(blocks) => self.shard.write_part(blocks, self.unit),
            Home::Device | Home::Host => Ok(()),
        }
    }
}

impl Drop for ResidentPart {
    fn drop(&mut self) {
        let mut state = self.shard.lock();
        let unit = &mut state.units[self.unit];
        unit.num_users -= 1;
        if unit.num_users == 0
            && let Err(error) = free_storage(&unit.shard)
        {
            tracing::error!("memory of an offloaded part stays: {error}");
        }
    }
}
