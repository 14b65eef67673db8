//! Low-rank adapters beside PEFT's numbers and files, on one process and on several.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod adapters;
mod checkpoints;
mod conv1d;
mod divided;
mod files;
mod hostile;
mod model;
mod qlora;
mod ranks;
mod vectors;
