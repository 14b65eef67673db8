//! Runs and ranks as people read them.

use std::fmt::Write as _;
use std::time::Duration;

use accelerate_core::status::number_ranges;
use accelerate_core::weight_files::format_size;
use anstyle::{AnsiColor, Style};

use super::facts::{CallFacts, RankFacts, RunFacts, State};
use crate::table::{Align, Table, age, processes};

/// Where there is no run.
pub(super) fn nothing() -> String {
    "No run of yours is going on on this machine. Runs are seen that `accelerate launch` has started here; those in a container \
     are seen from in there.\n"
        .to_owned()
}

/// Several runs, a line for each.
pub(super) fn list(runs: &[RunFacts]) -> String {
    let mut table = Table::new(&[
        ("launcher", Align::Right),
        ("ranks", Align::Right),
        ("running for", Align::Right),
        ("step", Align::Right),
        ("awaited", Align::Left),
        ("program", Align::Left),
    ]);
    for run in runs {
        let awaited = awaited(run);
        let style = if awaited.is_empty() { Style::new() } else { AnsiColor::Yellow.on_default() };
        let steps = run.ranks.iter().filter(|rank| rank.tells).map(|rank| rank.steps).max();
        let cells = [
            run.launcher.to_string(),
            run.ranks.len().to_string(),
            lasted(run.elapsed_seconds),
            steps.map_or_else(|| "-".to_owned(), |steps| steps.to_string()),
            if awaited.is_empty() { "-".to_owned() } else { number_ranges(&awaited) },
            shortened(&run.command),
        ];
        table.push(style, cells.into());
    }
    format!("{}\naccelerate status LAUNCHER shows one of them\n", table.text(""))
}

/// One run with its ranks.
pub(super) fn one(run: &RunFacts) -> String {
    let RunFacts { launcher, num_processes, first_rank, ranks, .. } = run;
    let mut text = format!("{}\n", shortened(&run.command));
    let mut started = processes(*num_processes);
    if let RunFacts { restart_count: 1.., .. } = run {
        let _ = write!(started, ", restart {} of {}", run.restart_count, run.max_restarts);
    }
    let _ = writeln!(text, "launcher {launcher}, {started}, for {}\n", lasted(run.elapsed_seconds));
    let mut table = Table::new(&[
        ("", Align::Left),
        ("rank", Align::Right),
        ("process", Align::Right),
        ("state", Align::Left),
        ("step", Align::Right),
        ("samples/s", Align::Right),
        ("memory", Align::Right),
        ("for", Align::Right),
        ("doing", Align::Left),
    ]);
    for rank in ranks {
        let style = match rank {
            RankFacts { awaited: true, .. } => AnsiColor::Yellow.on_default().bold(),
            RankFacts { state: State::Ended, .. } => Style::new().dimmed(),
            _ => Style::new(),
        };
        table.push(style, row(rank));
    }
    text += &table.text("");
    let notes = notes(run, *first_rank);
    if !notes.is_empty() {
        let _ = write!(text, "\n{notes}");
    }
    text
}

fn row(rank: &RankFacts) -> Vec<String> {
    let unknown = || "-".to_owned();
    let told = |text: String| if rank.tells { text } else { unknown() };
    let (doing, since) = doing(rank);
    vec![
        if rank.awaited { ">" } else { "" }.to_owned(),
        rank.rank.to_string(),
        rank.process_id.map_or_else(unknown, |id| id.to_string()),
        state(rank),
        told(rank.steps.to_string()),
        rank.samples_per_second.map_or_else(unknown, |number| format!("{number:.1}")),
        rank.resident_bytes.map_or_else(unknown, format_size),
        since.map_or_else(unknown, lasted),
        doing,
    ]
}

fn state(rank: &RankFacts) -> String {
    match (rank.state, rank.exit_code, &rank.signal) {
        (State::Starting, ..) => "starting".to_owned(),
        (State::Running, ..) => "running".to_owned(),
        (State::Stopped, ..) => "stopped".to_owned(),
        (State::Ended, Some(code), _) => format!("exited {code}"),
        (State::Ended, None, Some(signal)) => signal.clone(),
        (State::Ended, None, None) => "ended".to_owned(),
    }
}

/// And for how many seconds.
fn doing(rank: &RankFacts) -> (String, Option<f64>) {
    let name = |call: &CallFacts| {
        let site = call.site.as_ref().map_or_else(String::new, |site| format!(" at {site}"));
        format!("{} number {}{site}", call.op, call.number)
    };
    match (&rank.call, &rank.last_call) {
        _ if !rank.tells => ("not told".to_owned(), None),
        (Some(call), _) => (name(call), Some(call.seconds)),
        (None, Some(call)) => (format!("computing after {}", name(call)), Some(call.seconds)),
        (None, None) => ("computing".to_owned(), None),
    }
}

/// What the table means.
fn notes(run: &RunFacts, first_rank: usize) -> String {
    let mut notes = String::new();
    let awaited = awaited(run);
    match awaited.as_slice() {
        [] => {}
        [one] => {
            let _ = writeln!(notes, "Others wait for rank {one}: it has not come to the call that they are in.");
        }
        several => {
            let _ = writeln!(
                notes,
                "Others wait for ranks {}: they have not come to the call that others are in.",
                number_ranges(several)
            );
        }
    }
    let silent: Vec<usize> =
        run.ranks.iter().filter(|rank| !rank.tells && rank.state != State::Ended).map(|rank| rank.rank).collect();
    if !silent.is_empty() {
        let of = if silent.len() == 1 { "rank" } else { "ranks" };
        let _ = writeln!(
            notes,
            "Nothing is told by {of} {}: the program does not use accelerate-rs, or has not built its Accelerator yet.",
            number_ranges(&silent)
        );
    }
    if run.ranks.len() < run.num_processes {
        let here: Vec<usize> = (first_rank..first_rank + run.ranks.len()).collect();
        let _ = writeln!(
            notes,
            "Ranks {} of {} are on this machine; run `accelerate status` on the others for theirs.",
            number_ranges(&here),
            run.num_processes
        );
    }
    notes
}

fn awaited(run: &RunFacts) -> Vec<usize> {
    run.ranks.iter().filter(|rank| rank.awaited).map(|rank| rank.rank).collect()
}

/// Tenths of seconds as long as they matter.
fn lasted(seconds: f64) -> String {
    if seconds < 60.0 { format!("{seconds:.1} s") } else { age(Duration::from_secs_f64(seconds.min(1e15))) }
}

fn shortened(command: &[String]) -> String {
    const MOST_LETTERS: usize = 120;
    let text = command.join(" ");
    match text.char_indices().nth(MOST_LETTERS) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::super::facts::tests::run;
    use super::*;

    fn plain(text: &str) -> String {
        anstream::adapter::strip_str(text).to_string()
    }

    #[test]
    fn a_run_is_a_table_with_the_ranks_that_are_waited_for() {
        let text = plain(&one(&run()));
        let wanted = "\
train --epochs 3
launcher 39, 16 processes, for 9.0 s

   rank  process  state    step  samples/s  memory    for  doing
>     4       44  stopped     3        6.4  1.2 GB  5.0 s  computing after all_reduce number 16 at src/main.rs:40
      5       41  running     3        6.4    1 MB  4.0 s  all_reduce number 17 at src/main.rs:40
      6       42  running     -          -    1 MB      -  not told
      7       43  SIGKILL     -          -       -      -  not told

Others wait for rank 4: it has not come to the call that they are in.
Nothing is told by rank 6: the program does not use accelerate-rs, or has not built its Accelerator yet.
Ranks 4-7 of 16 are on this machine; run `accelerate status` on the others for theirs.
";
        assert_eq!(text, wanted);
    }

    #[test]
    fn a_run_that_was_restarted_says_so() {
        let text = plain(&one(&RunFacts { restart_count: 1, max_restarts: 3, ..run() }));
        assert!(text.contains("\nlauncher 39, 16 processes, restart 1 of 3, for 9.0 s\n"), "{text}");
    }

    #[test]
    fn several_runs_are_a_list() {
        let text = plain(&list(&[run(), run()]));
        assert!(text.contains("39      4        9.0 s     3  4        train --epochs 3\n"), "{text}");
        assert!(text.contains("accelerate status LAUNCHER"), "{text}");
    }

    #[test]
    fn long_times_have_one_unit() {
        assert_eq!(
            [lasted(59.94), lasted(61.0), lasted(7200.0), lasted(f64::MAX)].map(|text| text.len() < 20),
            [true; 4]
        );
        assert_eq!((lasted(2.06), lasted(7300.0)), ("2.1 s".to_owned(), "2 h".to_owned()));
    }
}
