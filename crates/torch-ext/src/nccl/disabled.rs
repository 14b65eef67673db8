//! A build without CUDA: asking for NCCL is an error that names the feature.

use super::NcclOptions;
use crate::border::Handle;
use crate::error::{Error, ErrorKind, Result};
use crate::store::Store;

pub(crate) fn nccl(_store: &Store, _rank: i32, _world_size: i32, _options: &NcclOptions<'_>) -> Result<Handle> {
    let message = "this build has no NCCL; build with the cargo feature `cuda` of torch-ext";
    Err(Error::new(ErrorKind::NotCompiled, "ProcessGroupNCCL", message))
}
