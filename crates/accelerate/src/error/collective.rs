//! What can go wrong between processes.

use super::{CollectiveCall, Error, Failure, listed_ranks};

#[derive(Debug, thiserror::Error)]
pub(crate) enum CollectiveError {
    #[error(
        "{} did not finish within {:?}: {}. Every rank has to make the same collective calls in the same \
         order; look for one that only some ranks reach, or for a rank that is stuck. For work that \
         really takes longer, raise InitProcessGroupKwargs.timeout",
        failure.call(), failure.deadline, failure.blame()
    )]
    Timeout { failure: Failure, source: torch_ext::Error },

    #[error(
        "{} lost the connection to another process: {}. The first process that failed says why; if none did, one has ended \
         before this call, which every rank has to make",
        failure.call(), failure.blame()
    )]
    PeerGone { failure: Failure, source: torch_ext::Error },

    #[error(
        "rank {rank} changed or dropped its parameters while {what} was being read from it. Every rank has to make the same \
         passes in the same order; change parameters before the forward pass or after the backward pass"
    )]
    MemoryClosed { rank: usize, what: String },

    #[error(
        "the memory of rank {rank} cannot be read any more while {what} is being read from it: {source}. The rank lives; look \
         whether something on this machine has withdrawn the permission, such as kernel.yama.ptrace_scope"
    )]
    MemoryUnreadable { rank: usize, what: String, source: std::io::Error },

    #[error(
        "{op} is called in a copy of the process that has joined the run (fork), which is no rank of it. Make collectives in the \
         process that made the Accelerator, and start others by a launcher"
    )]
    AfterFork { op: &'static str },

    #[error(
        "{place}, {call}: NCCL needs one GPU for each process, but two processes use the same GPU. Start no more processes on a machine \
         than it has GPUs (accelerate launch --num_processes), give each a GPU of its own in CUDA_VISIBLE_DEVICES, let Gloo connect \
         them (InitProcessGroupKwargs.backend), or train on the CPU (--cpu)"
    )]
    SharedGpu { place: String, call: CollectiveCall, source: torch_ext::Error },

    #[error("{op} needs the same shapes and dtypes on every rank, but found {per_rank}. {cure}")]
    Disagreement { op: &'static str, per_rank: String, cure: &'static str },

    #[error(
        "ranks make different calls: {per_rank}. Every rank has to make the same calls in the same order, with the same \
         shapes and dtypes; look for a call that only some ranks reach"
    )]
    DifferentCalls { per_rank: String },

    #[error("the communication hook panicked at bucket {index}: {text}")]
    HookPanicked { index: usize, text: String },

    #[error(
        "the communication hook returned {found} for bucket {index}, which is {wanted}; return the mean over ranks, flat, of \
         the dtype of the buffer and on its device, or None to leave it to libtorch"
    )]
    HookResult { index: usize, found: String, wanted: String },

    #[error("{what} failed on rank {rank}, and ends on this rank too: {reason}")]
    FailedElsewhere { what: &'static str, rank: usize, reason: String, kind: ElsewhereKind },

    #[error("{op} cannot cut {shape} into {world_size} equal parts along dim 0; pad it to a multiple first")]
    Indivisible { op: &'static str, shape: String, world_size: usize },

    #[error(
        "{op} cannot give the mean of {found}, which this dtype cannot hold; convert to a floating dtype first, such as by \
         tensor.to_kind(Kind::Float), or ask for ReduceOp::Sum"
    )]
    MeanOfIntegers { op: &'static str, found: String },

    #[error(
        "{op} cannot give the largest or smallest of {found}: complex numbers have no order. Take their absolute values or \
         their real parts first, or ask for ReduceOp::Sum or ReduceOp::Mean"
    )]
    NoOrder { op: &'static str, found: String },

    #[error(
        "{op} is given the {what} {value} for a tensor of {found}, which this dtype cannot hold; give a number that it \
         can hold, or convert the tensor first, such as by tensor.to_kind(Kind::Float)"
    )]
    NotHeld { op: &'static str, what: &'static str, value: f64, found: String },

    #[error("{op} names rank {rank}, but there are {world_size} ranks, counted from 0")]
    NoSuchRank { op: &'static str, rank: usize, world_size: usize },

    #[error("{op} cannot {verb} an object as bytes: {source}")]
    Object { op: &'static str, verb: &'static str, source: Box<dyn std::error::Error + Send + Sync> },

    #[error(
        "gather_for_metrics found a tensor of {found} on rank {rank}, where the batch has {wanted} rows; the \
         first dim has to be the rows of the batch. For values that are not per row, use gather"
    )]
    NotRows { found: String, rank: usize, wanted: usize },

    #[error(
        "gather_for_metrics is called in a round without a batch of {} (even_batches is false), so not all can take part. Use \
         even_batches: true, which fills up the last round (of streams, too) with rows that are left out of metrics exactly, or \
         run the loop inside of accelerator.join_uneven_inputs",
        listed_ranks(ranks)
    )]
    RanksWithoutBatch { ranks: String },

    #[error(
        "values of type {name} cannot be sent to another process; use maps with keys of type String, derive \
         TensorTree without skipped fields, implement TensorTree::pack and unpack, or set \
         DataLoaderConfiguration.dispatch_batches to false so that every process reads its own rows"
    )]
    NotSendable { name: &'static str },

    #[error("a value that was sent by another process cannot be put together: {why}")]
    Parcel { why: String },

    #[error("rank 0 could not make the batch: {message}")]
    DispatchFailed { message: String },

    #[error(
        "rank {rank} waits for round {wanted:?} (pass, round) of dispatched batches, but rank 0 sent round {found:?}; \
         every rank has to run through the same loop, and to leave it after the same batch"
    )]
    OtherRound { rank: usize, wanted: (u64, u64), found: (u64, u64) },
}

/// Of what kind an error of another rank is, so that programs on all ranks go the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ElsewhereKind {
    Checkpoint,
    Weights,
    Data,
    Config,
    Other,
}

impl ElsewhereKind {
    /// With a letter for each, by which ranks tell each other.
    const ALL: [(Self, char); 5] =
        [(Self::Checkpoint, 'c'), (Self::Weights, 'w'), (Self::Data, 'd'), (Self::Config, 's'), (Self::Other, 'o')];

    pub(crate) fn of(error: &Error) -> Self {
        let kinds = [
            (Self::Checkpoint, error.is_checkpoint()),
            (Self::Weights, error.is_weights()),
            (Self::Data, error.is_data()),
            (Self::Config, error.is_config()),
        ];
        kinds.into_iter().find(|(_, is_it)| *is_it).map_or(Self::Other, |(kind, _)| kind)
    }

    pub(crate) fn letter(self) -> char {
        Self::ALL.iter().find(|(kind, _)| *kind == self).map_or('o', |(_, letter)| *letter)
    }

    pub(crate) fn of_letter(letter: char) -> Self {
        Self::ALL.iter().find(|(_, own)| *own == letter).map_or(Self::Other, |(kind, _)| *kind)
    }
}

impl CollectiveError {
    pub(crate) fn is_elsewhere(&self, wanted: ElsewhereKind) -> bool {
        matches!(self, Self::FailedElsewhere { kind, .. } if *kind == wanted)
    }

    pub(crate) fn is_timeout(&self) -> bool {
        matches!(self, Self::Timeout { .. })
    }

    pub(crate) fn is_peer_failure(&self) -> bool {
        matches!(self, Self::PeerGone { .. } | Self::MemoryClosed { .. })
    }
}
