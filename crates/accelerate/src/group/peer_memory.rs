//! Ranks on one machine that read each other's memory: nothing passes through sockets, and nobody waits for the one it reads
//! from, unless what it wants is not there yet.
//!
//! The kernel copies once, from process to process, as MPI libraries do within a machine (Goglin, Moreaud, "KNEM", Journal
//! of Parallel and Distributed Computing 73, 2013).

use super::{Group, ReduceOp};
use crate::error::{CollectiveError, Result};
use rustix::io::Errno;
use std::collections::hash_map::RandomState;
use std::fs;
use std::hash::{BuildHasher, DefaultHasher, Hash, Hasher};
use std::io;
use std::sync::atomic::{AtomicI64, Ordering, fence};
use std::thread;
use std::time::{Duration, Instant};
use tch::Tensor;
use torch_ext::process_memory::{let_siblings_read, read, read_words};

/// Stands where nobody may read.
const CLOSED: i64 = 0;

/// How many pieces of memory can be on offer at once.
pub(crate) const MOST_OFFERS: usize = 8;

/// How long to sleep before looking again: less than a piece takes, and more than looking does.
const PAUSE: Duration = Duration::from_micros(50);

/// Numbers of a status.
const NUM_WORDS: usize = 4 + MOST_OFFERS;

/// What its peers see of a rank.
#[derive(Debug, Default)]
#[repr(C)]
struct PeerStatus {
    /// What its memory holds: whoever reads looks whether it is still the same afterwards.
    stamp: AtomicI64,
    /// Pieces offered since the opening, and pieces taken from every other rank.
    num_offered: AtomicI64,
    num_taken: AtomicI64,
    /// Passes since the opening in which it does not read any more.
    num_ended: AtomicI64,
    /// Addresses of the last offers, by their numbers modulo the number of places.
    places: [AtomicI64; MOST_OFFERS],
}

/// A status as it was when a peer read it.
struct Seen([i64; NUM_WORDS]);

impl Seen {
    fn stamp(&self) -> i64 {
        self.0[0]
    }
    fn num_offered(&self) -> i64 {
        self.0[1]
    }
    fn num_taken(&self) -> i64 {
        self.0[2]
    }
    fn num_ended(&self) -> i64 {
        self.0[3]
    }
    fn place(&self, number: i64) -> usize {
        self.0[4 + number as usize % MOST_OFFERS] as usize
    }
}

/// The ranks of a group, each of which can read the memory of every other.
#[derive(Debug)]
pub(crate) struct PeerMemory {
    group: Group,
    peers: Vec<Peer>,
    status: Box<PeerStatus>,
    /// The stamp of the last opening, or the number that the ranks met with.
    last: AtomicI64,
}

/// A rank whose status can be read.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) process: u32,
    status_at: usize,
    /// What its status began with.
    pub(super) nonce: i64,
}

impl Peer {
    /// The first numbers of its status.
    pub(super) fn look(&self, words: &mut [i64]) -> io::Result<()> {
        read_words(self.process, self.status_at, words)
    }
}

/// A number nobody else has, by which a status is known: another process may have the same id in another container.
pub(super) fn nonce() -> i64 {
    (RandomState::new().hash_one(std::process::id()) >> 1) as i64 | 1
}

/// Stands for the network that this process is in. To launchers a process in another network is on another machine, also where both
/// have one kernel: it may be lost, and the ways to it cut, and then ranks have to notice.
fn network() -> i64 {
    let namespace = fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let mut hasher = DefaultHasher::new();
    namespace.hash(&mut hasher);
    hasher.finish() as i64
}

/// How a rank is found by the others.
pub(super) struct Card {
    /// Where its status begins, of which the first number is its `nonce`.
    pub(super) status_at: usize,
    pub(super) nonce: i64,
    /// Of a file that others open, if they are to.
    pub(super) descriptor: i64,
}

/// The ranks of a group, if each can read the status of every other, and what it can `open` of them; `None` on all of them
/// otherwise. Collective: `gather` joins all ranks' numbers, and `least` gives the least of them.
pub(super) fn meet<T>(
    Card { status_at, nonce, descriptor }: Card,
    gather: impl FnOnce(&Tensor) -> Result<Tensor>,
    least: impl FnOnce(&Tensor) -> Result<()>,
    open: impl Fn(&Peer, i64) -> Option<T>,
) -> Result<Option<Vec<(Peer, T)>>> {
    // Whether that was needed and allowed shows below.
    let _ = let_siblings_read();
    let network = network();
    let own = [i64::from(std::process::id()), status_at as i64, nonce, network, descriptor];
    let cards = Vec::<i64>::try_from(&gather(&Tensor::f_from_slice(&own)?)?)?;
    let peer = |card: &[i64]| {
        let peer = Peer { process: card[0] as u32, status_at: card[1] as usize, nonce: card[2] };
        let mut found = [0];
        let is_readable = card[3] == network && peer.look(&mut found).is_ok() && found[0] == peer.nonce;
        let opened = if is_readable { open(&peer, card[4]) } else { None };
        opened.map(|opened| (peer, opened))
    };
    let peers: Option<Vec<(Peer, T)>> = cards.chunks_exact(own.len()).map(peer).collect();
    let can_read = Tensor::f_from_slice(&[i64::from(peers.is_some())])?;
    least(&can_read)?;
    Ok(peers.filter(|_| i64::try_from(&can_read).is_ok_and(|least| least == 1)))
}

impl Group {
    /// The ranks, if each can read every other's memory; `None` on all of them otherwise. Collective.
    pub(crate) fn peer_memory(&self) -> Result<Option<PeerMemory>> {
        if self.world_size() == 1 {
            return Ok(None);
        }
        let nonce = nonce();
        let status = Box::new(PeerStatus { stamp: AtomicI64::new(nonce), ..Default::default() });
        let card = Card { status_at: &raw const *status as usize, nonce, descriptor: -1 };
        let least = |can_read: &Tensor| self.all_reduce(can_read, ReduceOp::Min);
        let met = meet(card, |own| self.all_gather_into_tensor(own), least, |_, _| Some(()))?;
        let found = met.map(|met| {
            let peers = met.into_iter().map(|(peer, ())| peer).collect();
            PeerMemory { group: self.clone(), peers, status, last: AtomicI64::new(nonce) }
        });
        found.iter().for_each(PeerMemory::close);
        Ok(found)
    }
}

impl PeerMemory {
    /// From now on this rank's memory may be read; others compare this number.
    pub(crate) fn open(&self) -> i64 {
        let PeerStatus { stamp, num_offered, num_taken, num_ended, .. } = &*self.status;
        [num_offered, num_taken, num_ended].into_iter().for_each(|number| number.store(0, Ordering::SeqCst));
        // Odd numbers only, so never `CLOSED`.
        let own = self.last.fetch_add(2, Ordering::Relaxed).wrapping_add(2);
        stamp.store(own, Ordering::SeqCst);
        own
    }

    /// From now on it may not: what was read is found to be wrong by the one who read it.
    pub(crate) fn close(&self) {
        self.status.stamp.store(CLOSED, Ordering::SeqCst);
        // Before anything that is written to the memory afterwards.
        fence(Ordering::SeqCst);
    }

    /// Offers memory to all other ranks, which stays as it is until it has been [taken](Self::await_taken); the number of
    /// the offer.
    pub(crate) fn offer(&self, address: usize) -> i64 {
        let number = self.status.num_offered.load(Ordering::SeqCst);
        self.status.places[number as usize % MOST_OFFERS].store(address as i64, Ordering::SeqCst);
        self.status.num_offered.store(number + 1, Ordering::SeqCst);
        number
    }

    /// Says that this rank has taken what it wants of one more offer of every rank.
    pub(crate) fn has_taken(&self) {
        self.status.num_taken.fetch_add(1, Ordering::SeqCst);
    }

    /// Says that this rank has ended one more pass, and does not read for it any more.
    pub(crate) fn has_ended(&self) {
        self.status.num_ended.fetch_add(1, Ordering::SeqCst);
    }

    fn look(&self, rank: usize) -> io::Result<Seen> {
        let mut seen = Seen([0; NUM_WORDS]);
        self.peers[rank].look(&mut seen.0)?;
        Ok(seen)
    }

    /// Looks at a rank's status until something is found there.
    fn await_status<T>(
        &self,
        rank: usize,
        reading: &PeerRead<'_>,
        find: impl Fn(io::Result<Seen>) -> Result<Option<T>>,
    ) -> Result<T> {
        let started = Instant::now();
        let deadline = self.group.timeout().unwrap_or(Duration::MAX);
        let _entered = self.group.enter_reading(reading.op);
        loop {
            if let Some(found) = find(self.look(rank))? {
                return Ok(found);
            }
            if deadline <= started.elapsed() {
                let error = torch_ext::Error::timeout(reading.op, format!("rank {} is late", self.group.name_of(rank)));
                return Err(self.group.explain_own(reading.op, reading.what.clone(), error));
            }
            thread::sleep(PAUSE);
        }
    }

    /// Waits until all ranks have ended something or do not read any more: they have closed, or are gone.
    fn await_others(&self, reading: &PeerRead<'_>, has_ended: impl Fn(&Seen) -> bool) -> Result<()> {
        let others = (0..self.peers.len()).filter(|&rank| rank != self.group.rank());
        others.into_iter().try_for_each(|rank| {
            let ends = |seen: &Seen| seen.stamp() != reading.stamps[rank] || has_ended(seen);
            self.await_status(rank, reading, |seen| Ok(seen.as_ref().map_or(true, ends).then_some(())))
        })
    }

    fn check(&self, rank: usize, reading: &PeerRead<'_>, seen: &Seen) -> Result<()> {
        if seen.stamp() == reading.stamps[rank] {
            return Ok(());
        }
        Err(self.closed(rank, reading))
    }

    /// A rank whose collective has failed drops what others still read; it is not at fault.
    #[cold]
    fn closed(&self, rank: usize, reading: &PeerRead<'_>) -> crate::Error {
        if self.group.has_failed(rank) {
            let reason = format!("rank {} has failed, and what was read from it is gone", self.group.name_of(rank));
            return self.group.explain_own(
                reading.op,
                reading.what.clone(),
                torch_ext::Error::connection(reading.op, reason),
            );
        }
        CollectiveError::MemoryClosed { rank: self.group.name_of(rank), what: reading.what.clone() }.into()
    }

    #[cold]
    fn lost(&self, rank: usize, reading: &PeerRead<'_>, source: io::Error) -> crate::Error {
        // The process has ended, or what was read is not there any more.
        let of_the_rank = [Errno::SRCH, Errno::FAULT].map(|error| Some(error.raw_os_error()));
        let is_gone = of_the_rank.contains(&source.raw_os_error()) || self.group.has_failed(rank);
        let rank = self.group.name_of(rank);
        if !is_gone {
            // The rank lives, and nothing is wrong with it: this one has failed.
            let error = CollectiveError::MemoryUnreadable { rank, what: reading.what.clone(), source };
            self.group.fail(reading.op, reading.what.clone(), &error.to_string());
            return error.into();
        }
        let error =
            torch_ext::Error::connection(reading.op, format!("the memory of rank {rank} cannot be read: {source}"));
        self.group.explain_own(reading.op, reading.what.clone(), error)
    }

    /// Fills `place` from what rank `rank` has at an address.
    ///
    /// # Errors
    /// The rank is gone, or has closed its memory meanwhile.
    pub(crate) fn read(&self, rank: usize, address: usize, place: &Tensor, reading: &PeerRead<'_>) -> Result<()> {
        let process = self.peers[rank].process;
        let seen = read(process, address, place).and_then(|()| self.look(rank));
        self.check(rank, reading, &seen.map_err(|source| self.lost(rank, reading, source))?)
    }

    /// Waits for offer `number` of rank `rank`, and fills `place` from its bytes `offset` and following.
    ///
    /// # Errors
    /// As [`read`](Self::read); the deadline has passed.
    pub(crate) fn take(
        &self,
        rank: usize,
        number: i64,
        offset: usize,
        place: &Tensor,
        reading: &PeerRead<'_>,
    ) -> Result<()> {
        let seen = self.await_status(rank, reading, |seen| {
            let seen = seen.map_err(|source| self.lost(rank, reading, source))?;
            self.check(rank, reading, &seen)?;
            Ok((number < seen.num_offered()).then_some(seen))
        })?;
        self.read(rank, seen.place(number) + offset, place, reading)
    }

    /// Waits until all ranks have taken offer `number` of this one.
    ///
    /// # Errors
    /// The deadline has passed.
    pub(crate) fn await_taken(&self, number: i64, reading: &PeerRead<'_>) -> Result<()> {
        self.await_others(reading, |seen| number < seen.num_taken())
    }

    /// Waits until all ranks have ended as many passes as this one.
    ///
    /// # Errors
    /// The deadline has passed.
    pub(crate) fn await_ended(&self, reading: &PeerRead<'_>) -> Result<()> {
        let number = self.status.num_ended.load(Ordering::SeqCst);
        self.await_others(reading, |seen| number <= seen.num_ended())
    }
}

/// What a rank reads of its peers, and the numbers under which they have opened their memory.
pub(crate) struct PeerRead<'a> {
    pub(crate) op: &'static str,
    /// For messages.
    pub(crate) what: String,
    /// By rank.
    pub(crate) stamps: &'a [i64],
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::testing;
    use torch_ext::Store;

    fn reading(stamps: &[i64]) -> PeerRead<'_> {
        PeerRead { op: "reading", what: "numbers".to_owned(), stamps }
    }

    /// All ranks' numbers, one from each.
    fn exchange(group: &Group, own: i64) -> Vec<i64> {
        Vec::try_from(&group.all_gather_into_tensor(&Tensor::from_slice(&[own])).unwrap()).unwrap()
    }

    #[test]
    fn ranks_read_what_others_have_while_it_is_open() {
        for world_size in 1..=3 {
            testing::ranks(world_size, Default::default(), |accelerator| {
                let group = accelerator.group();
                let Some(peer_memory) = group.peer_memory()? else {
                    assert_eq!(world_size, 1);
                    return Ok(());
                };
                let own = Tensor::from_slice(&[group.rank() as i64, 7]);
                let next = (group.rank() + 1) % world_size;
                for _ in 0..2 {
                    let stamps = exchange(group, peer_memory.open());
                    let address = exchange(group, own.data_ptr() as i64)[next] as usize;
                    let place = Tensor::from_slice(&[0i64; 2]);
                    peer_memory.read(next, address, &place, &reading(&stamps))?;
                    assert_eq!(place, Tensor::from_slice(&[next as i64, 7]));
                    let others = vec![1; world_size];
                    let other = peer_memory.read(next, address, &place, &reading(&others)).unwrap_err();
                    assert!(other.to_string().contains("numbers"), "another stamp: {other}");
                    let absent = peer_memory.read(next, 0, &place, &reading(&stamps)).unwrap_err();
                    assert!(absent.is_peer_failure(), "{absent}");
                    group.barrier()?;
                    peer_memory.close();
                    group.barrier()?;
                    let closed = peer_memory.read(next, address, &place, &reading(&stamps)).unwrap_err();
                    assert!(closed.to_string().contains(&format!("rank {next} changed")), "{closed}");
                    group.barrier()?;
                }
                Ok(())
            })
            .unwrap();
        }
    }

    #[test]
    fn offers_are_taken_in_their_order_and_stay_until_then() {
        testing::ranks(3, Default::default(), |accelerator| {
            let group = accelerator.group();
            let peer_memory = group.peer_memory()?.unwrap();
            let stamps = exchange(group, peer_memory.open());
            let reading = reading(&stamps);
            let mut memories = [0, 1].map(|_| Tensor::from_slice(&[0i64; 3]));
            for number in 0..3 * MOST_OFFERS as i64 {
                if 1 < number {
                    peer_memory.await_taken(number - 2, &reading)?;
                }
                // Overwrites what others would still find if nobody had waited.
                let memory = &mut memories[number as usize % 2];
                memory.copy_(&(Tensor::from_slice(&[0i64, 1, 2]) + 10 * number + 1000 * group.rank() as i64));
                assert_eq!(peer_memory.offer(memory.data_ptr() as usize), number);
                for rank in (0..3).filter(|&rank| rank != group.rank()) {
                    let place = Tensor::from_slice(&[0i64]);
                    peer_memory.take(rank, number, 8 * group.rank(), &place, &reading)?;
                    assert_eq!(i64::try_from(&place)?, group.rank() as i64 + 10 * number + 1000 * rank as i64);
                }
                peer_memory.has_taken();
            }
            group.barrier()
        })
        .unwrap();
    }

    #[test]
    fn a_rank_that_offers_nothing_is_named_at_the_deadline() {
        let store = Store::hash().unwrap();
        let rank = |rank: usize| {
            let group = testing::join_with_deadline(&store, rank, 2, Duration::from_secs(5)).unwrap();
            let peer_memory = group.peer_memory().unwrap().unwrap();
            let stamps = exchange(&group, peer_memory.open());
            let taken = (rank == 0).then(|| peer_memory.take(1, 0, 0, &Tensor::from_slice(&[0i64]), &reading(&stamps)));
            // The other stays until it has been missed.
            if rank == 0 {
                store.set("missed", &[]).unwrap();
            } else {
                store.wait(&["missed"], Duration::from_secs(60)).unwrap();
            }
            taken
        };
        let rank = &rank;
        let error = std::thread::scope(|scope| {
            let threads = [0, 1].map(|number| scope.spawn(move || rank(number)));
            threads.map(|thread| thread.join().unwrap()).into_iter().flatten().next().unwrap().unwrap_err()
        });
        let text = error.to_string();
        assert!(
            error.is_timeout() && text.contains("numbers") && text.contains("rank 1 has not made this call"),
            "{text}"
        );
    }
}
