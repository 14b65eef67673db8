//! What can go wrong between processes.

use super::*;
use std::time::Duration;

#[derive(Debug, thiserror::Error)]
pub(crate) enum CollectiveError {
    #[error(
        "rank {rank} of {world_size}: {op} number {sequence} on {shape} did not finish within {deadline:?}; \
         a peer has not made the same call, or is stuck or very slow. Every rank has to make the same \
         sequence of collective calls: look for one inside `if accelerator.is_main_process()`. A longer \
         deadline is set by InitProcessGroupKwargs.timeout"
    )]
    Timeout { rank: usize, world_size: usize, op: &'static str, sequence: u64, shape: String, deadline: Duration, source: torch_ext::Error },
}

impl CollectiveError {
    pub(crate) fn is_timeout(&self) -> bool { matches!(self, Self::Timeout { .. }) }
    pub(crate) fn is_peer_failure(&self) -> bool { false }
}
