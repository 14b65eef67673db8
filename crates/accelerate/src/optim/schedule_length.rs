//! Says once when a schedule of known length does not end with the loop that moves it.

use crate::messages;
use accelerate_core::schedule::{LengthMismatch, ScheduledPass};

/// What the steps of a prepared scheduler have shown so far.
#[derive(Debug)]
pub(super) struct LengthWatch {
    total_steps: usize,
    /// Known from the first step inside of a loop over a prepared loader on.
    pass: Option<ScheduledPass>,
    /// Where the schedule stands.
    last_epoch: usize,
    /// Ticks that were not made, because the schedule was at its end.
    num_capped: usize,
    is_told: bool,
}

impl LengthWatch {
    pub(super) fn new(total_steps: usize) -> Self {
        Self { total_steps, pass: None, last_epoch: 0, num_capped: 0, is_told: false }
    }

    /// The scheduler was asked for so many ticks and has moved from one step to another, inside of a `pass` if one is known.
    pub(super) fn moved(
        &mut self,
        ticks: usize,
        (from, to): (usize, usize),
        pass: impl FnOnce() -> Option<ScheduledPass>,
    ) {
        self.last_epoch = to;
        self.num_capped += ticks.saturating_sub(to.saturating_sub(from));
        if self.is_told {
            return;
        }
        if self.pass.is_none() {
            self.pass = pass();
            self.tell(self.pass.and_then(|pass| pass.check_length(self.total_steps)));
        }
        let beyond = to.saturating_sub(self.total_steps) + self.num_capped;
        if 0 < beyond {
            self.tell(self.pass.and_then(|pass| pass.check_end(self.total_steps, beyond)));
        }
    }

    fn tell(&mut self, mismatch: Option<LengthMismatch>) {
        if let Some(mismatch) = mismatch.filter(|_| !self.is_told) {
            messages::warning!("{mismatch}");
            self.is_told = true;
        }
    }
}

/// The loop is over.
impl Drop for LengthWatch {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.tell(self.pass.and_then(|pass| pass.check_moved(self.total_steps, self.last_epoch)));
        }
    }
}
