//! Reductions: calls that combine the tensors of all ranks.

use super::{DONE, Running, Step, num_bytes};
use crate::error::Error;
use crate::group::ReduceOp;
use crate::group::call_board::Counter;
use crate::group::staging::{Blocks, LEAD};
use accelerate_core::ring;
use tch::{Device, Kind, Tensor};
use torch_ext::scalar;

/// How much is read and added at once: it stays in the caches of a core.
const BLOCK_BYTES: usize = 128 << 10;

impl Running<'_> {
    /// Room for `count` times as many elements as `like` has.
    fn room(&mut self, count: usize, like: &Tensor) -> Step<Vec<Tensor>> {
        let (bytes, numel) = (num_bytes(like), like.numel() as i64);
        let wanted = (count * bytes).max(2 * BLOCK_BYTES) as i64;
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
        self.leave()?;
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
        let blocks = self.state.staging.blocks_of(own)?;
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

    pub(super) fn reduce_scatter(&mut self, rows: &Tensor, shard: &Tensor, op: ReduceOp) -> Step {
        let calls = self.calls;
        let add = Add { op: op.of_backend(), factor: None };
        let element_bytes = shard.f_kind()?.elt_size_in_bytes();
        let row = calls.rank * shard.numel();
        let rows = rows.f_view([-1])?;
        for start in (0..shard.numel()).step_by(BLOCK_BYTES / element_bytes) {
            let numel = (BLOCK_BYTES / element_bytes).min(shard.numel() - start);
            let mut sum = shard.f_narrow(0, start as i64, numel as i64)?;
            let input = self.room(1, &sum)?.swap_remove(0);
            for rank in 0..calls.peers.len() {
                let own =
                    (rank == calls.rank).then(|| rows.f_narrow(0, (row + start) as i64, numel as i64)).transpose()?;
                match (rank, own) {
                    (0, Some(own)) => drop(sum.f_copy_(&own)?),
                    (0, None) => self.read(rank, (row + start) * element_bytes, &sum)?,
                    (_, Some(own)) => add.combine(&sum, &own)?,
                    (_, None) => {
                        self.read(rank, (row + start) * element_bytes, &input)?;
                        add.combine(&sum, &input)?;
                    }
                }
            }
        }
        self.leave()
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
