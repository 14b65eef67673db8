//! Calls that move parts of tensors from ranks to others as they are.

use super::{DONE, Running, Step, num_bytes};
use crate::error::Error;
use crate::group::call_board::Counter;
use crate::group::staging::{LEAD, MovedBlocks};
use tch::Tensor;
use torch_ext::storage::{CopyMode, copy_bytes};

/// What a rank sends and receives in one call.
pub(super) struct Moves<'a> {
    input: &'a Tensor,
    /// The input of every rank is so many parts of one size.
    num_parts: usize,
    /// The parts that this rank sends.
    sent: Vec<usize>,
    received: Vec<Received<'a>>,
    /// A part of this rank's own that it gets as well, and where.
    kept: Option<(usize, &'a Tensor)>,
}

/// Part `part` of rank `from` goes to `place`.
struct Received<'a> {
    from: usize,
    part: usize,
    place: &'a Tensor,
}

impl<'a> Moves<'a> {
    /// Rank `source`'s tensor goes to all others.
    pub(super) fn broadcast(rank: usize, tensor: &'a Tensor, source: usize) -> Self {
        let (sent, received) = match rank == source {
            true => (vec![0], Vec::new()),
            false => (Vec::new(), vec![Received { from: source, part: 0, place: tensor }]),
        };
        Self { input: tensor, num_parts: 1, sent, received, kept: None }
    }

    /// Every rank's input goes to all ranks.
    pub(super) fn all_gather(rank: usize, input: &'a Tensor, places: &'a [Tensor]) -> Self {
        let received = received_by(rank, places, 0);
        Self { input, num_parts: 1, sent: vec![0], received, kept: places.get(rank).map(|place| (0, place)) }
    }

    /// Part `r` of every rank's input goes to rank `r`.
    pub(super) fn all_to_all(rank: usize, input: &'a Tensor, places: &'a [Tensor]) -> Self {
        let sent = (0..places.len()).filter(|receiver| *receiver != rank).collect();
        let received = received_by(rank, places, rank);
        let kept = places.get(rank).map(|place| (rank, place));
        Self { input, num_parts: places.len(), sent, received, kept }
    }

    /// Every rank's input goes to the next rank, and the last one's to the first.
    pub(super) fn rotate((rank, world_size): (usize, usize), input: &'a Tensor, place: &'a Tensor) -> Self {
        let from = (rank + world_size - 1) % world_size;
        let received = vec![Received { from, part: 0, place }];
        Self { input, num_parts: 1, sent: vec![0], received, kept: None }
    }

    fn part_bytes(&self) -> usize {
        num_bytes(self.input) / self.num_parts.max(1)
    }
}

/// The part of this number from every other rank.
fn received_by(rank: usize, places: &[Tensor], part: usize) -> Vec<Received<'_>> {
    let others = places.iter().enumerate().filter(|(from, _)| *from != rank);
    others.map(|(from, place)| Received { from, part, place }).collect()
}

impl Running<'_> {
    pub(super) fn move_parts(&mut self, moves: &Moves<'_>) -> Step {
        if let Some((part, place)) = moves.kept
            && place.data_ptr() != moves.input.data_ptr()
        {
            let (part_bytes, from) = (moves.part_bytes(), moves.input);
            copy_bytes((from, part * part_bytes), (place, 0), part_bytes, CopyMode::Cached).map_err(Error::other)?;
        }
        if !self.is_on_board {
            return self.move_blocks(moves);
        }
        for Received { from, part, place } in &moves.received {
            self.read(*from, part * moves.part_bytes(), place)?;
        }
        self.post(DONE);
        Ok(())
    }

    /// Every rank sends its parts block by block through its staging buffer, and receives those of others `LEAD` blocks later.
    fn move_blocks(&mut self, moves: &Moves<'_>) -> Step {
        let blocks = MovedBlocks::new(moves.num_parts, moves.part_bytes());
        let num_blocks = blocks.num_blocks();
        for turn in 0..num_blocks + LEAD {
            if turn < num_blocks {
                self.send_parts(moves, blocks, turn)?;
            }
            if let Some(block) = turn.checked_sub(LEAD) {
                self.receive_parts(moves, blocks, block)?;
            }
        }
        self.state.staging.end_call(num_blocks);
        self.post(DONE);
        Ok(())
    }

    fn send_parts(&self, moves: &Moves<'_>, blocks: MovedBlocks, block: usize) -> Step {
        let staging = &self.state.staging;
        for part in &moves.sent {
            staging.send_part(blocks, moves.input, *part, block).map_err(Error::other)?;
        }
        self.calls.own.set_counter(Counter::BlocksSent, staging.number(block));
        Ok(())
    }

    fn receive_parts(&self, moves: &Moves<'_>, blocks: MovedBlocks, block: usize) -> Step {
        let staging = &self.state.staging;
        // Also for ranks that send nothing to this one: they may have to read what it will overwrite.
        for rank in self.calls.others() {
            self.wait_for_block(rank, Counter::BlocksSent, staging.number(block))?;
        }
        for Received { from, part, place } in &moves.received {
            staging.receive_part(blocks, (*from, *part), place, block).map_err(Error::other)?;
        }
        Ok(())
    }
}
