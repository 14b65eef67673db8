//! State that is not in memory: it is read when a checkpoint comes to it.

use crate::error::Result;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use tch::Tensor;

/// An object whose [`state_views`](super::Stateful::state_views) may have tensors without memory, because what they stand for is
/// on a disk.
pub(crate) trait StateReader: Send + Sync {
    /// Fills tensors, on the CPU, with those of these names. Of what is read together, nothing is read twice. Not collective.
    ///
    /// # Errors
    /// There is none of this name; the disk fails.
    fn read_state(&self, wanted: &[(&str, &Tensor)]) -> Result<()>;
}

/// The objects that may have such state, by name.
#[derive(Clone, Default)]
pub(crate) struct StateReaders(BTreeMap<String, Arc<dyn StateReader>>);

impl StateReaders {
    pub(crate) fn get(&self, object: &str) -> Option<&Arc<dyn StateReader>> {
        self.0.get(object)
    }
}

impl FromIterator<(String, Arc<dyn StateReader>)> for StateReaders {
    fn from_iter<I: IntoIterator<Item = (String, Arc<dyn StateReader>)>>(readers: I) -> Self {
        Self(readers.into_iter().collect())
    }
}

impl fmt::Debug for StateReaders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}
