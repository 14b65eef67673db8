//! The project's chores, one file per task: `cargo xtask <task>`.
//!
//! Every task does the set-up that it needs, so each works as the first command after a clone.
//! Nothing here links libtorch: these tasks are what finds it.

mod bench;
mod book;
mod check_cuda;
mod ci;
mod demo;
mod first_hour;
mod gpu;
mod libtorch;
mod parity;
mod paths;
mod process;
mod python;
mod race;
mod ranks;
mod settings;
mod setup;
mod soak;
mod test;
mod tidy;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Chores of this repository. Each does the set-up it needs, libtorch included.
#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    after_help = "First time here? `cargo xtask demo` trains a model in two processes; \
                  `cargo xtask test` runs every test. Both set up libtorch first."
)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Find or install libtorch, and link it as `.libtorch` at the root of the repository
    Setup(setup::Arguments),
    /// Train a small BERT in two processes on the built-in corpus
    Demo(demo::Arguments),
    /// Type the lines of the README for a project of one's own, outside of this repository, with the time of each
    FirstHour(first_hour::Arguments),
    /// Run the whole test suite: unit, integration, documentation and multi-process tests
    Test(test::Arguments),
    /// Run what continuous integration runs: formatting, lints with warnings denied, a user's first hour, tests
    Ci(ci::Arguments),
    /// Check the rules of the workspace: dependency direction, raw memory, sizes, headers
    Tidy(tidy::Arguments),
    /// Compare numbers with Python Accelerate
    Parity(parity::Arguments),
    /// Race against Python Accelerate
    Bench(bench::Arguments),
    /// Find faults that need many tries: attacks on runs, and inputs that nobody thought of
    Soak(soak::Arguments),
    /// Build the book of the project into `target/book`
    Book(book::Arguments),
    /// Write the page of the book that lists every setting
    Settings(settings::Arguments),
    /// Type-check the `cuda` feature against header packages; needs no CUDA toolkit
    CheckCuda(check_cuda::Arguments),
    /// Build the checks for GPUs as a bundle, and run it: on the GPU, or on the CPU as a rehearsal
    Gpu(gpu::Arguments),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().task {
        Task::Setup(arguments) => setup::run(&arguments),
        Task::Demo(arguments) => demo::run(&arguments),
        Task::FirstHour(arguments) => first_hour::run(&arguments),
        Task::Test(arguments) => test::run(&arguments),
        Task::Ci(arguments) => ci::run(&arguments),
        Task::Tidy(arguments) => tidy::run(&arguments),
        Task::Parity(arguments) => parity::run(&arguments),
        Task::Bench(arguments) => bench::run(&arguments),
        Task::Soak(arguments) => soak::run(&arguments),
        Task::Book(arguments) => book::run(&arguments),
        Task::Settings(arguments) => settings::run(&arguments),
        Task::CheckCuda(arguments) => check_cuda::run(&arguments),
        Task::Gpu(arguments) => gpu::run(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
