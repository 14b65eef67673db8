//! What can be wrong with sizes, names and indexes of weight files.

#[derive(Debug, thiserror::Error)]
pub(crate) enum WeightFilesErrorKind {
    #[error(
        "{found:?} is not a size; write a number and a unit, for example \"10GB\" (10^9 bytes each), \
         \"5GiB\" (2^30 bytes each), \"200MB\" or \"1500\" (bytes)"
    )]
    Size { found: String },
    #[error(
        "the weight map names the file {file:?} for {name:?}; a file must lie in the folder of the index \
         itself, without a path"
    )]
    FileOutsideFolder { name: String, file: String },
    #[error("this is not an index of weight files: {reason}")]
    Index { reason: String },
    #[error("this is not a list of saved files: {reason}")]
    Manifest { reason: String },
}
