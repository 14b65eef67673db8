//! `accelerate doctor`: what is wrong with a machine, and the cure.
//!
//! [`facts`] looks at the machine, and [`checks`] judges what was seen; here it is shown.

mod checks;
mod facts;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anstyle::{AnsiColor, Style};
use clap::Args;

use crate::print_error;
use checks::{Check, Verdict, checks};
use facts::Facts;

/// Check whether this machine has what building and training need.
///
/// Looks at libtorch, the compilers, the default configuration file, NVIDIA's driver, the network within this machine, shared
/// memory, the permission to read other processes' memory, open files, cores and memory. What is missing is shown with its
/// cure.
///
/// The exit code is 1 if there is a problem. A warning is what works, but slowly or not always.
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    accelerate doctor\n  \
    accelerate doctor --json | jq '.[] | select(.verdict != \"ok\")'")]
pub(crate) struct Arguments {
    /// Print a JSON list of checks: name, verdict (ok, warning or problem), found, and cure or null
    #[arg(long)]
    json: bool,
    /// The project to look at, in place of that of the current folder
    #[arg(long, value_name = "PROJECT", default_value = ".", hide_default_value = true)]
    folder: PathBuf,
}

pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    let checks = checks(&Facts::of_this_machine(&arguments.folder));
    let shown = if arguments.json { print_json(&checks) } else { print_list(&checks) };
    match shown {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            print_error("accelerate", &error, &error.to_string());
            ExitCode::FAILURE
        }
        _ if checks.iter().any(|check| check.verdict == Verdict::Problem) => ExitCode::FAILURE,
        _ => ExitCode::SUCCESS,
    }
}

fn print_json(checks: &[Check]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer_pretty(&mut out, checks)?;
    writeln!(out)
}

fn print_list(checks: &[Check]) -> io::Result<()> {
    let mut out = anstream::stdout().lock();
    for check in checks {
        let (word, color) = match check.verdict {
            Verdict::Ok => ("ok", AnsiColor::Green),
            Verdict::Warning => ("warning", AnsiColor::Yellow),
            Verdict::Problem => ("PROBLEM", AnsiColor::Red),
        };
        let style: Style = color.on_default().bold();
        writeln!(out, "{style}{word:<8}{style:#}{}: {}", check.name, check.found)?;
        if let Some(cure) = &check.cure {
            writeln!(out, "        {cure}")?;
        }
    }
    let count = |verdict| checks.iter().filter(|check| check.verdict == verdict).count();
    writeln!(out, "\n{} problem(s), {} warning(s)", count(Verdict::Problem), count(Verdict::Warning))
}
