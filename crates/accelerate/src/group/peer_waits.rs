//! How a rank waits for a word in another one's memory: at first it looks all the time, later others get the processor.

use std::hint;
use std::thread;
use std::time::{Duration, Instant};

/// As long as ranks that come together need for a step.
const SPIN: Duration = Duration::from_micros(30);

/// As long as a call of another rank that is a little late.
const YIELD: Duration = Duration::from_millis(1);

/// Between looks from then on: the kernel adds as much again.
const SHORT_PAUSE: Duration = Duration::from_micros(50);

/// Between looks where a rank is so late that nobody would notice.
const LONG_PAUSE: Duration = Duration::from_millis(1);

/// How long something is waited for.
pub(super) struct Patience {
    began: Option<Instant>,
    deadline: Duration,
    spins: bool,
}

impl Patience {
    /// Without a `deadline`, for ever. Who `spins` has a processor of its own.
    pub(super) fn new(deadline: Option<Duration>, spins: bool) -> Self {
        Self { began: None, deadline: deadline.unwrap_or(Duration::MAX), spins }
    }

    /// Has it taken longer than a call of another rank does?
    pub(super) fn is_late(&self) -> bool {
        self.began.is_some_and(|began| YIELD <= began.elapsed())
    }

    /// Has it taken so long that something may be wrong?
    pub(super) fn is_long(&self) -> bool {
        self.began.is_some_and(|began| 50 * YIELD <= began.elapsed())
    }

    /// Waits a little; whether it is worthwhile to look again.
    pub(super) fn wait(&mut self) -> bool {
        let began = *self.began.get_or_insert_with(Instant::now);
        let waited = began.elapsed();
        match waited {
            _ if self.deadline <= waited => return false,
            _ if waited < SPIN && self.spins => hint::spin_loop(),
            _ if waited < YIELD => thread::yield_now(),
            _ if waited < 50 * YIELD => thread::sleep(SHORT_PAUSE),
            _ => thread::sleep(LONG_PAUSE),
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_ends_at_the_deadline_and_not_before() {
        assert!(!Patience::new(Some(Duration::ZERO), true).wait());
        let began = Instant::now();
        let mut patience = Patience::new(Some(Duration::from_millis(3)), true);
        while patience.wait() {}
        assert!(Duration::from_millis(3) <= began.elapsed());
        assert!(!patience.is_long() || Duration::from_millis(50) <= began.elapsed());
        assert!(Patience::new(None, false).wait());
    }
}
