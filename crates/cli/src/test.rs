//! `accelerate test`: the conformance checks, launched with the settings in force.

use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use accelerate_core::files::ShownPath;
use accelerate_core::settings::Setting;
use accelerate_launch::{
    Capture, Helper, LaunchConfig, Program, Reporter, Source, StopSignals, exit_code_of_signal, launch, signal_name,
    temporary_folder,
};
use anstyle::{AnsiColor, Style};
use clap::{Arg, Args};

use crate::config_file;
use crate::launch::check_working_folder;
use crate::output::Unwritten;
use crate::resolve::{num_gpus, resolve};
use crate::settings::{AllSettings, SHORT_HELP, Selection, SettingFlags};

/// The checks, which the program knows by these names, and what they look at.
const CHECKS: [(&str, &str); 12] = [
    ("test_script", "process control, loaders, training against one process, splitting"),
    ("test_sync", "accumulation, and when gradients synchronise"),
    ("test_distributed_data_loop", "batch sizes of each rank, even and uneven"),
    ("test_ops", "collectives"),
    ("test_metrics", "metrics over uneven data"),
    ("test_memory_utils", "batch sizes that do not fit on one rank"),
    ("test_optimizer", "states of optimizers, windows and skipped steps"),
    ("test_scheduler", "how far schedules move with their optimizers"),
    ("test_checkpointing", "accuracy and learning rates of runs that go on"),
    ("test_state_checkpointing", "checkpoints: what goes on, names, limits"),
    ("test_ddp_comm_hook", "compressed gradients"),
    ("test_kwargs_handlers", "settings of single mechanisms"),
];

/// Check that training on several processes works with your settings.
///
/// Launches each of the conformance checks, which are the reference's own test scripts, with the settings in force: flags,
/// variables and the configuration file, as `accelerate launch` would. Where nobody says how many processes there are, there is
/// one for each GPU, and without a GPU there are two. Prints a line for each check, and what a rank said last where one fails.
///
/// The program of the checks is built once, in a checkout of Accelerate: `cargo build --release --package conformance`. It is
/// looked for like every program: in PATH, then among what Cargo has built for the project around the working folder.
#[derive(Debug, Args)]
#[command(after_help = SHORT_HELP)]
#[command(after_long_help = "Examples:\n  \
    With the settings of the default configuration file:\n    \
      accelerate test\n  \
    Four processes, and only two of the checks:\n    \
      accelerate test --num_processes 4 --checks test_ops,test_sync\n\n\
    Exit code: 0 if all checks passed, 1 if one failed or the report could not be written, 2 if none could be launched, and\n\
    130 after Ctrl-C or 143 after SIGTERM.")]
pub(crate) struct Arguments {
    #[command(flatten)]
    settings: SettingFlags<ForTest>,

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

/// The settings of a launch. Only the number of processes has another default: with one, hardly anything would be checked.
#[derive(Debug)]
struct ForTest;

impl Selection for ForTest {
    fn includes(setting: &Setting) -> bool {
        AllSettings::includes(setting)
    }

    fn adjust(flag: &str, argument: Arg) -> Arg {
        let argument = AllSettings::adjust(flag, argument);
        if flag != "num_processes" {
            return argument;
        }
        let long = argument.get_long_help().map(ToString::to_string).unwrap_or_default();
        let paragraphs = long.split("\n\n").map(|paragraph| match paragraph.starts_with("Without it") {
            true => "Without it: one per NVIDIA GPU that CUDA_VISIBLE_DEVICES leaves visible; two if there is none, or with --cpu.",
            false => paragraph,
        });
        let long = paragraphs.collect::<Vec<_>>().join("\n\n");
        argument.long_help(long)
    }
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

/// The checks write files.
#[derive(Debug, thiserror::Error)]
#[error("no folder for the checks can be made in {}; set TMPDIR to one that you can write to", place.shown())]
struct NoFolder {
    place: PathBuf,
    source: io::Error,
}

#[derive(Debug, thiserror::Error)]
#[error("this command cannot listen for signals, by which it would be stopped")]
struct NoSignals {
    source: io::Error,
}

/// Somebody has stopped this command, and not a check.
#[derive(Debug, thiserror::Error)]
#[error("stopped by {} during {check}; before it {num_passed} passed and {num_failed} failed", signal_name(*signal))]
struct Stopped {
    signal: i32,
    check: &'static str,
    num_passed: usize,
    num_failed: usize,
}

pub(crate) fn run(arguments: Arguments) -> ExitCode {
    match run_checks(arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            crate::print_error("accelerate test", error.as_ref(), &error.to_string());
            match (error.downcast_ref::<Stopped>(), error.is::<Unwritten>()) {
                (Some(stopped), _) => ExitCode::from(exit_code_of_signal(stopped.signal)),
                (None, true) => ExitCode::FAILURE,
                (None, false) => ExitCode::from(2),
            }
        }
    }
}

/// Have all passed?
fn run_checks(arguments: Arguments) -> Result<bool, Box<dyn Error>> {
    check_working_folder()?;
    let flags = arguments.settings.said;
    let resolved = resolve(flags, arguments.config_file.as_deref(), false, &config_file::variable)?;
    let run = resolved.run;
    let gpus = if run.cluster.use_cpu { 0 } else { num_gpus(&run) };
    let num_processes = run.cluster.num_processes.unwrap_or(if gpus == 0 { 2 } else { gpus });
    let config = LaunchConfig {
        capture: Capture::Always,
        helper: Some(Helper::this_executable()),
        dedicated_process: true,
        // There is no checkpoint to wait for.
        shutdown_grace_period: Duration::from_millis(500),
        // What fails once has failed.
        max_restarts: 0,
        ..LaunchConfig::of_run(&run, Program::Executable(arguments.program.into()), num_processes)
    };
    let is_chosen = |name: &str| arguments.checks.is_empty() || arguments.checks.iter().any(|chosen| chosen == name);
    let stop = StopSignals::listen().map_err(|source| NoSignals { source })?;
    let began = Instant::now();
    let (mut num_passed, mut num_failed) = (0, 0);
    for (name, about) in CHECKS.into_iter().filter(|(name, _)| is_chosen(name)) {
        match check(&config, &stop, name, about)? {
            Checked::Passed => num_passed += 1,
            Checked::Failed => num_failed += 1,
            Checked::Stopped(signal) => return Err(Stopped { signal, check: name, num_passed, num_failed }.into()),
        }
    }
    let took = began.elapsed().as_secs_f64();
    say(&format!("{num_passed} passed, {num_failed} failed, on {num_processes} processes in {took:.1} s"))?;
    Ok(num_failed == 0)
}

fn say(line: &str) -> Result<(), Unwritten> {
    crate::print_coloured(&format!("{line}\n"))
}

/// Shows nothing. A signal that came before a launch listened ends it.
struct Attentive<'a> {
    stop: &'a StopSignals,
    looks_at: Option<Instant>,
}

impl Reporter for Attentive<'_> {
    fn output(&mut self, _: Source, _: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn wakes_at(&self) -> Option<Instant> {
        self.looks_at
    }

    fn wake(&mut self, _: Instant) -> io::Result<()> {
        self.looks_at = None;
        self.stop.received().map_or(Ok(()), |_| Err(io::ErrorKind::Interrupted.into()))
    }
}

/// What became of a check.
enum Checked {
    Passed,
    Failed,
    /// By this signal to this command.
    Stopped(i32),
}

/// What stops all checks, such as a program that is not there, is an error.
fn check(config: &LaunchConfig, stop: &StopSignals, name: &str, about: &str) -> Result<Checked, Box<dyn Error>> {
    let folder =
        tempfile::tempdir_in(temporary_folder()).map_err(|source| NoFolder { place: temporary_folder(), source })?;
    let args = vec![name.into(), "--folder".into(), folder.path().into()];
    let began = Instant::now();
    let outcome = launch(&LaunchConfig { args, ..config.clone() }, &mut Attentive { stop, looks_at: Some(began) });
    let took = began.elapsed().as_secs_f64();
    let line = |color: AnsiColor, word: &str| {
        let style: Style = color.on_default().bold();
        format!("{style}{word:<4}{style:#}  {name:<27}{took:>6.1} s  {about}")
    };
    let error = match outcome {
        Ok(_) => {
            say(&line(AnsiColor::Green, "ok"))?;
            return Ok(Checked::Passed);
        }
        Err(error) => error,
    };
    match (error.stopped_by().or_else(|| stop.received()), error.failure()) {
        (Some(signal), _) => Ok(Checked::Stopped(signal)),
        (None, Some(failure)) => {
            say(&line(AnsiColor::Red, "FAIL"))?;
            say(&failure.to_string())?;
            Ok(Checked::Failed)
        }
        (None, None) if error.is_program_not_found() => Err(Box::new(NoChecks { source: error })),
        (None, None) => Err(error.into()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rustix::process::{Signal, getpid, kill_process};

    /// Between two checks nobody else listens.
    #[test]
    fn a_signal_between_two_checks_stops_the_next_one() {
        let stop = StopSignals::listen().unwrap();
        assert_eq!(stop.received(), None);
        kill_process(getpid(), Signal::TERM).unwrap();
        while stop.received().is_none() {
            std::thread::yield_now();
        }
        // It would never end by itself.
        let config =
            LaunchConfig { capture: Capture::Always, ..LaunchConfig::new(Program::Executable("yes".into()), 1) };
        let checked = check(&config, &stop, "test_ops", "").unwrap();
        assert!(matches!(checked, Checked::Stopped(15)));
    }
}
