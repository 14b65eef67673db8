//! The kernels' source, and their compiler behind the C++ shim.

use crate::border::check;
use crate::error::{Error, Result};
use tch::Device;

unsafe extern "C" {
    fn te_cuda_kernels_load(source: *const u8, length: usize, device: i32) -> i32;
}

const SOURCE: &str = concat!(
    include_str!("../../shim/cuda/elements.cu"),
    include_str!("../../shim/cuda/quantization.cu"),
    include_str!("../../shim/cuda/fp8.cu")
);

pub(super) fn load(device: Device) -> Result<()> {
    const OPERATION: &str = "load_cuda_kernels";
    let Device::Cuda(index) = device else {
        return Err(Error::invalid(OPERATION, format!("{device:?} is no CUDA device")));
    };
    let index = i32::try_from(index).map_err(|_| Error::invalid(OPERATION, format!("there is no {device:?}")))?;
    // SAFETY: the source lives as long as the program.
    check(OPERATION, unsafe { te_cuda_kernels_load(SOURCE.as_ptr(), SOURCE.len(), index) })
}
