//! Memory that runs out, and what can go wrong while a batch size that fits into it is looked for.

use super::listed_ranks;
use std::time::Duration;

#[derive(Debug, thiserror::Error)]
pub(crate) enum MemoryError {
    #[error(
        "find_executable_batch_size found no batch size that fits into memory; it went down to the last one{}{last}. \
         Use a smaller model, shorter inputs, mixed precision, or a device with more memory",
        if last.is_empty() { "" } else { ", which said: " }
    )]
    NothingFits { last: String },

    #[error("reduce_batch_size_fn made {next} of {found}, but it has to make something smaller; 0 ends the search")]
    NotSmaller { found: usize, next: usize },

    #[error(
        "find_executable_batch_size: the ranks are about to try different batch sizes ({sizes}, in the order of ranks); \
         give every rank the same starting_batch_size and reduce_batch_size_fn"
    )]
    DifferentBatchSizes { sizes: String },

    #[error(
        "find_executable_batch_size: rank {rank} failed with batch size {batch_size}, and not for lack of memory: {text}"
    )]
    RankFailed { rank: usize, batch_size: usize, text: String },

    #[error(
        "find_executable_batch_size: {} did not come to the end of the try within {deadline:?}, so each of them died or is \
         stuck. Look at its output",
        listed_ranks(ranks)
    )]
    Silent { ranks: String, deadline: Duration },
}

/// The texts of `should_reduce_batch_size` (`utils/memory.py` of the reference), from CUDA, cuDNN and the CPU.
pub(crate) fn says_out_of_memory(text: &str) -> bool {
    const TEXTS: [&str; 3] =
        [" out of memory", "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED", "DefaultCPUAllocator: can't allocate memory"];
    TEXTS.iter().any(|wanted| text.contains(wanted))
}
