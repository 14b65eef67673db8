//! The collectives of units that this rank has issued, in order: ranks compare them, because a gather and a reduce-scatter of
//! equal sizes cannot be told from those of another unit by anyone else.

use super::units::Units;
use crate::engine::replicate::difference_from_main;
use crate::error::{Result, StateError};
use crate::group::Group;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A collective of a unit.
#[derive(Clone, Copy)]
pub(super) enum IssuedCollective {
    AllGather(usize),
    ReduceScatter(usize),
}

/// How often a unit was gathered, and its gradients were reduced.
#[cfg(test)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) gathers: usize,
    pub(super) reduce_scatters: usize,
}

/// What has been issued since ranks last compared.
#[derive(Default)]
pub(super) struct IssuedCollectives {
    since: Mutex<Vec<IssuedCollective>>,
    #[cfg(test)]
    all: Mutex<Vec<IssuedCollective>>,
}

impl IssuedCollectives {
    // A list that only grows or goes: a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, Vec<IssuedCollective>> {
        self.since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn record(&self, issued: IssuedCollective) {
        self.lock().push(issued);
        #[cfg(test)]
        self.all.lock().unwrap_or_else(PoisonError::into_inner).push(issued);
    }

    /// Compares what ranks have issued; `None` if none has issued anything. The inner error is that they differ. Collective if
    /// anything was issued.
    pub(super) fn compare(&self, job: &Group, units: &Units) -> Result<Option<Result<()>>> {
        let issued = std::mem::take(&mut *self.lock());
        if issued.is_empty() {
            return Ok(None);
        }
        let line = |issued: &IssuedCollective| {
            let (what, unit) = match issued {
                IssuedCollective::AllGather(unit) => ("gathers", unit),
                IssuedCollective::ReduceScatter(unit) => ("reduces", unit),
            };
            format!("{what} {}\n", units.label(*unit))
        };
        let order: String = issued.iter().map(line).collect();
        let Some(orders) = job.disagreement("check_order", &order)? else { return Ok(Some(Ok(()))) };
        let (rank, on_main, there) = difference_from_main(&orders);
        Ok(Some(Err(StateError::DifferentOrders { rank, on_main, there }.into())))
    }

    /// Since the beginning, by unit.
    #[cfg(test)]
    pub(super) fn counts(&self, num_units: usize) -> Vec<Counts> {
        let mut counts = vec![Counts::default(); num_units];
        for issued in &*self.all.lock().unwrap_or_else(PoisonError::into_inner) {
            match issued {
                IssuedCollective::AllGather(unit) => counts[*unit].gathers += 1,
                IssuedCollective::ReduceScatter(unit) => counts[*unit].reduce_scatters += 1,
            }
        }
        counts
    }
}
