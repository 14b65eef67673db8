//! What can be wrong with sizes, names and indexes of weight files.

use crate::weight_files::Header;

#[derive(Debug, thiserror::Error)]
pub(crate) enum WeightFilesErrorKind {
    #[error(
        "{found:?} is not a size; write a number and a unit, for example \"10GB\" (10^9 bytes each), \
         \"5GiB\" (2^30 bytes each), \"200MB\" or \"1500\" (bytes)"
    )]
    Size { found: String },
    #[error(
        "the weight map names the file \"{file}\" for \"{name}\"; a file must lie in the folder of the index itself, and \
         be named without a path, without control characters, and in at most 255 bytes"
    )]
    FileOutsideFolder { name: String, file: String },
    #[error("this is not an index of weight files: {reason}")]
    Index { reason: String },
    #[error("this is not an index of offloaded weights: {reason}")]
    OffloadIndex { reason: String },
    #[error("this is not a list of saved files: {reason}")]
    Manifest { reason: String },
    #[error("this is not the description of a checkpoint: {reason}")]
    Checkpoint { reason: String },
    #[error(
        "it is in version {found} of the format `{format}`, and versions up to {known} are read here: a newer version of this \
         library has written it; update this one, or read it with that one"
    )]
    NewerVersion { format: &'static str, found: u64, known: u32 },
    #[error(
        "ranks hold different tensors under the name `{name}` of `{object}`: rank {} {}, rank {} {}; make the same objects \
         with the same settings on all ranks",
        found[0].0, found[0].1, found[1].0, found[1].1
    )]
    RanksDiffer { object: String, name: String, found: [(usize, String); 2] },
    #[error("`{object}` cannot be saved: {reason}")]
    NotSaved { object: String, reason: String },
    #[error("`{name}` of {object} cannot be written whole: {reason}; set state_dict_type to SHARDED_STATE_DICT")]
    NotWhole { object: String, name: String, reason: String },
    #[error("it cannot be read: {reason}")]
    Unreadable { reason: String },
    #[error(transparent)]
    Header { problem: HeaderProblem },
}

/// What is wrong with the header of a safetensors file. Names are shortened already.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HeaderProblem {
    #[error("it has only {found_bytes} bytes, and a header begins with 8 that tell its length")]
    Short { found_bytes: u64 },
    #[error("its header claims {claimed_bytes} bytes, more than the {} allowed", Header::MAX_BYTES)]
    LongHeader { claimed_bytes: u64 },
    #[error("its header claims {claimed_bytes} bytes, but the file has only {found_bytes} in all")]
    HeaderBeyondEnd { claimed_bytes: u64, found_bytes: u64 },
    #[error("its header cannot be understood: {0}")]
    Json(String),
    #[error(
        "it has {found_bytes} bytes where its header promises {wanted_bytes}, so that {}",
        if found_bytes < wanted_bytes { "it was cut off" } else { "it was lengthened, or its header damaged" }
    )]
    Length { found_bytes: u64, wanted_bytes: u64 },
    #[error(
        "the tensor `{name}` has the data_offsets {found:?}, and {wanted} is where it has to begin, since tensors lie one \
         behind the other without holes"
    )]
    Offsets { name: String, found: [u64; 2], wanted: u64 },
    #[error("the tensor `{name}` has the shape {shape:?}, which takes no countable number of whole bytes as {dtype}")]
    Uncountable { name: String, shape: Vec<usize>, dtype: String },
    #[error(
        "the tensor `{name}` of shape {shape:?} takes {wanted_bytes} bytes as {dtype}, and its data_offsets are \
         {found_bytes} apart"
    )]
    Size { name: String, shape: Vec<usize>, dtype: String, found_bytes: u64, wanted_bytes: u64 },
    #[error(
        "it would have a tensor that is called `{}`, which is the key of the notes that a safetensors file has about itself; \
         rename the tensor in the program that has made it",
        Header::METADATA_KEY
    )]
    Reserved,
    #[error("it would have two tensors that are called `{name}`; rename one of them in the program that has made them")]
    Twice { name: String },
    #[error(
        "it would have {found} tensors, and files with more than {} are not read; divide them among several files",
        Header::MAX_TENSORS
    )]
    Many { found: usize },
    #[error(
        "its header would have {num_bytes} bytes, and at most {} are read; divide the tensors among more files",
        Header::MAX_BYTES
    )]
    Long { num_bytes: u64 },
}
