//! Checks of everything that only a GPU can show. Where there is none, they are rehearsed on the CPU.

mod check;
mod checks;
mod machine;
mod models;
mod races;
mod report;
mod runner;
mod transformer;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::{Args, Parser, Subcommand};

use check::Plant;

/// Run every check, each in a process of its own, and report what came of them.
///
/// On a machine with an NVIDIA GPU the checks run there. On any other they run on the CPU over Gloo: a rehearsal, which shows
/// that the checks themselves are in order and nothing about a GPU. The exit code is 1 where a check failed.
#[derive(Debug, Parser)]
#[command(
    name = "gpu-checks",
    args_conflicts_with_subcommands = true,
    after_help = "Examples:\n  gpu-checks                                everything, in at most 8 minutes\n  \
                  gpu-checks --list                         what there is\n  \
                  gpu-checks --only fsdp_two --only offload  two of them\n  \
                  gpu-checks --only dropout --plant dropout=crash   does the report say so?"
)]
struct Arguments {
    #[command(flatten)]
    run: RunArguments,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Debug, Args)]
struct RunArguments {
    /// Say what checks there are, and run none
    #[arg(long)]
    list: bool,
    /// Run this check only; may be given several times
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Stay on the CPU although there is a GPU
    #[arg(long)]
    rehearse: bool,
    /// Let a check go wrong on purpose: by a wrong `figure`, a `crash` or a `hang`
    #[arg(long, value_name = "NAME=HOW", value_parser = parse_plant)]
    plant: Vec<(String, Plant)>,
    /// Seconds for all checks together; what is left of them is what the next check may take at most
    #[arg(long, value_name = "SECONDS", default_value_t = BUDGET)]
    budget: u64,
    /// The folder for report.txt and report.json
    #[arg(long, value_name = "FOLDER", default_value = "report", overrides_with = "output")]
    output: PathBuf,
    /// A Python with torch 2.11 and Accelerate, whose numbers are compared with; `none` if none are to be. On a GPU a Python that
    /// cannot be used is a failure
    #[arg(long, value_name = "PATH", default_value = "python3", overrides_with = "python")]
    python: PathBuf,
    /// The folder of the Python scripts. Default: `python` beside this program
    #[arg(long, value_name = "FOLDER")]
    scripts: Option<PathBuf>,
    /// What the report says of the sources that this was built from
    #[arg(long, value_name = "TEXT", hide = true)]
    commit: Option<String>,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// Run one check in this process; what it found goes to a file
    #[command(hide = true)]
    Check(check::Order),
    /// Say which devices there are and which one an accelerator takes, as JSON
    #[command(hide = true)]
    Probe,
}

/// Seconds.
const BUDGET: u64 = 480;

impl RunArguments {
    /// What a report has to say, because it is not of everything.
    fn asked(&self) -> Vec<String> {
        let only = self.only.iter().map(|name| format!("--only {name}"));
        let planted = self.plant.iter().map(|(name, how)| {
            let how = clap::ValueEnum::to_possible_value(how).map(|value| value.get_name().to_owned());
            format!("--plant {name}={}", how.unwrap_or_default())
        });
        let budget = (self.budget < BUDGET).then(|| format!("--budget {}", self.budget));
        let python = (self.python == Path::new(machine::NO_PROGRAM)).then(|| "--python none".to_owned());
        only.chain(planted).chain(budget).chain(python).collect()
    }
}

fn parse_plant(text: &str) -> Result<(String, Plant), String> {
    let (name, how) = text.split_once('=').ok_or("write it as NAME=HOW, such as dropout=crash")?;
    let how = <Plant as clap::ValueEnum>::from_str(how, false);
    Ok((name.to_owned(), how.map_err(|_| "a check goes wrong by figure, crash or hang, such as dropout=crash")?))
}

fn main() -> ExitCode {
    // In a process that a check has launched, this runs its function and does not return.
    let workers = checks::workers();
    let arguments = Arguments::parse();
    let outcome = match arguments.role {
        Some(Role::Check(order)) => check::obey(&order, &workers).map(|()| true),
        Some(Role::Probe) => machine::probe().map(|()| true),
        None => run(&arguments.run),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &RunArguments) -> Result<bool> {
    if arguments.list {
        for check in checks::ALL {
            runner::show(&format!("{:18} {}\n", check.name, check.about));
        }
        return Ok(true);
    }
    let names = arguments.only.iter().chain(arguments.plant.iter().map(|(name, _)| name));
    for name in names {
        if checks::find(name).is_none() {
            bail!("there is no check {name:?}; `gpu-checks --list` says which there are");
        }
    }
    let is_left_out = |name: &String| !arguments.only.is_empty() && !arguments.only.contains(name);
    if let Some((name, _)) = arguments.plant.iter().find(|(name, _)| is_left_out(name)) {
        bail!("{name} is to go wrong and is not run; add --only {name}");
    }
    let program = std::env::current_exe().context("this program does not know where it is")?;
    let scripts = arguments.scripts.clone().or_else(|| Some(program.parent()?.join("python")));
    let settings = runner::Settings {
        program,
        only: arguments.only.clone(),
        plants: arguments.plant.clone(),
        budget: Duration::from_secs(arguments.budget),
        rehearse: arguments.rehearse,
        python: arguments.python.clone(),
        scripts: scripts.unwrap_or_default(),
        commit: arguments.commit.clone(),
        asked: arguments.asked(),
    };
    let write = |report: &report::Report| report.write(&arguments.output).context("the report, see --output");
    let report = runner::run(&settings, write)?;
    // Head and rows have been printed as they came.
    runner::show(&report.tail());
    runner::show(&format!("\nwritten to {0}/report.txt and {0}/report.json\n", arguments.output.display()));
    Ok(report.is_good())
}
