//! One call of a group: its number, its deadline, who is told of it, and which way it takes: through the ranks' memory where that
//! can be, or through the backend.

use super::peer_call::PeerCall;
use super::peer_calls::{CallError, Made, PeerCalls};
use super::{Group, Links, ReduceOp, shape_text};
use crate::error::Result;
use accelerate_core::status::{BACKWARD, RENDEZVOUS};
use std::sync::atomic::Ordering;
use tch::{Device, Kind, Tensor};
use torch_ext::{ProcessGroup, Work, scalar};

impl Group {
    pub(super) fn next_sequence(&self) -> u64 {
        self.inner.sequence.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(super) fn run(
        &self,
        op: &'static str,
        shape: &dyn Fn() -> String,
        call: &PeerCall<'_>,
        start: impl FnOnce(&ProcessGroup) -> torch_ext::Result<Work>,
    ) -> Result<()> {
        self.compare_call(op, shape)?;
        self.run_uncompared(op, shape, call, start)
    }

    /// Makes a call in memory, or starts it in the backend and waits for it; explains its failure. The text is made only then.
    pub(super) fn run_uncompared(
        &self,
        op: &'static str,
        shape: &dyn Fn() -> String,
        call: &PeerCall<'_>,
        start: impl FnOnce(&ProcessGroup) -> torch_ext::Result<Work>,
    ) -> Result<()> {
        if self.run_by_peers_uncompared(op, shape, call)? {
            return Ok(());
        }
        let Some(links) = &self.inner.links else { return Ok(()) };
        let sequence = self.next_sequence();
        let _entered = self.enter(op, sequence);
        start(&links.process_group)
            .and_then(|work| work.wait(None))
            .map_err(|error| self.explain(links, op, sequence, shape(), error))
    }

    /// Makes a call in memory, if that can be.
    pub(super) fn run_by_peers(
        &self,
        op: &'static str,
        shape: &dyn Fn() -> String,
        call: &PeerCall<'_>,
    ) -> Result<bool> {
        let Some(found) = self.peer_calls(op, shape, call)? else { return Ok(false) };
        self.compare_call(op, shape)?;
        self.run_in_memory(op, shape, call, found).map(|()| true)
    }

    fn run_by_peers_uncompared(
        &self,
        op: &'static str,
        shape: &dyn Fn() -> String,
        call: &PeerCall<'_>,
    ) -> Result<bool> {
        let Some(found) = self.peer_calls(op, shape, call)? else { return Ok(false) };
        self.run_in_memory(op, shape, call, found).map(|()| true)
    }

    fn run_in_memory(
        &self,
        op: &'static str,
        shape: &dyn Fn() -> String,
        call: &PeerCall<'_>,
        found: (&Links, &PeerCalls),
    ) -> Result<()> {
        self.run_in_memory_with(op, shape, found, |peers, made| peers.run(made, call))
    }

    pub(super) fn run_in_memory_with(
        &self,
        op: &'static str,
        shape: &dyn Fn() -> String,
        (links, peers): (&Links, &PeerCalls),
        run: impl FnOnce(&PeerCalls, &Made<'_>) -> std::result::Result<(), CallError>,
    ) -> Result<()> {
        let sequence = self.next_sequence();
        let _entered = self.enter(op, sequence);
        run(peers, &Made { group: self, op, shape }).map_err(|error| match error {
            CallError::Peer(error) => self.explain(links, op, sequence, shape(), error),
            CallError::Own(error) => error,
        })
    }

    /// The ranks, if the call can be made in their memory. Collective at the first call with a tensor of the CPU, when they find out.
    fn peer_calls(
        &self,
        op: &'static str,
        shape: &dyn Fn() -> String,
        call: &PeerCall<'_>,
    ) -> Result<Option<(&Links, &PeerCalls)>> {
        let Some(links) = self.inner.links.as_ref().filter(|_| call.is_readable()) else { return Ok(None) };
        // Whether the backend knows tensors of the CPU is not known before there is one.
        if links.peer_calls.get().is_none() && !matches!(call, PeerCall::Barrier) {
            let found = self.meet_peers(links, op, shape)?;
            // Nobody else has made a call of this group meanwhile.
            let _ = links.peer_calls.set(found);
        }
        Ok(links.peer_calls.get().and_then(Option::as_ref).map(|peers| (links, peers)))
    }

    /// It is part of the call that is to be made.
    fn meet_peers(&self, links: &Links, op: &'static str, shape: &dyn Fn() -> String) -> Result<Option<PeerCalls>> {
        let sequence = self.inner.sequence.load(Ordering::Relaxed) + 1;
        let _entered = self.enter(op, sequence);
        let wait = |work: torch_ext::Result<Work>| {
            let ended = work.and_then(|work| work.wait(None));
            ended.map_err(|error| self.explain(links, op, sequence, shape(), error))
        };
        let gather = |own: &Tensor| {
            let all = own.f_empty_like()?.f_repeat([self.world_size() as i64])?;
            wait(links.process_group.all_gather_into_tensor(&all, own, None))?;
            Ok(all)
        };
        let least = |number: &Tensor| wait(links.process_group.all_reduce(number, torch_ext::ReduceOp::Min, None));
        PeerCalls::new((self.rank(), self.world_size()), gather, least)
    }

    /// Finds out whether the ranks can make collectives of tensors of the CPU in their memory, while all of them are known to be here.
    /// Collective. Without it they find out at the first such collective.
    pub(crate) fn look_for_peers(&self) -> Result<()> {
        let nothing = Tensor::f_empty([0], (Kind::Float, Device::Cpu))?;
        let call = PeerCall::Compare { input: &nothing, places: &[] };
        self.peer_calls(RENDEZVOUS, &String::new, &call).map(drop)
    }

    /// Do ranks make collectives of tensors of the CPU in their memory? They have found out if there was any.
    pub(crate) fn reads_peers(&self) -> bool {
        self.inner.links.as_ref().is_some_and(|links| matches!(links.peer_calls.get(), Some(Some(_))))
    }

    /// Makes the mean over ranks of gradients, `[num_elements]` on the CPU, in place, as the reducer would: each rank's are divided
    /// before they are added. For ranks that [read each other's memory](Self::reads_peers). Collective.
    pub(crate) fn mean_of_gradients(&self, gradients: &Tensor) -> Result<()> {
        let factor = 1.0 / self.world_size() as f64;
        let call = PeerCall::AllReduce {
            tensor: gradients,
            asked: ReduceOp::Mean,
            op: torch_ext::ReduceOp::Sum,
            factor: Some(factor),
        };
        self.run_uncompared(BACKWARD, &|| shape_text(gradients), &call, |group| {
            scalar::mul_(gradients, factor)?;
            group.all_reduce(gradients, torch_ext::ReduceOp::Sum, None)
        })
    }

    /// Overwrites tensors with those of rank `source` in memory, if that can be. Collective.
    pub(super) fn broadcast_by_peers(&self, tensors: &[Tensor], source: usize) -> Result<bool> {
        const OP: &str = "broadcast_coalesced";
        let all = |tensor: &Tensor| PeerCall::Broadcast { tensor, source }.is_readable();
        if !tensors.iter().all(all) {
            return Ok(false);
        }
        for tensor in tensors {
            let call = PeerCall::Broadcast { tensor, source };
            if !self.run_by_peers_uncompared(OP, &|| format!("{} tensors", tensors.len()), &call)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The same by the backend, packed into few messages.
    pub(super) fn broadcast_packed(&self, links: &Links, tensors: &[Tensor], source: usize) -> Result<()> {
        const OP: &str = "broadcast_coalesced";
        /// The size PyTorch's DistributedDataParallel uses for its first broadcast.
        const BUFFER_BYTES: usize = 250 << 20;
        let sequence = self.next_sequence();
        let _entered = self.enter(OP, sequence);
        links
            .process_group
            .broadcast_coalesced(tensors, BUFFER_BYTES, source)
            .map_err(|error| self.explain(links, OP, sequence, format!("{} tensors", tensors.len()), error))
    }
}
