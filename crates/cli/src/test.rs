//! `accelerate test`: the conformance checks, launched with the settings in force.

use std::error::Error;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use accelerate_launch::{Capture, Helper, LaunchConfig, Program, Silent, launch};
use anstyle::{AnsiColor, Style};
use clap::Args;

use crate::config_file;
use crate::resolve::{num_gpus, resolve};
use crate::settings::{AllSettings, SettingFlags};

/// The checks, which the program knows by these names, and what they look at.
const CHECKS: [(&str, &str); 10] = [
    ("test_script", "process control, loaders, training against one process, splitting"),
    ("test_sync", "accumulation, and when gradients synchronise"),
    ("test_distributed_data_loop", "batch sizes of each rank, even and uneven"),
    ("test_ops", "collectives"),
    ("test_metrics", "metrics over uneven data"),
    ("test_memory_utils", "batch sizes that do not fit on one rank"),
    ("test_optimizer", "states of optimizers, windows and skipped steps"),
    ("test_scheduler", "how far schedules move with their optimizers"),
    ("test_ddp_comm_hook", "compressed gradients"),
    ("test_kwargs_handlers", "settings of single mechanisms"),
];

/// Check that training on several processes works with your settings.
///
/// Launches each of the conformance checks, which are the reference's own test scripts, with the settings in force: flags,
/// variables and the configuration file, as `accelerate launch` would. Where nobody says how many processes there are, it is
/// one for each GPU, or two. Prints a line for each check, and what a rank said last where one fails.
///
/// The program of the checks is built once, in a checkout of Accelerate: `cargo build --release --package conformance`. It is
/// looked for like every program: in PATH, then among what Cargo has built for the project around the working folder.
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    With the settings of the default configuration file:\n    \
      accelerate test\n  \
    Four processes, and only two of the checks:\n    \
      accelerate test --num_processes 4 --checks test_ops,test_sync\n\n\
    Exit code: 0 if all checks passed, 1 if one failed, 2 if none could be launched.")]
pub(crate) struct Arguments {
    #[command(flatten)]
    settings: SettingFlags<AllSettings>,

    /// A configuration file (YAML or JSON) in place of the default one.
    #[arg(long = "config_file", alias = "config-file", value_name = "FILE")]
    config_file: Option<PathBuf>,

    /// The program of the checks: a path, or a name to look for.
    #[arg(long, value_name = "PROGRAM", default_value = "conformance")]
    program: PathBuf,

    /// Only these checks.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = CHECKS.map(|(name, _)| name))]
    checks: Vec<String>,
}

/// There is nothing to launch.
#[derive(Debug, thiserror::Error)]
#[error(
    "the program of the checks was not found; build it in a checkout of Accelerate with \
     `cargo build --release --package conformance`, and call this command there or name it with --program"
)]
struct NoChecks {
    source: accelerate_launch::Error,
}

pub(crate) fn run(arguments: Arguments) -> ExitCode {
    match run_checks(arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            crate::print_error("accelerate test", error.as_ref(), &error.to_string());
            ExitCode::from(2)
        }
    }
}

/// Have all passed?
fn run_checks(arguments: Arguments) -> Result<bool, Box<dyn Error>> {
    let flags = arguments.settings.said;
    let resolved = resolve(flags, arguments.config_file.as_deref(), false, &config_file::variable)?;
    let run = resolved.run;
    let gpus = if run.cluster.use_cpu { 0 } else { num_gpus(&run) };
    let num_processes = run.cluster.num_processes.unwrap_or(if gpus == 0 { 2 } else { gpus });
    let config = LaunchConfig {
        capture: Capture::Always,
        helper: Some(Helper::this_executable()),
        dedicated_process: true,
        ..LaunchConfig::of_run(&run, Program::Executable(arguments.program.into()), num_processes)
    };
    let is_chosen = |name: &str| arguments.checks.is_empty() || arguments.checks.iter().any(|chosen| chosen == name);
    let began = Instant::now();
    let (mut num_passed, mut num_failed) = (0, 0);
    for (name, about) in CHECKS.into_iter().filter(|(name, _)| is_chosen(name)) {
        match check(&config, name, about)? {
            true => num_passed += 1,
            false => num_failed += 1,
        }
    }
    let took = began.elapsed().as_secs_f64();
    say(&format!("{num_passed} passed, {num_failed} failed, on {num_processes} processes in {took:.1} s"))?;
    Ok(num_failed == 0)
}

fn say(line: &str) -> io::Result<()> {
    writeln!(anstream::stdout().lock(), "{line}")
}

/// Has the check passed? What stops all of them, such as a program that is not there, is an error.
fn check(config: &LaunchConfig, name: &str, about: &str) -> Result<bool, Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let args = vec![name.into(), "--folder".into(), folder.path().into()];
    let began = Instant::now();
    let outcome = launch(&LaunchConfig { args, ..config.clone() }, &mut Silent);
    let took = began.elapsed().as_secs_f64();
    let failure = match &outcome {
        Ok(_) => None,
        Err(error) => error.failure(),
    };
    let (word, color) = if outcome.is_ok() { ("ok  ", AnsiColor::Green) } else { ("FAIL", AnsiColor::Red) };
    let style: Style = color.on_default().bold();
    if outcome.is_ok() || failure.is_some() {
        say(&format!("{style}{word}{style:#}  {name:<27}{took:>6.1} s  {about}"))?;
    }
    if let Some(failure) = failure {
        say(&failure.to_string())?;
    }
    match outcome {
        Ok(_) => Ok(true),
        Err(error) if error.is_child_failed() => Ok(false),
        Err(source) if source.is_program_not_found() => Err(Box::new(NoChecks { source })),
        Err(error) => Err(error.into()),
    }
}
