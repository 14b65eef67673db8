//! Checkpoints of whole runs: what is in their folder, which rank writes which part of it, and which of them are kept.
//!
//! The format is written down in the page "Checkpoint format" of the book.

mod assign;
mod description;
mod names;

pub use assign::{Assignment, HeldTensor, PlannedFile, assign};
pub use description::{Checkpoint, SavedObject, SavedPiece, SavedTensor};
pub use names::{Completed, Retention, checkpoint_name, checkpoint_number};

/// What the manifest of a checkpoint is named after: `checkpoint.manifest.json`, without which a folder is no checkpoint.
pub const STEM: &str = "checkpoint";

/// The file that describes what a checkpoint holds, a [`Checkpoint`] as JSON.
pub const DESCRIPTION: &str = "checkpoint.json";
