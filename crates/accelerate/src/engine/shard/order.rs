//! The order in which units are used: compared between ranks, and known in advance from the pass before.

use super::Shard;
use crate::engine::replicate::difference_from_main;
use crate::error::{Result, StateError};

/// A collective of a unit.
#[derive(Clone, Copy)]
pub(super) enum Travel {
    Gather(usize),
    ReduceScatter(usize),
}

/// The units that forward passes use, or backward passes gather, in order.
#[derive(Default)]
pub(super) struct Order {
    /// Of the last whole pass.
    known: Vec<usize>,
    /// Of the pass that is running.
    now: Vec<usize>,
}

impl Order {
    /// Notes that it is the turn of `unit`.
    pub(super) fn record(&mut self, unit: usize) {
        self.now.push(unit);
    }

    /// Whose turn is next if the pass goes on as the one before; nothing once it has taken another way.
    pub(super) fn expected(&self) -> &[usize] {
        self.known.strip_prefix(self.now.as_slice()).unwrap_or_default()
    }

    /// Ends a pass, whose order is the known one from now on; returns the order before if it was another.
    pub(super) fn finish(&mut self) -> Option<Vec<usize>> {
        let now = std::mem::take(&mut self.now);
        if now == self.known {
            return None;
        }
        let before = std::mem::replace(&mut self.known, now);
        (!before.is_empty()).then_some(before)
    }

    /// The order of the last whole pass.
    pub(super) fn known(&self) -> &[usize] {
        &self.known
    }

    /// Forgets a pass that has not ended well.
    pub(super) fn abandon(&mut self) {
        self.now.clear();
    }
}

impl Shard {
    /// Fails on every rank unless all ranks have gathered and reduced the same units in the same order. Collective if
    /// anything has travelled.
    pub(super) fn check_order(&self) -> Result<()> {
        let travelled = std::mem::take(&mut self.lock().travelled);
        if travelled.is_empty() {
            return Ok(());
        }
        let line = |travel: &Travel| {
            let (what, unit) = match travel {
                Travel::Gather(unit) => ("gathers", unit),
                Travel::ReduceScatter(unit) => ("reduces", unit),
            };
            format!("{what} {}\n", self.label(*unit))
        };
        let order: String = travelled.iter().map(line).collect();
        let orders = self.0.job.disagreement("check_order", &order)?;
        // Everyone is here, so nobody reads parts any more.
        let closed = self.close_window();
        let Some(orders) = orders else { return closed };
        let (rank, on_main, there) = difference_from_main(&orders);
        Err(StateError::DifferentOrders { rank, on_main, there }.into())
    }

    /// Ends a forward pass whose gradients are wanted.
    ///
    /// # Errors
    /// It used units in another order than the one before, and units are fetched ahead in that order.
    pub(super) fn finish_forward_order(&self) -> Result<()> {
        let mut state = self.lock();
        let before = state.forward_order.finish();
        let Some(before) = before.filter(|_| self.0.prefetch.wants_one_order()) else {
            return Ok(());
        };
        let text = |units: &[usize]| units.iter().map(|&unit| self.label(unit)).collect::<Vec<_>>().join(", ");
        let (before, now) = (text(&before), text(state.forward_order.known()));
        Err(StateError::ChangedOrder { before, now }.into())
    }

    /// A unit in messages: `unit 1 (layers.0)`.
    pub(super) fn label(&self, unit: usize) -> String {
        let path = &self.unit(unit).path;
        format!("unit {unit} ({})", if path.is_empty() { "root" } else { path })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_next_is_known_until_the_pass_takes_another_way() {
        let mut order = Order::default();
        let after = |order: &mut Order, unit: usize| {
            order.record(unit);
            order.expected().to_vec()
        };
        for unit in [2, 0, 1] {
            assert!(after(&mut order, unit).is_empty(), "nothing is known in the first pass");
        }
        assert_eq!(order.finish(), None);
        assert_eq!(after(&mut order, 2), [0, 1]);
        assert_eq!(after(&mut order, 0), [1]);
        assert!(after(&mut order, 3).is_empty());
        assert!(after(&mut order, 1).is_empty());
        assert_eq!(order.finish(), Some(vec![2, 0, 1]));
        assert_eq!(after(&mut order, 2), [0, 3, 1]);
        order.abandon();
        assert_eq!(after(&mut order, 2), [0, 3, 1]);
    }
}
