//! Blocks that are read ahead, changed one at a time, and written behind.

use super::store::{self, BlockStore, Direction, Transfer};
use crate::error::Result;
use accelerate_core::config::OffloadTarget;
use accelerate_core::offload::{Block, BlockLayout, MAX_BLOCK_BYTES};
use accelerate_core::plan::NVME_BLOCKS_BYTES;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tch::{Device, Kind, Tensor};
use torch_ext::stream::Stream;

/// Blocks in memory at once: one is changed, the others are on their way. A disk is idle between two requests of one who waits.
const NUM_BUFFERS: usize = NVME_BLOCKS_BYTES / MAX_BLOCK_BYTES;

/// All blocks of some state, and the memory that they come to.
#[derive(Debug)]
pub(crate) struct Blocks {
    pub(crate) layout: BlockLayout,
    /// Used by one pass at a time.
    memory: Mutex<Memory>,
}

#[derive(Debug)]
struct Memory {
    store: Box<dyn BlockStore>,
    /// Kept from step to step.
    buffers: Vec<Tensor>,
}

/// What happens to a block besides being looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// It is read, and stays as it is.
    Read,
    /// It is written, whatever was there.
    Write,
    /// It is read, changed and written.
    Update,
}

impl Blocks {
    /// Room on `target` for state of tensors on `device`.
    ///
    /// # Errors
    /// The folder is not there, or there is no room in it.
    pub(crate) fn new(layout: BlockLayout, target: &OffloadTarget, device: Device) -> Result<Self> {
        let store = store::open(target, layout.num_bytes, device, NUM_BUFFERS)?;
        Ok(Self::over(layout, store))
    }

    /// `store` takes as many transfers at once as there are buffers.
    fn over(layout: BlockLayout, store: Box<dyn BlockStore>) -> Self {
        Self { layout, memory: Mutex::new(Memory { store, buffers: Vec::new() }) }
    }

    /// Brings each block that is `wanted` into memory and shows it to `visit`, in any order: its planes, each
    /// `[num_elements]` of the type and on the device that `options` gives the block. Waits for a pass of another thread.
    ///
    /// # Errors
    /// Those of `visit` and of the store; then some blocks have been changed and others not.
    pub(crate) fn run(
        &self,
        access: Access,
        wanted: impl Fn(&Block) -> bool,
        options: impl Fn(&Block) -> (Kind, Device),
        mut visit: impl FnMut(&Block, &[Tensor]) -> Result<()>,
    ) -> Result<()> {
        let blocks: Vec<&Block> = self.layout.blocks.iter().filter(|block| wanted(block)).collect();
        let largest = self.layout.blocks.iter().map(|block| block.num_bytes).max().unwrap_or(0);
        let num_planes = self.layout.num_planes;
        let change = |block: &Block, buffer: &Tensor| {
            let (kind, device) = options(block);
            let bytes = buffer.f_to_device(device)?;
            visit(block, &planes(&bytes, block, num_planes, kind)?)?;
            if device != buffer.device() && access != Access::Read {
                buffer.shallow_clone().f_copy_(&bytes)?;
            }
            hand_over(buffer.device())
        };
        let mut memory = lock(&self.memory);
        memory.settle()?;
        memory.make_buffers(NUM_BUFFERS.min(self.layout.blocks.len()), largest)?;
        memory.buffers.first().map_or(Ok(()), |buffer| hand_over(buffer.device()))?;
        memory.stream(access, &blocks, change)
    }
}

/// Threads of the store transfer what was computed here, on the default stream of the device: it waits for what this thread has asked
/// of its own.
fn hand_over(device: Device) -> Result<()> {
    if device.is_cuda() {
        let (own, of_threads) = (Stream::current(device)?, Stream::default_of(device)?);
        if own != of_threads {
            of_threads.wait_for(&own)?;
        }
    }
    Ok(())
}

impl Memory {
    /// Makes what is not there yet: all in one piece, which may be on large pages then.
    fn make_buffers(&mut self, count: usize, num_bytes: usize) -> Result<()> {
        if self.buffers.is_empty() && count > 0 {
            let memory = self.store.buffer(count * num_bytes)?;
            self.buffers = memory.f_view([count as i64, num_bytes as i64])?.f_unbind(0)?;
        }
        Ok(())
    }

    /// Takes `blocks` through `change`, the next ones being read and those before written meanwhile. An error leaves transfers
    /// behind.
    fn stream(
        &mut self,
        access: Access,
        blocks: &[&Block],
        mut change: impl FnMut(&Block, &Tensor) -> Result<()>,
    ) -> Result<()> {
        let mut next = blocks.iter();
        let mut free: Vec<usize> = (0..self.buffers.len()).collect();
        // What each buffer is in use for.
        let mut uses: Vec<Option<(&Block, Direction)>> = vec![None; self.buffers.len()];
        loop {
            // What is asked first decides: a block must not go for want of a buffer.
            let begins = free.last().copied().and_then(|number| Some((number, *next.next()?)));
            let (number, block, has_come) = match begins {
                Some((number, block)) => {
                    free.pop();
                    (number, block, access == Access::Write)
                }
                None => {
                    let Some((number, ended)) = self.store.finish()? else { return Ok(()) };
                    ended?;
                    match uses[number].take() {
                        Some((block, Direction::Read)) => (number, block, true),
                        _ => {
                            free.push(number);
                            continue;
                        }
                    }
                }
            };
            if has_come {
                change(block, &self.buffers[number])?;
            }
            let direction = if has_come { Direction::Write } else { Direction::Read };
            if has_come && access == Access::Read {
                free.push(number);
                continue;
            }
            let bytes = self.buffers[number].f_narrow(0, 0, block.num_bytes as i64)?;
            self.store.start(Transfer { direction, offset: block.file_offset, bytes, number })?;
            uses[number] = Some((block, direction));
        }
    }

    /// Waits for transfers that a pass has left behind: they use the buffers.
    fn settle(&mut self) -> Result<()> {
        loop {
            match self.store.finish() {
                Ok(None) => return Ok(()),
                // Why that pass has failed is known.
                Ok(Some(_)) => {}
                Err(error) => {
                    self.buffers.clear();
                    return Err(error);
                }
            }
        }
    }
}

fn lock(memory: &Mutex<Memory>) -> MutexGuard<'_, Memory> {
    // A pass that has panicked leaves no more behind than one that has failed.
    memory.lock().unwrap_or_else(PoisonError::into_inner)
}

fn planes(bytes: &Tensor, block: &Block, num_planes: usize, kind: Kind) -> Result<Vec<Tensor>> {
    let size = (block.num_elements * block.element_bytes) as i64;
    (0..num_planes as i64).map(|plane| Ok(bytes.f_narrow(0, plane * size, size)?.f_view_dtype(kind)?)).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::offload::store::tests::all_kinds;
    use accelerate_core::offload::Member;
    use std::collections::BTreeSet;

    const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

    fn layout() -> BlockLayout {
        let member = |num_elements, unit| Member { num_elements, element_bytes: 4, unit };
        // More blocks than buffers.
        BlockLayout::new(&[member(150_000, 0), member(3, 0), member(2_000_000, 1), member(7, 2)], 2)
    }

    fn all_blocks(layout: &BlockLayout) -> (tempfile::TempDir, Vec<Blocks>) {
        let folder = tempfile::tempdir().unwrap();
        let stores = all_kinds(folder.path(), layout.num_bytes, NUM_BUFFERS).into_iter();
        let blocks = stores.map(|store| Blocks::over(layout.clone(), store)).collect();
        (folder, blocks)
    }

    fn visited(blocks: &Blocks, access: Access, mut visit: impl FnMut(f64, &[Tensor])) -> BTreeSet<u64> {
        let mut seen = BTreeSet::new();
        let of_block = |block: &Block, planes: &[Tensor]| {
            assert!(planes.iter().all(|plane| plane.numel() == block.num_elements && plane.kind() == Kind::Float));
            assert!(seen.insert(block.file_offset), "a block is visited once");
            visit(block.file_offset as f64, planes);
            Ok(())
        };
        blocks.run(access, |_| true, |_| FLOAT, of_block).unwrap();
        seen
    }

    #[test]
    fn every_block_comes_once_and_goes_back_where_it_was() {
        let layout = layout();
        let (_folder, kinds) = all_blocks(&layout);
        for blocks in kinds {
            let all: BTreeSet<u64> = layout.blocks.iter().map(|block| block.file_offset).collect();
            assert!(all.len() > NUM_BUFFERS);
            let fill = |number: f64, planes: &[Tensor]| {
                let _ = (planes[0].shallow_clone().fill_(number), planes[1].shallow_clone().fill_(-number));
            };
            assert_eq!(visited(&blocks, Access::Write, fill), all);
            let double = |_: f64, planes: &[Tensor]| {
                planes.iter().for_each(|plane| drop(plane.shallow_clone().g_mul_scalar_(2.0)))
            };
            assert_eq!(visited(&blocks, Access::Update, double), all);
            for _ in 0..2 {
                let check = |number: f64, planes: &[Tensor]| {
                    for (plane, sign) in planes.iter().zip([2.0, -2.0]) {
                        let (low, high) = plane.aminmax(None, false);
                        let wanted = f64::from((sign * number) as f32);
                        assert_eq!((low.double_value(&[]), high.double_value(&[])), (wanted, wanted));
                        // What is read only does not stay.
                        let _ = plane.shallow_clone().zero_();
                    }
                };
                assert_eq!(visited(&blocks, Access::Read, check), all);
            }
            assert_eq!(lock(&blocks.memory).buffers.len(), NUM_BUFFERS, "memory is kept");
        }
    }

    #[test]
    fn only_what_is_wanted_moves() {
        let (_folder, kinds) = all_blocks(&layout());
        for blocks in kinds {
            let mut units = Vec::new();
            let of_block = |block: &Block, _: &[Tensor]| {
                units.push(block.unit);
                Ok(())
            };
            blocks.run(Access::Update, |block| block.unit == 2, |_| FLOAT, of_block).unwrap();
            assert_eq!(units, [2]);
            blocks
                .run(Access::Update, |_| false, |_| FLOAT, |_, _| Err(Error::other("nothing was asked for")))
                .unwrap();
        }
    }

    /// Fails to read or write one block.
    #[derive(Debug)]
    struct Failing {
        store: Box<dyn BlockStore>,
        direction: Direction,
        offset: u64,
        failed: Vec<usize>,
    }

    impl BlockStore for Failing {
        fn buffer(&self, num_bytes: usize) -> Result<Tensor> {
            self.store.buffer(num_bytes)
        }
        fn start(&mut self, transfer: Transfer) -> Result<()> {
            if (transfer.direction, transfer.offset) == (self.direction, self.offset) {
                self.failed.push(transfer.number);
                return Ok(());
            }
            self.store.start(transfer)
        }
        fn finish(&mut self) -> Result<Option<(usize, Result<()>)>> {
            match self.failed.pop() {
                Some(number) => Ok(Some((number, Err(Error::other("no transfer"))))),
                None => self.store.finish(),
            }
        }
    }

    #[test]
    fn a_failure_at_any_block_ends_the_pass_with_its_error() {
        let layout = layout();
        let folder = tempfile::tempdir().unwrap();
        let offsets: Vec<u64> = layout.blocks.iter().map(|block| block.file_offset).step_by(7).collect();
        for offset in offsets {
            for direction in [Direction::Read, Direction::Write] {
                for store in all_kinds(folder.path(), layout.num_bytes, NUM_BUFFERS) {
                    let store = Box::new(Failing { store, direction, offset, failed: Vec::new() });
                    let blocks = Blocks::over(layout.clone(), store);
                    let run = |access: Access| blocks.run(access, |_| true, |_| FLOAT, |_, _| Ok(()));
                    assert_eq!(run(Access::Update).unwrap_err().to_string(), "no transfer");
                    // What a pass need not do, it does not.
                    let other = if direction == Direction::Read { Access::Write } else { Access::Read };
                    run(other).unwrap();
                }
            }
            for store in all_kinds(folder.path(), layout.num_bytes, NUM_BUFFERS) {
                let blocks = Blocks::over(layout.clone(), store);
                let visit = |block: &Block, _: &[Tensor]| match block.file_offset == offset {
                    true => Err(Error::other("no visit")),
                    false => Ok(()),
                };
                assert_eq!(blocks.run(Access::Update, |_| true, |_| FLOAT, visit).unwrap_err().to_string(), "no visit");
                // The next pass finds everything in order again.
                assert_eq!(visited(&blocks, Access::Read, |_, _| {}).len(), layout.blocks.len());
            }
        }
    }
}
