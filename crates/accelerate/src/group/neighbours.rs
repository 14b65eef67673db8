//! Ranks on one machine that read each other's memory: nothing passes through sockets, and nobody waits for the one it reads
//! from.
//!
//! The kernel copies once, from process to process, as MPI libraries do within a machine (Goglin, Moreaud, "KNEM", Journal
//! of Parallel and Distributed Computing 73, 2013).

use super::Group;
use crate::error::{CollectiveError, Result};
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicI64, Ordering, fence};
use tch::Tensor;
use torch_ext::process_memory::{let_siblings_read, read};

/// Stands where nobody may read.
const CLOSED: i64 = 0;

/// All ranks of a group, which can read each other's memory.
#[derive(Debug)]
pub(crate) struct Neighbours {
    peers: Vec<Peer>,
    /// What this rank's memory holds: others that read look whether it is still the same afterwards.
    stamp: Box<AtomicI64>,
    /// The stamp of the last opening, or the number that the ranks met with.
    last: AtomicI64,
}

#[derive(Debug)]
struct Peer {
    process: u32,
    stamp_at: usize,
}

impl Group {
    /// The ranks, if each can read every other's memory; `None` on all of them otherwise. Collective.
    pub(crate) fn neighbours(&self) -> Result<Option<Neighbours>> {
        if self.world_size() == 1 {
            return Ok(None);
        }
        // Whether that was needed and allowed shows below.
        let _ = let_siblings_read();
        // A number nobody else has: another process may have the same id in another container.
        let nonce = (RandomState::new().hash_one(std::process::id()) >> 1) as i64 | 1;
        let stamp = Box::new(AtomicI64::new(nonce));
        let own = [i64::from(std::process::id()), &raw const *stamp as i64, nonce];
        let cards = Vec::<i64>::try_from(&self.all_gather_into_tensor(&Tensor::f_from_slice(&own)?)?)?;
        let peer = |card: &[i64]| Peer { process: card[0] as u32, stamp_at: card[1] as usize };
        let found = Neighbours { peers: cards.chunks_exact(3).map(peer).collect(), stamp, last: AtomicI64::new(nonce) };
        let reads = |(rank, card): (usize, &[i64])| found.stamp_of(rank).is_ok_and(|stamp| stamp == card[2]);
        let can_read = Tensor::f_from_slice(&[i64::from(cards.chunks_exact(3).enumerate().all(reads))])?;
        self.all_reduce(&can_read, super::ReduceOp::Min)?;
        found.close();
        Ok((i64::try_from(&can_read)? == 1).then_some(found))
    }
}

impl Neighbours {
    /// From now on this rank's memory may be read; others compare this number.
    pub(crate) fn open(&self) -> i64 {
        // Odd numbers only, so never `CLOSED`.
        let stamp = self.last.fetch_add(2, Ordering::Relaxed).wrapping_add(2);
        self.stamp.store(stamp, Ordering::SeqCst);
        stamp
    }

    /// From now on it may not: what was read is found to be wrong by the one who read it.
    pub(crate) fn close(&self) {
        self.stamp.store(CLOSED, Ordering::SeqCst);
        // Before anything that is written to the memory afterwards.
        fence(Ordering::SeqCst);
    }

    fn stamp_of(&self, rank: usize) -> std::io::Result<i64> {
        let place = Tensor::f_from_slice(&[0i64]).map_err(std::io::Error::other)?;
        let peer = &self.peers[rank];
        read(peer.process, peer.stamp_at, &place)?;
        i64::try_from(&place).map_err(std::io::Error::other)
    }

    /// Fills `place` from what rank `rank` has at an address, while it is open as `stamp`; `what` is for messages.
    ///
    /// # Errors
    /// The rank is gone, or has closed its memory meanwhile.
    pub(crate) fn read(&self, rank: usize, address: usize, stamp: i64, place: &Tensor, what: &str) -> Result<()> {
        let read = read(self.peers[rank].process, address, place).and_then(|()| self.stamp_of(rank));
        match read {
            Ok(found) if found == stamp => Ok(()),
            Ok(_) => Err(CollectiveError::MemoryClosed { rank, what: what.to_owned() }.into()),
            Err(source) => Err(CollectiveError::MemoryGone { rank, what: what.to_owned(), source }.into()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn ranks_read_what_others_have_while_it_is_open() {
        for world_size in 1..=3 {
            testing::ranks(world_size, |accelerator| {
                let group = accelerator.group();
                let Some(neighbours) = group.neighbours()? else {
                    assert_eq!(world_size, 1);
                    return Ok(());
                };
                let own = Tensor::from_slice(&[group.rank() as i64, 7]);
                let next = (group.rank() + 1) % world_size;
                for _ in 0..2 {
                    let card = Tensor::from_slice(&[own.data_ptr() as i64, neighbours.open()]);
                    let cards = group.all_gather(&card)?;
                    let (address, stamp) = (cards[next].int64_value(&[0]) as usize, cards[next].int64_value(&[1]));
                    let place = Tensor::from_slice(&[0i64; 2]);
                    neighbours.read(next, address, stamp, &place, "numbers")?;
                    assert_eq!(place, Tensor::from_slice(&[next as i64, 7]));
                    let other = neighbours.read(next, address, stamp + 2, &place, "numbers").unwrap_err();
                    assert!(other.to_string().contains("numbers"), "another stamp: {other}");
                    group.barrier()?;
                    neighbours.close();
                    group.barrier()?;
                    let closed = neighbours.read(next, address, stamp, &place, "numbers").unwrap_err();
                    assert!(closed.to_string().contains(&format!("rank {next}")), "{closed}");
                    let absent = neighbours.read(next, 0, CLOSED, &place, "numbers").unwrap_err();
                    assert!(absent.is_peer_failure(), "{absent}");
                    group.barrier()?;
                }
                Ok(())
            })
            .unwrap();
        }
    }
}
