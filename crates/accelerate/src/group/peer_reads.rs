//! Shards that ranks on one machine read out of each other's memory, whenever they need them, while nobody changes them.
//!
//! Gradients of other ranks' shards lie ready for them in the same way, piece by piece.
//!
//! An epoch opens with a forward pass and closes when all ranks have compared what they gathered, after the backward pass,
//! before anything changes. Whoever changes shards in between is found out, by itself or by who has read them.

use super::peer_memory::{MOST_OFFERS, PeerMemory, PeerRead};
use super::{Group, PendingCollective, PendingReduceScatter};
use crate::error::Result;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use tch::{Device, Kind, Tensor};
use torch_ext::scalar;

/// How many rows may be on offer before this rank has added up its own.
pub(crate) const MOST_PENDING: usize = 4;

/// How many rows that this rank has added up may wait for the other ranks to take theirs.
const MOST_LENT: usize = 2;

// What has been offered and not been taken has a place of its own.
const _: () = assert!(MOST_PENDING + MOST_LENT < MOST_OFFERS);

/// The ranks of a group, whose shards can be read.
pub(super) struct PeerReads {
    group: Group,
    memory: PeerMemory,
    /// Addresses of each shard on all ranks.
    addresses: Vec<Vec<usize>>,
    /// They stay as long as anybody may read them. (A tensor may be sent to another thread, but not shared, hence the mutex.)
    _shards: Mutex<Vec<Tensor>>,
    epoch: Mutex<Option<PeerReadEpoch>>,
}

/// The time in which nobody changes shards.
struct PeerReadEpoch {
    /// The numbers under which ranks have opened their memory, by rank, and what brings them.
    stamps: Tensor,
    opening: Option<PendingCollective>,
    /// Rows that other ranks may not have taken yet, by the numbers of their offers.
    lent: VecDeque<(i64, Tensor)>,
    /// The running backward pass will say when it has ended.
    is_end_awaited: bool,
    /// How often own shards had been written to at the beginning.
    versions: Vec<i64>,
}

impl PeerReads {
    /// `None` on all ranks unless all can read every other's shards. Collective.
    pub(super) fn new(group: &Group, shards: Vec<Tensor>) -> Result<Option<Self>> {
        let Some(memory) = group.peer_memory()? else { return Ok(None) };
        let own: Vec<i64> = shards.iter().map(|shard| shard.data_ptr() as i64).collect();
        let all = Vec::<i64>::try_from(&group.all_gather_into_tensor(&Tensor::f_from_slice(&own)?)?)?;
        let of = |shard: usize| all.iter().skip(shard).step_by(own.len()).map(|&address| address as usize).collect();
        let addresses = (0..own.len()).map(of).collect();
        Ok(Some(Self { group: group.clone(), memory, addresses, _shards: Mutex::new(shards), epoch: Mutex::new(None) }))
    }

    // Every statement leaves the epoch whole, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, Option<PeerReadEpoch>> {
        self.epoch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens an epoch; `versions` say how often this rank's shards have been written to. Collective, but nobody waits here.
    pub(super) fn open(&self, versions: Vec<i64>) -> Result<()> {
        // Nobody opens as this, should the others' numbers not arrive.
        let stamps = scalar::full(&[self.group.world_size() as i64], -1, (Kind::Int64, Device::Cpu))?;
        let own = Tensor::f_from_slice(&[self.memory.open()])?;
        let opening = self.group.start_all_gather(&stamps, &own, "parameters at the beginning of a forward pass")?;
        *self.lock() = Some(PeerReadEpoch { stamps, opening, lent: VecDeque::new(), is_end_awaited: false, versions });
        Ok(())
    }

    pub(super) fn is_open(&self) -> bool {
        self.lock().is_some()
    }

    /// How ranks have opened, by rank; `None` outside of an epoch.
    fn stamps(&self) -> Result<Option<Vec<i64>>> {
        let (stamps, opening) = {
            let mut epoch = self.lock();
            let Some(epoch) = &mut *epoch else { return Ok(None) };
            (epoch.stamps.shallow_clone(), epoch.opening.take())
        };
        opening.map_or(Ok(()), PendingCollective::wait)?;
        Ok(Some(Vec::try_from(&stamps)?))
    }

    /// Reads what the other ranks have as shard number `shard` to where it belongs in `full`; whether that is possible.
    pub(super) fn read(&self, shard: usize, full: &Tensor, label: &str) -> Result<bool> {
        let Some(stamps) = self.stamps()? else { return Ok(false) };
        let reading = PeerRead { op: "all_gather", what: label.to_owned(), stamps: &stamps };
        let places = full.f_detach()?.f_chunk(stamps.len() as i64, 0)?;
        for (rank, place) in places.iter().enumerate().filter(|(rank, _)| *rank != self.group.rank()) {
            self.memory.read(rank, self.addresses[shard][rank], place, &reading)?;
        }
        Ok(true)
    }

    /// A backward pass reads; whether nobody has promised yet to call [`end_backward`](Self::end_backward) for it.
    pub(super) fn begin_backward(&self) -> bool {
        self.lock().as_mut().is_some_and(|epoch| !std::mem::replace(&mut epoch.is_end_awaited, true))
    }

    /// That backward pass has ended.
    pub(super) fn end_backward(&self) {
        if let Some(epoch) = &mut *self.lock() {
            epoch.is_end_awaited = false;
        }
        self.end_pass();
    }

    /// Says that this rank has read what it needed for a forward or backward pass.
    pub(super) fn end_pass(&self) {
        if self.is_open() {
            self.memory.has_ended();
        }
    }

    /// Offers rows, one for each rank, to those that want them; the number of the offer, if that is possible.
    pub(super) fn offer(&self, rows: &Tensor) -> Result<Option<i64>> {
        Ok(self.stamps()?.map(|_| self.memory.offer(rows.data_ptr() as usize)))
    }

    /// Adds up this rank's rows of an offer of all ranks, `rows` among them, in the order of ranks; whether the epoch of the
    /// offer is still open. `room` is memory for as many elements.
    pub(super) fn sum_offered(
        &self,
        (number, rows): (i64, Tensor),
        room: &Tensor,
        sum: Tensor,
        label: &str,
    ) -> Result<bool> {
        let Some(stamps) = self.stamps()? else { return Ok(false) };
        let reading = PeerRead { op: "reduce_scatter", what: label.to_owned(), stamps: &stamps };
        let (own, world_size) = (self.group.rank(), stamps.len());
        let row_bytes = rows.numel() / world_size * rows.f_kind()?.elt_size_in_bytes();
        let mut versions = room.f_view([world_size as i64, -1])?.f_unbind(0)?;
        versions[own] = rows.f_view([world_size as i64, -1])?.f_select(0, own as i64)?;
        for (rank, place) in versions.iter().enumerate().filter(|(rank, _)| *rank != own) {
            let taken = self.memory.take(rank, number, own * row_bytes, place, &reading);
            // What this rank has offered goes with the error.
            taken.inspect_err(|_| self.memory.close())?;
        }
        self.memory.has_taken();
        PendingReduceScatter::here(versions).write_to(sum)?;
        if let Some(epoch) = &mut *self.lock() {
            epoch.lent.push_back((number, rows));
        }
        self.await_lent(MOST_LENT)?;
        Ok(true)
    }

    /// Waits until other ranks have taken all rows but the last so many.
    fn await_lent(&self, most_left: usize) -> Result<()> {
        loop {
            let lent = {
                let mut epoch = self.lock();
                let lent = epoch.as_mut().map(|epoch| &mut epoch.lent).filter(|lent| most_left < lent.len());
                lent.and_then(VecDeque::pop_front)
            };
            let Some((number, _rows)) = lent else { return Ok(()) };
            if let Some(stamps) = self.stamps()? {
                let reading = PeerRead { op: "reduce_scatter", what: "gradients".to_owned(), stamps: &stamps };
                let taken = self.memory.await_taken(number, &reading);
                taken.inspect_err(|_| self.memory.close())?;
            }
        }
    }

    /// Waits until other ranks have taken all rows.
    pub(super) fn finish(&self) -> Result<()> {
        self.await_lent(0)
    }

    /// Closes the epoch, if one is open, before shards change: waits until all ranks have ended as many passes. How often own
    /// shards had been written to when it opened.
    pub(super) fn close(&self) -> Result<Option<Vec<i64>>> {
        let epoch = self.lock().take();
        epoch.map(|epoch| self.close_epoch(epoch)).transpose()
    }

    fn close_epoch(&self, epoch: PeerReadEpoch) -> Result<Vec<i64>> {
        let PeerReadEpoch { stamps, opening, versions, lent, .. } = epoch;
        let opened = opening.map_or(Ok(()), PendingCollective::wait).and_then(|()| Ok(Vec::<i64>::try_from(&stamps)?));
        let ended = opened.and_then(|stamps| {
            let what = "the end of a pass".to_owned();
            self.memory.await_ended(&PeerRead { op: "forward or backward", what, stamps: &stamps })
        });
        self.memory.close();
        drop(lent);
        ended.map(|()| versions)
    }
}

/// Shards go with their model; others may still be reading them.
impl Drop for PeerReads {
    fn drop(&mut self) {
        let epoch = self.epoch.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let Some(epoch) = epoch else { return };
        // A rank that has failed, or not even begun to read, does not wait for others, which may never come so far.
        if epoch.opening.is_some() || thread::panicking() || self.group.is_out_of_step() {
            return self.memory.close();
        }
        // Nobody is left who could be told: who still reads then, finds the epoch closed.
        let _ = self.close_epoch(epoch);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::testing;
    use std::time::Duration;
    use torch_ext::Store;

    #[test]
    fn a_rank_whose_pass_has_failed_waits_for_nobody_when_its_model_is_dropped() {
        let store = Store::hash().unwrap();
        let rank = |rank: usize| {
            let group = testing::join_with_deadline(&store, rank, 2, Duration::from_secs(2)).unwrap();
            let reads = PeerReads::new(&group, vec![Tensor::from_slice(&[0f32])]).unwrap().unwrap();
            reads.open(vec![0]).unwrap();
            if rank == 1 {
                // Ends no pass until it has been missed.
                reads.stamps().unwrap();
                return store.wait(&["dropped"], Duration::from_secs(60)).unwrap();
            }
            reads.end_pass();
            let rows = Tensor::from_slice(&[1f32, 2.0]);
            let number = reads.offer(&rows).unwrap().unwrap();
            let (room, sum) = (rows.empty_like(), Tensor::from_slice(&[0f32]));
            assert!(reads.sum_offered((number, rows), &room, sum, "gradients").unwrap_err().is_timeout());
            let said = || String::from_utf8(store.get("journal/failed/0").unwrap()).unwrap();
            assert!(said().starts_with("reduce_scatter"), "{}", said());
            drop(reads);
            // A wait at the end of a pass would have failed and been said.
            assert!(said().starts_with("reduce_scatter"), "{}", said());
            store.set("dropped", &[]).unwrap();
        };
        let rank = &rank;
        std::thread::scope(|scope| {
            for number in [0, 1] {
                scope.spawn(move || rank(number));
            }
        });
    }
}
