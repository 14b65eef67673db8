//! Tensors of any origin: where their data are, and how they get into files. No more than one of them is in memory at a time.

mod copy;
mod distributed;
mod error;
mod input;
mod output;
mod placing;
mod temporary;

pub(crate) use copy::{BLOCK_BYTES, Copier, Sink};
pub(crate) use distributed::{open_distributed, open_nested};
pub(crate) use error::WeightsError;
pub(crate) use input::{Data, Files, Part, Tensor, Weights, open, open_named};
pub(crate) use output::{write, write_safetensors};
pub(crate) use temporary::{has_only_temporary, remove_abandoned};
