//! Kernels of our own for CUDA devices: with the cargo feature `cuda`, none without.

#[cfg(not(feature = "cuda"))]
mod disabled;
#[cfg(feature = "cuda")]
mod enabled;

#[cfg(not(feature = "cuda"))]
pub(super) use disabled::Kernels;
#[cfg(feature = "cuda")]
pub(super) use enabled::Kernels;
