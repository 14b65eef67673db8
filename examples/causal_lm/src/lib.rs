//! The parts of the language-modelling example: what can be said on the command line, a corpus that needs no file, texts as
//! tokens, and tokens as blocks. `main.rs` puts them together into a training program.

pub mod arguments;
pub mod blocks;
pub mod corpus;
pub mod tokens;
