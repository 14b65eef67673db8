//! What can be wrong with how rows are dealt to ranks.

#[derive(Debug, thiserror::Error)]
pub(crate) enum DataErrorKind {
    #[error("the batch size is 0, but must be at least 1")]
    ZeroBatchSize,
    #[error("the number of processes is 0, but must be at least 1")]
    ZeroProcesses,
    #[error(
        "with split_batches, one batch is cut into equal parts for all ranks, so the batch size \
         ({batch_size}) must be a multiple of the number of processes ({num_processes}); use a batch size \
         of {suggestion}, or set split_batches to false"
    )]
    IndivisibleBatch { batch_size: usize, num_processes: usize, suggestion: usize },
    #[error("rank {rank} does not exist: there are {num_processes} processes, counted from 0")]
    NoSuchRank { rank: usize, num_processes: usize },
    #[error(
        "every value of a dictionary to split must have the same length, but {first:?} has \
         {first_length} and {second:?} has {second_length}"
    )]
    UnequalLengths { first: String, first_length: usize, second: String, second_length: usize },
}
