//! Checkpoints of whole runs: what is in their folder, which rank writes which part of it, and which of them are kept.
//!
//! The format is written down in the page "Checkpoint format" of the book.

mod assign;
mod blocks;
mod description;
mod names;
pub mod python;
mod whole;

pub use assign::{Assignment, HeldTensor, PlannedFile, assign};
pub use blocks::{BLOCK_ELEMENTS, FromBlocks, blocks_of, from_blocks, num_blocks, scale_name};
pub use description::{Checkpoint, MOST_RUNS, MOST_STEPS, SavedObject, SavedPiece, SavedTensor};
pub use names::{
    COMM_HOOK, Completed, GRADIENTS, KEPT_BY_RANK, Retention, checkpoint_name, checkpoint_number, is_of_one_rank,
};
pub use whole::{WholeTensor, WrittenBy, plan_whole_tensors};

/// What the manifest of a checkpoint is named after: `checkpoint.manifest.json`, without which a folder is no checkpoint.
pub const STEM: &str = "checkpoint";

/// The file that describes what a checkpoint holds, a [`Checkpoint`] as JSON.
pub const DESCRIPTION: &str = "checkpoint.json";
