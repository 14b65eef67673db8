//! A failed collective as people are told of it: which call it was, and where the other ranks were.

use accelerate_core::status::{BACKWARD, operation};
use std::fmt;
use std::time::Duration;

/// `rank 1`, or `ranks 1, 2`: of numbers with commas between them.
pub(crate) fn listed_ranks(numbers: &str) -> String {
    format!("{} {numbers}", if numbers.contains(',') { "ranks" } else { "rank" })
}

/// A collective call as one rank saw it. A backward pass counts as the collective that comes next, because that is what ranks compare;
/// people are told of the one before it, as `accelerate status` tells them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CollectiveCall {
    pub(crate) op: String,
    pub(crate) sequence: u64,
    pub(crate) shape: String,
}

impl CollectiveCall {
    /// A call that is going on, with the number of the last collective of its group: its own, or the one before a backward pass.
    pub(crate) fn watched(op: &str, last: u64) -> Self {
        let sequence = if op == BACKWARD { last.saturating_add(1) } else { last };
        Self { op: op.to_owned(), sequence, shape: String::new() }
    }
}

impl fmt::Display for CollectiveCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_backward = self.op == BACKWARD;
        f.write_str(&operation(&self.op, self.sequence.saturating_sub(u64::from(is_backward))))?;
        if self.shape.is_empty() { Ok(()) } else { write!(f, " on {}", self.shape) }
    }
}

/// What the other ranks said about themselves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Findings {
    /// Whether the store answered at all.
    pub(crate) store: StoreState,
    /// Ranks in the job that said nothing.
    pub(crate) silent: Vec<usize>,
    /// Ranks that were in another call.
    pub(crate) elsewhere: Vec<(usize, CollectiveCall)>,
    /// Ranks that have left the group, and why. With them the failure is explained: who else was where is not asked.
    pub(crate) left: Vec<(usize, String)>,
    /// Ranks that have failed by themselves in this call, and how. They explain the failure as well.
    pub(crate) failed: Vec<(usize, String)>,
}

/// The store through which ranks tell each other where they are, and with it rank 0, which keeps it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum StoreState {
    #[default]
    Answers,
    /// Connected, without an answer: rank 0 is stopped, or its machine is.
    Silent,
    /// The connection is lost.
    Gone,
}

/// A failed collective in full.
#[derive(Debug)]
pub(crate) struct Failure {
    /// This process among the members of the group: `rank 1 of 4`.
    pub(crate) place: String,
    pub(crate) call: CollectiveCall,
    pub(crate) deadline: Duration,
    pub(crate) findings: Findings,
}

impl Failure {
    /// The call: `rank 1 of 2, all_reduce (collective 7) on [2] Float`.
    pub(crate) fn call(&self) -> String {
        format!("{}, {}", self.place, self.call)
    }

    /// Who is to blame, as far as the others' answers tell.
    pub(crate) fn blame(&self) -> String {
        let findings = &self.findings;
        let mut parts = Vec::new();
        if findings.store == StoreState::Gone {
            parts.push("rank 0, which keeps the rendezvous store, is gone".to_owned());
        } else if findings.store == StoreState::Silent {
            parts.push("rank 0, which keeps the rendezvous store, does not answer; it may be stopped".to_owned());
        } else if !findings.silent.is_empty() {
            let (noun, verb) = if findings.silent.len() == 1 { ("rank", "has") } else { ("ranks", "have") };
            let ranks: Vec<_> = findings.silent.iter().map(usize::to_string).collect();
            parts.push(format!("{noun} {} {verb} not made this call", ranks.join(", ")));
        }
        for (rank, reason) in &findings.left {
            parts.push(format!("rank {rank} has left: {reason}"));
        }
        for (rank, reason) in &findings.failed {
            parts.push(format!("rank {rank} has failed by itself: {reason}"));
        }
        for (rank, call) in &findings.elsewhere {
            parts.push(format!("rank {rank} is in {call}"));
        }
        if parts.is_empty() {
            parts.push("all ranks made this call, so the network between them is at fault".to_owned());
        }
        parts.join("; ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    /// As `accelerate status` says it of the same moment, from the number of the last collective.
    #[rstest]
    #[case("all_reduce")]
    #[case(BACKWARD)]
    fn a_call_that_goes_on_has_one_name(#[case] op: &str) {
        let call = CollectiveCall::watched(op, 17);
        assert_eq!(call.to_string(), operation(op, 17));
        assert_eq!(call.sequence > 17, op == BACKWARD, "ranks compare it with the collective that comes next");
    }
}
