//! Weights that PyTorch has saved: `pytorch_model.bin`, and the folders of `torch.distributed.checkpoint`.
//!
//! Both are Python's pickles, beside bytes of tensors. A pickle is a program, and Python runs it. Here it is read as plain
//! data: a [machine](pickle) without a single effect makes up lists, texts and numbers, and names of a few functions and
//! classes of PyTorch, which are told apart by their names and never called. Any other name is an error.

mod archive;
mod contents;
mod distributed;
mod file;
mod globals;
mod nested;
mod pickle;
mod plain;
mod strided;
mod tiling;
mod write;

pub use archive::StoredBytes;
pub use distributed::{Chunk, DistributedCheckpoint, DistributedTensor};
pub use file::{TorchFile, TorchTensor, check_tensor_name};
pub use nested::DistributedItem;
pub use pickle::MAX_PICKLE_BYTES;
pub use plain::Plain;
pub use strided::{Run, StoredTensor};
pub use write::{Pickled, TorchArchive};
