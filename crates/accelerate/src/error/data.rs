//! What can go wrong in `data`.

use std::fmt;

#[derive(Debug, thiserror::Error)]
pub(crate) enum DataError {
    #[error("row {index} does not exist: the dataset has {num_rows} rows, counted from 0")]
    NoSuchRow { index: usize, num_rows: usize },
    #[error(
        "the tensors of a TensorDataset must have the same size in dimension 0, which counts the rows, \
         but tensor {position} has shape {found:?} and the tensors before it have {wanted} rows"
    )]
    UnequalRows { position: usize, found: Vec<i64>, wanted: i64 },
    #[error(
        "tensor {position} of the TensorDataset has no dimensions, so it has no rows; give it a first \
         dimension, for example with tensor.unsqueeze(0)"
    )]
    NoRowDimension { position: usize },
    #[error("a TensorDataset needs at least one tensor to know its number of rows, but it was given none")]
    NoTensors,
    #[error("cannot build a batch of no rows; give at least one row")]
    EmptyBatch,
    #[error(
        "the {what} of row {position} of the batch is {found}, but that of row 0 is {wanted}; rows of one batch \
         must agree: pad them, or build the batch yourself with DataLoaderBuilder::collate_fn"
    )]
    UnequalItems { position: usize, what: &'static str, found: String, wanted: String },
    #[error("{value} does not fit the Int64 of a tensor, whose largest value is {}", i64::MAX)]
    TooLarge { value: String },
    #[error(
        "the data set to be shuffled has no rows; look whether its files have any, and leave shuffle out where that may be so"
    )]
    NothingToShuffle,
    #[error("{setting} is {found}, but must be at least 1")]
    MustBePositive { setting: &'static str, found: usize },
    #[error(
        "DataLoaderBuilder::{first} and DataLoaderBuilder::{second} exclude each other, because {why}; give one of them"
    )]
    Exclusive { first: &'static str, second: &'static str, why: &'static str },
    #[error(
        "split_batches cuts every batch of {batch_size} rows into equal parts for {num_processes} processes, \
         but {batch_size} is not a multiple of {num_processes}; use a batch size of {}, or set \
         DataLoaderConfiguration.split_batches to false", Nearest { batch_size: *batch_size, num_processes: *num_processes }
    )]
    IndivisibleBatch { batch_size: usize, num_processes: usize },
    #[error(
        "the rows cannot be shared: {why}; every rank must name the same number of shares, and every share must be named \
         by equally many ranks"
    )]
    BadShares { why: String },
    #[error(
        "split_batches needs to know the batch size to cut batches into equal parts, but the batch sampler \
         returns None from BatchSampler::batch_size; return its fixed size there, or set \
         DataLoaderConfiguration.split_batches to false"
    )]
    UnknownBatchSize,
    #[error(
        "batch {position} of the batch sampler has {found} rows, but BatchSampler::batch_size promises {wanted} \
         for every batch {}; return None from BatchSampler::batch_size if sizes vary",
        if *.is_last { "(the last one may be smaller)" } else { "except the last one" }
    )]
    BrokenPromise { position: usize, found: usize, wanted: usize, is_last: bool },
    #[error("batch {position} of the batch sampler has no rows; leave empty batches out")]
    EmptySamplerBatch { position: usize },
    #[error(
        "prefetch_factor is given, but num_workers is 0, so no thread makes batches ahead of time; set \
         DataLoaderBuilder::num_workers to 1 or more, or leave prefetch_factor out"
    )]
    NothingToPrefetch,
    #[error(
        "rank {rank} has {found} rows to shuffle, but rank 0 has {wanted}; every process must make the same dataset. \
         If each has rows of its own on purpose, set DataLoaderConfiguration.use_configured_sampler"
    )]
    UnequalPasses { rank: usize, found: usize, wanted: usize },
    #[error(
        "the order of the rows is not that of the run that is resumed ({found} entries, saved: {wanted}): going on would \
         hand out some rows twice and others never. Use the same dataset, sampler and seed, or begin the epoch anew: do not \
         load the state of the loader"
    )]
    OtherOrder { found: u64, wanted: u64 },
    #[error(
        "a state was loaded during this pass over the loader, and put it at another place; leave the loop, and begin a new pass, \
         which goes on from there"
    )]
    LoadedMeanwhile,
    #[error("the saved loader is in epoch {epoch}, which no run reaches; go on from another checkpoint")]
    NoSuchEpoch { epoch: usize },
    #[error(
        "the saved loader has handed out {rows_delivered} rows, which no run reaches; go on from another checkpoint"
    )]
    NoSuchPlace { rows_delivered: u64 },
    #[error(
        "the saved run had handed out {found} rows (or batches, of a sampler that decides their sizes) of this pass, and it has only {wanted}; go on \
         from another checkpoint"
    )]
    BehindTheEnd { found: u64, wanted: u64 },
    #[error("the stream ended after {found} rows, before the place where the saved run stood: row {wanted}")]
    StreamTooShort { found: u64, wanted: u64 },
    #[error("the stream cannot be taken to a saved place, although it said where it stood; implement RowStream::seek")]
    CannotSeek,
    #[error(
        "DataLoaderConfiguration.dispatch_batches needs device placement, because batches arrive from rank 0; leave \
         AcceleratorBuilder::device_placement at true, or set dispatch_batches to false"
    )]
    DispatchWithoutDevice,
    #[error(
        "there is no random number stream \"{rng_type}\" on this device to take over from rank 0; give \"torch\", \"generator\" \
         or, on a CUDA device, \"cuda\" to AcceleratorBuilder::rng_types"
    )]
    NoSuchGenerator { rng_type: String },
    #[error("no batch size was found, because the value holds no tensor with at least one dimension")]
    NoBatchSize,
    #[error("there is no dimension {dim} in a tensor of shape {shape:?}")]
    NoSuchDimension { dim: i64, shape: Vec<i64> },
    #[error(
        "cannot concatenate {num_values} values: value {position} holds {found} tensors, but value 0 holds {wanted}"
    )]
    UnequalForm { num_values: usize, position: usize, found: usize, wanted: usize },
    #[error(
        "the thread that prepares batches ended without a result for batch {round}; this is a fault of \
         accelerate, please report it"
    )]
    WorkerGone { round: usize },
    #[error("cannot start a thread to prepare batches in the background; set num_workers to 0 to do without")]
    Spawn { source: std::io::Error },
    #[error("sample weight {position} is {found}, but weights must be finite and at least 0, and not all of them 0")]
    BadWeight { position: usize, found: f64 },
    #[error(
        "cannot split {num_rows} rows into parts of {lengths:?}, which add up to {total}; make the lengths add up to {num_rows}"
    )]
    BadSplit { num_rows: usize, lengths: Vec<usize>, total: usize },
}

/// The batch sizes next to an indivisible one: "4 or 8", or only the upper one.
struct Nearest {
    batch_size: usize,
    num_processes: usize,
}

impl fmt::Display for Nearest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let below = self.batch_size - self.batch_size % self.num_processes;
        if below > 0 {
            write!(f, "{below} or ")?;
        }
        write!(f, "{}", below + self.num_processes)
    }
}
