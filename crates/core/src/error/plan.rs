//! What can be wrong with a plan.

use crate::config::ShardingStrategy;
use crate::files::in_one_line;
use crate::names::counted;
use crate::plan::Phase;
use crate::weight_files::format_size;
use std::fmt;

#[derive(Debug, thiserror::Error)]
pub(crate) enum PlanErrorKind {
    #[error(
        "{strategy} on {} takes {} of memory on each at its peak ({phase}), {}, but there is only {}; the \
         largest {} is {} with {}. {}",
        counted(*world_size, "rank"), format_size(*needed_bytes), activations(*activation_bytes), format_size(*available_bytes),
        largest.0, in_one_line(&largest.1), format_size(largest.2), cure(alternatives, *activation_bytes)
    )]
    DoesNotFit {
        strategy: ShardingStrategy,
        world_size: usize,
        phase: Phase,
        needed_bytes: u64,
        available_bytes: u64,
        /// 0 where nobody has said.
        activation_bytes: u64,
        /// What it is, its name and its bytes.
        largest: (&'static str, String, u64),
        alternatives: Vec<Alternative>,
    },
    #[error("config.json cannot be understood: {reason}; activations are estimated from what `save_pretrained` writes")]
    Config { reason: String },
    #[error(
        "config.json has {found} as {name}, and a number of at least 1 is wanted; activations cannot be estimated without it"
    )]
    ConfigNumber { name: &'static str, found: String },
    #[error(
        "config.json says nothing of {what} ({}), so that activations cannot be estimated; the estimate is for \
         transformers with one stack of layers, such as BERT and GPT-2: leave out the batch size and the sequence length",
        names.join(", ")
    )]
    NotATransformer { what: &'static str, names: &'static [&'static str] },
    #[error(
        "the model has an encoder and a decoder (is_encoder_decoder in config.json), and the estimate of activations is for \
         transformers with one stack of layers, such as BERT and GPT-2; leave out the batch size and the sequence length"
    )]
    EncoderDecoder,
    #[error(
        "{found:?} is not a bandwidth; a number above 0 and a unit are wanted, in bits (100Gbit, 800Mbit/s, 25Gbps) or in \
         bytes (12GB/s, 900MB)"
    )]
    Bandwidth { found: String },
    #[error(
        "{found:?} is not a number of floating-point operations in a second; a number above 0 is wanted, for example 312T, \
         1.5PFLOPS or 3.12e14"
    )]
    Flops { found: String },
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
        write!(f, "{} on {}{units} takes {}", self.strategy, counted(self.world_size, "rank"), format_size(self.bytes))
    }
}

fn activations(bytes: u64) -> String {
    match bytes {
        0 => "without activations".to_owned(),
        bytes => format!("{} of it activations", format_size(bytes)),
    }
}

fn cure(alternatives: &[Alternative], activation_bytes: u64) -> String {
    match alternatives {
        [] if activation_bytes > 0 => "No strategy and no number of ranks helps, because every rank has the activations of its own rows beside \
               the largest unit: use a smaller batch, shorter rows, activation checkpointing, a narrower element type, or ranks \
               with more memory"
            .to_owned(),
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
