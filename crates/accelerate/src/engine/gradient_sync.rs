//! Whether backward passes reduce gradients over ranks.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Also for one backward pass alone, which may stand in a block without reductions.
#[derive(Debug)]
pub(super) struct GradientSync(Mutex<Sync>);

#[derive(Debug)]
struct Sync {
    is_on: bool,
    /// What it becomes after the next backward pass, if it was turned on for that one.
    after_backward: Option<bool>,
}

impl Default for GradientSync {
    fn default() -> Self {
        Self(Mutex::new(Sync { is_on: true, after_backward: None }))
    }
}

impl GradientSync {
    fn lock(&self) -> MutexGuard<'_, Sync> {
        // Both values are whole after every statement.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_on(&self) -> bool {
        self.lock().is_on
    }

    /// Until it is set again; what it was.
    pub(super) fn set(&self, is_on: bool) -> bool {
        let mut sync = self.lock();
        sync.after_backward = None;
        std::mem::replace(&mut sync.is_on, is_on)
    }

    /// Until the end of the next backward pass.
    pub(super) fn turn_on_for_one_backward(&self) {
        let mut sync = self.lock();
        let before = std::mem::replace(&mut sync.is_on, true);
        sync.after_backward.get_or_insert(before);
    }

    /// A backward pass has ended; whether it was to reduce.
    pub(super) fn end_backward(&self) -> bool {
        let mut sync = self.lock();
        let was_on = sync.is_on;
        sync.is_on = sync.after_backward.take().unwrap_or(was_on);
        was_on
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_for_one_backward_pass_ends_with_it_or_with_the_block_around_it() {
        let sync = GradientSync::default();
        assert!(sync.set(false));
        assert!(!sync.end_backward());
        sync.turn_on_for_one_backward();
        sync.turn_on_for_one_backward();
        assert!(sync.is_on() && sync.end_backward());
        assert!(!sync.is_on() && !sync.end_backward());
        sync.turn_on_for_one_backward();
        assert!(sync.set(true));
        assert!(sync.end_backward() && sync.is_on());
    }
}
