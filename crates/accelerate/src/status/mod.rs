//! What this process tells of itself while it runs, in the page of the launcher's file that is its own
//! ([`accelerate_core::status`]): in which call it is, how many steps and samples it has done. `accelerate status` reads it, and
//! so does the launcher when a rank has failed.
//!
//! A program that no launcher of ours has started has no page, and nothing is written.

mod call_log;
mod call_site;

pub(crate) use call_log::{CallLog, LoggedCall, LoggedGroup};
pub(crate) use call_site::here;
use call_site::{CallSite, call_site};

use accelerate_core::environment::RankVariables;
use accelerate_core::status::{PAGE_WORDS, RunInfo, StatusPlace, VARIABLE, link_text, rank_of_word, words};
use rustix::fs::OFlags;
use rustix::process::geteuid;
use rustix::time::{ClockId, Timespec, clock_gettime};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use torch_ext::shared_memory::SharedWords;

/// Beside its number, says that the process which has written a page writes no more: its accelerator is gone.
const LET_GO: u64 = 1 << 32;

/// The page of this process, if it has one. Clones write the same page.
#[derive(Clone, Debug, Default)]
pub(crate) struct Status(Option<Arc<Page>>);

#[derive(Debug)]
struct Page {
    words: SharedWords,
    /// The rank whose page it is, and of how many.
    rank: (usize, usize),
    /// The same moment by the clock of this program and by that of the page.
    epoch: (Instant, u64),
    /// How often samples were handed out, and how many.
    progress: Mutex<(u64, u64)>,
}

impl Status {
    /// The page that a launcher has for this process.
    ///
    /// None where the variable is that of a launcher that is gone or cannot be reached, such as in another container, and where
    /// another process writes the page: a program that this one has started inherits the variable, too.
    pub(crate) fn of_process(lookup: &dyn Fn(&str) -> Option<String>) -> Self {
        let place = lookup(VARIABLE).and_then(|text| text.parse().ok());
        Self(place.and_then(|place| Page::claim(place).ok().flatten()).map(Arc::new))
    }

    /// An optimizer has taken so many steps by now.
    pub(crate) fn stepped(&self, num_steps: usize) {
        if let Some(page) = &self.0 {
            page.words[words::STEPS].fetch_max(num_steps as u64, Ordering::Relaxed);
        }
    }

    /// So many samples have been handed out to all ranks, this rank's among them.
    pub(crate) fn handed_out(&self, num_samples: u64) {
        if let Some(page) = &self.0 {
            page.handed_out(num_samples);
        }
    }

    /// The rank of the launcher's run that was the first to end with code 0, if these are that run's ranks: a program may make up
    /// other numbers for a run of its own.
    pub(crate) fn first_ended(&self, ranks: &RankVariables) -> Option<usize> {
        let page = self.0.as_ref().filter(|page| page.rank == (ranks.rank, ranks.world_size))?;
        rank_of_word(page.words[words::FIRST_ENDED].load(Ordering::Relaxed))
    }

    /// Where calls to other ranks are written; one for a process, since it has no lock.
    pub(crate) fn call_log(&self) -> Option<CallLog> {
        self.0.clone().map(CallLog::new)
    }
}

impl Page {
    /// Takes the page over, if it is what a launcher has made and nobody writes it.
    fn claim(place: StatusPlace) -> io::Result<Option<Self>> {
        let path = place.file();
        // Nothing else that a descriptor may be is opened.
        if fs::read_link(&path)?.as_os_str() != link_text().as_str() {
            return Ok(None);
        }
        // In another container that may be a pipe, which nobody is to wait for.
        let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
        let file = File::options().read(true).write(true).custom_flags(flags).open(&path)?;
        let mut first = vec![0; accelerate_core::status::PAGE_BYTES];
        file.read_exact_at(&mut first, 0)?;
        let run = RunInfo::decode(&first)
            .filter(|run| run.process_id == place.process_id && place.page as usize <= run.num_local_processes);
        let Some(run) = run.filter(|_| file.metadata().is_ok_and(|file| file.uid() == geteuid().as_raw())) else {
            return Ok(None);
        };
        // The page of the run comes before those of its ranks.
        let rank = (run.first_rank + place.page as usize - 1, run.num_processes);
        let words = SharedWords::map(&file, place.offset(), PAGE_WORDS)?;
        let epoch = (Instant::now(), now());
        Ok(take_over(&words).then(|| Self { words, rank, epoch, progress: Mutex::default() }))
    }

    /// A moment by the clock of the page.
    fn time(&self, at: Instant) -> u64 {
        self.epoch.1.saturating_add(at.saturating_duration_since(self.epoch.0).as_nanos() as u64)
    }

    fn handed_out(&self, num_samples: u64) {
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        let (time, samples) = (progress.0, progress.1 + num_samples);
        *progress = (time + 1, samples);
        let at = self.time(Instant::now());
        let place = words::PROGRESS + 2 + 2 * (time as usize % words::NUM_TIMES);
        self.change(words::PROGRESS, |page| {
            page[words::PROGRESS + 1].store(time + 1, Ordering::Relaxed);
            page[place].store(at, Ordering::Relaxed);
            page[place + 1].store(samples, Ordering::Relaxed);
        });
    }

    /// Stores words behind the count at `count`, which is odd meanwhile: whoever reads sees that. One thread at a time may do so.
    fn change(&self, count: usize, store: impl FnOnce(&[AtomicU64])) {
        let before = self.words[count].load(Ordering::Relaxed);
        self.words[count].store(before | 1, Ordering::Relaxed);
        fence(Ordering::Release);
        store(&self.words);
        self.words[count].store((before | 1).wrapping_add(1), Ordering::Release);
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // What it tells stays: the launcher may want to know how far this process has come.
        self.words[words::OWNER].store(u64::from(process::id()) | LET_GO, Ordering::Release);
    }
}

/// Makes this process the one that writes the page; not if another one or another part of this one does.
fn take_over(page: &SharedWords) -> bool {
    let owner = page[words::OWNER].load(Ordering::Acquire);
    let is_free = owner & LET_GO != 0 || !Path::new(&format!("/proc/{owner}")).exists();
    let own = u64::from(process::id());
    if !is_free || page[words::OWNER].compare_exchange(owner, own, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        return false;
    }
    // What the one before has told is over.
    page[words::STEPS].store(0, Ordering::Relaxed);
    page[words::PROGRESS..].iter().for_each(|word| word.store(0, Ordering::Relaxed));
    true
}

fn now() -> u64 {
    nanoseconds(clock_gettime(ClockId::Monotonic))
}

fn nanoseconds(time: Timespec) -> u64 {
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

#[cfg(test)]
mod tests;
