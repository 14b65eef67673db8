//! The parts of the image-classification example: what can be said on the command line, and images that need no file. `main.rs`
//! puts them together into a training program.

pub mod arguments;
pub mod images;
