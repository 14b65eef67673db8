//! `accelerate doctor`: what is wrong with a machine, and the cure.
//!
//! [`facts`] looks at the machine, and [`checks`] judges what was seen; here it is shown.

mod checks;
mod facts;

use accelerate_core::names::counted;
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use anstyle::{AnsiColor, Style};
use clap::Args;

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

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Box<dyn Error>> {
    let checks = checks(&Facts::of_this_machine(&arguments.folder));
    match arguments.json {
        true => crate::print_result(&(serde_json::to_string_pretty(&checks)? + "\n"))?,
        false => crate::print_coloured(&list(&checks))?,
    }
    let is_problem = checks.iter().any(|check| check.verdict == Verdict::Problem);
    Ok(if is_problem { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn list(checks: &[Check]) -> String {
    let described = |check: &Check| {
        let (word, color) = match check.verdict {
            Verdict::Ok => ("ok", AnsiColor::Green),
            Verdict::Warning => ("warning", AnsiColor::Yellow),
            Verdict::Problem => ("PROBLEM", AnsiColor::Red),
        };
        let style: Style = color.on_default().bold();
        let cure = check.cure.as_ref().map_or_else(String::new, |cure| format!("        {cure}\n"));
        format!("{style}{word:<8}{style:#}{}: {}\n{cure}", check.name, check.found)
    };
    let count = |verdict, thing| counted(checks.iter().filter(|check| check.verdict == verdict).count(), thing);
    let checked: String = checks.iter().map(described).collect();
    format!("{checked}\n{}, {}\n", count(Verdict::Problem, "problem"), count(Verdict::Warning, "warning"))
}
