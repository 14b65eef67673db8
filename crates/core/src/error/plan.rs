//! What can be wrong with a plan.

use crate::config::ShardingStrategy;
use crate::plan::Phase;
use crate::weight_files::format_size;
use std::fmt;

#[derive(Debug, thiserror::Error)]
pub(crate) enum PlanErrorKind {
    #[error(
        "{strategy} on {} takes {} of memory on each at its peak ({phase}), without activations, but there is only {}; the \
         largest {} is {} with {}. {}",
        ranks(*world_size), format_size(*needed_bytes), format_size(*available_bytes),
        largest.0, largest.1, format_size(largest.2), cure(alternatives)
    )]
    DoesNotFit {
        strategy: ShardingStrategy,
        world_size: usize,
        phase: Phase,
        needed_bytes: u64,
        available_bytes: u64,
        /// What it is, its name and its bytes.
        largest: (&'static str, String, u64),
        alternatives: Vec<Alternative>,
    },
}

/// Another plan for the same model.
#[derive(Debug, PartialEq)]
pub(crate) struct Alternative {
    pub(crate) strategy: ShardingStrategy,
    pub(crate) world_size: usize,
    /// The blocks of the model are units, as they are not now.
    pub(crate) has_blocks: bool,
    /// Of each rank at its peak.
    pub(crate) bytes: u64,
}

impl fmt::Display for Alternative {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = if self.has_blocks { " with auto_wrap_policy TRANSFORMER_BASED_WRAP" } else { "" };
        write!(f, "{} on {}{units} takes {}", self.strategy, ranks(self.world_size), format_size(self.bytes))
    }
}

fn ranks(number: usize) -> String {
    format!("{number} {}", if number == 1 { "rank" } else { "ranks" })
}

fn cure(alternatives: &[Alternative]) -> String {
    match alternatives {
        [] => "No strategy and no number of ranks helps, because every rank has the whole model until it is divided, and its \
               largest unit and the gradients of that in the backward pass: use a narrower element type, smaller units, or \
               ranks with more memory"
            .to_owned(),
        some => {
            let items: String = some.iter().map(|alternative| format!("\n  - {alternative}")).collect();
            format!("These fit:{items}")
        }
    }
}
