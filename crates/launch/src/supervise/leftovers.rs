//! Ending descendants that have left their rank's process group, in a process that has adopted them.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, wait};

use super::signals::Signals;
use super::timespec;

/// Asks all remaining children of this process to end, makes them after `grace_period`, and returns how
/// many there were. Killing one can bring up its own children, so it goes on until there are none.
pub(super) fn end(signals: &mut Signals, grace_period: Duration) -> usize {
    let kill_at = Instant::now() + grace_period;
    // Whoever outlives this too is stuck in the kernel.
    let give_up_at = kill_at + grace_period;
    let mut known = BTreeSet::new();
    loop {
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => break,
                // No children at all: the usual case, and cheap.
                Err(_) => return known.len(),
            }
        }
        let now = Instant::now();
        if now >= give_up_at {
            return known.len();
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
        // Which signal it was does not matter: the end has begun already.
        signals.pending();
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
