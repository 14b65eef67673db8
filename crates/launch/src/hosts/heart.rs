//! Signs of life, which launcher and agents send each other: a side that hears none is alone.
//!
//! Silence is counted in looks, of which several have to find nothing. A process that was stopped for a while, or that had no time
//! to look, has missed one of them, however long that was; so it does not take its own pause for that of the other side.

use std::io;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

/// How often each side says something within the time after which it would be given up, and how often in a row it is missed then.
const BEATS_PER_TIMEOUT: u32 = 4;
const SHORTEST_INTERVAL: Duration = Duration::from_millis(10);
/// Between two signs of life of an agent that was told to end its ranks.
pub(super) const INTERVAL_OF_ENDING: Duration = Duration::from_secs(1);
/// An agent that was told to end its ranks and has said nothing for so long is as lost as one that says nothing while they run.
pub(super) const LONGEST_SILENCE_OF_ENDING: Duration = Duration::from_secs(5);

/// Between two signs of life, and between two looks for one.
pub(super) fn interval(timeout: Duration) -> Duration {
    (timeout / BEATS_PER_TIMEOUT).max(SHORTEST_INTERVAL)
}

/// Calls `beat` again and again, until the sender is dropped. It has a thread of its own, since others may have to wait.
pub(super) fn start(timeout: Duration, beat: impl Fn() + Send + 'static) -> io::Result<Sender<()>> {
    let (sender, is_over) = channel::<()>();
    let beats = move || {
        while is_over.recv_timeout(interval(timeout)) == Err(RecvTimeoutError::Timeout) {
            beat();
        }
    };
    thread::Builder::new().name("heart".to_owned()).spawn(beats).map(|_| sender)
}

/// How often in a row nothing was heard.
#[derive(Debug, Default)]
pub(super) struct Silence(u32);

impl Silence {
    pub(super) fn broken(&mut self) {
        self.0 = 0;
    }

    /// Nothing was heard since the last look. Is that too long now?
    pub(super) fn goes_on(&mut self) -> bool {
        self.0 = self.0.saturating_add(1);
        self.0 >= BEATS_PER_TIMEOUT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_what_several_looks_in_a_row_have_found() {
        let mut silence = Silence::default();
        let looks = [false, false, false, true, true];
        assert_eq!(looks.map(|_| silence.goes_on()), looks);
        silence.broken();
        assert!(!silence.goes_on());
    }
}
