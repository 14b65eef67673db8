//! A build without CUDA: there is no device that could have kernels.

use crate::error::{Error, ErrorKind, Result};
use tch::Device;

pub(super) fn load(_device: Device) -> Result<i32> {
    let message = "this build has no kernels for CUDA devices; build with the cargo feature `cuda` of torch-ext";
    Err(Error::new(ErrorKind::NotCompiled, "load_cuda_kernels", message))
}
