//! Launching from inside a program (`launchers.py` of the reference): a function runs in several processes, which are this
//! program started again.
//!
//! A new process has nothing of the one that starts it. So it has to be told which function to run, and it has to reach that
//! function before it does what the program does otherwise. Both are the business of [`Workers`]: there is none before a worker
//! process would have been noticed, and nobody can launch without it. The function travels by its name, its argument and its
//! result as bytes in files that only the two processes have (`call.rs`). Starting, watching and ending is `accelerate-launch`'s.

mod call;
mod descriptors;
mod object;
mod options;
mod workers;

pub use options::NotebookLauncherOptions;
pub use torch_ext::exported_function;
pub use workers::{WorkerFunctions, Workers};

use crate::error::{LauncherError, Result};
use crate::messages;
use crate::state::process_environment;
use accelerate_core::config::MixedPrecision;
use accelerate_launch::{LinePrefix, TerminalOptions, TerminalReporter, launch};
use call::CallFiles;
use options::Settings;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Runs `function` in several processes, and returns what it returned in each, in the order of their ranks (`notebook_launcher`
/// of the reference). Ranks of other machines are not among them.
///
/// The processes are this program, or a notebook's kernel, started anew. `workers` comes from [`workers!`](crate::workers), which
/// stands at the beginning of `main`, or in the cell that launches. `args` is what the function is given, a tuple for more than
/// one value. It travels as bytes; nothing else of this process does. What the processes print appears here behind `[rank N]`.
///
/// Method: everything that holds for `accelerate launch` holds here. The first process that fails ends the others, and none
/// outlives the call, nor this process, even if that is killed. Devices and accelerators belong into the function.
///
/// # Errors
///
/// All have [`Error::is_launcher`](crate::Error::is_launcher).
///
/// - Before anything starts: no number of processes; settings that contradict each other or cannot be honoured; a function that
///   `workers` does not have; `args` that cannot be sent. An accelerator or a CUDA device that this process has, if more than one
///   process is to start. A call inside a worker process.
/// - A process that failed, with its last lines; [`Error::failed_rank`](crate::Error::failed_rank) says which. With
///   [`max_restarts`](NotebookLauncherOptions::max_restarts) all processes are started again before, and what earlier attempts died
///   of is told, too.
///
/// ```no_run
/// use accelerate::prelude::*;
/// use accelerate::{NotebookLauncherOptions, notebook_launcher, workers};
///
/// fn train((learning_rate, epochs): (f64, usize)) -> accelerate::Result<f64> {
///     let accelerator = Accelerator::builder().build()?;
///     // ... the training
/// #   let _ = accelerator;
///     Ok(learning_rate * epochs as f64)
/// }
///
/// fn main() -> accelerate::Result<()> {
///     let workers = workers![train];
///     let options = NotebookLauncherOptions { num_processes: Some(2), mixed_precision: Some(Bf16), ..Default::default() };
///     let losses = notebook_launcher(&workers, train, (1e-3, 5), &options)?;
///     println!("{losses:?}");
///     Ok(())
/// }
/// ```
pub fn notebook_launcher<F, A, O, E>(
    workers: &Workers,
    function: F,
    args: A,
    options: &NotebookLauncherOptions,
) -> Result<Vec<O>>
where
    F: Fn(A) -> Result<O, E>,
    A: Serialize + DeserializeOwned,
    O: DeserializeOwned,
{
    run(workers, function, &args, &Settings { options: options.clone(), use_cpu: false })
}

/// Runs `function` in `num_processes` processes on the CPU, in float32, and returns what it returned in each
/// (`debug_launcher` of the reference, whose default is 2 processes).
///
/// Otherwise as [`notebook_launcher`], but for the refusals of accelerators and devices: nothing on the CPU is in the way.
///
/// # Errors
///
/// As [`notebook_launcher`].
///
/// ```no_run
/// use accelerate::{Accelerator, debug_launcher, workers};
///
/// fn rank(_: ()) -> accelerate::Result<usize> {
///     Ok(Accelerator::builder().build()?.process_index())
/// }
///
/// fn main() -> accelerate::Result<()> {
///     let workers = workers![rank];
///     assert_eq!(debug_launcher(&workers, rank, (), 3)?, [0, 1, 2]);
///     Ok(())
/// }
/// ```
pub fn debug_launcher<F, A, O, E>(workers: &Workers, function: F, args: A, num_processes: usize) -> Result<Vec<O>>
where
    F: Fn(A) -> Result<O, E>,
    A: Serialize + DeserializeOwned,
    O: DeserializeOwned,
{
    let options = NotebookLauncherOptions {
        num_processes: Some(num_processes),
        mixed_precision: Some(MixedPrecision::No),
        ..Default::default()
    };
    run(workers, function, &args, &Settings { options, use_cpu: true })
}

fn run<F, A, O, E>(workers: &Workers, function: F, args: &A, settings: &Settings) -> Result<Vec<O>>
where
    F: Fn(A) -> Result<O, E>,
    A: Serialize + DeserializeOwned,
    O: DeserializeOwned,
{
    let name = workers::name_of(&function);
    workers.check(name)?;
    let bytes = rmp_serde::to_vec_named(args).map_err(|source| LauncherError::ArgumentsUnsent { name, source })?;
    // What the workers would say of it one by one.
    let read: Result<A, _> = rmp_serde::from_slice(&bytes);
    read.map(drop).map_err(|source| LauncherError::ArgumentsUnread { name, source })?;
    let results = run_in_processes(workers, name, &bytes, settings)?;
    let read = |(rank, bytes): (usize, Vec<u8>)| {
        rmp_serde::from_slice(&bytes).map_err(|source| LauncherError::ResultUnread { name, rank, source }.into())
    };
    results.into_iter().map(read).collect()
}

/// The result of each rank of this machine, with its rank.
fn run_in_processes(
    workers: &Workers,
    name: &'static str,
    args: &[u8],
    settings: &Settings,
) -> Result<Vec<(usize, Vec<u8>)>> {
    if call::is_worker_process() {
        return Err(LauncherError::InsideWorker { name }.into());
    }
    let (run, mut config) = settings.resolve(&process_environment)?;
    if config.num_processes > 1 && !settings.use_cpu {
        descriptors::check()?;
    }
    workers.settle(&mut config)?;
    for warning in run.warnings(0) {
        messages::warning!("{warning}");
    }
    let files = CallFiles::make(name, args, config.num_local_processes())
        .map_err(|source| LauncherError::System { action: "keep what the processes are to be told", source })?;
    config.environment.push((call::VARIABLE.into(), files.variable().into()));
    let mut reporter = TerminalReporter::new(TerminalOptions { has_prefix: true, is_quiet: false });
    if let Some(template) = settings.options.log_line_prefix_template.clone() {
        reporter = reporter.with_line_prefix(LinePrefix { template, role: config.role.clone() });
    }
    let outcome = launch(&config, &mut reporter).map_err(|error| LauncherError::Failed { name, error })?;
    let first_rank = config.first_rank();
    let of_rank = |local_rank: usize| {
        let rank = first_rank + local_rank;
        let bytes = files
            .result(local_rank, outcome.num_restarts)
            .map_err(|source| LauncherError::System { action: "read the result of a process", source })?;
        // Every value takes a byte at least.
        let bytes = bytes.filter(|bytes| !bytes.is_empty());
        bytes.map(|bytes| (rank, bytes)).ok_or_else(|| LauncherError::NoResult { name, rank }.into())
    };
    (0..config.num_local_processes()).map(of_rank).collect()
}
