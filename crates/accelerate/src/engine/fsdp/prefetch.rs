//! Which units are gathered before they are used: those that the pass before used next.

use super::units::Units;
use crate::error::{Result, StateError};
use crate::group::NeededBy;
use accelerate_core::config::{BackwardPrefetch, FullyShardedSettings};
use smallvec::SmallVec;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The units that forward passes use, or backward passes gather, in order.
#[derive(Default)]
struct UnitSequence {
    /// Of the last whole pass.
    known: Vec<usize>,
    /// Of the pass that is running.
    now: Vec<usize>,
}

impl UnitSequence {
    /// Notes that it is the turn of `unit`.
    fn record(&mut self, unit: usize) {
        self.now.push(unit);
    }

    /// Whose turn is next if the pass goes on as the one before; nothing once it has taken another way.
    fn expected(&self) -> &[usize] {
        self.known.strip_prefix(self.now.as_slice()).unwrap_or_default()
    }

    /// Ends a pass, whose order is the known one from now on; returns the order before if it was another.
    fn finish(&mut self) -> Option<Vec<usize>> {
        let now = std::mem::take(&mut self.now);
        if now == self.known {
            return None;
        }
        let before = std::mem::replace(&mut self.known, now);
        (!before.is_empty()).then_some(before)
    }

    /// Forgets a pass that has not ended well.
    fn abandon(&mut self) {
        self.now.clear();
    }
}

#[derive(Default)]
struct Sequences {
    forward: UnitSequence,
    backward: UnitSequence,
}

/// The units that come next in a pass, as the pass before had them.
pub(super) type Expected = SmallVec<[usize; 16]>;

/// Knows the order in which units are used.
pub(super) struct Prefetcher {
    forward: bool,
    backward: BackwardPrefetch,
    /// The order of forward passes may change.
    is_dynamic: bool,
    sequences: Mutex<Sequences>,
}

impl Prefetcher {
    pub(super) fn new(plugin: &FullyShardedSettings) -> Self {
        let FullyShardedSettings { forward_prefetch, backward_prefetch, dynamic, .. } = *plugin;
        let sequences = Mutex::default();
        Self { forward: forward_prefetch, backward: backward_prefetch, is_dynamic: dynamic, sequences }
    }

    // Every statement leaves the sequences whole, so a panic elsewhere does not spoil them.
    fn lock(&self) -> MutexGuard<'_, Sequences> {
        self.sequences.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A forward pass uses a unit, whether that is here or not: that may differ from pass to pass, which units a pass uses may
    /// not.
    pub(super) fn record_forward(&self, unit: usize) {
        self.lock().forward.record(unit);
    }

    /// Those that come after a unit that a pass gathers now, and whether they are to be asked for.
    pub(super) fn after_gather(&self, unit: usize, needed_by: NeededBy) -> (Expected, bool) {
        let Sequences { forward, backward } = &mut *self.lock();
        match needed_by {
            NeededBy::Forward => (forward.expected().into(), self.forward),
            NeededBy::Backward => {
                // A unit that is here is not recorded: saved tensors ask again and again.
                backward.record(unit);
                (backward.expected().into(), self.backward == BackwardPrefetch::BackwardPre)
            }
            NeededBy::Outside => (Expected::new(), false),
        }
    }

    /// Those to be asked for after the backward pass of a unit.
    pub(super) fn after_backward_of_unit(&self) -> Option<Expected> {
        (self.backward == BackwardPrefetch::BackwardPost).then(|| self.lock().backward.expected().into())
    }

    /// Ends a forward pass whose gradients are wanted.
    ///
    /// # Errors
    /// It used units in another order than the one before, and units are gathered ahead in that order.
    pub(super) fn finish_forward(&self, units: &Units) -> Result<()> {
        let sequence = &mut self.lock().forward;
        let before = sequence.finish();
        let prefetches = self.forward || self.backward != BackwardPrefetch::NoPrefetch;
        let Some(before) = before.filter(|_| prefetches && !self.is_dynamic) else { return Ok(()) };
        let text = |order: &[usize]| order.iter().map(|&unit| units.label(unit)).collect::<Vec<_>>().join(", ");
        let (before, now) = (text(&before), text(&sequence.known));
        Err(StateError::ChangedOrder { before, now }.into())
    }

    pub(super) fn finish_backward(&self) {
        self.lock().backward.finish();
    }

    /// Forgets passes that have not ended well.
    pub(super) fn abandon(&self) {
        let Sequences { forward, backward } = &mut *self.lock();
        forward.abandon();
        backward.abandon();
    }

    /// How many units the last forward and the last backward pass have used.
    #[cfg(test)]
    pub(super) fn num_known(&self) -> [usize; 2] {
        let sequences = self.lock();
        [sequences.forward.known.len(), sequences.backward.known.len()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_next_is_known_until_the_pass_takes_another_way() {
        let mut sequence = UnitSequence::default();
        let after = |sequence: &mut UnitSequence, unit: usize| {
            sequence.record(unit);
            sequence.expected().to_vec()
        };
        for unit in [2, 0, 1] {
            assert!(after(&mut sequence, unit).is_empty(), "nothing is known in the first pass");
        }
        assert_eq!(sequence.finish(), None);
        assert_eq!(after(&mut sequence, 2), [0, 1]);
        assert_eq!(after(&mut sequence, 0), [1]);
        assert!(after(&mut sequence, 3).is_empty());
        assert!(after(&mut sequence, 1).is_empty());
        assert_eq!(sequence.finish(), Some(vec![2, 0, 1]));
        assert_eq!(after(&mut sequence, 2), [0, 3, 1]);
        sequence.abandon();
        assert_eq!(after(&mut sequence, 2), [0, 3, 1]);
    }
}
