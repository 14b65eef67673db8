//! NCCL through the C++ shim.

use super::NcclOptions;
use crate::border::{Handle, check};
use crate::error::{Error, Result};
use crate::store::{Store, milliseconds};

unsafe extern "C" {
    fn te_pg_nccl(
        store: Handle,
        rank: i32,
        size: i32,
        timeout_ms: i64,
        device_index: i32,
        gloo: Handle,
        out: *mut Handle,
    ) -> i32;
}

pub(crate) fn nccl(store: &Store, rank: i32, world_size: i32, options: &NcclOptions<'_>) -> Result<Handle> {
    const OPERATION: &str = "ProcessGroupNCCL";
    let device = i32::try_from(options.device_index)
        .map_err(|_| Error::invalid(OPERATION, format!("there is no CUDA device {}", options.device_index)))?;
    let guard = options.cpu.map(|group| group.lock());
    let gloo = guard.as_ref().map_or(std::ptr::null_mut(), |handle| **handle);
    let mut out = std::ptr::null_mut();
    // SAFETY: the store and the Gloo group live through the call; the new group keeps its own references.
    check(OPERATION, unsafe {
        te_pg_nccl(store.handle(), rank, world_size, milliseconds(options.timeout), device, gloo, &mut out)
    })?;
    Ok(out)
}
