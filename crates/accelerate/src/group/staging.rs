//! Tensors that are too large for a board go through shared memory, block by block.
//!
//! Each rank has a staging buffer, memory that all ranks have mapped. Blocks of parts that are only moved, or reduced where they arrive,
//! take two steps: a rank copies its block into its staging buffer (sent), and those who get it copy it from there (received). In turn
//! `n` of a call, a rank sends its block `n` of every part and receives the blocks `n - LEAD`. So ranks need not be in step, and a block
//! stays in the caches from its first step to its last.
//!
//! An all-reduce is a reduce-scatter and an all-gather, pipelined. Each rank reduces one part of the tensor ([`ring`]), and a block takes
//! three steps. All other ranks send their contributions. The part's rank combines them with its own one, in its tensor, and copies the
//! result into its staging buffer (reduced). The others receive it. In turn `n`, a rank sends its block `n`, reduces its block
//! `n - LEAD` and receives the blocks `n - 2 * LEAD`.
//!
//! A staging buffer has a few slots for each part, which blocks use in turn: block `n` has the slot of block `n - SLOTS`. No rank fills a
//! slot that another one still reads, and this is why:
//!
//! - No rank begins to send before all ranks need nothing more of each other in the call before.
//! - Moved: a rank in turn `n` has received block `n - 1 - LEAD`, for which it has waited until all others had sent it. They were in turn
//!   `n - 1 - LEAD` then, and had received block `n - 2 - 2 * LEAD`. `SLOTS` is at least `2 * LEAD + 2`, so block `n - SLOTS` is that
//!   block or an earlier one.
//! - Reduced: a rank in turn `n` has received block `n - 1 - 2 * LEAD` of every part, so all others have reduced that block: its
//!   contribution is not needed any more. A rank that reduces block `n` has seen that all others have sent it, so they are in turn `n`
//!   as well, and have received block `n - 1 - 2 * LEAD`: its result is not needed any more.
//!
//! What one processor has written last lies in its caches. Where another one has to fetch it from there across the machine, line by
//! line, that takes several times as long as reading memory. So each rank measures how far away the others are, which is as far as it
//! is from them, and writes past its caches if one of them is far.
//!
//! Method: buffers with slots as in NCCL (`NCCL_STEPS`), fragments in shared memory as in Open MPI's `coll/sm`.

use crate::error::{Error, Result};
use accelerate_core::ring;
use std::io;
use std::ops::Range;
use std::time::Duration;
use tch::{Kind, Tensor};
use torch_ext::storage::{CopyMode, add_and_copy_floats, copy_bytes};

/// Slots per part.
const SLOTS: usize = 8;

/// How many blocks each step is ahead of the next one.
pub(super) const LEAD: usize = 3;

// A slot is filled again only after its block is through all steps, as the head of this file says.
const _: () = assert!(2 * LEAD + 2 <= SLOTS);

/// Bytes of all slots of a rank.
const STAGING_BYTES: usize = 1 << 20;

/// The most that a block of a part that is moved has: more would not stay in the second cache until it is received.
const MOST_MOVED_BYTES: usize = 64 << 10;

/// Blocks begin at lines of the cache.
const ALIGNMENT: usize = 64;

/// Processors that share a cache take some 50 ns for a line that one of them has written last, and others 130 ns and more.
const FAR_LINE: Duration = Duration::from_nanos(90);

/// Bytes of a block, where so many parts share a staging buffer.
fn block_bytes(num_parts: usize) -> usize {
    (STAGING_BYTES / (SLOTS * num_parts) / ALIGNMENT).max(1) * ALIGNMENT
}

/// Bytes of a rank's staging buffer.
pub(super) fn staging_bytes(world_size: usize) -> usize {
    SLOTS * world_size * block_bytes(world_size)
}

/// The staging buffers of all ranks.
pub(super) struct Staging {
    rank: usize,
    /// By rank. Each has slots for every part: those of the own part hold results, and the others contributions.
    buffers: Vec<Tensor>,
    block_bytes: usize,
    /// Blocks of all calls so far.
    num_blocks: i64,
    /// The slots of all ranks for this rank's part, as elements of the kind of the last call.
    contributions: Option<(Kind, Vec<Vec<Tensor>>)>,
    /// How staging buffers are written.
    mode: CopyMode,
}

impl Staging {
    pub(super) fn new(rank: usize, buffers: Vec<Tensor>) -> Self {
        let block_bytes = block_bytes(buffers.len());
        Self { rank, buffers, block_bytes, num_blocks: 0, contributions: None, mode: CopyMode::Cached }
    }

    /// How long it has just taken to read a line of the cache that the farthest rank has written.
    pub(super) fn measured(&mut self, line: Duration) {
        self.mode = if line < FAR_LINE { CopyMode::Cached } else { CopyMode::NonTemporal };
    }

    /// A tensor of one dimension in the parts of an all-reduce, and their blocks.
    pub(super) fn ring_blocks<'a>(&mut self, tensor: &'a Tensor) -> Result<Blocks<'a>> {
        let parts = ring::parts(tensor.numel(), tensor.f_kind()?.elt_size_in_bytes(), self.buffers.len());
        self.blocks_of(tensor, parts)
    }

    /// A tensor of one dimension in equal parts, and their blocks.
    pub(super) fn equal_blocks<'a>(&mut self, tensor: &'a Tensor) -> Result<Blocks<'a>> {
        let world_size = self.buffers.len();
        let part = tensor.numel() / world_size;
        self.blocks_of(tensor, (0..world_size).map(|rank| rank * part..(rank + 1) * part).collect())
    }

    fn blocks_of<'a>(&mut self, tensor: &'a Tensor, parts: Vec<Range<usize>>) -> Result<Blocks<'a>> {
        let kind = tensor.f_kind()?;
        let element_bytes = kind.elt_size_in_bytes();
        if self.contributions.as_ref().is_none_or(|(found, _)| *found != kind) {
            self.contributions = Some((kind, self.slots_as(kind)?));
        }
        let (mode, block_numel) = (self.mode, self.block_bytes / element_bytes);
        Ok(Blocks { tensor, kind, parts, element_bytes, block_numel, mode })
    }

    /// The slots of each rank for this rank's part.
    fn slots_as(&self, kind: Kind) -> Result<Vec<Vec<Tensor>>> {
        let slot_of = |buffer: &Tensor, slot| -> Result<Tensor> {
            let start = self.byte(self.rank, slot) as i64;
            Ok(buffer.f_narrow(0, start, self.block_bytes as i64)?.f_view_dtype(kind)?)
        };
        let slots_of = |buffer: &Tensor| (0..SLOTS).map(|slot| slot_of(buffer, slot)).collect();
        self.buffers.iter().map(slots_of).collect()
    }

    /// Where a slot for rank `part`'s part begins.
    fn byte(&self, part: usize, slot: usize) -> usize {
        (part * SLOTS + slot) * self.block_bytes
    }

    /// The slot of a block of this call.
    fn slot(&self, block: usize) -> usize {
        (self.num_blocks as usize + block) % SLOTS
    }

    /// The number of a block of this call among those of all calls, counted from 1.
    pub(super) fn number(&self, block: usize) -> i64 {
        self.num_blocks + block as i64 + 1
    }

    /// A call of so many blocks has ended.
    pub(super) fn end_call(&mut self, num_blocks: usize) {
        self.num_blocks += num_blocks as i64;
    }

    /// Copies this rank's numbers of a block of rank `part`'s part into its staging buffer: its contribution to another one's part, or the
    /// result of its own.
    pub(super) fn send(&self, blocks: &Blocks<'_>, part: usize, block: usize) -> io::Result<()> {
        let (start, num_bytes) = blocks.bytes(part, block);
        let place = self.byte(part, self.slot(block));
        copy_bytes((blocks.tensor, start), (&self.buffers[self.rank], place), num_bytes, blocks.mode)
    }

    /// What rank `from` contributes to a block of this rank's part, in its staging buffer.
    pub(super) fn contribution(&self, blocks: &Blocks<'_>, from: usize, block: usize) -> Result<Tensor> {
        let numel = blocks.range(self.rank, block).len() as i64;
        let slots = self.contributions.as_ref().and_then(|(_, slots)| slots.get(from));
        let slot = slots.and_then(|slots| slots.get(self.slot(block)));
        let slot = slot.ok_or_else(|| Error::other(format!("rank {from} has no staging buffer")))?;
        Ok(slot.f_narrow(0, 0, numel)?)
    }

    /// Adds what rank `from` contributes to a block of this rank's part of float32, and copies the result into the staging buffer.
    pub(super) fn add_and_send(&self, blocks: &Blocks<'_>, from: usize, block: usize) -> io::Result<()> {
        let (start, _) = blocks.bytes(self.rank, block);
        let numel = blocks.range(self.rank, block).len();
        let place = self.byte(self.rank, self.slot(block));
        let own = &self.buffers[self.rank];
        add_and_copy_floats((&self.buffers[from], place), (blocks.tensor, start), (own, place), numel, blocks.mode)
    }

    /// Copies the result of a block of rank `part`'s part out of that rank's staging buffer.
    pub(super) fn receive(&self, blocks: &Blocks<'_>, part: usize, block: usize) -> io::Result<()> {
        let (start, num_bytes) = blocks.bytes(part, block);
        let place = self.byte(part, self.slot(block));
        copy_bytes((&self.buffers[part], place), (blocks.tensor, start), num_bytes, CopyMode::Cached)
    }

    /// Copies a block of a part of this rank's tensor into its staging buffer.
    pub(super) fn send_part(&self, blocks: MovedBlocks, tensor: &Tensor, part: usize, block: usize) -> io::Result<()> {
        let (start, num_bytes) = blocks.bytes(block);
        let place = blocks.place(part, self.slot(block));
        let own = (&self.buffers[self.rank], place);
        copy_bytes((tensor, part * blocks.part_bytes + start), own, num_bytes, self.mode)
    }

    /// Copies a block of a part of rank `from`'s tensor out of that rank's staging buffer, into a tensor that is for this part.
    pub(super) fn receive_part(
        &self,
        blocks: MovedBlocks,
        (from, part): (usize, usize),
        tensor: &Tensor,
        block: usize,
    ) -> io::Result<()> {
        let (start, num_bytes) = blocks.bytes(block);
        let place = blocks.place(part, self.slot(block));
        copy_bytes((&self.buffers[from], place), (tensor, start), num_bytes, CopyMode::Cached)
    }
}

/// The blocks of parts that go from ranks to others as they are, where each rank has so many parts of `part_bytes` bytes each.
#[derive(Clone, Copy)]
pub(super) struct MovedBlocks {
    part_bytes: usize,
    block_bytes: usize,
}

impl MovedBlocks {
    pub(super) fn new(num_parts: usize, part_bytes: usize) -> Self {
        Self { part_bytes, block_bytes: block_bytes(num_parts).min(MOST_MOVED_BYTES) }
    }

    /// Blocks of a part.
    pub(super) fn num_blocks(self) -> usize {
        self.part_bytes.div_ceil(self.block_bytes)
    }

    /// Where a block begins in its part, and how many bytes it has.
    fn bytes(self, block: usize) -> (usize, usize) {
        let start = block * self.block_bytes;
        (start, self.block_bytes.min(self.part_bytes.saturating_sub(start)))
    }

    /// Where the slot of a block begins in a staging buffer.
    fn place(self, part: usize, slot: usize) -> usize {
        (part * SLOTS + slot) * self.block_bytes
    }
}

/// A tensor in parts of blocks.
pub(super) struct Blocks<'a> {
    tensor: &'a Tensor,
    pub(super) kind: Kind,
    parts: Vec<Range<usize>>,
    element_bytes: usize,
    block_numel: usize,
    mode: CopyMode,
}

impl Blocks<'_> {
    /// Blocks of the longest part.
    pub(super) fn num_blocks(&self) -> usize {
        let longest = self.parts.iter().map(Range::len).max().unwrap_or_default();
        longest.div_ceil(self.block_numel)
    }

    /// The elements of a block of rank `part`'s part, none where the part is shorter than others.
    pub(super) fn range(&self, part: usize, block: usize) -> Range<usize> {
        let part = &self.parts[part];
        let start = (part.start + block * self.block_numel).min(part.end);
        start..(start + self.block_numel).min(part.end)
    }

    /// Where they begin in the tensor, and how many bytes they have.
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
            let mut staging = staging(0, world_size);
            for (numel, kind) in [(1, Kind::Float), (70_001, Kind::Half), (500_000, Kind::Double), (99, Kind::Uint8)] {
                let tensor = Tensor::zeros([numel], (kind, Device::Cpu));
                let blocks = staging.ring_blocks(&tensor).unwrap();
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

    #[test]
    fn blocks_of_moved_parts_are_every_byte_once_and_within_the_buffer() {
        for (world_size, num_parts) in [(2, 1), (2, 2), (3, 3), (64, 1), (64, 64), (5000, 5000)] {
            for part_bytes in [0, 1, 63, 64, 70_001, 3 << 20] {
                let blocks = MovedBlocks::new(num_parts, part_bytes);
                let mut end = 0;
                for block in 0..blocks.num_blocks() {
                    let (start, num_bytes) = blocks.bytes(block);
                    assert_eq!(start, end, "{num_parts} parts of {part_bytes} bytes");
                    assert!(num_bytes > 0);
                    end = start + num_bytes;
                }
                assert_eq!(end, part_bytes);
                let last = blocks.place(num_parts - 1, SLOTS - 1) + blocks.block_bytes;
                assert!(last <= staging_bytes(world_size), "{num_parts} parts of {world_size} ranks");
            }
        }
    }

    /// Without memory that is shared: what one rank writes is where the other one looks for it.
    #[test]
    fn a_block_goes_from_its_rank_to_the_one_that_reduces_and_back() {
        let (mut first, mut second) = (staging(0, 2), staging(1, 2));
        let kind = Kind::Int;
        let tensors = [0, 1].map(|rank| Tensor::arange(100_000, (kind, Device::Cpu)) + 1_000_000 * rank);
        let (theirs, block) = (Tensor::zeros([100_000], (kind, Device::Cpu)), 2);
        first.end_call(5);
        second.end_call(5);
        let (sent, own) = (first.ring_blocks(&tensors[0]).unwrap(), second.ring_blocks(&tensors[1]).unwrap());
        first.send(&sent, 1, block).unwrap();
        // As if both had mapped it.
        second.buffers[0].shallow_clone().copy_(&first.buffers[0]);
        assert_eq!(second.contribution(&own, 0, block).unwrap(), sent.block(1, block).unwrap());
        second.send(&own, 1, block).unwrap();
        first.buffers[1].shallow_clone().copy_(&second.buffers[1]);
        let place = first.ring_blocks(&theirs).unwrap();
        first.receive(&place, 1, block).unwrap();
        assert_eq!(place.block(1, block).unwrap(), own.block(1, block).unwrap());
        let num_received = i64::try_from(&theirs.ne(0).sum(Kind::Int64)).unwrap();
        assert_eq!(num_received, own.range(1, block).len() as i64);
    }

    #[test]
    fn only_ranks_that_are_far_apart_write_past_their_caches() {
        let mut staging = staging(0, 2);
        for (nanoseconds, wanted) in [(45, CopyMode::Cached), (145, CopyMode::NonTemporal), (30, CopyMode::Cached)] {
            staging.measured(Duration::from_nanos(nanoseconds));
            assert_eq!(staging.mode, wanted, "{nanoseconds}");
        }
    }
}
