//! `accelerate status`: what the ranks of a run are doing, from outside and while they do it.
//!
//! [`together`] puts together what launchers and agents tell, [`facts`] looks at runs and their processes, [`show`] turns what was
//! found into tables.

mod facts;
mod process;
mod show;
mod together;

use std::error::Error;
use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use accelerate_core::files::in_one_line;
use accelerate_core::status::{LauncherName, RankStatus, RunInfo};
use accelerate_launch::status::{Run, is_unreadable, runs};
use clap::Args;

use facts::RunFacts;
use process::Process;
use together::{launcher_of, may_start_again, of_launchers, of_processes, together};

/// Show what the processes of a run are doing: step, samples per second, memory, and the call to other ranks that each is in.
///
/// For runs of yours on this machine that `accelerate launch` has started, also while they hang: nothing is asked of the ranks.
/// A rank that others wait for is marked. Of several runs they are listed; name one by the number of its launcher's process, or
/// of any of its ranks'. A run that has failed and waits to be started again says so.
///
/// Steps are those that the optimizer has taken. Samples are those of all ranks together, over the last batches. Programs that do
/// not use accelerate-rs, such as Python scripts, are listed with their processes and tell nothing. Runs that another launcher
/// has started, such as torchrun, srun or mpirun, are not seen. In a run on several machines each machine shows its own ranks; that
/// of the launcher names the others. Runs in a container are seen from in there.
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    accelerate status\n  \
    accelerate status --watch=5\n  \
    accelerate status 4711 --json | jq '.runs[].ranks[] | select(.awaited) | .rank'\n  \
    ssh node2 accelerate status")]
pub(crate) struct Arguments {
    /// Which run: the number of its launcher's process, or of any of its ranks'
    #[arg(value_name = "PROCESS", value_parser = process_number)]
    process_id: Option<u32>,

    /// Show it again every second until the run is over, or every so many seconds (--watch=10)
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "1", value_parser = seconds)]
    watch: Option<Duration>,

    /// Print JSON; with --watch, an object in each line
    #[arg(long)]
    json: bool,
}

fn process_number(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| "the number of a process is wanted, as `accelerate status` and ps show it".to_owned())
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.1..=86_400.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "a number of seconds from 0.1 to 86400 is wanted".to_owned())
}

/// Why there is nothing to show.
#[derive(Debug, thiserror::Error)]
enum StatusError {
    #[error("the processes of this machine cannot be looked at, since /proc cannot be read")]
    NoProcesses { source: io::Error },
    #[error(
        "no run of yours on this machine has a launcher or a rank with process number {process_id} now; `accelerate status` lists \
         those that there are{hint}"
    )]
    NoSuchRun { process_id: u32, hint: String },
    #[error(
        "process {process_id} is a launcher, and what it says of its run cannot be read: it is of another version than this command, \
         or one of its ranks has written over it; ask by the `accelerate` that has started it, or look at its ranks by ps"
    )]
    Unreadable { process_id: u32 },
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Box<dyn Error>> {
    let mut has_shown = false;
    let mut waits = false;
    let mut silence = Silence::default();
    // Pages can be read for as long as somebody has their file.
    let mut last: Vec<Vec<Run>> = Vec::new();
    let mut launchers: Vec<Process> = Vec::new();
    let mut named =
        arguments.process_id.map(|process_id| Named { process_ids: vec![process_id], launchers: Vec::new() });
    loop {
        let found = wanted(named.as_ref())?;
        match arguments.process_id {
            Some(process_id) if found.is_empty() && !has_shown => {
                return Err(nothing_of(process_id, arguments.watch.is_some()).into());
            }
            // Until an attempt begins there is a moment in which its launcher tells nothing.
            _ if found.is_empty() && launchers.iter().any(Process::is_alive) => {
                silence.tell(&launchers);
                thread::sleep(arguments.watch.unwrap_or_default());
                continue;
            }
            _ if found.is_empty() && last.iter().any(|run| may_start_again(told_by(run))) => {
                if !std::mem::replace(&mut waits, true) {
                    last.iter().filter(|run| may_start_again(told_by(run))).for_each(|run| print_waiting(run));
                }
                thread::sleep(arguments.watch.unwrap_or_default());
                continue;
            }
            _ if found.is_empty() && has_shown => {
                crate::print_message("the run is over");
                return Ok(ExitCode::SUCCESS);
            }
            _ => {}
        }
        let facts: Vec<RunFacts> = found.iter().filter_map(|run| RunFacts::of(run)).collect();
        show(arguments, &facts, has_shown)?;
        let Some(pause) = arguments.watch.filter(|_| !facts.is_empty()) else { return Ok(ExitCode::SUCCESS) };
        if crate::output::is_reader_gone() {
            return Ok(ExitCode::SUCCESS);
        }
        (has_shown, waits, silence) = (true, false, Silence::default());
        let process_ids: Vec<u32> = found.iter().flatten().map(|part| part.info.process_id).collect();
        launchers = process_ids.iter().filter_map(|&process_id| Process::of(process_id)).collect();
        // The launcher stays, and after a restart it has other ranks and agents than the one that was named.
        named = named.map(|_| {
            let launchers = found.iter().flatten().filter_map(|part| launcher_of(&part.info));
            Named { process_ids, launchers: launchers.cloned().collect() }
        });
        last = found;
        thread::sleep(pause);
    }
}

/// A launcher that tells nothing of a run, although it lives. Before an attempt that is a moment; after its last one, a program that
/// has launched may go on with anything.
#[derive(Default)]
struct Silence {
    since: Option<Instant>,
    is_told: bool,
}

impl Silence {
    /// Longer than any launcher needs to begin an attempt.
    const LONG: Duration = Duration::from_secs(1);

    /// Says once what is waited for.
    fn tell(&mut self, launchers: &[Process]) {
        let since = *self.since.get_or_insert_with(Instant::now);
        if self.is_told || since.elapsed() < Self::LONG {
            return;
        }
        self.is_told = true;
        let living = launchers.iter().filter(|launcher| launcher.is_alive()).map(|launcher| launcher.id().to_string());
        crate::print_message(&format!(
            "the ranks have ended, and their launcher, process {}, is still there; waiting until it launches again or ends",
            living.collect::<Vec<_>>().join(", ")
        ));
    }
}

fn nothing_of(process_id: u32, is_watching: bool) -> StatusError {
    if is_unreadable(process_id) {
        return StatusError::Unreadable { process_id };
    }
    let hint = is_watching.then(|| format!("; for a look every {process_id} s say --watch={process_id}"));
    StatusError::NoSuchRun { process_id, hint: hint.unwrap_or_default() }
}

/// What was asked for.
struct Named {
    process_ids: Vec<u32>,
    /// Those elsewhere, whose next agents here are other processes.
    launchers: Vec<LauncherName>,
}

/// All runs, or those that were asked for, each in its parts.
fn wanted(named: Option<&Named>) -> Result<Vec<Vec<Run>>, StatusError> {
    let all = || Ok(together(runs().map_err(|source| StatusError::NoProcesses { source })?, |run: &Run| &run.info));
    let Some(Named { process_ids, launchers }) = named else { return all() };
    let has_rank = |run: &Run, process_id| {
        let ranks = run.ranks();
        ranks.iter().any(|rank| [rank.owner, rank.started].contains(&Some(process_id)))
    };
    let of_processes = of_processes(all()?, process_ids, |run| &run.info, has_rank);
    if of_processes.is_empty() && !launchers.is_empty() {
        return Ok(of_launchers(all()?, launchers, |run| &run.info));
    }
    Ok(of_processes)
}

/// The parts of a run, and their ranks, which may be gone.
fn told_by(run: &[Run]) -> impl Iterator<Item = (&RunInfo, Vec<RankStatus>)> {
    run.iter().map(|part| (&part.info, part.ranks()))
}

/// Only the launcher knows whether, and when.
fn print_waiting(run: &[Run]) {
    let Some((info, launcher)) = run.first().and_then(|part| Some((&part.info, launcher_of(&part.info)?))) else {
        return;
    };
    crate::print_message(&format!(
        "the ranks of this machine have ended; waiting for restart {} of {}, which their launcher, process {} on {}, may begin",
        info.restart_count.saturating_add(1),
        info.max_restarts,
        launcher.process_id,
        in_one_line(&launcher.host)
    ));
}

fn show(arguments: &Arguments, facts: &[RunFacts], is_again: bool) -> Result<(), Box<dyn Error>> {
    if arguments.json {
        let report = serde_json::json!({ "runs": facts });
        let text = match arguments.watch {
            Some(_) => serde_json::to_string(&report)?,
            None => serde_json::to_string_pretty(&report)?,
        };
        return Ok(crate::print_result(&(text + "\n"))?);
    }
    let text = match facts {
        [] => show::nothing(),
        [run] => show::one(run),
        several => show::list(several),
    };
    // At a terminal it takes the place of what was there.
    let before = match (is_again, io::stdout().is_terminal()) {
        (true, true) => "\x1b[H\x1b[2J",
        (true, false) => "\n",
        (false, _) => "",
    };
    Ok(crate::print_coloured(&format!("{before}{text}"))?)
}
