//! Calls in which a rank computes with parts of a tensor while it waits for others. A part stays where its rank has it, and others read
//! it there.

use super::reduce::Add;
use super::{DONE, PeerCall, Running, Step};
use crate::error::Result;
use crate::group::call_board::Counter;
use std::time::Instant;
use tch::{Kind, Tensor};

impl Running<'_> {
    /// Every rank's part goes to all ranks. `compute` is called with each rank, this one first, as soon as its part is in its place.
    pub(super) fn gather_parts(&mut self, places: &[Tensor], compute: &mut dyn FnMut(usize) -> Result<()>) -> Step {
        let calls = self.calls;
        let own = &places[calls.rank];
        let addresses = Tensor::f_from_slice(&[own.data_ptr() as i64])?;
        let numel = places.iter().map(Tensor::numel).sum();
        let hash = self.announce(&PeerCall::Parts { addresses: &addresses, kind: own.f_kind()?, numel })?;
        compute(calls.rank)?;
        self.began = Instant::now();
        self.meet(hash)?;
        let mut to_read = calls.others().peekable();
        while let Some(rank) = to_read.next() {
            self.read_part(rank, 0, &places[rank])?;
            if to_read.peek().is_none() {
                // Others need not wait for what is computed with the last part.
                self.post(DONE);
            }
            compute(rank)?;
        }
        self.finish()
    }

    /// Rank `r` gets the `sum` of what all ranks contribute to its part, added in the order of ranks. `compute` makes this rank's
    /// contribution to a part, its own one last.
    pub(super) fn sum_parts(
        &mut self,
        (sum, numel): (&Tensor, usize),
        compute: &mut dyn FnMut(usize) -> Result<Tensor>,
    ) -> Step {
        let calls = self.calls;
        let (own, world_size) = (calls.rank, calls.peers.len());
        self.parts = (0..world_size).map(|_| Tensor::new()).collect();
        let mut addresses = vec![0i64; world_size];
        let table = Tensor::f_from_slice(&addresses)?;
        let hash = self.announce(&PeerCall::Parts { addresses: &table, kind: sum.f_kind()?, numel })?;
        for (step, rank) in calls.others().enumerate() {
            self.parts[rank] = compute(rank)?.f_contiguous()?;
            addresses[rank] = self.parts[rank].data_ptr() as i64;
            // The addresses that others may be reading are stored once more as they are.
            let table = Tensor::f_from_slice(&addresses)?;
            calls.own.store(self.state.number, &table).map_err(crate::Error::other)?;
            calls.own.set_counter(Counter::PartsMade, self.num_parts_made(step));
        }
        self.parts[own] = compute(own)?;
        self.began = Instant::now();
        self.meet(hash)?;
        let room = sum.f_empty_like()?;
        let add = Add { op: torch_ext::ReduceOp::Sum, factor: None };
        for rank in 0..world_size {
            if rank != own {
                // Rank `r` makes the part of the rank behind it first.
                let step = (own + world_size - rank) % world_size - 1;
                self.wait_for_block(rank, Counter::PartsMade, self.num_parts_made(step))?;
                self.read_part(rank, own, &room)?;
            }
            add.set_or_combine(rank == 0, sum, if rank == own { &self.parts[own] } else { &room })?;
        }
        self.finish()
    }

    /// What a rank has counted after this step of the call, counted from 0. It is more than in any call before, also in one that failed
    /// because ranks made different calls.
    fn num_parts_made(&self, step: usize) -> i64 {
        self.state.number * self.calls.peers.len() as i64 + step as i64 + 1
    }

    /// Fills `place` from what a rank has at address number `index` on its board.
    fn read_part(&self, rank: usize, index: usize, place: &Tensor) -> Step {
        let address = Tensor::f_zeros([1], (Kind::Int64, tch::Device::Cpu))?;
        self.read(rank, index * size_of::<i64>(), &address)?;
        self.read_memory(rank, i64::try_from(&address)? as usize, place)
    }
}
