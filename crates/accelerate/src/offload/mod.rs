//! Bytes that are kept where they take none of the device's memory, and come back block by block.
//!
//! An optimizer's state is needed for the length of a step only, and one part of it at a time: while one block is
//! changed, the next ones are read and the ones before are written. Blocks are decided in [`accelerate_core::offload`].
//!
//! Method: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", USENIX ATC 2021; Rajbhandari et al.,
//! "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", SC 2021.

mod blocks;
mod outline;
mod queued;
mod store;
mod threads;

pub(crate) use blocks::{Access, Blocks};
pub(crate) use outline::{is_outline, outline};
