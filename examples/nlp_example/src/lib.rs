//! The parts of the text-classification example: reading labelled text, cutting it into word pieces,
//! what BERT takes, and the pictures and numbers that say how well it learned.
//!
//! `main.rs` puts them together into a training program; each module holds one idea and can be read alone.

pub mod arguments;
pub mod batch;
pub mod corpus;
pub mod hub;
pub mod metrics;
pub mod plot;
pub mod pretrained;
pub mod progress;
pub mod readers;
pub mod splits;
pub mod tokenize;
