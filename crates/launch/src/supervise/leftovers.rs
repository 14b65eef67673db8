//! Ending descendants that have left their rank's process group, in a process that has adopted them.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, wait};

use super::rank::KILL_PATIENCE;
use super::signals::{Event, Signals};
use super::timespec;
use crate::failure::Survivor;
use crate::helper::Guard;
use crate::process_stat::ProcessStat;
use crate::report::{Leftover, Notice};

/// Nobody is told of a leftover that ends as soon as it is asked to.
const PATIENCE: Duration = Duration::from_secs(1);

/// From when to when leftovers are waited for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wait {
    pub(super) since: Instant,
    pub(super) until: Instant,
}

/// Tells once which leftovers the end of a run waits for.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    has_told: bool,
}

impl Waiting {
    /// When there is something to tell. Leftovers that may not take that long are never told of.
    pub(super) fn tells_at(&self, wait: Option<Wait>) -> Option<Instant> {
        let tells_at = wait.filter(|_| !self.has_told).map(|wait| (wait.since + PATIENCE, wait.until));
        tells_at.filter(|(at, until)| at < until).map(|(at, _)| at)
    }

    /// What there is to tell now of those that satisfy `is_leftover`.
    pub(super) fn told(
        &mut self,
        wait: Option<Wait>,
        now: Instant,
        is_leftover: impl Fn(Pid, &ProcessStat) -> bool,
    ) -> Option<Notice> {
        self.tells_at(wait).filter(|at| *at <= now)?;
        self.has_told = true;
        let processes: Vec<_> = living(is_leftover).into_iter().map(leftover).collect();
        let time_left = wait?.until.saturating_duration_since(now);
        (!processes.is_empty()).then_some(Notice::WaitingForLeftovers { processes, time_left })
    }
}

/// What was found, and the signal that told this process to stop meanwhile.
pub(super) struct Leftovers {
    /// How many have ended.
    pub(super) num_ended: usize,
    /// Those that could not be ended.
    pub(super) survivors: Vec<Survivor>,
    pub(super) stopped_by: Option<i32>,
}

/// Asks all remaining children of this process to end, and makes them after `grace_period` or at once when this process is told to
/// stop. Killing one can bring up its own children, so it goes on until there are none, or only those that are `given_up`: they
/// have been killed before, and waited for. The guard is dismissed last: this process may be killed meanwhile. `tell` hears of those
/// that take their time.
pub(super) fn end(
    signals: &mut Signals,
    grace_period: Duration,
    waiting: &mut Waiting,
    mut guard: Option<Guard>,
    given_up: impl Fn(Pid) -> bool,
    mut tell: impl FnMut(&Notice),
) -> Leftovers {
    let began = Instant::now();
    let mut kill_at = began + grace_period;
    let mut known = BTreeSet::new();
    let mut stopped_by = None;
    if guard.as_ref().is_some_and(|guard| is_only_child(guard.process_id())) {
        guard.take().into_iter().for_each(Guard::dismiss);
    }
    loop {
        if !has_children_left(&mut guard) {
            return Leftovers { num_ended: known.len(), survivors: Vec::new(), stopped_by };
        }
        let now = Instant::now();
        // Whoever outlives this too is stuck in the kernel.
        let give_up_at = kill_at + KILL_PATIENCE;
        let guard_process = guard.as_ref().map(Guard::process_id);
        let children: Vec<_> = children().into_iter().filter(|child| Some(*child) != guard_process).collect();
        if children.is_empty() && guard.is_some() {
            guard.take().into_iter().for_each(Guard::dismiss);
            continue;
        }
        let are_given_up = !children.is_empty() && children.iter().all(|child| given_up(*child));
        if now >= give_up_at || are_given_up {
            let survivors: Vec<_> = children.iter().filter_map(|child| survivor(*child)).collect();
            guard.into_iter().for_each(Guard::dismiss);
            known.retain(|number| !children.iter().any(|child| child.as_raw_nonzero() == *number));
            return Leftovers { num_ended: known.len(), survivors, stopped_by };
        }
        for child in children.into_iter().filter(|child| !given_up(*child)) {
            if known.insert(child.as_raw_nonzero()) && now < kill_at {
                let _ = kill_process(child, Signal::TERM);
            }
            if now >= kill_at {
                let _ = kill_process(child, Signal::KILL);
            }
        }
        let wait = Some(Wait { since: began, until: kill_at });
        if now < kill_at {
            let own = getpid().as_raw_nonzero().get();
            let is_leftover = |process, stat: &ProcessStat| stat.parent == own && Some(process) != guard_process;
            waiting.told(wait, now, is_leftover).iter().for_each(&mut tell);
        }
        let next = if now < kill_at { kill_at } else { give_up_at };
        let next = waiting.tells_at(wait).filter(|at| now < *at).map_or(next, |at| next.min(at));
        let timeout = timespec(next.saturating_duration_since(now));
        let _ = poll(&mut [PollFd::from_borrowed_fd(signals.descriptor(), PollFlags::IN)], Some(&timeout));
        if let Some(signal) = signals.pending().into_iter().find_map(Event::stop) {
            stopped_by.get_or_insert(signal);
            kill_at = kill_at.min(Instant::now());
        }
    }
}

/// Collects children that have ended.
fn has_children_left(guard: &mut Option<Guard>) -> bool {
    loop {
        match wait(WaitOptions::NOHANG) {
            // Somebody has killed it. Its number may soon be that of another process.
            Ok(Some((ended, _))) if guard.as_ref().is_some_and(|guard| guard.process_id() == ended) => *guard = None,
            Ok(Some(_)) | Err(Errno::INTR) => {}
            Ok(None) => return true,
            // No children at all: the usual case, and cheap.
            Err(_) => return false,
        }
    }
}

/// What is to be told of a process that is still there; `None` if it is not. It has had its time, so that it is killed once more.
pub(super) fn survivor(process: Pid) -> Option<Survivor> {
    let process_id = process.as_raw_nonzero().get().unsigned_abs();
    match kill_process(process, Signal::KILL) {
        Err(Errno::SRCH) => None,
        killed => Some(Survivor { process_id, is_refused: killed.is_err() }),
    }
}

/// Living processes whose parent is this one.
fn children() -> Vec<Pid> {
    let own = getpid().as_raw_nonzero().get();
    living(|_, stat| stat.parent == own)
}

/// Living processes of this machine that satisfy `is_wanted`.
fn living(is_wanted: impl Fn(Pid, &ProcessStat) -> bool) -> Vec<Pid> {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| {
            let name = entry.ok()?.file_name();
            let number = name.to_str()?;
            let process = number.parse().ok().and_then(Pid::from_raw)?;
            let is_here = ProcessStat::read(number).is_some_and(|stat| !stat.has_ended && is_wanted(process, &stat));
            is_here.then_some(process)
        })
        .collect()
}

fn leftover(process: Pid) -> Leftover {
    let process_id = process.as_raw_nonzero().get().unsigned_abs();
    // One that has ended meanwhile has no name any more.
    let name = std::fs::read(format!("/proc/{process_id}/comm")).unwrap_or_default();
    Leftover { process_id, name: String::from_utf8_lossy(&name).trim_end().to_owned() }
}

/// Is the guard the only child? The kernel may overlook one that has just come, which is found once the guard is gone. Asking it is
/// cheaper than looking at all processes of the machine; `false` where it cannot be asked.
fn is_only_child(guard: Pid) -> bool {
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return false };
    let lists = threads.map(|thread| std::fs::read_to_string(thread?.path().join("children")));
    let Ok(lists) = lists.collect::<std::io::Result<Vec<_>>>() else { return false };
    let guard = guard.as_raw_nonzero().to_string();
    lists.iter().flat_map(|list| list.split_whitespace()).all(|number| number == guard)
}
