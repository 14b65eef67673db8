//! Kernels of our own for CUDA devices: with the cargo feature `cuda`, none without.

#[cfg(not(feature = "cuda"))]
mod disabled;
#[cfg(feature = "cuda")]
mod enabled;

#[cfg(not(feature = "cuda"))]
use disabled as border;
#[cfg(feature = "cuda")]
use enabled as border;

use crate::error::Result;
use tch::Device;
#[cfg(feature = "cuda")]
use tch::{Kind, Tensor};

/// The kernels of a device are there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernels {
    /// 10 times the first number of the device's compute capability, and the second: 89 for 8.9.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "without CUDA there are none"))]
    pub(crate) capability: i32,
}

impl Kernels {
    /// Compiles them for the device, if this process has not done that: some seconds.
    ///
    /// # Errors
    /// Another device than one of CUDA; a build without it; a libtorch without its compiler.
    pub(crate) fn of(device: Device) -> Result<Self> {
        border::load(device).map(|capability| Self { capability })
    }
}

/// Makes the kernels of a CUDA device ready, which otherwise their first use does: those of [`quantization`](crate::quantization) and
/// [`fp8`](crate::fp8). They are compiled by the compiler that comes with libtorch.
///
/// # Errors
/// Why there are none, and libtorch's operators do their work: another device, a build without the feature `cuda`, a libtorch without its
/// compiler.
///
/// ```
/// # #[cfg(not(feature = "cuda"))]
/// assert!(torch_ext::load_cuda_kernels(tch::Device::Cuda(0)).is_err_and(|error| error.is_feature_disabled()));
/// ```
pub fn load_cuda_kernels(device: Device) -> Result<()> {
    Kernels::of(device).map(|_| ())
}

/// Is it on a device that has kernels?
#[cfg(feature = "cuda")]
pub(crate) fn has_kernels(tensor: &Tensor) -> bool {
    matches!(tensor.device(), Device::Cuda(_)) && Kernels::of(tensor.device()).is_ok()
}

/// A type that the kernels have.
#[cfg(feature = "cuda")]
pub(crate) fn is_float(kind: Kind) -> bool {
    matches!(kind, Kind::Float | Kind::BFloat16 | Kind::Half)
}

/// Of this type, and in one piece on the device?
#[cfg(feature = "cuda")]
pub(crate) fn is_here(tensor: &Tensor, kind: Kind, device: Device) -> bool {
    tensor.device() == device && tensor.f_kind().is_ok_and(|found| found == kind) && tensor.is_contiguous()
}

/// Does it lie where 16 bytes can be read at once?
#[cfg(feature = "cuda")]
pub(crate) fn is_aligned(tensor: &Tensor) -> bool {
    (tensor.data_ptr() as usize).is_multiple_of(16)
}
