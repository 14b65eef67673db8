//! What can go wrong while the processes of a job find each other.

#[derive(Debug, thiserror::Error)]
pub(crate) enum StateError {}

impl StateError {
    pub(crate) fn is_timeout(&self) -> bool { false }
}
