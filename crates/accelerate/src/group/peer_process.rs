//! Processes of other ranks on this machine: a rank that fails because another one has failed ends after it, so that
//! whoever watches both sees the first failure first.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::fs;
use std::process;
use std::time::{Duration, Instant};

/// How long the end of a rank that is to blame is waited for.
const PATIENCE: Duration = Duration::from_secs(2);

/// A process and the machine on which it has its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PeerProcess {
    id: u32,
    /// The machine since it was started, and the container in it where there are several.
    machine: String,
}

impl PeerProcess {
    pub(crate) fn own() -> Self {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let container = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        Self { id: process::id(), machine: format!("{} {}", boot.trim(), container.display()) }
    }

    /// In one line.
    pub(crate) fn encode(&self) -> String {
        format!("{} {}", self.id, self.machine)
    }

    pub(crate) fn decode(line: &str) -> Option<Self> {
        let (id, machine) = line.split_once(' ')?;
        Some(Self { id: id.parse().ok()?, machine: machine.to_owned() })
    }

    /// Returns when the process has ended, or at the deadline: at once if it is this one or not on this machine.
    fn await_end(&self, deadline: Instant) {
        let own = Self::own();
        if self.machine != own.machine || self.id == own.id {
            return;
        }
        let Some(pid) = i32::try_from(self.id).ok().and_then(Pid::from_raw) else { return };
        // An error says that there is no such process any more, or that this system cannot wait for one.
        let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { return };
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let _ended_or_late = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&timeout));
    }
}

/// Returns when all of them have ended, or after two seconds.
pub(crate) fn await_ends(processes: &[PeerProcess]) {
    let deadline = Instant::now() + PATIENCE;
    processes.iter().for_each(|process| process.await_end(deadline));
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn the_end_of_a_process_is_waited_for() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let peer = PeerProcess { id: child.id(), ..PeerProcess::own() };
        drop(child.stdin.take());
        peer.await_end(Instant::now() + Duration::from_secs(60));
        assert!(child.try_wait().unwrap().is_some());
    }

    #[test]
    fn nobody_waits_for_itself_or_for_another_machine_or_for_ever() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let own = PeerProcess::own();
        let elsewhere = PeerProcess { id: child.id(), machine: "another".to_owned() };
        let far = Instant::now() + Duration::from_secs(3600);
        [&own, &elsewhere].into_iter().for_each(|process| process.await_end(far));
        PeerProcess { id: child.id(), ..own }.await_end(Instant::now());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_process_survives_the_store() {
        let own = PeerProcess::own();
        assert_eq!(PeerProcess::decode(&own.encode()), Some(own));
        assert_eq!(PeerProcess::decode("nonsense"), None);
    }
}
