//! Collectives that are started now and waited for later, so that they run beside computation.

use super::{Group, ReduceOp, shape_text, wire};
use crate::error::Result;
use tch::{Device, Tensor};
use torch_ext::{ProcessGroup, Work};

/// A collective that has been started. Its tensors may not be touched before [`wait`](Self::wait); dropped, it goes on
/// unobserved.
#[must_use = "what arrives is there only once it has been waited for"]
pub(crate) struct PendingCollective {
    group: Group,
    op: &'static str,
    sequence: u64,
    /// What travels, for messages.
    label: String,
    works: Vec<Work>,
    /// Memory that the backend reads and writes meanwhile.
    _kept: Vec<Tensor>,
}

impl PendingCollective {
    /// Returns when everything has arrived and everything has been sent.
    ///
    /// # Errors
    /// The deadline has passed, or a rank is gone: as of any collective.
    pub(crate) fn wait(self) -> Result<()> {
        let Self { group, op, sequence, label, works, _kept } = self;
        let entered = group.enter(op, sequence);
        let ended = works
            .into_iter()
            .try_for_each(|work| work.wait(None))
            .or_else(|error| group.explain_late(op, sequence, label, error));
        drop(entered);
        ended
    }
}

/// A reduce-scatter that has been started: every rank's version of this rank's shard comes in.
#[must_use = "the result is there only once it has been waited for"]
pub(crate) struct PendingReduceScatter {
    pending: Option<PendingCollective>,
    op: ReduceOp,
    /// To be combined in this order.
    versions: Vec<Tensor>,
}

impl PendingReduceScatter {
    /// Versions that are all here, to be added.
    pub(crate) fn here(versions: Vec<Tensor>) -> Self {
        Self { pending: None, op: ReduceOp::Sum, versions }
    }

    /// Waits for all versions, combines them in the order of ranks, and writes the result to `output`. A mean is still a sum.
    pub(crate) fn write_to(self, mut output: Tensor) -> Result<()> {
        let Self { pending, op, versions } = self;
        pending.map_or(Ok(()), PendingCollective::wait)?;
        let combine = |own: &Tensor, version: &Tensor, output: &Tensor| match op {
            ReduceOp::Sum | ReduceOp::Mean => own.f_add_out(output, version),
            ReduceOp::Max => own.f_maximum_out(output, version),
            ReduceOp::Min => own.f_minimum_out(output, version),
        };
        let rest = match versions.as_slice() {
            [first, second, rest @ ..] if first.f_kind()? == output.f_kind()? => {
                let _ = combine(first, second, &output)?;
                rest
            }
            [first, rest @ ..] => {
                output.f_copy_(first)?;
                rest
            }
            [] => &[],
        };
        for version in rest {
            match op {
                ReduceOp::Sum | ReduceOp::Mean => drop(output.f_add_(version)?),
                ReduceOp::Max | ReduceOp::Min => drop(combine(&output, version, &output)?),
            }
        }
        Ok(())
    }
}

impl Group {
    /// Starts to collect all ranks' shards in `full`, `[world_size * n]` elements, where this rank's shard, `[n]`, may stand
    /// already. `label` says what it is. Collective.
    ///
    /// On the CPU the shards go straight to where they belong; Gloo's own all-gather copies them twice more
    /// (libtorch 2.11.0, `ProcessGroupGloo::_allgather_base`).
    pub(crate) fn start_all_gather(
        &self,
        full: &Tensor,
        own: &Tensor,
        label: &str,
    ) -> Result<Option<PendingCollective>> {
        const OP: &str = "all_gather";
        let shards = full.f_detach()?.f_chunk(self.world_size() as i64, 0)?;
        if full.device() == Device::Cpu {
            let mut place = shards[self.rank()].shallow_clone();
            if place.data_ptr() != own.data_ptr() {
                place.f_copy_(own)?;
            }
            return self.start(OP, label, full, |group, tag| {
                let mut works = Vec::with_capacity(2 * shards.len());
                for (rank, shard) in shards.iter().enumerate().filter(|(rank, _)| *rank != group.rank()) {
                    works.push(group.recv(shard, Some(rank), tag)?);
                    works.push(group.send(&shards[group.rank()], rank, tag)?);
                }
                Ok(works)
            });
        }
        let (flat, own) = (wire::movable(full)?, wire::movable(own)?);
        self.start(OP, label, full, |group, _| Ok(vec![group.all_gather_into_tensor(&flat, &own, None)?]))
    }

    /// Starts a reduce-scatter of `rows`, `[world_size * n]` elements: row `r` goes to rank `r`, which combines what it gets.
    /// `room` gives memory for as many elements, where that is needed. Collective.
    ///
    /// Gloo's own reduce-scatter is an all-reduce of a copy, of which a shard is copied out (libtorch 2.11.0). Sending each
    /// rank only its shard takes less than half the time.
    pub(crate) fn start_reduce_scatter(
        &self,
        rows: &Tensor,
        room: impl FnOnce() -> Result<Tensor>,
        op: ReduceOp,
        label: &str,
    ) -> Result<PendingReduceScatter> {
        const OP: &str = "reduce_scatter";
        let world_size = self.world_size() as i64;
        let size = [world_size, rows.numel() as i64 / world_size];
        let versions = rows.f_view(size)?.f_unbind(0)?;
        if world_size == 1 {
            return Ok(PendingReduceScatter { pending: None, op, versions });
        }
        if rows.device() != Device::Cpu {
            let shard = versions[self.rank()].f_empty_like()?;
            let flat = rows.f_view([-1])?;
            let pending = self.start(OP, label, rows, |group, _| {
                Ok(vec![group.reduce_scatter_tensor(&shard, &flat, op.of_backend(), None)?])
            })?;
            return Ok(PendingReduceScatter { pending, op, versions: vec![shard] });
        }
        let mut incoming = room()?.f_view(size)?.f_unbind(0)?;
        let pending = self.start(OP, label, rows, |group, tag| {
            let mut works = Vec::with_capacity(2 * versions.len());
            for (rank, row) in versions.iter().enumerate().filter(|(rank, _)| *rank != group.rank()) {
                works.push(group.recv(&incoming[rank], Some(rank), tag)?);
                works.push(group.send(row, rank, tag)?);
            }
            Ok(works)
        })?;
        incoming[self.rank()] = versions[self.rank()].shallow_clone();
        Ok(PendingReduceScatter { pending, op, versions: incoming })
    }

    /// Starts to add up a tensor over all ranks, in place. Collective.
    pub(crate) fn start_all_reduce(&self, tensor: &Tensor, label: &str) -> Result<Option<PendingCollective>> {
        let sum = tensor.f_detach()?;
        self.start("all_reduce", label, tensor, |group, _| {
            Ok(vec![group.all_reduce(&sum, torch_ext::ReduceOp::Sum, None)?])
        })
    }

    /// Starts one numbered operation, which may consist of several messages. `None` in a group of one.
    fn start(
        &self,
        op: &'static str,
        label: &str,
        tensor: &Tensor,
        start: impl FnOnce(&ProcessGroup, i32) -> torch_ext::Result<Vec<Work>>,
    ) -> Result<Option<PendingCollective>> {
        let Some(links) = &self.inner.links else { return Ok(None) };
        let shape = shape_text(tensor);
        let label = if label.is_empty() { shape } else { format!("{label} {shape}") };
        self.compare_call(op, || label.clone())?;
        let sequence = self.next_sequence();
        match start(&links.process_group, tag(sequence, tensor.numel())) {
            Ok(works) => {
                let _kept = vec![tensor.shallow_clone()];
                Ok(Some(PendingCollective { group: self.clone(), op, sequence, label, works, _kept }))
            }
            Err(error) => self.explain_late(op, sequence, label, error).map(|()| None),
        }
    }

    fn explain_late(&self, op: &'static str, sequence: u64, label: String, error: torch_ext::Error) -> Result<()> {
        match &self.inner.links {
            Some(links) => Err(self.explain(links, op, sequence, label, error)),
            None => Err(error.into()),
        }
    }
}

/// What tells the messages of one operation from those of others. Gloo ends the process that gets a message longer than
/// the memory for it, so sizes are part of it: ranks that disagree run into the deadline, which says who waits for what.
fn tag(sequence: u64, num_elements: usize) -> i32 {
    let size = num_elements.wrapping_mul(0x9e37_79b9) >> 20;
    ((sequence % (1 << 18)) << 12 | (size as u64 & 0xfff)) as i32
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::testing;
    use std::time::Duration;
    use tch::Kind;
    use torch_ext::Store;

    const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

    #[test]
    fn shards_of_all_ranks_come_together() {
        for world_size in 1..=4 {
            for kind in [Kind::Float, Kind::BFloat16, Kind::Bool] {
                testing::ranks(world_size, Default::default(), |accelerator| {
                    let group = accelerator.group();
                    let own = Tensor::full([3], 1 + group.rank() as i64, (kind, Device::Cpu));
                    let nothing = Tensor::zeros([0], (kind, Device::Cpu));
                    group.start_all_gather(&nothing, &nothing, "nothing")?.map_or(Ok(()), PendingCollective::wait)?;
                    let full = Tensor::zeros([3 * world_size as i64], (kind, Device::Cpu));
                    group.start_all_gather(&full, &own, "test")?.map_or(Ok(()), PendingCollective::wait)?;
                    let wanted: Vec<Tensor> = (0..world_size as i64).map(|rank| own.full_like(1 + rank)).collect();
                    assert_eq!(full, Tensor::cat(&wanted, 0), "{world_size} ranks, {kind:?}");
                    Ok(())
                })
                .unwrap();
            }
        }
    }

    #[test]
    fn a_rank_that_is_missing_in_a_subgroup_is_named_by_its_rank_in_the_job() {
        let store = Store::hash().unwrap();
        let failed = std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..4)
                .map(|rank| {
                    let store = store.clone();
                    scope.spawn(move || {
                        let job = testing::join_with_deadline(&store, rank, 4, Duration::from_secs(5)).unwrap();
                        let subgroup = job.subgroup(&[rank % 2, rank % 2 + 2]).unwrap();
                        let own = Tensor::from_slice(&[rank as f32]);
                        // Everyone stays until all are done, so that nobody's connections go.
                        let outcome = (rank != 3).then(|| subgroup.all_reduce(&own, crate::ReduceOp::Sum));
                        (job, subgroup, own, outcome)
                    })
                })
                .collect();
            let ends: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
            assert_eq!((&ends[0].2, &ends[2].2), (&Tensor::from_slice(&[2f32]), &Tensor::from_slice(&[2f32])));
            ends.into_iter().nth(1).unwrap().3.unwrap().unwrap_err()
        });
        let text = failed.to_string();
        assert!(failed.is_timeout(), "{text}");
        assert!(text.contains("rank 1 of ranks 1, 3") && text.contains("rank 3 has not made this call"), "{text}");
    }

    #[test]
    fn rows_are_added_in_the_order_of_ranks_whatever_is_waited_for_first() {
        for world_size in 1..=4i64 {
            testing::ranks(world_size as usize, Default::default(), |accelerator| {
                let group = accelerator.group();
                let rank = group.rank() as i64;
                let start = |factor: i64| {
                    let rows = Tensor::arange(2 * world_size, FLOAT) * (rank + 1) * factor;
                    group.start_reduce_scatter(&rows, || Ok(rows.f_empty_like()?), ReduceOp::Sum, "test")
                };
                let ranks = world_size * (world_size + 1) / 2;
                for kind in [Kind::Float, Kind::Double] {
                    let (first, second) = (start(1)?, start(10)?);
                    for (pending, factor) in [(second, 10), (first, 1)] {
                        let sum = Tensor::full([2], f64::NAN, (kind, Device::Cpu));
                        pending.write_to(sum.shallow_clone())?;
                        let wanted = (Tensor::arange(2, FLOAT) + 2 * rank) * (factor * ranks);
                        assert_eq!(sum, wanted.to_kind(kind));
                    }
                }
                Ok(())
            })
            .unwrap();
        }
    }

    #[test]
    fn ranks_that_send_other_sizes_are_told_at_the_deadline() {
        let store = Store::hash().unwrap();
        let store = &store;
        let rank = |rank: usize| {
            let group = testing::join_with_deadline(store, rank, 2, Duration::from_secs(2))?;
            group.barrier()?;
            let size = 3 + rank as i64;
            let full = Tensor::zeros([2 * size], FLOAT);
            let pending = group.start_all_gather(&full, &Tensor::zeros([size], FLOAT), "unit blocks.0")?;
            pending.map_or(Ok(()), PendingCollective::wait)
        };
        let errors: Vec<_> = std::thread::scope(|scope| {
            let threads = [0, 1].map(|number| scope.spawn(move || rank(number)));
            threads.into_iter().map(|thread| thread.join().unwrap().unwrap_err()).collect()
        });
        for error in errors {
            // The one whose deadline ends later may find the other gone.
            assert!(error.is_timeout() || error.is_peer_failure(), "{error}");
            let text = error.to_string();
            assert!(text.contains("unit blocks.0 [6]") && text.contains("unit blocks.0 [8]"), "{text}");
        }
    }
}
