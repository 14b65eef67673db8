//! Whether backward passes of an engine reduce gradients over ranks.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Do backward passes reduce gradients over ranks? Within a block that says no, one of them alone may.
#[derive(Debug)]
pub(super) struct GradientSync(Mutex<State>);

#[derive(Debug)]
struct State {
    is_on: bool,
    /// What it becomes after the next backward pass, if it was turned on for that one.
    after_backward: Option<bool>,
}

impl Default for GradientSync {
    fn default() -> Self {
        Self(Mutex::new(State { is_on: true, after_backward: None }))
    }
}

impl GradientSync {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Both values are whole after every statement.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_on(&self) -> bool {
        self.lock().is_on
    }

    /// Sets it until it is set again, and gives what it was.
    pub(super) fn set(&self, is_on: bool) -> bool {
        let mut state = self.lock();
        state.after_backward = None;
        std::mem::replace(&mut state.is_on, is_on)
    }

    /// Turns it on until the end of the next backward pass.
    pub(super) fn turn_on_for_one_backward(&self) {
        let mut state = self.lock();
        let before = std::mem::replace(&mut state.is_on, true);
        state.after_backward.get_or_insert(before);
    }

    /// Notes the end of a backward pass, and says whether it was to reduce.
    pub(super) fn end_backward(&self) -> bool {
        let mut state = self.lock();
        let was_on = state.is_on;
        state.is_on = state.after_backward.take().unwrap_or(was_on);
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
