//! Ending descendants that have left their rank's process group, in a process that has adopted them.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, wait};

use super::rank::KILL_PATIENCE;
use super::signals::{Event, Signals};
use super::timespec;

/// What was found, and the signal that told this process to stop meanwhile.
pub(super) struct Leftovers {
    pub(super) num_processes: usize,
    pub(super) stopped_by: Option<i32>,
}

/// Asks all remaining children of this process to end, makes them after `grace_period` or at once when this process is told to
/// stop, and returns how many there were. Killing one can bring up its own children, so it goes on until there are none.
pub(super) fn end(signals: &mut Signals, grace_period: Duration) -> Leftovers {
    let mut kill_at = Instant::now() + grace_period;
    let mut known = BTreeSet::new();
    let mut stopped_by = None;
    loop {
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => break,
                // No children at all: the usual case, and cheap.
                Err(_) => return Leftovers { num_processes: known.len(), stopped_by },
            }
        }
        let now = Instant::now();
        // Whoever outlives this too is stuck in the kernel.
        let give_up_at = kill_at + KILL_PATIENCE;
        if now >= give_up_at {
            return Leftovers { num_processes: known.len(), stopped_by };
        }
        for child in children() {
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

/// Processes whose parent is this one, living or not.
fn children() -> Vec<Pid> {
    let own = getpid().as_raw_nonzero().get();
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok())
        .filter(|number| {
            std::fs::read_to_string(format!("/proc/{number}/stat")).is_ok_and(|stat| parent(&stat) == Some(own))
        })
        .filter_map(Pid::from_raw)
        .collect()
}

/// The fourth field; the second is a name in parentheses that may itself contain spaces and parentheses.
fn parent(stat: &str) -> Option<i32> {
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parent_is_found_behind_any_name() {
        assert_eq!(parent("12 (sh) S 7 12 12 0"), Some(7));
        assert_eq!(parent("12 (a) S 9 (b c) R 7 12"), Some(7));
        assert_eq!(parent("12"), None);
    }
}
