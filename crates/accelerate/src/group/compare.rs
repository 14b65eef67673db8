//! Ranks compare what they are about to do, by 8 bytes that stand for it; texts travel only when these differ.
//!
//! Calls that differ between ranks would be undefined behaviour of the backend. The accelerator's collectives are always
//! compared. In debug mode every call of the group is, before it is made.

use super::peer_call::PeerCall;
use super::peer_process::await_ends;
use super::{Group, PeerProcess};
use crate::error::{CollectiveError, ElsewhereKind, Error, Result};
use std::hash::{DefaultHasher, Hasher};
use tch::{Device, Kind, Tensor};
use torch_ext::ProcessGroup;

/// A rank, and what has failed on it.
pub(crate) type Failure = (usize, String);

impl Group {
    /// The same group, in which every call is compared (debug mode). All ranks have to use it.
    pub(crate) fn comparing_calls(&self) -> Self {
        Self { compares_calls: true, ..self.clone() }
    }

    /// The same group, for the calls that a comparison itself consists of.
    pub(super) fn uncompared(&self) -> Self {
        Self { compares_calls: false, ..self.clone() }
    }

    /// In debug mode: fails on every rank, with all ranks' calls, unless all are about to make this one. Collective then.
    pub(crate) fn compare_call(&self, op: &'static str, details: impl FnOnce() -> String) -> Result<()> {
        if !self.compares_calls {
            return Ok(());
        }
        let details = details();
        let Some(calls) = self.exchange(op, &details, &call_text(op, &details))? else { return Ok(()) };
        Err(CollectiveError::DifferentCalls { per_rank: self.per_rank(&calls) }.into())
    }

    /// All ranks' descriptions in rank order if they differ, `None` if all are equal.
    ///
    /// Costs one collective of 8 bytes; the descriptions travel only when they differ. Collective.
    pub(crate) fn disagreement(&self, op: &'static str, description: &str) -> Result<Option<Vec<String>>> {
        // Otherwise another rank's call would be taken for its description.
        self.compare_call(op, String::new)?;
        self.exchange(op, "", description)
    }

    /// What has failed, by rank, where `own` is what has failed on this one; empty if nothing has.
    ///
    /// A rank on which nothing has failed waits for the end of processes on which something has, so that it does not end first
    /// and is not taken for the cause. Collective.
    ///
    /// # Errors
    /// Ranks that are about to do something else than `what`.
    pub(crate) fn failures(&self, what: &'static str, own: Option<&str>) -> Result<Vec<Failure>> {
        let (failures, processes) = self.failures_now(what, own)?;
        if own.is_none() {
            await_ends(&processes);
        }
        Ok(failures)
    }

    /// The same without waiting, and the processes whose end is to be waited for. Collective.
    fn failures_now(&self, what: &'static str, own: Option<&str>) -> Result<(Vec<Failure>, Vec<PeerProcess>)> {
        let failed = |reason| format!("{}\n{reason}", PeerProcess::own().encode());
        let mine = own.map_or_else(|| what.to_owned(), failed);
        let texts = self.disagreement(what, &mine)?.unwrap_or_default();
        let (mut failures, mut processes) = (Vec::new(), Vec::new());
        for (rank, text) in texts.iter().enumerate() {
            let Some((process, reason)) = text.split_once('\n') else {
                if text == what {
                    continue;
                }
                return Err(self.different_calls(&texts));
            };
            processes.extend(PeerProcess::decode(process));
            failures.push((rank, reason.to_owned()));
        }
        Ok((failures, processes))
    }

    /// Passes on what this rank has made of `what` if all ranks have succeeded. Otherwise fails on all of them: with the
    /// rank's own failure, or with that of the first that has failed. Collective.
    pub(crate) fn agree_on_success<T>(&self, what: &'static str, own: Result<T>) -> Result<T> {
        let text = own.as_ref().err().map(|error| format!("{}{error}", ElsewhereKind::of(error).letter()));
        let failures = self.failures_now(what, text.as_deref());
        let made = own?;
        let (failures, processes) = failures?;
        let Some((rank, text)) = failures.into_iter().next() else { return Ok(made) };
        // Whoever waits may be ended meanwhile, and temporary files would stay.
        drop(made);
        await_ends(&processes);
        let mut letters = text.chars();
        let kind = letters.next().map_or(ElsewhereKind::Other, ElsewhereKind::of_letter);
        Err(CollectiveError::FailedElsewhere { what, rank, reason: letters.as_str().to_owned(), kind }.into())
    }

    /// Fails on every rank, with all ranks' descriptions, unless all ranks describe the same call. Collective.
    pub(crate) fn agree(&self, op: &'static str, description: &str, cure: &'static str) -> Result<()> {
        // In debug mode, this is what other calls are compared with.
        let Some(calls) = self.exchange(op, description, &call_text(op, description))? else { return Ok(()) };
        let per_rank = self.per_rank(&calls);
        let details_of = |call: &String| call.strip_prefix(op).map(|rest| rest.is_empty() || rest.starts_with(" of "));
        let is_same_op = calls.iter().all(|call| details_of(call) == Some(true));
        Err(match is_same_op {
            true => CollectiveError::Disagreement { op, per_rank, cure },
            false => CollectiveError::DifferentCalls { per_rank },
        }
        .into())
    }

    /// All ranks' texts in rank order if they differ, `None` if all are equal. `shape` is for the message of a failure.
    /// Collective.
    fn exchange(&self, op: &'static str, shape: &str, text: &str) -> Result<Option<Vec<String>>> {
        if self.world_size() == 1 {
            return Ok(None);
        }
        let mut hasher = DefaultHasher::new();
        hasher.write(op.as_bytes());
        hasher.write(text.as_bytes());
        let mine = Tensor::f_from_slice(&[hasher.finish() as i64])?;
        let all = Tensor::f_empty([self.world_size() as i64], (Kind::Int64, Device::Cpu))?;
        let start = |group: &ProcessGroup| group.all_gather_into_tensor(&all, &mine, None);
        let call = PeerCall::Compare { input: &mine, places: &all.f_split(1, 0)? };
        self.run_uncompared(op, &|| shape.to_owned(), &call, start)?;
        let hashes = Vec::<i64>::try_from(&all)?;
        if hashes.iter().all(|hash| *hash == hashes[0]) {
            return Ok(None);
        }
        let texts = self.uncompared().gather_bytes(text.as_bytes())?;
        Ok(Some(texts.iter().map(|text| String::from_utf8_lossy(text).into_owned()).collect()))
    }

    /// The error of ranks that have described different calls to each other.
    pub(crate) fn different_calls(&self, texts: &[String]) -> Error {
        let shown = |text: &String| text.split_once('\n').map_or_else(|| text.clone(), |(_, reason)| reason.to_owned());
        let calls: Vec<String> = texts.iter().map(shown).collect();
        CollectiveError::DifferentCalls { per_rank: self.per_rank(&calls) }.into()
    }

    /// What each rank is about to do, by its rank in the job.
    pub(crate) fn per_rank(&self, calls: &[String]) -> String {
        let calls = calls.iter().enumerate().map(|(rank, call)| format!("rank {}: {call}", self.name_of(rank)));
        calls.collect::<Vec<_>>().join("; ")
    }
}

/// An operation with what it is called with.
pub(super) fn call_text(op: &str, details: &str) -> String {
    if details.is_empty() { op.to_owned() } else { format!("{op} of {details}") }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::testing;
    use std::sync::atomic::Ordering;

    #[test]
    fn a_call_is_one_operation_of_the_backend_and_in_debug_mode_two() {
        testing::ranks(2, Default::default(), |accelerator| {
            let group = accelerator.group();
            let num_operations = || group.inner.sequence.load(Ordering::Relaxed);
            group.barrier()?;
            assert_eq!(num_operations(), 1);
            group.comparing_calls().barrier()?;
            assert_eq!(num_operations(), 3);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn groups_of_a_group_in_debug_mode_are_in_it_too() {
        testing::ranks(2, Default::default(), |accelerator| {
            let group = accelerator.group().comparing_calls();
            let groups = [group.fork()?, group.side_group()?, group.subgroup(&[0, 1])?, group.clone()];
            assert!(groups.iter().all(|group| group.compares_calls));
            assert!(!accelerator.group().fork()?.compares_calls);
            Ok(())
        })
        .unwrap();
    }
}
