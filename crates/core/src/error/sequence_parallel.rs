//! What can be wrong with sequences and heads that ranks are to divide.

#[derive(Debug, thiserror::Error)]
pub(crate) enum SequenceParallelErrorKind {
    #[error(
        "a sequence of {length} tokens does not divide into {num_chunks} equal parts for {num_ranks} ranks ({axis}_size); fill it up to \
         a multiple of {num_chunks}, for example to {cure}, or leave out tokens"
    )]
    SequenceDoesNotDivide { axis: &'static str, length: usize, num_ranks: usize, num_chunks: usize, cure: usize },
    #[error(
        "{num_heads} heads of attention do not divide among {num_ranks} ranks (sp_size); let sp_size divide the number of heads that \
         each rank computes, or divide sequences by cp_size, which leaves heads whole"
    )]
    HeadsDoNotDivide { num_heads: usize, num_ranks: usize },
    #[error(
        "{num_heads} heads of queries do not share {num_key_value_heads} heads of keys and values evenly; give a multiple of them"
    )]
    HeadsDoNotShare { num_heads: usize, num_key_value_heads: usize },
    #[error(
        "a sequence has {found} tokens, and sp_seq_length is {wanted}, while sp_seq_length_is_variable is false; give sequences of that \
         length, or set sp_seq_length_is_variable to true"
    )]
    OtherLength { found: usize, wanted: usize },
}
