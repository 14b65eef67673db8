//! Reductions: calls that combine the tensors of all ranks.

use super::{DONE, Running, Step, num_bytes};
use crate::error::Error;
use crate::group::call_board::Counter;
use crate::group::staging::{Blocks, LEAD};
use accelerate_core::ring;
use tch::{Device, Kind, Tensor};
use torch_ext::scalar;

impl Running<'_> {
    /// Room for `count` times as many elements as `like` has.
    fn room(&mut self, count: usize, like: &Tensor) -> Step<Vec<Tensor>> {
        let (bytes, numel) = (num_bytes(like), like.numel() as i64);
        let wanted = (count * bytes) as i64;
        let room = match self.state.room.take() {
            Some(room) if wanted <= room.numel() as i64 => room,
            _ => Tensor::f_empty([wanted], (Kind::Uint8, Device::Cpu))?,
        };
        let all = room.f_narrow(0, 0, (count * bytes) as i64)?.f_view_dtype(like.f_kind()?)?;
        self.state.room = Some(room);
        let place = |at: usize| Ok(all.f_narrow(0, at as i64 * numel, numel)?);
        (0..count).map(place).collect()
    }

    /// Every rank adds up everything.
    pub(super) fn reduce_small(&mut self, own: &Tensor, add: Add) -> Step {
        let calls = self.calls;
        let (rank, world_size) = (calls.rank, calls.peers.len());
        let mut inputs = self.room(world_size, own)?;
        for rank in calls.others() {
            self.read(rank, 0, &inputs[rank])?;
        }
        self.post(DONE);
        if world_size == 2 {
            add.scale(own)?;
            add.scale(&inputs[1 - rank])?;
            return add.combine(own, &inputs[1 - rank]);
        }
        inputs[rank].f_copy_(own)?;
        inputs.iter().try_for_each(|input| add.scale(input))?;
        for (owner, part) in ring::parts(own.numel(), own.f_kind()?.elt_size_in_bytes(), world_size).iter().enumerate()
        {
            let of = |tensor: &Tensor| tensor.f_narrow(0, part.start as i64, part.len() as i64);
            let mut ranks = ring::order(owner, world_size);
            let sum = of(&inputs[ranks.next().unwrap_or(owner)])?;
            for next in ranks {
                add.combine(&sum, &of(&inputs[next])?)?;
            }
            of(own)?.f_copy_(&sum)?;
        }
        Ok(())
    }

    /// Every rank reduces its part, block by block, and gets the results of the others.
    pub(super) fn reduce(&mut self, own: &Tensor, add: Add) -> Step {
        let blocks = self.state.staging.ring_blocks(own)?;
        let num_blocks = blocks.num_blocks();
        let before = |turn: usize, lead: usize| turn.checked_sub(lead).filter(|&block| block < num_blocks);
        for turn in 0..num_blocks + 2 * LEAD {
            if let Some(block) = before(turn, 0) {
                self.send_block(&blocks, block, add)?;
            }
            if let Some(block) = before(turn, LEAD) {
                self.reduce_block(&blocks, block, add)?;
            }
            if let Some(block) = before(turn, 2 * LEAD) {
                self.receive_block(&blocks, block)?;
            }
        }
        self.state.staging.end_call(num_blocks);
        self.post(DONE);
        Ok(())
    }

    /// Sends a block of every other rank's part.
    fn send_block(&self, blocks: &Blocks<'_>, block: usize, add: Add) -> Step {
        let (calls, staging) = (self.calls, &self.state.staging);
        for rank in calls.others() {
            if add.factor.is_some() {
                add.scale(&blocks.block(rank, block)?)?;
            }
            staging.send(blocks, rank, block).map_err(Error::other)?;
        }
        calls.own.set_counter(Counter::BlocksSent, staging.number(block));
        Ok(())
    }

    /// Reduces a block of this rank's part.
    fn reduce_block(&self, blocks: &Blocks<'_>, block: usize, add: Add) -> Step {
        let (calls, staging) = (self.calls, &self.state.staging);
        if add.factor.is_some() {
            add.scale(&blocks.block(calls.rank, block)?)?;
        }
        // Others are combined in the slot of the first one, whose rank will fill it again.
        let mut ranks = ring::order(calls.rank, calls.peers.len()).take(calls.peers.len() - 1);
        let first = ranks.next().unwrap_or(calls.rank);
        self.wait_for_block(first, Counter::BlocksSent, staging.number(block))?;
        for rank in ranks {
            self.wait_for_block(rank, Counter::BlocksSent, staging.number(block))?;
            add.combine(&staging.contribution(blocks, first, block)?, &staging.contribution(blocks, rank, block)?)?;
        }
        if add.op == torch_ext::ReduceOp::Sum && blocks.kind == Kind::Float {
            staging.add_and_send(blocks, first, block).map_err(Error::other)?;
        } else {
            add.combine(&blocks.block(calls.rank, block)?, &staging.contribution(blocks, first, block)?)?;
            staging.send(blocks, calls.rank, block).map_err(Error::other)?;
        }
        calls.own.set_counter(Counter::BlocksReduced, staging.number(block));
        Ok(())
    }

    /// Gets the results of a block of every other rank's part.
    fn receive_block(&self, blocks: &Blocks<'_>, block: usize) -> Step {
        let (calls, staging) = (self.calls, &self.state.staging);
        for rank in calls.others() {
            self.wait_for_block(rank, Counter::BlocksReduced, staging.number(block))?;
            staging.receive(blocks, rank, block).map_err(Error::other)?;
        }
        Ok(())
    }

    /// Every rank combines what all of them have for its `shard`, in the order of ranks.
    pub(super) fn reduce_scatter(&mut self, rows: &Tensor, shard: &Tensor, add: Add) -> Step {
        if self.is_on_board {
            return self.reduce_scatter_small(rows, shard, add);
        }
        let blocks = self.state.staging.equal_blocks(rows)?;
        let num_blocks = blocks.num_blocks();
        for turn in 0..num_blocks + LEAD {
            if turn < num_blocks {
                self.send_block(&blocks, turn, add)?;
            }
            if let Some(block) = turn.checked_sub(LEAD) {
                self.reduce_rows(&blocks, block, shard, add)?;
            }
        }
        self.state.staging.end_call(num_blocks);
        self.post(DONE);
        Ok(())
    }

    fn reduce_rows(&self, blocks: &Blocks<'_>, block: usize, shard: &Tensor, add: Add) -> Step {
        let (calls, staging) = (self.calls, &self.state.staging);
        for rank in calls.others() {
            self.wait_for_block(rank, Counter::BlocksSent, staging.number(block))?;
        }
        let (own, first) = (blocks.range(calls.rank, block), blocks.range(calls.rank, 0).start);
        let sum = shard.f_narrow(0, (own.start - first) as i64, own.len() as i64)?;
        for rank in 0..calls.peers.len() {
            let input = match rank == calls.rank {
                true => blocks.block(rank, block)?,
                false => staging.contribution(blocks, rank, block)?,
            };
            add.set_or_combine(rank == 0, &sum, &input)?;
        }
        Ok(())
    }

    fn reduce_scatter_small(&mut self, rows: &Tensor, shard: &Tensor, add: Add) -> Step {
        let (calls, row_bytes) = (self.calls, num_bytes(shard));
        let room = self.room(1, shard)?.swap_remove(0);
        let own = rows.f_narrow(0, (calls.rank * shard.numel()) as i64, shard.numel() as i64)?;
        for rank in 0..calls.peers.len() {
            if rank != calls.rank {
                self.read(rank, calls.rank * row_bytes, &room)?;
            }
            add.set_or_combine(rank == 0, shard, if rank == calls.rank { &own } else { &room })?;
        }
        self.post(DONE);
        Ok(())
    }
}

/// How two tensors are combined.
#[derive(Clone, Copy)]
pub(super) struct Add {
    pub(super) op: torch_ext::ReduceOp,
    pub(super) factor: Option<f64>,
}

impl Add {
    fn scale(self, input: &Tensor) -> Step {
        if let Some(factor) = self.factor {
            scalar::mul_(input, factor)?;
        }
        Ok(())
    }

    /// The first input is what the others are combined with.
    pub(super) fn set_or_combine(self, is_first: bool, result: &Tensor, input: &Tensor) -> Step {
        if is_first {
            result.shallow_clone().f_copy_(input)?;
            return Ok(());
        }
        self.combine(result, input)
    }

    fn combine(self, result: &Tensor, input: &Tensor) -> Step {
        match self.op {
            torch_ext::ReduceOp::Max => drop(result.f_maximum_out(result, input)?),
            torch_ext::ReduceOp::Min => drop(result.f_minimum_out(result, input)?),
            // The only other one of a group; a sum of `Bool` is its maximum.
            _ if result.f_kind()? == Kind::Bool => drop(result.f_logical_or_out(result, input)?),
            _ => drop(result.shallow_clone().f_add_(input)?),
        }
        Ok(())
    }
}
