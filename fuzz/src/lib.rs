//! What the targets share that read rows of files.

#[cfg(feature = "rows")]
mod rows;

#[cfg(feature = "rows")]
pub use rows::{Row, check, with_file};
