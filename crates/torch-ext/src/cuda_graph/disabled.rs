//! A build without CUDA: asking for a graph is an error that names the feature.

use crate::error::{Error, ErrorKind, Result};
use crate::generator::Generator;

/// There is none.
pub(super) enum Raw {}

fn not_compiled<T>() -> Result<T> {
    let message = "this build has no CUDA graphs; build with the cargo feature `cuda` of torch-ext";
    Err(Error::new(ErrorKind::NotCompiled, "CudaGraph", message))
}

pub(super) fn pool() -> Result<[u64; 2]> {
    not_compiled()
}

impl Raw {
    pub(super) fn new() -> Result<Self> {
        not_compiled()
    }

    pub(super) fn register_generator(&self, _generator: &Generator) -> Result<()> {
        match *self {}
    }

    pub(super) fn begin(&self, _pool: [u64; 2]) -> Result<()> {
        match *self {}
    }

    pub(super) fn end(&self) -> Result<()> {
        match *self {}
    }

    pub(super) fn replay(&self) -> Result<()> {
        match *self {}
    }
}
