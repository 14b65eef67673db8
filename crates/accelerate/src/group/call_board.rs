//! What ranks on one machine show each other of their calls: words that all of them have mapped, so that a look is a load and no
//! call of the kernel. Small tensors lie there, too.
//!
//! What belongs to a call has two places, of which calls use one after the other. A rank that writes what belongs to a call has seen
//! all others in the call before, so nobody reads any more what it overwrites: that of the call before that one. Behind the words
//! is a staging buffer, through which larger tensors go block by block (`staging`).

use crate::error::{Error, Result};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use std::fs::File;
use std::hint;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tch::{Device, Kind, Tensor};
use torch_ext::shared_memory::SharedWords;

/// Tensors up to this size lie on the board.
pub(super) const SMALL_BYTES: usize = 16 << 10;

/// The number that the ranks have met with, or why nobody may read any more.
const STANDING: usize = 0;
/// Where the text of a call is, when ranks make different ones.
const TEXT_AT: usize = 2;
const TEXT_BYTES: usize = 3;
/// The first [`Counter`]. Each has two lines of the cache: processors fetch them in pairs, and each counter has readers of its own.
const FIRST_COUNTER: usize = COUNTER_WORDS;
const NUM_COUNTERS: usize = 4;
const COUNTER_WORDS: usize = 16;
/// Words that only tell how long it takes to read what a peer has written last, in chains. Each says which one of its chain is read
/// next, in an order that no processor guesses.
const FIRST_PROBE: usize = FIRST_COUNTER + NUM_COUNTERS * COUNTER_WORDS;
const NEXT_PROBE: [u64; 4] = [2, 3, 1, 0];
const NUM_CHAINS: usize = 2;
const NUM_PROBES: usize = NUM_CHAINS * NEXT_PROBE.len();
/// The first of the two places.
const FIRST_PLACE: usize = FIRST_PROBE + NUM_PROBES * COUNTER_WORDS;

/// Within a place: what stands for the call and its number; its tensor, if it is small.
const CALL: usize = 0;
const CONTENT: usize = 8;
const PLACE_WORDS: usize = CONTENT + SMALL_BYTES / size_of::<u64>();

const NUM_WORDS: usize = FIRST_PLACE + 2 * PLACE_WORDS;

// The staging buffer behind them begins at a line of the cache, so elements of any dtype can lie there.
const _: () = assert!((NUM_WORDS * size_of::<u64>()).is_multiple_of(64));
const _: () = assert!(Counter::PartsMade as usize + 1 == NUM_COUNTERS);

/// What a rank counts, from its first call on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counter {
    /// Number of the call and how far it is.
    Progress,
    /// Blocks of which its contribution to every other rank's part is in its staging buffer.
    BlocksSent,
    /// Blocks of its own part of which the result is in its staging buffer.
    BlocksReduced,
    /// Contributions to the parts of other ranks, which lie where the rank has made them: see `peer_calls::parts`.
    PartsMade,
}

impl Counter {
    fn word(self) -> usize {
        FIRST_COUNTER + COUNTER_WORDS * self as usize
    }
}

fn place_of(number: i64) -> usize {
    FIRST_PLACE + PLACE_WORDS * (number & 1) as usize
}

/// The words of one rank.
#[derive(Debug)]
pub(super) struct CallBoard(SharedWords);

/// A board as it was when a peer looked at it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub(super) standing: i64,
    pub(super) count: i64,
}

impl CallBoard {
    /// A new one with a staging buffer of so many bytes, and the file that others map both from.
    pub(super) fn new(standing: i64, staging_bytes: usize) -> Result<(Self, File)> {
        let make = || -> io::Result<(SharedWords, File)> {
            let file = File::from(memfd_create("accelerate-calls", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
            file.set_len((NUM_WORDS * size_of::<u64>() + staging_bytes) as u64)?;
            fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
            Ok((SharedWords::map(&file, 0, NUM_WORDS)?, file))
        };
        let (words, file) = make().map_err(Error::other)?;
        let board = Self(words);
        board.set(STANDING, standing);
        Ok((board, file))
    }

    /// The file of another process's board, which it has open as this descriptor.
    pub(super) fn open(process: u32, descriptor: i64) -> io::Result<File> {
        File::options().read(true).write(true).open(format!("/proc/{process}/fd/{descriptor}"))
    }

    /// A board that was opened.
    pub(super) fn map(file: &File) -> io::Result<Self> {
        SharedWords::map(file, 0, NUM_WORDS).map(Self)
    }

    /// The staging buffer behind a board that was [mapped](Self::map): so many bytes. What other processes write meanwhile is seen. Two
    /// tensors of one file are the same memory at two addresses.
    pub(super) fn staging_buffer(file: &File, staging_bytes: usize) -> Result<Tensor> {
        let num_bytes = NUM_WORDS * size_of::<u64>() + staging_bytes;
        // libtorch would make a shorter file longer. None becomes shorter: it is sealed, or it would be no board.
        if file.metadata().map_err(Error::other)?.len() != num_bytes as u64 {
            return Err(Error::other("the board has a staging buffer of another size"));
        }
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let all = Tensor::f_from_file(&path, true, num_bytes as i64, (Kind::Uint8, Device::Cpu))?;
        Ok(all.f_narrow(0, (num_bytes - staging_bytes) as i64, staging_bytes as i64)?)
    }

    /// By which other processes find a file of this one.
    pub(super) fn descriptor(file: &File) -> i64 {
        i64::from(file.as_raw_fd())
    }

    fn get(&self, word: usize) -> i64 {
        self.0[word].load(Ordering::SeqCst) as i64
    }

    fn set(&self, word: usize, value: i64) {
        self.0[word].store(value as u64, Ordering::SeqCst);
    }

    pub(super) fn look(&self, counter: Counter) -> Seen {
        // In this order: a rank that has left the group counts no more, so what is seen of its counters afterwards is all.
        let standing = self.get(STANDING);
        Seen { standing, count: self.get(counter.word()) }
    }

    pub(super) fn standing(&self) -> i64 {
        self.get(STANDING)
    }

    pub(super) fn set_standing(&self, standing: i64) {
        self.set(STANDING, standing);
    }

    /// Leaves another standing as it is.
    pub(super) fn change_standing(&self, from: i64, to: i64) {
        let (from, to) = (from as u64, to as u64);
        let _other = self.0[STANDING].compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Before the progress that tells of it.
    pub(super) fn set_call(&self, number: i64, call: i64) {
        self.set(place_of(number) + CALL, call);
    }

    /// What stands for the call.
    pub(super) fn call(&self, number: i64) -> i64 {
        self.get(place_of(number) + CALL)
    }

    /// After everything that it tells of.
    pub(super) fn set_counter(&self, counter: Counter, count: i64) {
        self.set(counter.word(), count);
    }

    /// Before peers measure how long [`time_to_read`](Self::time_to_read) takes.
    pub(super) fn set_probes(&self) {
        for probe in 0..NUM_PROBES {
            let next = NEXT_PROBE[probe % NEXT_PROBE.len()];
            self.0[FIRST_PROBE + probe * COUNTER_WORDS].store(next, Ordering::Relaxed);
        }
    }

    /// How long this process takes to read a line of the cache that the rank of this board has written. The shorter one of two
    /// measurements counts: something may have interrupted the other one.
    pub(super) fn time_to_read(&self) -> Duration {
        let chains = (0..NUM_CHAINS).map(|chain| {
            let began = Instant::now();
            let mut probe = 0;
            for _ in NEXT_PROBE {
                let place = chain * NEXT_PROBE.len() + probe;
                let next = self.0[FIRST_PROBE + place * COUNTER_WORDS].load(Ordering::Acquire);
                probe = next as usize % NEXT_PROBE.len();
            }
            hint::black_box(probe);
            began.elapsed()
        });
        chains.min().unwrap_or_default() / NEXT_PROBE.len() as u32
    }

    pub(super) fn set_text(&self, text: &str) {
        self.set(TEXT_AT, text.as_ptr() as i64);
        self.set(TEXT_BYTES, text.len() as i64);
    }

    /// Where it begins, in the memory of the rank, and how long it is.
    pub(super) fn text(&self) -> (usize, i64) {
        (self.get(TEXT_AT) as usize, self.get(TEXT_BYTES))
    }

    /// Before the progress that tells of it.
    pub(super) fn store(&self, number: i64, tensor: &Tensor) -> io::Result<()> {
        self.0.store_tensor(place_of(number) + CONTENT, tensor)
    }

    /// Fills `place` from byte `offset` of the tensor of a call on.
    pub(super) fn load(&self, number: i64, offset: usize, place: &Tensor) -> io::Result<()> {
        self.0.load_tensor(place_of(number) + CONTENT, offset, place)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_one_process_writes_another_one_sees_as_long_as_it_likes() {
        let (own, file) = CallBoard::new(7, 4096).unwrap();
        let opened = CallBoard::open(std::process::id(), CallBoard::descriptor(&file)).unwrap();
        let peer = CallBoard::map(&opened).unwrap();
        let tensors = [1i64, 2].map(|number| Tensor::from_slice(&[number, 10 * number, 100 * number]));
        for (number, tensor) in (1i64..).zip(&tensors) {
            own.set_call(number, 1000 + number);
            own.store(number, tensor).unwrap();
            own.set_counter(Counter::Progress, number);
        }
        own.change_standing(8, 9);
        drop((own, file, opened));
        let seen = peer.look(Counter::Progress);
        assert_eq!((seen.standing, seen.count), (7, 2));
        for (number, tensor) in (1i64..).zip(&tensors) {
            assert_eq!(peer.call(number), 1000 + number);
            let place = Tensor::from_slice(&[0i64; 2]);
            peer.load(number, 8, &place).unwrap();
            assert_eq!(place, tensor.narrow(0, 1, 2));
        }
    }

    #[test]
    fn a_staging_buffer_is_the_same_memory_for_all_and_no_part_of_the_board() {
        let (own, file) = CallBoard::new(7, 4096).unwrap();
        let staging = |staging_bytes| CallBoard::staging_buffer(&file, staging_bytes);
        let (mut here, there) = (staging(4096).unwrap(), staging(4096).unwrap());
        assert!(staging(8192).is_err() && staging(64).is_err());
        let _ = here.fill_(9);
        own.set_probes();
        for counter in [Counter::Progress, Counter::BlocksSent, Counter::BlocksReduced, Counter::PartsMade] {
            own.set_counter(counter, i64::MIN);
        }
        let tensor = Tensor::zeros([SMALL_BYTES as i64], (Kind::Uint8, Device::Cpu));
        (0..2).for_each(|number| own.store(number, &tensor).unwrap());
        drop((own, file));
        assert_eq!(there, Tensor::full([4096], 9, (Kind::Uint8, Device::Cpu)));
    }

    #[test]
    fn every_probe_of_a_chain_is_read() {
        let mut read = vec![0];
        while read.len() < NEXT_PROBE.len() {
            read.push(NEXT_PROBE[read[read.len() - 1] as usize]);
        }
        read.sort_unstable();
        assert_eq!(read, [0, 1, 2, 3]);
    }

    #[test]
    fn what_is_no_board_is_an_error() {
        assert!(CallBoard::open(std::process::id(), -1).is_err());
        assert!(CallBoard::map(&tempfile::tempfile().unwrap()).is_err());
    }
}
