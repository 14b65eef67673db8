//! In which order the objects of one call are prepared, whatever the order of the tuple.

use super::{Preparation, Prepare};
use crate::error::Result;

/// When an object has its turn among those of one call. A schedule is for an optimizer, so that comes first. Whatever draws
/// random numbers or is collective has the same place in every order of the tuple, so results and calls are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    Model,
    DataLoader,
    Optimizer,
    Scheduler,
}

impl Turn {
    /// All turns but the last, in which everything is prepared that is left.
    pub(super) const BEFORE_LAST: [Self; 3] = [Self::Model, Self::DataLoader, Self::Optimizer];

    /// The turn of a tuple: that of its last object, because only then it is complete.
    pub(super) const fn of_tuple(turns: &[Self]) -> Self {
        let (mut latest, mut next) = (Self::Model, 0);
        while next < turns.len() {
            if latest as u8 <= turns[next] as u8 {
                latest = turns[next];
            }
            next += 1;
        }
        latest
    }
}

/// An object of a tuple, before and after its turn.
pub(super) enum Slot<T, P> {
    Waiting(T),
    Ready(P),
}

impl<T, P> Slot<T, P> {
    /// Prepares the object if this is its turn.
    pub(super) fn take<K>(self, turn: Turn, preparation: &Preparation<'_>) -> Result<Self>
    where
        T: Prepare<K, Prepared = P>,
    {
        match self {
            Self::Waiting(object) if T::TURN == turn => object.prepare(preparation).map(Self::Ready),
            slot => Ok(slot),
        }
    }

    /// Prepares the object unless that is done.
    pub(super) fn finish<K>(self, preparation: &Preparation<'_>) -> Result<P>
    where
        T: Prepare<K, Prepared = P>,
    {
        match self {
            Self::Waiting(object) => object.prepare(preparation),
            Self::Ready(prepared) => Ok(prepared),
        }
    }
}
