//! What can go wrong when weights are written or read.

use crate::nn::Mismatch;
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub(crate) enum WeightsError {
    #[error("cannot {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },

    #[error(
        "the state dict does not fit the model: {mismatch}. Nothing was changed. Pass strict = false to load \
         what has the same name and shape"
    )]
    StateDict { mismatch: Mismatch },
}
