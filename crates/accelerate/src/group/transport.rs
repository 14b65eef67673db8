//! How shards of a group's ranks come together, and gradients go apart: sent by the backend, or read out of each other's
//! memory where all ranks are on one machine. Whoever gathers and reduces does not know which.

use super::peer_reads::PeerReads;
use super::{Group, PendingCollective, PendingReduceScatter, ReduceOp};
use crate::error::{Result, StateError};
use std::sync::Arc;
use tch::Tensor;

/// Who needs what is gathered, which says how long it may be read out of other ranks' memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum NeededBy {
    Forward,
    Backward,
    /// Somebody outside of both passes: nobody would know when a rank has read what it wants, so it is sent.
    Outside,
}

/// The two ways between the ranks of a group. Clones are the same.
#[derive(Clone)]
pub(crate) struct ShardTransport {
    group: Group,
    peers: Option<Arc<PeerReads>>,
}

/// A sum over ranks of this rank's rows that has been started.
#[must_use = "the sum is there only once it has been waited for"]
pub(crate) enum PendingSum {
    Sent(PendingReduceScatter),
    /// The rows, one for each rank, lie ready under the number of an offer.
    Offered(i64, Tensor),
}

impl ShardTransport {
    /// Ranks read each other's `shards` where there are any and all ranks can; otherwise everything is sent. Collective.
    pub(crate) fn new(group: &Group, shards: Vec<Tensor>) -> Result<Self> {
        let peers = if shards.is_empty() { None } else { PeerReads::new(group, shards)? };
        Ok(Self { group: group.clone(), peers: peers.map(Arc::new) })
    }

    pub(crate) fn group(&self) -> &Group {
        &self.group
    }

    /// Do ranks read each other's shards?
    #[cfg(test)]
    pub(crate) fn has_peers(&self) -> bool {
        self.peers.is_some()
    }

    /// Is what is gathered now read? Then it needs no time in advance.
    pub(crate) fn reads(&self) -> bool {
        self.peers.as_ref().is_some_and(|peers| peers.is_open())
    }

    /// From now on shards stay as they are, and may be read. Their `versions` say how often they have been written to.
    /// Collective, but nobody waits here.
    pub(crate) fn open(&self, versions: impl FnOnce() -> Result<Vec<i64>>) -> Result<()> {
        self.peers.as_ref().map_or(Ok(()), |peers| peers.open(versions()?))
    }

    /// From now on shards may change. Waits until all ranks have read what they need; the versions with which they opened, if
    /// they had.
    pub(crate) fn close(&self) -> Result<Option<Vec<i64>>> {
        self.peers.as_ref().map_or(Ok(None), |peers| peers.close())
    }

    /// A pass needs nothing more of other ranks.
    pub(crate) fn end_pass(&self) {
        if let Some(peers) = &self.peers {
            peers.end_pass();
        }
    }

    /// A backward pass begins to gather; whether [`end_backward`](Self::end_backward) has to be called at its end.
    pub(crate) fn begin_backward(&self) -> bool {
        self.peers.as_ref().is_some_and(|peers| peers.begin_backward())
    }

    pub(crate) fn end_backward(&self) {
        if let Some(peers) = &self.peers {
            peers.end_backward();
        }
    }

    /// Starts to collect what all ranks have as shard number `shard` in `full`, where this rank's `own` may stand already.
    /// `None` if all is there at once. Collective.
    pub(crate) fn start_all_gather(
        &self,
        shard: usize,
        (full, own): (&Tensor, &Tensor),
        needed_by: NeededBy,
        label: &str,
    ) -> Result<Option<PendingCollective>> {
        if let Some(peers) = self.peers.as_ref().filter(|_| needed_by != NeededBy::Outside)
            && peers.read(shard, full, label)?
        {
            return Ok(None);
        }
        self.group.start_all_gather(full, own, label)
    }

    /// Starts to add up `rows`, one for each rank. `room` gives memory for as many elements, where that is needed. Collective.
    pub(crate) fn start_sum(
        &self,
        rows: &Tensor,
        room: impl FnOnce() -> Result<Tensor>,
        label: &str,
    ) -> Result<PendingSum> {
        let offered = self.peers.as_ref().map_or(Ok(None), |peers| peers.offer(rows))?;
        Ok(match offered {
            Some(number) => PendingSum::Offered(number, rows.shallow_clone()),
            None => PendingSum::Sent(self.group.start_reduce_scatter(rows, room, ReduceOp::Sum, label)?),
        })
    }

    /// Waits for all ranks' rows and writes their sum, added in the order of ranks. `room` gives memory for as many elements as
    /// there are rows, where that is needed.
    pub(crate) fn finish_sum(
        &self,
        pending: PendingSum,
        room: impl FnOnce(&Tensor) -> Result<Tensor>,
        sum: Tensor,
        label: &str,
    ) -> Result<()> {
        match (pending, &self.peers) {
            (PendingSum::Sent(pending), _) => return pending.write_to(sum),
            (PendingSum::Offered(number, rows), Some(peers)) => {
                let room = room(&rows)?;
                if peers.sum_offered((number, rows), &room, sum, label)? {
                    return Ok(());
                }
            }
            (PendingSum::Offered(..), None) => {}
        }
        Err(StateError::ChangedWhileRead { unit: label.to_owned() }.into())
    }

    /// Waits until other ranks have all that they add up.
    pub(crate) fn finish_sums(&self) -> Result<()> {
        self.peers.as_ref().map_or(Ok(()), |peers| peers.finish())
    }
}
