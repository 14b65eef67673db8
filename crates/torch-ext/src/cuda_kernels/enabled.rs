//! The kernels' source, and their compiler behind the C++ shim.

use crate::border::check;
use crate::device::index_of;
use crate::error::Result;
use tch::Device;

unsafe extern "C" {
    fn te_cuda_kernels_load(source: *const u8, length: usize, device: i32, capability: *mut i32) -> i32;
}

const SOURCE: &str = concat!(
    include_str!("../../shim/cuda/elements.cu"),
    include_str!("../../shim/cuda/quantization.cu"),
    include_str!("../../shim/cuda/fp8.cu")
);

pub(super) fn load(device: Device) -> Result<i32> {
    const OPERATION: &str = "load_cuda_kernels";
    let index = index_of(OPERATION, device)?;
    let mut capability = 0;
    // SAFETY: the source lives as long as the program; a number comes back.
    check(OPERATION, unsafe { te_cuda_kernels_load(SOURCE.as_ptr(), SOURCE.len(), index, &raw mut capability) })?;
    Ok(capability)
}
