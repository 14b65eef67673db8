//! Collectives of ranks on one machine, through memory that all of them have mapped: nothing passes through sockets, and no thread but
//! the caller's takes part.
//!
//! Each rank publishes on its [`CallBoard`] which call it makes and how far it is. All ranks compare the calls before anything is read.
//! Small tensors lie on the board, and larger ones go block by block through staging buffers ([`Staging`]). So no rank has to wait until
//! others have read what they need of it, and a rank that fails has not changed what they read. It says on its board that it has failed.
//! Parts that a rank computes with during a call ([`parts`]) are read where they are, so the ranks wait for each other at its end.
//!
//! Sums are added in the order of Gloo's ring ([`ring`](accelerate_core::ring)), so they have the same bits, and the same on every rank: each part is
//! added by one rank, and copied by the others. Small tensors are added by all ranks, in that same order.

mod moves;
mod parts;
mod reduce;

use super::Group;
use super::call_board::{CallBoard, Counter, SMALL_BYTES};
use super::compare::call_text;
use super::peer_call::PeerCall;
use super::peer_memory::{Card, Peer, meet, nonce};
use super::peer_waits::Patience;
use super::staging::{Staging, staging_bytes};
use crate::error::{CollectiveError, Error, Result};
use moves::Moves;
use reduce::Add;
use rustix::io::Errno;
use std::io;
use std::sync::atomic::{AtomicI64, Ordering, fence};
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};
use tch::{Device, Kind, Tensor};
use torch_ext::process_memory::read;

/// In place of the number that a standing begins with.
const FAILED: i64 = -1;
const CLOSED: i64 = 0;

/// How far a rank is in a call.
const ENTERED: i64 = 1;
/// It has found that ranks make different calls, and says which one it makes.
const HAS_TEXT: i64 = 2;
/// It needs nothing more of the others.
const DONE: i64 = 3;
const NUM_STEPS: i64 = 4;

/// Why a call ends early.
enum Fault {
    /// Of the others: a deadline, or a rank that is gone.
    Peer(torch_ext::Error),
    /// Of this rank.
    Own(Error),
    /// What ranks are about to do, in their order.
    Different(Vec<String>),
}

impl<E: Into<Error>> From<E> for Fault {
    fn from(error: E) -> Self {
        Self::Own(error.into())
    }
}

type Step<T = ()> = std::result::Result<T, Fault>;

/// Which call of a group is made, for messages.
pub(super) struct Made<'a> {
    pub(super) group: &'a Group,
    pub(super) op: &'static str,
    pub(super) shape: &'a dyn Fn() -> String,
}

/// The ranks of a group, which make collectives in each other's memory.
pub(super) struct PeerCalls {
    rank: usize,
    peers: Vec<Peer>,
    /// By rank.
    boards: Vec<CallBoard>,
    own: CallBoard,
    nonce: i64,
    /// The process that has joined: a copy of it (`fork`) shares its board, and is no rank.
    process: u32,
    /// Is there a processor for each rank?
    spins: bool,
    state: Mutex<State>,
}

struct State {
    /// Calls so far.
    number: i64,
    staging: Staging,
    /// Bytes for what is read before it is added.
    room: Option<Tensor>,
}

/// A running call.
struct Running<'a> {
    calls: &'a PeerCalls,
    made: &'a Made<'a>,
    state: MutexGuard<'a, State>,
    /// Are the tensors on the boards?
    is_on_board: bool,
    /// The deadline is that of the call, and not of each of its steps. What this rank computes in it does not count.
    began: Instant,
    /// What others may read of this rank. It is dropped after the rank has said that the call has failed.
    parts: Vec<Tensor>,
}

/// A call that panics in the middle has failed, and nobody should take what is in the memory that it gives back.
impl Drop for Running<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.calls.own.set_standing(FAILED);
            fence(Ordering::SeqCst);
        }
    }
}

impl PeerCalls {
    /// `None` on all ranks unless each can read every other's memory. Collective, through `gather` and `least` of [`meet`].
    pub(super) fn new(
        (rank, world_size): (usize, usize),
        gather: impl FnOnce(&Tensor) -> Result<Tensor>,
        least: impl FnOnce(&Tensor) -> Result<()>,
    ) -> Result<Option<Self>> {
        let nonce = nonce();
        // Peers may look for it for as long as this process lives: as long as it can be read, the process does.
        let sign_of_life: &AtomicI64 = Box::leak(Box::new(AtomicI64::new(nonce)));
        // Without a board this rank is one whose board nobody can open.
        let staging_bytes = staging_bytes(world_size);
        let made = CallBoard::new(nonce, staging_bytes).ok();
        let descriptor = made.as_ref().map_or(-1, |(_, file)| CallBoard::descriptor(file));
        let card = Card { status_at: &raw const *sign_of_life as usize, nonce, descriptor };
        let open = |peer: &Peer, descriptor: i64| {
            let file = CallBoard::open(peer.process, descriptor).ok()?;
            let board = CallBoard::map(&file).ok().filter(|board| board.standing() == peer.nonce)?;
            Some((board, CallBoard::staging_buffer(&file, staging_bytes).ok()?))
        };
        let met = meet(card, gather, least, open)?;
        let num_processors = thread::available_parallelism().map_or(1, usize::from);
        Ok(met.zip(made).map(|(met, (own, _file))| {
            let spins = met.len() <= num_processors;
            let (peers, opened): (_, Vec<_>) = met.into_iter().unzip();
            let (boards, buffers) = opened.into_iter().unzip();
            let state = Mutex::new(State { number: 0, staging: Staging::new(rank, buffers), room: None });
            Self { rank, peers, boards, own, nonce, process: std::process::id(), spins, state }
        }))
    }

    /// Makes a call that all ranks make. Collective.
    ///
    /// # Errors
    /// Ranks that make different calls; a rank that is gone, has failed, or does not come before the deadline.
    pub(super) fn run(&self, made: &Made<'_>, call: &PeerCall<'_>) -> std::result::Result<(), CallError> {
        self.run_with(made, |running| running.make(call))
    }

    /// The same with a call in which this rank computes: `compute` gets each rank's part in its place.
    pub(super) fn gather_parts(
        &self,
        made: &Made<'_>,
        places: &[Tensor],
        compute: &mut dyn FnMut(usize) -> Result<()>,
    ) -> std::result::Result<(), CallError> {
        self.run_with(made, |running| running.gather_parts(places, compute))
    }

    /// The same, where `compute` makes this rank's contribution to each rank's part of a tensor of `numel` elements.
    pub(super) fn sum_parts(
        &self,
        made: &Made<'_>,
        (sum, numel): (&Tensor, usize),
        compute: &mut dyn FnMut(usize) -> Result<Tensor>,
    ) -> std::result::Result<(), CallError> {
        self.run_with(made, |running| running.sum_parts((sum, numel), compute))
    }

    fn run_with(
        &self,
        made: &Made<'_>,
        make: impl FnOnce(&mut Running<'_>) -> Step,
    ) -> std::result::Result<(), CallError> {
        if std::process::id() != self.process {
            return Err(CallError::Own(CollectiveError::AfterFork { op: made.op }.into()));
        }
        let state = self.state.lock().unwrap_or_else(|poisoned| {
            // Another thread has panicked in the middle of a call, so this rank has failed.
            self.own.set_standing(FAILED);
            poisoned.into_inner()
        });
        let mut running =
            Running { calls: self, made, state, is_on_board: false, began: Instant::now(), parts: Vec::new() };
        let fault = match running.check_standing().and_then(|()| make(&mut running)) {
            Ok(()) => return Ok(()),
            Err(fault) => fault,
        };
        if let Fault::Different(calls) = fault {
            return Err(CallError::Own(made.group.different_calls(&calls)));
        }
        // Before anything that is written to the memory afterwards.
        self.own.set_standing(FAILED);
        fence(Ordering::SeqCst);
        Err(match fault {
            Fault::Peer(error) => CallError::Peer(error),
            Fault::Own(error) => {
                made.group.fail(made.op, (made.shape)(), &error.to_string());
                CallError::Own(error)
            }
            Fault::Different(_) => CallError::Own(Error::other("ranks make different calls")),
        })
    }

    /// Is a rank well and so far? Whoever has failed may have written elsewhere meanwhile.
    fn has_reached(&self, rank: usize, counter: Counter, wanted: i64) -> bool {
        let seen = self.boards[rank].look(counter);
        seen.standing != FAILED && wanted <= seen.count
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (own, world_size) = (self.rank, self.peers.len());
        (1..world_size).map(move |step| (own + step) % world_size)
    }

    /// # Errors
    /// The system's own: the process has ended.
    fn find_alive(&self, rank: usize) -> io::Result<()> {
        let (peer, mut found) = (&self.peers[rank], [0]);
        peer.look(&mut found)?;
        // Another process may have its number by now.
        if found[0] == peer.nonce { Ok(()) } else { Err(Errno::SRCH.into()) }
    }
}

/// A failed call.
pub(super) enum CallError {
    /// To be explained: who is missing?
    Peer(torch_ext::Error),
    Own(Error),
}

impl Drop for PeerCalls {
    fn drop(&mut self) {
        if std::process::id() == self.process {
            self.own.change_standing(self.nonce, CLOSED);
        }
    }
}

impl Running<'_> {
    fn check_standing(&self) -> Step {
        if self.calls.own.standing() == self.calls.nonce {
            return Ok(());
        }
        let reason = "an earlier collective of this group has failed on this rank";
        Err(Fault::Peer(torch_ext::Error::connection(self.made.op, reason)))
    }

    fn make(&mut self, call: &PeerCall<'_>) -> Step {
        let hash = self.announce(call)?;
        self.meet(hash)?;
        match *call {
            // `gather_parts` and `sum_parts` make these calls themselves.
            PeerCall::Parts { .. } => self.finish(),
            PeerCall::Barrier => {
                self.post(DONE);
                Ok(())
            }
            PeerCall::AllReduce { tensor, op, factor, .. } => {
                let flat = tensor.f_view([-1])?;
                let add = Add { op, factor };
                if self.is_on_board { self.reduce_small(&flat, add) } else { self.reduce(&flat, add) }
            }
            PeerCall::Broadcast { tensor, source } => {
                self.move_parts(&Moves::broadcast(self.calls.rank, tensor, source))
            }
            PeerCall::AllGather { input, places } | PeerCall::Compare { input, places } => {
                self.move_parts(&Moves::all_gather(self.calls.rank, input, places))
            }
            PeerCall::AllToAll { input, places } => self.move_parts(&Moves::all_to_all(self.calls.rank, input, places)),
            PeerCall::Rotate { input, place } => {
                let ranks = (self.calls.rank, self.calls.peers.len());
                self.move_parts(&Moves::rotate(ranks, input, place))
            }
            PeerCall::ReduceScatter { rows, shard, op } => {
                let add = Add { op: op.of_backend(), factor: None };
                self.reduce_scatter(&rows.f_view([-1])?, &shard.f_view([-1])?, add)
            }
        }
    }

    /// Says which call this rank makes, and gives the number that ranks compare for it.
    fn announce(&mut self, call: &PeerCall<'_>) -> Step<i64> {
        let calls = self.calls;
        self.state.number += 1;
        let number = self.state.number;
        let hash = call.hash(self.made.op, number);
        calls.own.set_call(number, hash);
        self.is_on_board = call.tensor().is_none_or(|tensor| num_bytes(tensor) <= SMALL_BYTES);
        if let Some(tensor) = call.shown_by(calls.rank).filter(|_| self.is_on_board) {
            calls.own.store(number, tensor).map_err(Error::other)?;
        }
        if !self.is_on_board {
            calls.own.set_probes();
        }
        self.post(ENTERED);
        Ok(hash)
    }

    /// Waits until all ranks make this call.
    fn meet(&mut self, hash: i64) -> Step {
        let (calls, number) = (self.calls, self.state.number);
        let mut are_equal = true;
        let mut line = Duration::ZERO;
        for rank in calls.others() {
            self.wait_for(rank, ENTERED)?;
            if !self.is_on_board {
                line = line.max(calls.boards[rank].time_to_read());
            }
            are_equal &= calls.boards[rank].call(number) == hash;
        }
        if !self.is_on_board {
            // Reading the own lines takes as long as measuring does.
            self.state.staging.measured(line.saturating_sub(calls.own.time_to_read()));
        }
        if are_equal { Ok(()) } else { Err(self.differ()) }
    }

    /// All ranks find that they make different calls; what each of them makes.
    #[cold]
    fn differ(&mut self) -> Fault {
        let calls = self.calls;
        let text = call_text(self.made.op, &(self.made.shape)());
        calls.own.set_text(&text);
        self.post(HAS_TEXT);
        let read_texts = || -> Step<Vec<String>> {
            let mut texts = vec![text.clone(); calls.peers.len()];
            for rank in calls.others() {
                self.wait_for(rank, HAS_TEXT)?;
                let (address, num_bytes) = calls.boards[rank].text();
                let bytes = Tensor::f_zeros([num_bytes.clamp(0, SMALL_BYTES as i64)], (Kind::Uint8, Device::Cpu))?;
                self.read_memory(rank, address, &bytes)?;
                texts[rank] = String::from_utf8_lossy(&Vec::<u8>::try_from(&bytes)?).into_owned();
            }
            self.finish()?;
            Ok(texts)
        };
        read_texts().map_or_else(|fault| fault, Fault::Different)
    }

    fn post(&self, step: i64) {
        self.calls.own.set_counter(Counter::Progress, self.state.number * NUM_STEPS + step);
    }

    /// Needs nothing more of the others, and waits until they need nothing more of this rank.
    fn finish(&self) -> Step {
        self.post(DONE);
        self.calls.others().try_for_each(|rank| self.wait_for(rank, DONE))
    }

    /// Waits until a rank is so far in this call.
    fn wait_for(&self, rank: usize, step: i64) -> Step {
        let wanted = self.state.number * NUM_STEPS + step;
        if self.calls.has_reached(rank, Counter::Progress, wanted) {
            return Ok(());
        }
        // Nothing is needed of a rank after its last step.
        self.wait_until(rank, Counter::Progress, wanted, step == DONE)
    }

    /// Waits until a rank has sent or reduced a block.
    fn wait_for_block(&self, rank: usize, counter: Counter, number: i64) -> Step {
        if self.calls.has_reached(rank, counter, number) {
            return Ok(());
        }
        self.wait_until(rank, counter, number, false)
    }

    fn wait_until(&self, rank: usize, counter: Counter, wanted: i64, is_last: bool) -> Step {
        let calls = self.calls;
        let left = self.made.group.timeout().map(|timeout| timeout.saturating_sub(self.began.elapsed()));
        let mut patience = Patience::new(left, calls.spins);
        loop {
            let mut seen = calls.boards[rank].look(counter);
            let alive = if patience.is_late() && seen.count < wanted { calls.find_alive(rank) } else { Ok(()) };
            if alive.is_err() {
                // It may have come so far, and ended, in between.
                seen = calls.boards[rank].look(counter);
            }
            if seen.standing == FAILED {
                return Err(self.gone(rank, "has failed"));
            }
            if wanted <= seen.count {
                return Ok(());
            }
            if seen.standing != calls.peers[rank].nonce {
                return Err(self.gone(rank, "has left the group"));
            }
            match alive {
                Ok(()) => {}
                Err(error) if is_last && has_ended(&error) => return Ok(()),
                Err(error) => return Err(self.lost(rank, error)),
            }
            if patience.is_long() {
                self.look_at_all(is_last)?;
            }
            if !patience.wait() {
                let rank = if counter == Counter::Progress { rank } else { self.last_of_others() };
                let late = format!("rank {} is late", self.made.group.name_of(rank));
                return Err(Fault::Peer(torch_ext::Error::timeout(self.made.op, late)));
            }
        }
    }

    /// The rank that has sent and reduced the fewest blocks: it waits for nobody.
    fn last_of_others(&self) -> usize {
        let calls = self.calls;
        let num_done = |counter, rank: usize| calls.boards[rank].look(counter).count;
        let all_done =
            |rank: &usize| num_done(Counter::BlocksSent, *rank).saturating_add(num_done(Counter::BlocksReduced, *rank));
        calls.others().min_by_key(all_done).unwrap_or(calls.rank)
    }

    /// Whoever is waited for may wait in turn for a rank that has failed, or is gone, before it had made this call.
    #[cold]
    fn look_at_all(&self, is_last: bool) -> Step {
        let calls = self.calls;
        let made = self.state.number * NUM_STEPS + DONE;
        for rank in calls.others() {
            let seen = calls.boards[rank].look(Counter::Progress);
            if seen.standing == FAILED && seen.count < made {
                return Err(self.gone(rank, "has failed"));
            }
            if let Err(error) = calls.find_alive(rank)
                && !is_last
                // It may have made the call, and ended.
                && calls.boards[rank].look(Counter::Progress).count < made
            {
                return Err(self.lost(rank, error));
            }
        }
        Ok(())
    }

    #[cold]
    fn gone(&self, rank: usize, what: &str) -> Fault {
        let rank = self.made.group.name_of(rank);
        Fault::Peer(torch_ext::Error::connection(self.made.op, format!("rank {rank} {what}")))
    }

    #[cold]
    fn lost(&self, rank: usize, source: io::Error) -> Fault {
        if has_ended(&source) {
            return self.gone(rank, &format!("cannot be read: {source}"));
        }
        let (rank, what) = (self.made.group.name_of(rank), (self.made.shape)());
        Fault::Own(CollectiveError::MemoryUnreadable { rank, what, source }.into())
    }

    /// Fills `place` from what a rank has on its board, from byte `offset` of its tensor on.
    fn read(&self, rank: usize, offset: usize, place: &Tensor) -> Step {
        if place.numel() == 0 {
            return Ok(());
        }
        Ok(self.calls.boards[rank].load(self.state.number, offset, place).map_err(Error::other)?)
    }

    fn read_memory(&self, rank: usize, address: usize, place: &Tensor) -> Step {
        if place.numel() == 0 {
            return Ok(());
        }
        read(self.calls.peers[rank].process, address, place).map_err(|source| self.lost(rank, source))
    }
}

/// Has the process ended, or is what was read not there any more?
fn has_ended(error: &io::Error) -> bool {
    [Errno::SRCH, Errno::FAULT].iter().any(|of_the_rank| error.raw_os_error() == Some(of_the_rank.raw_os_error()))
}

fn num_bytes(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}
