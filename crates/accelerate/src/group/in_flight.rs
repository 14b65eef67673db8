//! Collectives that are started now and waited for later, so that they run beside computation.

use super::{Group, shape_text, wire};
use crate::error::Result;
use tch::{Device, Tensor};
use torch_ext::{ProcessGroup, Work};

/// A collective under way. Its tensors may not be touched before [`wait`](Self::wait); dropped, it goes on unobserved.
#[must_use = "what arrives is there only once it has been waited for"]
pub(crate) struct InFlight {
    group: Group,
    op: &'static str,
    sequence: u64,
    /// What travels, for messages.
    label: String,
    works: Vec<Work>,
    /// Memory that the backend reads and writes meanwhile.
    _kept: Vec<Tensor>,
}

impl InFlight {
    /// Returns when everything has arrived and everything has been sent.
    ///
    /// # Errors
    /// The deadline has passed, or a rank is gone: as of any collective.
    pub(crate) fn wait(self) -> Result<()> {
        let Self { group, op, sequence, label, works, _kept } = self;
        works
            .into_iter()
            .try_for_each(|work| work.wait(None))
            .or_else(|error| group.explain_late(op, sequence, label, error))
    }
}

/// A reduce-scatter under way: every rank's version of this rank's part comes in.
#[must_use = "what arrives is there only once it has been waited for"]
pub(crate) struct Versions {
    in_flight: Option<InFlight>,
    /// To be added in this order.
    versions: Vec<Tensor>,
}

impl Versions {
    /// Versions that are all here.
    pub(crate) fn here(versions: Vec<Tensor>) -> Self {
        Self { in_flight: None, versions }
    }

    /// Waits for all versions and writes their sum.
    pub(crate) fn sum_into(self, mut sum: Tensor) -> Result<()> {
        let Self { in_flight, versions } = self;
        in_flight.map_or(Ok(()), InFlight::wait)?;
        let rest = match versions.as_slice() {
            [first, second, rest @ ..] if first.f_kind()? == sum.f_kind()? => {
                let _ = first.f_add_out(&sum, second)?;
                rest
            }
            [first, rest @ ..] => {
                sum.f_copy_(first)?;
                rest
            }
            [] => &[],
        };
        rest.iter().try_for_each(|version| sum.f_add_(version).map(drop))?;
        Ok(())
    }
}

impl Group {
    /// Starts to collect all ranks' parts in `whole`, `[world_size * n]` elements, where this rank's part, `[n]`, may stand
    /// already. `label` says what it is. Collective.
    ///
    /// On the CPU the parts go straight to where they belong; Gloo's own all-gather copies them twice more
    /// (libtorch 2.11.0, `ProcessGroupGloo::_allgather_base`).
    pub(crate) fn start_all_gather(&self, whole: &Tensor, own: &Tensor, label: &str) -> Result<Option<InFlight>> {
        const OP: &str = "all_gather";
        let parts = whole.f_detach()?.f_chunk(self.world_size() as i64, 0)?;
        if whole.device() == Device::Cpu {
            let mut place = parts[self.rank()].shallow_clone();
            if place.data_ptr() != own.data_ptr() {
                place.f_copy_(own)?;
            }
            return self.start(OP, label, whole, |group, tag| {
                let mut works = Vec::with_capacity(2 * parts.len());
                for (rank, part) in parts.iter().enumerate().filter(|(rank, _)| *rank != group.rank()) {
                    works.push(group.recv(part, Some(rank), tag)?);
                    works.push(group.send(&parts[group.rank()], rank, tag)?);
                }
                Ok(works)
            });
        }
        let (flat, own) = (wire::movable(whole)?, wire::movable(own)?);
        self.start(OP, label, whole, |group, _| Ok(vec![group.all_gather_into_tensor(&flat, &own, None)?]))
    }

    /// Starts a reduce-scatter of `rows`, `[world_size, n]`: row `r` goes to rank `r`, which adds what it gets. `room` gives
    /// memory for as many elements, where that is needed. Collective.
    pub(crate) fn start_reduce_scatter(
        &self,
        rows: &Tensor,
        room: impl FnOnce() -> Result<Tensor>,
        label: &str,
    ) -> Result<Versions> {
        const OP: &str = "reduce_scatter";
        let world_size = self.world_size() as i64;
        let versions = rows.f_view([world_size, -1])?.f_unbind(0)?;
        if world_size == 1 {
            return Ok(Versions::here(versions));
        }
        if rows.device() != Device::Cpu {
            let part = versions[self.rank()].f_empty_like()?;
            let flat = rows.f_view([-1])?;
            let in_flight = self.start(OP, label, rows, |group, _| {
                Ok(vec![group.reduce_scatter_tensor(&part, &flat, torch_ext::ReduceOp::Sum, None)?])
            })?;
            return Ok(Versions { in_flight, versions: vec![part] });
        }
        let mut incoming = room()?.f_view([world_size, -1])?.f_unbind(0)?;
        let in_flight = self.start(OP, label, rows, |group, tag| {
            let mut works = Vec::with_capacity(2 * versions.len());
            for (rank, row) in versions.iter().enumerate().filter(|(rank, _)| *rank != group.rank()) {
                works.push(group.recv(&incoming[rank], Some(rank), tag)?);
                works.push(group.send(row, rank, tag)?);
            }
            Ok(works)
        })?;
        incoming[self.rank()] = versions[self.rank()].shallow_clone();
        Ok(Versions { in_flight, versions: incoming })
    }

    /// Starts to add up a tensor over all ranks, in place. Collective.
    pub(crate) fn start_all_reduce(&self, tensor: &Tensor, label: &str) -> Result<Option<InFlight>> {
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
    ) -> Result<Option<InFlight>> {
        let Some(links) = &self.0.links else { return Ok(None) };
        let sequence = self.next_sequence();
        let label = format!("{label} {}", shape_text(tensor));
        match start(&links.process_group, tag(sequence, tensor.numel())) {
            Ok(works) => {
                let _kept = vec![tensor.shallow_clone()];
                Ok(Some(InFlight { group: self.clone(), op, sequence, label, works, _kept }))
            }
            Err(error) => self.explain_late(op, sequence, label, error).map(|()| None),
        }
    }

    fn explain_late(&self, op: &'static str, sequence: u64, label: String, error: torch_ext::Error) -> Result<()> {
        match &self.0.links {
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
    fn parts_of_all_ranks_come_together() {
        for world_size in 1..=4 {
            for kind in [Kind::Float, Kind::BFloat16, Kind::Bool] {
                testing::ranks(world_size, |accelerator| {
                    let group = accelerator.group();
                    let own = Tensor::full([3], 1 + group.rank() as i64, (kind, Device::Cpu));
                    let nothing = Tensor::zeros([0], (kind, Device::Cpu));
                    group.start_all_gather(&nothing, &nothing, "nothing")?.map_or(Ok(()), InFlight::wait)?;
                    let whole = Tensor::zeros([3 * world_size as i64], (kind, Device::Cpu));
                    group.start_all_gather(&whole, &own, "test")?.map_or(Ok(()), InFlight::wait)?;
                    let wanted: Vec<Tensor> = (0..world_size as i64).map(|rank| own.full_like(1 + rank)).collect();
                    assert_eq!(whole, Tensor::cat(&wanted, 0), "{world_size} ranks, {kind:?}");
                    Ok(())
                })
                .unwrap();
            }
        }
    }

    #[test]
    fn a_rank_that_is_missing_in_a_part_of_the_job_is_named_by_its_rank_in_the_job() {
        let store = Store::hash().unwrap();
        let failed = std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..4)
                .map(|rank| {
                    let store = store.clone();
                    scope.spawn(move || {
                        let job = testing::join_with_deadline(&store, rank, 4, Duration::from_secs(5)).unwrap();
                        let part = job.part(&[rank % 2, rank % 2 + 2]).unwrap();
                        let own = Tensor::from_slice(&[rank as f32]);
                        // Everyone stays until all are done, so that nobody's connections go.
                        let outcome = (rank != 3).then(|| part.all_reduce(&own, crate::ReduceOp::Sum));
                        (job, part, own, outcome)
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
            testing::ranks(world_size as usize, |accelerator| {
                let group = accelerator.group();
                let rank = group.rank() as i64;
                let start = |factor: i64| {
                    let rows = Tensor::arange(2 * world_size, FLOAT) * (rank + 1) * factor;
                    group.start_reduce_scatter(&rows, || Ok(rows.f_empty_like()?), "test")
                };
                let ranks = world_size * (world_size + 1) / 2;
                for kind in [Kind::Float, Kind::Double] {
                    let (first, second) = (start(1)?, start(10)?);
                    for (versions, factor) in [(second, 10), (first, 1)] {
                        let sum = Tensor::full([2], f64::NAN, (kind, Device::Cpu));
                        versions.sum_into(sum.shallow_clone())?;
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
            let whole = Tensor::zeros([2 * size], FLOAT);
            let flight = group.start_all_gather(&whole, &Tensor::zeros([size], FLOAT), "unit blocks.0")?;
            flight.map_or(Ok(()), InFlight::wait)
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
