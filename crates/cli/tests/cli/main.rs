//! The `accelerate` command from the outside: real processes, real signals, real terminals.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod commands;
mod config;
mod estimate_memory;
mod failures;
mod orphans;
mod output;
mod programs;
mod settings;
mod stopping;
mod support;
mod terminal;
