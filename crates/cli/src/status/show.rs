//! Runs and ranks as people read them.

use std::fmt::Write as _;
use std::time::Duration;

use accelerate_core::names::counted;
use accelerate_core::status::{named_ranks, number_ranges, operation};
use accelerate_core::weight_files::format_size;
use anstyle::{AnsiColor, Style};

use super::facts::{CallFacts, RankFacts, RunFacts, State};
use crate::table::{Align, Table, age};

/// Where there is no run.
pub(super) fn nothing() -> String {
    "No run of yours is going on on this machine. Runs are seen that `accelerate launch` has started here; those in a container \
     are seen from in there.\n"
        .to_owned()
}

/// Several runs, a line for each.
pub(super) fn list(runs: &[RunFacts]) -> String {
    let has_machines = runs.iter().any(|run| !run.machines.is_empty());
    let mut columns = vec![
        ("launcher", Align::Right),
        ("ranks", Align::Right),
        ("running for", Align::Right),
        ("step", Align::Right),
        ("awaited", Align::Left),
    ];
    columns.extend(has_machines.then_some(("machine (agent)", Align::Left)));
    columns.push(("program", Align::Left));
    let mut table = Table::new(&columns);
    for run in runs {
        let awaited = awaited(run);
        let style = if awaited.is_empty() { Style::new() } else { AnsiColor::Yellow.on_default() };
        let steps = run.ranks.iter().filter(|rank| rank.tells).map(|rank| rank.steps).max();
        let mut cells = vec![
            run.launcher.to_string(),
            num_ranks(run),
            run.pause.as_ref().map_or_else(|| lasted(run.elapsed_seconds), |_| "waits".to_owned()),
            steps.map_or_else(|| "-".to_owned(), |steps| steps.to_string()),
            if awaited.is_empty() { "-".to_owned() } else { number_ranges(&awaited) },
        ];
        cells.extend(has_machines.then(|| machines_here(run)));
        cells.push(shortened(&run.command));
        table.push(style, cells);
    }
    format!("{}\naccelerate status LAUNCHER shows one of them\n", table.text(""))
}

/// Those of this machine, of all.
fn num_ranks(run: &RunFacts) -> String {
    match run.ranks.len() {
        all if all == run.num_processes => all.to_string(),
        here => format!("{here} of {}", run.num_processes),
    }
}

/// Which machines of the run are this one, and where the launcher is if it is elsewhere.
fn machines_here(run: &RunFacts) -> String {
    let agents: Vec<String> =
        run.agents.iter().map(|agent| format!("{} ({})", agent.machine, agent.process_id)).collect();
    match (agents.as_slice(), &run.launcher_host) {
        ([], _) if run.machines.is_empty() => "-".to_owned(),
        ([], _) => "none here".to_owned(),
        (agents, None) => agents.join(", "),
        (agents, Some(host)) => format!("{}, launcher on {host}", agents.join(", ")),
    }
}

/// One run with its ranks.
pub(super) fn one(run: &RunFacts) -> String {
    let mut text = format!("{}\n{}\n", shortened(&run.command), headline(run));
    for agent in &run.agents {
        let _ = writeln!(text, "agent {} on {}: {}", agent.process_id, agent.machine, named_ranks(&agent.ranks));
    }
    text += "\n";
    if !run.ranks.is_empty() {
        text += &table_of(&run.ranks);
    }
    let notes = notes(run);
    if !run.ranks.is_empty() && !notes.is_empty() {
        text += "\n";
    }
    text + &notes
}

fn headline(run: &RunFacts) -> String {
    let mut text = format!("launcher {}", run.launcher);
    if let Some(host) = &run.launcher_host {
        let _ = write!(text, " on {host}");
    }
    let _ = write!(text, ", {}", counted(run.num_processes, "process"));
    if let Some(number) = run.num_machines {
        let _ = write!(text, " on {}", counted(number, "machine"));
    }
    let restart = format!("restart {} of {}", run.restart_count, run.max_restarts);
    match &run.pause {
        Some(pause) => {
            let _ = write!(text, ", waits to be started again: {restart} begins in {}", lasted(pause.seconds));
        }
        None => {
            let _ = match run.restart_count {
                0 => write!(text, ", for {}", lasted(run.elapsed_seconds)),
                _ => write!(text, ", {restart}, for {}", lasted(run.elapsed_seconds)),
            };
        }
    }
    text
}

fn table_of(ranks: &[RankFacts]) -> String {
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
    table.text("")
}

fn row(rank: &RankFacts) -> Vec<String> {
    let unknown = || "-".to_owned();
    let told = |text: String| if rank.tells { text } else { unknown() };
    let (doing, since) = doing(rank);
    vec![
        if rank.awaited || rank.state == State::Stopped { ">" } else { "" }.to_owned(),
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
        format!("{}{site}", operation(&call.op, call.number))
    };
    match (&rank.call, &rank.last_call) {
        _ if !rank.tells => ("not told".to_owned(), None),
        (Some(call), _) => (name(call), Some(call.seconds)),
        (None, Some(call)) => (format!("computing after {}", name(call)), Some(call.seconds)),
        (None, None) => ("computing".to_owned(), None),
    }
}

/// What the table means, and what is not in it.
fn notes(run: &RunFacts) -> String {
    let mut notes = String::new();
    // One that is stopped in a call has come to it, and is told of below.
    let missing = run.ranks.iter().filter(|rank| rank.awaited && rank.call.is_none()).map(|rank| rank.rank);
    match missing.collect::<Vec<_>>().as_slice() {
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
    for (rank, process_id) in run.ranks.iter().filter_map(|rank| Some((rank, rank.process_id?))) {
        if rank.state == State::Stopped {
            let rank = rank.rank;
            let _ = writeln!(notes, "Rank {rank} is stopped by a signal; `kill -CONT {process_id}` lets it go on.");
        }
    }
    let silent: Vec<usize> =
        run.ranks.iter().filter(|rank| !rank.tells && rank.state != State::Ended).map(|rank| rank.rank).collect();
    if !silent.is_empty() {
        let _ = writeln!(
            notes,
            "Nothing is told by {}: the program does not use accelerate-rs, or has not built its Accelerator yet.",
            named_ranks(&silent)
        );
    }
    if let Some(pause) = &run.pause {
        let _ = writeln!(notes, "The last attempt has failed: {}", pause.cause);
    } else if run.ranks.len() < run.num_processes {
        notes += &elsewhere(run);
    }
    notes
}

/// Where to ask for the other ranks.
fn elsewhere(run: &RunFacts) -> String {
    const MOST_NAMED: usize = 16;
    let here: Vec<usize> = run.ranks.iter().map(|rank| rank.rank).collect();
    let is_here = |machine: &&String| run.agents.iter().any(|agent| agent.machine == **machine);
    let others: Vec<&str> = run.machines.iter().filter(|machine| !is_here(machine)).map(String::as_str).collect();
    let verb = if here.len() == 1 { "is" } else { "are" };
    let found = match here.as_slice() {
        [] => format!("None of its {} is on this machine", counted(run.num_processes, "rank")),
        _ => format!("{} of {} {verb} on this machine", capitalized(&named_ranks(&here)), run.num_processes),
    };
    let Some(first) = others.first() else {
        return format!("{found}; run `accelerate status` on the others for theirs.\n");
    };
    let named = &others[..others.len().min(MOST_NAMED)];
    let num_others = run.num_machines.unwrap_or_default().saturating_sub(run.agents.len());
    let more = match num_others.saturating_sub(named.len()) {
        0 => String::new(),
        number => format!(" and {number} more"),
    };
    format!(
        "{found}. Each machine shows its own: ask {}{more}, such as by `ssh {first} accelerate status`.\n",
        named.join(", ")
    )
}

fn capitalized(text: &str) -> String {
    text.replacen('r', "R", 1)
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
    use super::super::facts::tests::{run, run_in_a_pause, run_of_an_agent, run_on_machines};
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
>     4       44  stopped     3        6.4  1.2 GB  5.0 s  computing after all_reduce (collective 16) at src/main.rs:40
      5       41  running     3        6.4    1 MB  4.0 s  all_reduce (collective 17) at src/main.rs:40
      6       42  running     -          -    1 MB      -  not told
      7       43  SIGKILL     -          -       -      -  not told

Others wait for rank 4: it has not come to the call that they are in.
Rank 4 is stopped by a signal; `kill -CONT 44` lets it go on.
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
    fn a_run_in_a_pause_waits() {
        let wanted = "\
train --epochs 3
launcher 39, 16 processes, waits to be started again: restart 2 of 3 begins in 4.0 s

The last attempt has failed: rank 1 exited with code 3\\u{1b}
";
        assert_eq!(plain(&one(&run_in_a_pause())), wanted);
    }

    #[test]
    fn ranks_of_other_machines_are_to_be_asked_for_there() {
        let wanted = "\
train --epochs 3
launcher 39, 16 processes on 4 machines, for 9.0 s

None of its 16 ranks is on this machine. Each machine shows its own: ask a, b, c, d, such as by `ssh a accelerate status`.
";
        assert_eq!(plain(&one(&run_on_machines(&[]))), wanted);
        let text = plain(&one(&run_on_machines(&[("a", 0), ("c", 5)])));
        assert!(text.contains("for 9.0 s\nagent 50 on a: ranks 0-1\nagent 50 on c: ranks 5-6\n\n"), "{text}");
        let last = "\nRanks 0-1, 5-6 of 16 are on this machine. Each machine shows its own: ask b, d, such as by `ssh b accelerate status`.\n";
        assert!(text.ends_with(last), "{text}");
        let text = plain(&one(&run_of_an_agent()));
        assert!(
            text.contains("\nlauncher 39 on head\\n, 16 processes, for 9.0 s\nagent 50 on b: ranks 4-5\n\n"),
            "{text}"
        );
        assert!(
            text.ends_with(
                "\nRanks 4-5 of 16 are on this machine; run `accelerate status` on the others for theirs.\n"
            ),
            "{text}"
        );
    }

    #[test]
    fn of_very_many_machines_the_first_are_named() {
        let machines: Vec<String> = (0..100).map(|number| format!("n{number}")).collect();
        let text = plain(&one(&RunFacts { machines, num_machines: Some(3000), ..run_on_machines(&[]) }));
        assert!(text.contains(" ask n0, n1, ") && text.contains(", n15 and 2984 more, such as by "), "{text}");
    }

    #[test]
    fn several_runs_are_a_list() {
        let wanted = "\
launcher    ranks  running for  step  awaited  program
      39  4 of 16        9.0 s     3  4        train --epochs 3
      39  0 of 16        waits     -  -        train --epochs 3

accelerate status LAUNCHER shows one of them
";
        assert_eq!(plain(&list(&[run(), run_in_a_pause()])), wanted);
    }

    #[test]
    fn the_list_says_which_machine_an_agent_is_for_and_whose_it_is() {
        let text = plain(&list(&[run(), run_on_machines(&[("a", 0)]), run_on_machines(&[]), run_of_an_agent()]));
        let wanted = "\
launcher    ranks  running for  step  awaited  machine (agent)             program
      39  4 of 16        9.0 s     3  4        -                           train --epochs 3
      39  2 of 16        9.0 s     -  -        a (50)                      train --epochs 3
      39  0 of 16        9.0 s     -  -        none here                   train --epochs 3
      39  2 of 16        9.0 s     -  -        b (50), launcher on head\\n  train --epochs 3
";
        assert!(text.starts_with(wanted), "{text}");
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
