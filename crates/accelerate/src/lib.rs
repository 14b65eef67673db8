//! Distributed and mixed-precision training, made simple.
//!
//! A plain training loop becomes one that runs on any number of processes and devices by four
//! changed lines: build an [`Accelerator`], `prepare` what you made, take batches as they come, and
//! call `accelerator.backward`.

pub use tch;

mod context;
pub mod data;
mod error;
mod gradient_state;
mod group;
pub mod nn;
pub mod optim;
mod tensor_tree;

pub use accelerate_derive::TensorTree;
pub use error::{Error, Result};
pub use group::{Group, ReduceOp};
pub use tensor_tree::TensorTree;
