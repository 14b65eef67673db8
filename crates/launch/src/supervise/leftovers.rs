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
/// have been killed before, and waited for.
pub(super) fn end(signals: &mut Signals, grace_period: Duration, given_up: impl Fn(Pid) -> bool) -> Leftovers {
    let mut kill_at = Instant::now() + grace_period;
    let mut known = BTreeSet::new();
    let mut stopped_by = None;
    loop {
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => break,
                // No children at all: the usual case, and cheap.
                Err(_) => return Leftovers { num_ended: known.len(), survivors: Vec::new(), stopped_by },
            }
        }
        let now = Instant::now();
        // Whoever outlives this too is stuck in the kernel.
        let give_up_at = kill_at + KILL_PATIENCE;
        let children = children();
        let are_given_up = !children.is_empty() && children.iter().all(|child| given_up(*child));
        if now >= give_up_at || are_given_up {
            let survivors: Vec<_> = children.iter().filter_map(|child| survivor(*child)).collect();
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
        let next = if now < kill_at { kill_at } else { give_up_at };
        let timeout = timespec(next.saturating_duration_since(now));
        let _ = poll(&mut [PollFd::from_borrowed_fd(signals.descriptor(), PollFlags::IN)], Some(&timeout));
        if let Some(signal) = signals.pending().into_iter().find_map(Event::stop) {
            stopped_by.get_or_insert(signal);
            kill_at = kill_at.min(Instant::now());
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
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok())
        .filter(|number| {
            std::fs::read_to_string(format!("/proc/{number}/stat"))
                .is_ok_and(|stat| living_child_of(&stat) == Some(own))
        })
        .filter_map(Pid::from_raw)
        .collect()
}

/// The fourth field, unless the third says that the process has ended; the second is a name in parentheses that may itself contain
/// spaces and parentheses.
fn living_child_of(stat: &str) -> Option<i32> {
    let (_, after_name) = stat.rsplit_once(')')?;
    let mut fields = after_name.split_whitespace();
    (fields.next()? != "Z").then(|| fields.next()?.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parent_is_found_behind_any_name() {
        assert_eq!(living_child_of("12 (sh) S 7 12 12 0"), Some(7));
        assert_eq!(living_child_of("12 (a) S 9 (b c) R 7 12"), Some(7));
        assert_eq!(living_child_of("12 (sh) Z 7 12 12 0"), None);
        assert_eq!(living_child_of("12"), None);
    }
}
