//! Failed collectives: who is to blame is asked in the journal, and who has failed by itself says so there.

use super::peer_process::await_ends;
use super::{Group, Links};
use crate::error::{CollectiveCall, CollectiveError, Error, Failure, StoreState};
use accelerate_core::status::BACKWARD;
use std::sync::atomic::Ordering;

/// NCCL says so, as an invalid usage, where two ranks come with one GPU.
fn is_of_shared_gpu(error: &torch_ext::Error) -> bool {
    error.message().contains("Duplicate GPU detected")
}

impl Group {
    /// Turns a failure inside the reducer's own collectives into one that names the ranks.
    pub(crate) fn explain_reducer(&self, error: torch_ext::Error) -> crate::Error {
        match &self.inner.links {
            Some(links) if error.is_timeout() || error.is_connection() || is_of_shared_gpu(&error) => {
                let sequence = self.next_sequence();
                self.explain(links, BACKWARD, sequence, String::new(), error)
            }
            _ => error.into(),
        }
    }

    /// Turns a failure of ranks that read each other's memory into one that names the call.
    #[cold]
    pub(super) fn explain_own(&self, op: &'static str, label: String, error: torch_ext::Error) -> Error {
        match &self.inner.links {
            Some(links) => self.explain(links, op, self.inner.sequence.load(Ordering::Relaxed), label, error),
            None => error.into(),
        }
    }

    /// Tells the others that this rank has failed by itself in the call that they are in.
    #[cold]
    pub(super) fn fail(&self, op: &'static str, label: String, reason: &str) {
        if let Some(links) = &self.inner.links {
            let sequence = self.inner.sequence.load(Ordering::Relaxed);
            // Without the store, there is nobody to tell.
            let _ = links.journal.fail(&CollectiveCall { op: op.to_owned(), sequence, shape: label }, reason);
        }
    }

    /// Has a rank said that this call of the group failed on it, or can nobody say any more?
    #[cold]
    pub(super) fn has_failed(&self, rank: usize) -> bool {
        let sequence = self.inner.sequence.load(Ordering::Relaxed);
        self.inner.links.as_ref().is_some_and(|links| links.journal.has_failed(rank, sequence))
    }

    /// The call of this group in which a rank of the job has been for long, as it would say itself if its deadline passed.
    fn long_call_of(&self, rank: usize) -> torch_ext::Result<Option<CollectiveCall>> {
        let Some(watch) = &self.watch else { return Ok(None) };
        watch.call_of(rank, &self.inner.name)
    }

    /// What people call rank `rank` of the group.
    pub(super) fn name_of(&self, rank: usize) -> usize {
        self.inner.members.in_job(rank)
    }

    #[cold]
    pub(super) fn explain(
        &self,
        links: &Links,
        op: &'static str,
        sequence: u64,
        shape: String,
        source: torch_ext::Error,
    ) -> crate::Error {
        let call = CollectiveCall { op: op.to_owned(), sequence, shape };
        if !(source.is_timeout() || source.is_connection()) {
            // An argument that is refused has not been sent to anybody.
            let is_argument = source.is_invalid_argument();
            let error = match is_of_shared_gpu(&source) {
                true => {
                    CollectiveError::SharedGpu { place: self.inner.members.own_place(), call: call.clone(), source }
                        .into()
                }
                false => Error::from(source),
            };
            if !is_argument {
                // The others learn it before the connections of this process close; without the store, nobody does.
                let _ = links.journal.fail(&call, &error.to_string());
            }
            return error;
        }
        self.is_out_of_step.store(true, Ordering::Relaxed);
        let (findings, mut to_blame) = links.journal.ask(&call, links.timeout, &|rank| self.long_call_of(rank));
        if findings.store == StoreState::Gone {
            to_blame.extend(self.rank_0.as_deref().cloned());
        }
        await_ends(&to_blame);
        let failure = Failure { place: self.inner.members.own_place(), call, deadline: links.timeout, findings };
        if source.is_timeout() {
            CollectiveError::Timeout { failure, source }.into()
        } else {
            CollectiveError::PeerGone { failure, source }.into()
        }
    }
}
