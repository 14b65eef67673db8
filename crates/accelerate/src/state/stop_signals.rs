//! Signals by which a process is asked to end, for a program that wants to save before it does.
//!
//! Until the program asks for the first time, signals do what they do without this crate. From then on, the first one is only
//! remembered, until the process ends: its handlers cannot be taken back without knowing who else in the process listens.

use accelerate_core::signals::Dispositions;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::{emulate_default_handler, signal_name};
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

/// Launchers and container runtimes send the first, terminals the second, and the others are what Slurm is asked to send some
/// time before an allocation ends (`--signal=USR1@120`).
const STOPPING: [i32; 4] = [SIGTERM, SIGINT, SIGUSR1, SIGUSR2];

/// In place of a signal.
const NONE: i32 = 0;

/// Remembers the first signal. The same one a second time ends the process at once.
#[derive(Debug)]
pub(super) struct StopSignals {
    first: Arc<AtomicI32>,
}

impl StopSignals {
    /// Listens from now on, apart from signals that this process was started to ignore.
    pub(super) fn listen() -> io::Result<Self> {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let dispositions = Dispositions::parse(&status);
        let wanted = STOPPING.into_iter().filter(|&signal| !dispositions.is_ignored(signal));
        let mut signals = SignalsInfo::<WithOrigin>::new(wanted)?;
        let first = Arc::new(AtomicI32::new(NONE));
        let remembered = Arc::clone(&first);
        let mut requests = Requests::new(std::os::unix::process::parent_id());
        std::thread::Builder::new().name("stop signals".to_owned()).spawn(move || {
            for origin in signals.forever() {
                let _ = remembered.compare_exchange(NONE, origin.signal, Ordering::Relaxed, Ordering::Relaxed);
                let sender = origin.process.and_then(|process| u32::try_from(process.pid).ok());
                if requests.is_repeated(origin.signal, sender) {
                    let _ = emulate_default_handler(origin.signal);
                }
            }
        })?;
        Ok(Self { first })
    }

    /// The number of the first one, if one has come.
    pub(super) fn first(&self) -> Option<i32> {
        Some(self.first.load(Ordering::Relaxed)).filter(|signal| *signal != NONE)
    }
}

/// A signal by its name.
pub(crate) fn name(signal: i32) -> String {
    signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_owned)
}

/// What this process has been asked so far, and by whom.
///
/// Slurm and systemd send a signal to all processes of a job, and the launcher, which gets it too, passes it on. Both mean the
/// same request, so what the parent sends is counted apart from what anybody else does.
#[derive(Debug)]
struct Requests {
    parent: u32,
    /// The signal, and whether the parent sent it.
    seen: BTreeSet<(i32, bool)>,
}

impl Requests {
    fn new(parent: u32) -> Self {
        Self { parent, seen: BTreeSet::new() }
    }

    /// Has the same been asked before? A signal of the kernel, such as that of a key, has no sender.
    fn is_repeated(&mut self, signal: i32, sender: Option<u32>) -> bool {
        !self.seen.insert((signal, sender == Some(self.parent)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_that_everybody_gets_and_the_launcher_passes_on_is_one_request() {
        let (launcher, slurm) = (Some(7), Some(9));
        let repeated = |requests: &[(i32, Option<u32>)]| {
            let mut seen = Requests::new(7);
            requests.iter().map(|&(signal, sender)| seen.is_repeated(signal, sender)).collect::<Vec<_>>()
        };
        for (requests, wanted) in [
            (vec![(SIGTERM, slurm), (SIGTERM, launcher)], vec![false, false]),
            (vec![(SIGTERM, slurm), (SIGTERM, launcher), (SIGTERM, slurm)], vec![false, false, true]),
            (vec![(SIGTERM, launcher), (SIGTERM, launcher)], vec![false, true]),
            // Two shells, and the key of a terminal.
            (vec![(SIGTERM, Some(11)), (SIGTERM, Some(12))], vec![false, true]),
            (vec![(SIGINT, None), (SIGINT, None)], vec![false, true]),
            // Slurm's warning, and the end of the allocation while the program still saves.
            (vec![(SIGUSR1, launcher), (SIGTERM, launcher)], vec![false, false]),
        ] {
            assert_eq!(repeated(&requests), wanted, "{requests:?}");
        }
    }

    #[test]
    fn signals_are_named() {
        assert_eq!((name(SIGTERM).as_str(), name(99).as_str()), ("SIGTERM", "signal 99"));
    }
}
