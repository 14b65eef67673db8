//! What ranks tell each other while some of them have run out of batches and the others go on.
//!
//! Method: `torch.distributed.algorithms.join`. Here every call that ranks without batches have to follow is announced by
//! one comparison of 8 bytes; only when ranks differ, because some are out of batches, do descriptions travel. A rank that
//! makes a call of another kind is compared by the same collective, and so becomes an error on all ranks.

use super::{Engine, GradientState};
use crate::error::{Result, StateError};
use crate::group::Group;
use accelerate_core::accumulation::WindowState;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

const OP: &str = "join_uneven_inputs";

/// What one rank is about to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Call {
    /// A forward pass of a model, a backward pass that reduces, or both.
    Pass(Pass),
    /// `gather_for_metrics` in a round in which not all ranks have a batch.
    Metrics { shapes: String },
    /// Nothing of its own any more.
    Done(Done),
}

/// A pass through a model, as ranks have to know that follow it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Pass {
    /// The model's place in the call of `join_uneven_inputs`.
    pub(crate) model: usize,
    /// The forward pass belongs to it; otherwise that ran before, without synchronisation.
    pub(crate) with_forward: bool,
    /// The forward pass begins with the buffers of the first rank that has a batch.
    pub(crate) copies_buffers: bool,
    /// The backward pass reduces.
    pub(crate) reduction: Option<Reduction>,
}

/// A backward pass that reduces.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Reduction {
    /// What gradients accumulated before are multiplied by.
    pub(crate) rescale: f64,
    /// Gradients are complete afterwards; otherwise they go on accumulating.
    pub(crate) ends_window: bool,
}

/// What a rank that is out of batches has seen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Done {
    /// Calls of the others that it has followed; the fewer, the more batches it had.
    pub(crate) followed: u64,
    /// Steps of all its optimizers.
    pub(crate) optimizer_steps: usize,
    pub(crate) window: WindowState,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pass(Pass { model, with_forward: true, .. }) => write!(f, "the forward pass of model {model}"),
            Self::Pass(Pass { model, .. }) => write!(f, "trigger_sync_in_backward of model {model}"),
            Self::Metrics { shapes } => write!(f, "gather_for_metrics of {shapes}"),
            Self::Done(_) => f.write_str("out of batches"),
        }
    }
}

impl Call {
    fn encode(&self) -> Result<String> {
        Ok(format!("{self}, in join_uneven_inputs {}", serde_json::to_string(self).map_err(crate::Error::other)?))
    }

    fn decode(text: &str) -> Option<Self> {
        let (_, json) = text.split_once(", in join_uneven_inputs ")?;
        serde_json::from_str(json).ok()
    }
}

/// One `join_uneven_inputs` on one rank.
#[derive(Debug)]
pub(crate) struct Join {
    group: Group,
    gradient_state: GradientState,
}

/// How the ranks went through the joined region.
#[derive(Debug)]
pub(crate) struct Summary {
    /// Per rank.
    pub(crate) done: Vec<Done>,
}

impl Summary {
    /// The rank whose state counts: the first of those that had most batches.
    pub(crate) fn authority(&self) -> usize {
        let least = self.done.iter().map(|done| done.followed).min();
        self.done.iter().position(|done| Some(done.followed) == least).unwrap_or(0)
    }
}

impl Join {
    pub(crate) fn new(group: Group, gradient_state: GradientState) -> Self {
        Self { group, gradient_state }
    }

    /// What the next backward pass that reduces does.
    pub(crate) fn next_reduction(&self) -> Reduction {
        let (rescale, ends_window) = self.gradient_state.reduction_to_come();
        Reduction { rescale, ends_window }
    }

    /// Tells all ranks what this one is about to do; the first rank that does it. Collective.
    ///
    /// # Errors
    /// Ranks with batches that are about to do something else.
    pub(crate) fn announce(&self, call: Call) -> Result<usize> {
        let Some(calls) = self.exchange(&call)? else { return Ok(0) };
        let (first, _) = agreed(&calls)?.ok_or_else(|| strayed(&calls))?;
        Ok(first)
    }

    /// Follows the others' calls until all ranks are out of batches. Collective.
    pub(crate) fn follow(&self, engines: &[Arc<dyn Engine>], optimizer_steps: usize) -> Result<Summary> {
        let mut done = Done { followed: 0, optimizer_steps, window: self.gradient_state.window_state() };
        loop {
            let Some(calls) = self.exchange(&Call::Done(done.clone()))? else {
                return Ok(Summary { done: vec![done; self.group.world_size()] });
            };
            let Some((source, call)) = agreed(&calls)? else {
                let done = calls.into_iter().filter_map(|call| match call {
                    Call::Done(done) => Some(done),
                    _ => None,
                });
                return Ok(Summary { done: done.collect() });
            };
            done.followed += 1;
            match call {
                Call::Pass(pass) => {
                    let engine = engines.get(pass.model).ok_or_else(|| strayed(&calls))?;
                    engine.follow(source, *pass)?;
                }
                _ => drop(self.group.all_gather_bytes(&[])?),
            }
        }
    }

    /// All ranks' calls, or `None` if all are this one's.
    fn exchange(&self, mine: &Call) -> Result<Option<Vec<Call>>> {
        let Some(texts) = self.group.disagreement(OP, &mine.encode()?)? else { return Ok(None) };
        let calls: Option<Vec<Call>> = texts.iter().map(|text| Call::decode(text)).collect();
        calls.map(Some).ok_or_else(|| StateError::StrayedInJoin { per_rank: per_rank(&texts) }.into())
    }
}

/// The call of all ranks that have batches, with the first of them; `None` if there are none.
fn agreed(calls: &[Call]) -> Result<Option<(usize, &Call)>> {
    let mut active = calls.iter().enumerate().filter(|(_, call)| !matches!(call, Call::Done(_)));
    let Some(first) = active.next() else { return Ok(None) };
    if active.all(|(_, call)| call == first.1) { Ok(Some(first)) } else { Err(strayed(calls)) }
}

fn strayed(calls: &[Call]) -> crate::Error {
    let texts: Vec<String> = calls.iter().map(Call::to_string).collect();
    StateError::StrayedInJoin { per_rank: per_rank(&texts) }.into()
}

fn per_rank(texts: &[String]) -> String {
    // What stands after the name is for ranks, not for people.
    let shown = texts.iter().map(|text| text.split(", in join_uneven_inputs ").next().unwrap_or(text));
    shown.enumerate().map(|(rank, text)| format!("rank {rank}: {text}")).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn done(followed: u64) -> Call {
        Call::Done(Done { followed, optimizer_steps: 3, window: WindowState::default() })
    }

    fn forward(model: usize) -> Call {
        let reduction = Some(Reduction { rescale: 4.0 / 3.0, ends_window: true });
        Call::Pass(Pass { model, with_forward: true, copies_buffers: true, reduction })
    }

    #[test]
    fn calls_survive_the_wire() {
        for call in [done(2), forward(1), Call::Metrics { shapes: "[2, 3] Float, in join".into() }] {
            let back = Call::decode(&call.encode().unwrap()).unwrap();
            assert_eq!(back.to_string(), call.to_string());
        }
        assert_eq!(Call::decode("gather of [2] Float"), None);
    }

    #[test]
    fn ranks_with_batches_have_to_agree() {
        assert_eq!(agreed(&[done(0), done(1)]).unwrap(), None);
        assert_eq!(agreed(&[done(0), forward(2), forward(2)]).unwrap(), Some((1, &forward(2))));
        let error = agreed(&[forward(0), done(0), forward(1)]).unwrap_err().to_string();
        assert!(error.contains("rank 0: the forward pass of model 0; rank 1: out of batches"), "{error}");
    }

    #[test]
    fn the_first_of_those_that_had_most_counts() {
        let of = |followed: &[u64]| {
            let done =
                followed.iter().map(|&followed| Done { followed, optimizer_steps: 0, window: WindowState::default() });
            Summary { done: done.collect() }.authority()
        };
        assert_eq!((of(&[2, 0, 0]), of(&[0, 1]), of(&[1, 1])), (1, 0, 0));
    }
}
