//! NCCL process groups: real ones with the cargo feature `cuda`, an error that names it without.

#[cfg(not(feature = "cuda"))]
mod disabled;
#[cfg(feature = "cuda")]
mod enabled;

#[cfg(not(feature = "cuda"))]
pub(crate) use disabled::nccl;
#[cfg(feature = "cuda")]
pub(crate) use enabled::nccl;

use crate::process_group::ProcessGroup;
use std::time::Duration;

/// Settings of an NCCL process group.
///
/// ```
/// let options = torch_ext::NcclOptions { device_index: 0, ..Default::default() };
/// assert_eq!(options.timeout.as_secs(), 600);
/// ```
#[derive(Debug)]
pub struct NcclOptions<'a> {
    /// Deadline of each collective; 600 s as in PyTorch.
    pub timeout: Duration,
    /// The CUDA device of this rank.
    pub device_index: usize,
    /// A Gloo group over the same ranks that moves CPU tensors, as `cuda:nccl,cpu:gloo` in PyTorch.
    pub cpu: Option<&'a ProcessGroup>,
}

impl Default for NcclOptions<'_> {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(600), device_index: 0, cpu: None }
    }
}
