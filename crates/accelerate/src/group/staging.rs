//! Sums of tensors that are too large for a board. They go block by block through staging buffers, memory that all ranks have mapped.
//!
//! Each rank adds up one part of the tensor ([`ring`]). A block of a part takes three steps. All other ranks copy their versions into
//! their staging buffers (sent). The rank adds them to its own one, in its tensor, and copies the sum into its staging buffer (summed).
//! The others copy it into their tensors (taken). Blocks of several ranks are in different steps at one time, so that nobody waits for
//! long, and are in the caches of the processors from their first step to their last. So memory is read and written once.
//!
//! A staging buffer has a few slots for each part, which blocks use in turn. Whoever fills a slot again waits until all others have
//! read what it held, also at the beginning of the next call. So a call ends without a last meeting of the ranks.
//!
//! What one processor has written last lies in its caches. Where another one has to fetch it from there across the machine, line by
//! line, that takes several times as long as reading memory. So ranks measure how far away they are from each other, and those that
//! are far apart write past their caches.

use crate::error::Result;
use accelerate_core::ring;
use std::io;
use std::ops::Range;
use std::time::Duration;
use tch::{Kind, Tensor};
use torch_ext::storage::{Stores, add_and_copy_floats, copy_bytes};

/// Of each part. While one block is read, others are filled.
const SLOTS: usize = 8;

/// Of all slots of a rank. They stay in the second cache of a processor, or nearly so.
const STAGING_BYTES: usize = 1 << 20;

/// Who needs longer for a line that a peer has written does not share a cache with it. Processors that do need some 50 ns, and others
/// 130 ns and more.
const FAR: Duration = Duration::from_nanos(90);

/// From this size of a tensor on, measuring costs nothing beside the sum.
pub(super) const MEASURED_BYTES: usize = 128 << 10;

/// A block begins where no other one's line of the cache ends.
const ALIGNMENT: usize = 64;

/// Bytes of a block, where so many ranks share a staging buffer.
fn block_bytes(world_size: usize) -> usize {
    (STAGING_BYTES / (SLOTS * world_size) / ALIGNMENT).max(1) * ALIGNMENT
}

/// Bytes of a rank's staging buffer.
pub(super) fn staging_bytes(world_size: usize) -> usize {
    SLOTS * world_size * block_bytes(world_size)
}

/// The staging buffers of all ranks.
pub(super) struct Staging {
    rank: usize,
    /// By rank. Each has slots for every part: those of the own one hold sums, and the others versions.
    buffers: Vec<Tensor>,
    block_bytes: usize,
    /// Blocks of all calls so far.
    pub(super) num_blocks: i64,
    /// The slots of the other ranks for this rank's part, as elements of the kind of the last sum.
    versions: Option<(Kind, Vec<Vec<Tensor>>)>,
    stores: Stores,
}

impl Staging {
    pub(super) fn new(rank: usize, buffers: Vec<Tensor>) -> Self {
        let block_bytes = block_bytes(buffers.len());
        Self { rank, buffers, block_bytes, num_blocks: 0, versions: None, stores: Stores::NonTemporal }
    }

    /// Writes from now on as is best for peers of which the farthest needs so long for a line of the cache.
    pub(super) fn write_for(&mut self, time_to_read: Duration) {
        self.stores = if time_to_read < FAR { Stores::Cached } else { Stores::NonTemporal };
    }

    /// How a tensor of one dimension goes.
    pub(super) fn blocks_of<'a>(&self, tensor: &'a Tensor) -> Result<Blocks<'a>> {
        let kind = tensor.f_kind()?;
        let element_bytes = kind.elt_size_in_bytes();
        let parts = ring::parts(tensor.numel(), element_bytes, self.buffers.len());
        Ok(Blocks { tensor, kind, parts, element_bytes, block_numel: self.block_bytes / element_bytes })
    }

    /// Makes the slots readable as elements of this kind.
    pub(super) fn read_as(&mut self, kind: Kind) -> Result<()> {
        if self.versions.as_ref().is_some_and(|(found, _)| *found == kind) {
            return Ok(());
        }
        let slot_of = |buffer: &Tensor, slot| -> Result<Tensor> {
            let start = self.byte(self.rank, slot) as i64;
            Ok(buffer.f_narrow(0, start, self.block_bytes as i64)?.f_view_dtype(kind)?)
        };
        let slots_of = |buffer: &Tensor| (0..SLOTS).map(|slot| slot_of(buffer, slot)).collect::<Result<Vec<_>>>();
        let versions = self.buffers.iter().map(slots_of).collect::<Result<_>>()?;
        self.versions = Some((kind, versions));
        Ok(())
    }

    /// Where a slot for rank `part`'s part begins.
    fn byte(&self, part: usize, slot: usize) -> usize {
        (part * SLOTS + slot) * self.block_bytes
    }

    /// The slot of a block of this call.
    fn slot(&self, block: usize) -> usize {
        (self.num_blocks as usize + block) % SLOTS
    }

    /// How many blocks, of all calls, have to be through before the slot of this one is free.
    pub(super) fn num_before(&self, block: usize) -> i64 {
        self.num_blocks + block as i64 + 1 - SLOTS as i64
    }

    /// The number of this block among those of all calls, counted from 1.
    pub(super) fn number(&self, block: usize) -> i64 {
        self.num_blocks + block as i64 + 1
    }

    /// Copies this rank's version of a block of another rank's part into its staging buffer.
    pub(super) fn send(&self, blocks: &Blocks<'_>, part: usize, block: usize) -> io::Result<()> {
        let (start, num_bytes) = blocks.bytes(part, block);
        let place = self.byte(part, self.slot(block));
        copy_bytes((blocks.tensor, start), (&self.buffers[self.rank], place), num_bytes, self.stores)
    }

    /// A block of this rank's part as rank `from` has it.
    pub(super) fn version(&self, blocks: &Blocks<'_>, from: usize, block: usize) -> Result<Tensor> {
        let numel = blocks.range(self.rank, block).len() as i64;
        let Some((_, versions)) = &self.versions else { return Ok(Tensor::f_empty([0], tch::kind::FLOAT_CPU)?) };
        Ok(versions[from][self.slot(block)].f_narrow(0, 0, numel)?)
    }

    /// Copies the sum of a block of this rank's part into its staging buffer.
    pub(super) fn show(&self, blocks: &Blocks<'_>, block: usize) -> io::Result<()> {
        self.send(blocks, self.rank, block)
    }

    /// Adds the version of rank `from`, or what was made of it, to the own one of float32, and copies the sum into the staging buffer.
    pub(super) fn add_and_show(&self, blocks: &Blocks<'_>, from: usize, block: usize) -> io::Result<()> {
        let (start, _) = blocks.bytes(self.rank, block);
        let numel = blocks.range(self.rank, block).len();
        let place = self.byte(self.rank, self.slot(block));
        let own = &self.buffers[self.rank];
        add_and_copy_floats((&self.buffers[from], place), (blocks.tensor, start), (own, place), numel, self.stores)
    }

    /// Copies the sum of a block of rank `part`'s part out of its staging buffer.
    pub(super) fn take(&self, blocks: &Blocks<'_>, part: usize, block: usize) -> io::Result<()> {
        let (start, num_bytes) = blocks.bytes(part, block);
        let place = self.byte(part, self.slot(block));
        copy_bytes((&self.buffers[part], place), (blocks.tensor, start), num_bytes, Stores::Cached)
    }
}

/// A tensor in parts of blocks.
pub(super) struct Blocks<'a> {
    tensor: &'a Tensor,
    pub(super) kind: Kind,
    parts: Vec<Range<usize>>,
    element_bytes: usize,
    block_numel: usize,
}

impl Blocks<'_> {
    /// Of the longest part.
    pub(super) fn num_blocks(&self) -> usize {
        let longest = self.parts.iter().map(Range::len).max().unwrap_or_default();
        longest.div_ceil(self.block_numel)
    }

    /// The elements of a block of rank `part`'s part, none where the part is shorter than others.
    fn range(&self, part: usize, block: usize) -> Range<usize> {
        let part = &self.parts[part];
        let start = (part.start + block * self.block_numel).min(part.end);
        start..(start + self.block_numel).min(part.end)
    }

    /// Where they begin, and how many bytes they have.
    fn bytes(&self, part: usize, block: usize) -> (usize, usize) {
        let range = self.range(part, block);
        (range.start * self.element_bytes, range.len() * self.element_bytes)
    }

    /// This rank's own numbers.
    pub(super) fn block(&self, part: usize, block: usize) -> Result<Tensor> {
        let range = self.range(part, block);
        Ok(self.tensor.f_narrow(0, range.start as i64, range.len() as i64)?)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tch::Device;

    fn staging(rank: usize, world_size: usize) -> Staging {
        let buffer = || Tensor::zeros([staging_bytes(world_size) as i64], (Kind::Uint8, Device::Cpu));
        Staging::new(rank, (0..world_size).map(|_| buffer()).collect())
    }

    #[test]
    fn blocks_of_all_parts_are_every_element_once() {
        for world_size in [1, 2, 3, 4, 7, 64] {
            let staging = staging(0, world_size);
            for (numel, kind) in [(1, Kind::Float), (70_001, Kind::Half), (500_000, Kind::Double), (99, Kind::Uint8)] {
                let tensor = Tensor::zeros([numel], (kind, Device::Cpu));
                let blocks = staging.blocks_of(&tensor).unwrap();
                let mut end = 0;
                for part in 0..world_size {
                    for block in 0..blocks.num_blocks() {
                        let range = blocks.range(part, block);
                        if range.is_empty() {
                            continue;
                        }
                        assert_eq!(range.start, end, "{world_size} ranks, {numel} {kind:?}");
                        let (_, num_bytes) = blocks.bytes(part, block);
                        assert!(num_bytes <= staging.block_bytes);
                        end = range.end;
                    }
                }
                assert_eq!(end, numel as usize);
            }
        }
    }

    #[test]
    fn slots_fill_a_buffer_and_share_no_line() {
        for world_size in [1, 2, 3, 5, 64, 5000] {
            let num_bytes = staging_bytes(world_size);
            let block_bytes = block_bytes(world_size);
            assert_eq!((num_bytes, block_bytes % ALIGNMENT), (world_size * SLOTS * block_bytes, 0));
            assert!(num_bytes <= STAGING_BYTES || block_bytes == ALIGNMENT);
        }
        let staging = staging(1, 3);
        let mut starts: Vec<usize> = (0..3)
            .flat_map(|part| (0..SLOTS).map(move |slot| (part, slot)))
            .map(|(part, slot)| staging.byte(part, slot))
            .collect();
        starts.sort_unstable();
        assert!(starts.iter().enumerate().all(|(number, start)| *start == number * staging.block_bytes));
    }

    /// Without memory that is shared: what one rank writes is where the other one looks for it.
    #[test]
    fn a_block_goes_from_its_rank_to_the_one_that_adds_and_back() {
        let mut ranks = [staging(0, 2), staging(1, 2)];
        let kind = Kind::Int;
        let tensors = [0, 1].map(|rank| Tensor::arange(100_000, (kind, Device::Cpu)) + 1_000_000 * rank);
        let (theirs, block) = (Tensor::zeros([100_000], (kind, Device::Cpu)), 2);
        for (staging, num_blocks) in ranks.iter_mut().zip([5, 5]) {
            staging.read_as(kind).unwrap();
            staging.num_blocks = num_blocks;
        }
        let [first, second] = &ranks;
        let blocks = first.blocks_of(&tensors[0]).unwrap();
        first.send(&blocks, 1, block).unwrap();
        // As if both had mapped it.
        let _ = second.buffers[0].shallow_clone().copy_(&first.buffers[0]);
        let own = second.blocks_of(&tensors[1]).unwrap();
        assert_eq!(second.version(&own, 0, block).unwrap(), blocks.block(1, block).unwrap());
        second.show(&own, block).unwrap();
        let _ = first.buffers[1].shallow_clone().copy_(&second.buffers[1]);
        let place = first.blocks_of(&theirs).unwrap();
        first.take(&place, 1, block).unwrap();
        assert_eq!(place.block(1, block).unwrap(), own.block(1, block).unwrap());
        assert_eq!(i64::try_from(&theirs.ne(0).sum(Kind::Int64)).unwrap(), own.range(1, block).len() as i64);
    }

    #[test]
    fn only_ranks_that_are_far_apart_write_past_their_caches() {
        let mut staging = staging(0, 2);
        for (nanoseconds, wanted) in [(45, Stores::Cached), (145, Stores::NonTemporal), (30, Stores::Cached)] {
            staging.write_for(Duration::from_nanos(nanoseconds));
            assert_eq!(staging.stores, wanted);
        }
    }
}
