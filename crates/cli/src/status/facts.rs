//! What is known of a run and its processes.

use std::fs;
use std::time::Duration;

use accelerate_core::files::in_one_line;
use accelerate_core::status::{RankActivity, RankStatus, RunInfo, awaited_ranks, samples_per_second};
use accelerate_launch::signal_name;
use accelerate_launch::status::{Run, now};
use serde::Serialize;

/// A call that has lasted so long waits for somebody. Shorter ones are the usual course of a step.
const LONG: Duration = Duration::from_secs(1);

/// A run, as JSON has it.
#[derive(Debug, Serialize)]
pub(super) struct RunFacts {
    /// The launcher's process.
    pub(super) launcher: u32,
    pub(super) version: String,
    pub(super) command: Vec<String>,
    pub(super) num_processes: usize,
    pub(super) first_rank: usize,
    pub(super) elapsed_seconds: f64,
    /// How often it was started before, after failures.
    pub(super) restart_count: usize,
    pub(super) max_restarts: usize,
    /// Those of this machine.
    pub(super) ranks: Vec<RankFacts>,
}

/// A rank, as JSON has it.
#[derive(Debug, Serialize)]
pub(super) struct RankFacts {
    pub(super) rank: usize,
    pub(super) process_id: Option<u32>,
    pub(super) state: State,
    /// Of one that has ended.
    pub(super) exit_code: Option<i32>,
    pub(super) signal: Option<String>,
    /// Nothing is told by programs that do not use the library; then what follows is not known.
    pub(super) tells: bool,
    pub(super) steps: u64,
    pub(super) samples: u64,
    pub(super) samples_per_second: Option<f64>,
    pub(super) resident_bytes: Option<u64>,
    /// Others wait for it.
    pub(super) awaited: bool,
    /// `null` where it is in no call.
    pub(super) call: Option<CallFacts>,
    /// The last call that has ended, where it is in none.
    pub(super) last_call: Option<CallFacts>,
}

/// A call, as JSON has it.
#[derive(Debug, Serialize)]
pub(super) struct CallFacts {
    pub(super) op: String,
    pub(super) number: u64,
    pub(super) site: Option<String>,
    /// Since it began, or since it ended.
    pub(super) seconds: f64,
}

/// What a process is doing as the kernel sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    Starting,
    Running,
    Stopped,
    Ended,
}

impl RunFacts {
    pub(super) fn of(run: &Run) -> Self {
        let (ranks, now) = (run.ranks(), now());
        Self::told(&run.info, &ranks, now, &process)
    }

    /// From what ranks tell and, by `process`, the kernel.
    fn told(info: &RunInfo, ranks: &[RankStatus], now: u64, process: &dyn Fn(u32) -> Process) -> Self {
        let awaited = awaited_ranks(ranks, info.num_processes, now, LONG);
        let ranks = ranks.iter().zip(awaited).enumerate().map(|(index, (status, awaited))| RankFacts {
            awaited,
            ..RankFacts::of(info.first_rank + index, status, now, process)
        });
        Self {
            launcher: info.process_id,
            version: in_one_line(&info.version),
            command: info.command.iter().map(|word| in_one_line(word)).collect(),
            num_processes: info.num_processes,
            first_rank: info.first_rank,
            elapsed_seconds: Duration::from_nanos(now.saturating_sub(info.started)).as_secs_f64(),
            restart_count: info.restart_count,
            max_restarts: info.max_restarts,
            ranks: ranks.collect(),
        }
    }
}

impl RankFacts {
    fn of(rank: usize, status: &RankStatus, now: u64, process: &dyn Fn(u32) -> Process) -> Self {
        // The process that tells may be a child of the one that was started, such as of a shell.
        let process_id = status.owner.or(status.started);
        let seen = process_id.filter(|_| status.ended.is_none()).map(process).unwrap_or_default();
        let state = match (status.ended, status.started, seen.state) {
            (Some(_), ..) => State::Ended,
            (None, None, _) => State::Starting,
            (None, Some(_), state) => state.unwrap_or(State::Ended),
        };
        let of_call = |call: accelerate_core::status::CallName, since: Duration| CallFacts {
            op: in_one_line(&call.op),
            number: call.sequence,
            site: call.site.as_deref().map(in_one_line),
            seconds: since.as_secs_f64(),
        };
        let (call, last_call) = match status.activity(now) {
            RankActivity::InCall { call, elapsed } => (Some(of_call(call, elapsed)), None),
            RankActivity::Computing { after } => (None, after.map(|(call, since)| of_call(call, since))),
            RankActivity::Unknown => (None, None),
        };
        Self {
            rank,
            process_id,
            state,
            exit_code: status.ended.and_then(Result::ok),
            signal: status.ended.and_then(Result::err).map(signal_name),
            tells: status.owner.is_some(),
            steps: status.steps,
            samples: status.progress.samples(),
            samples_per_second: samples_per_second(&status.progress, now).filter(|_| state != State::Ended),
            resident_bytes: seen.resident_bytes,
            awaited: false,
            call,
            last_call,
        }
    }
}

/// What the kernel says of a process; nothing of one that is gone.
#[derive(Clone, Copy, Debug, Default)]
struct Process {
    state: Option<State>,
    resident_bytes: Option<u64>,
}

fn process(id: u32) -> Process {
    fs::read_to_string(format!("/proc/{id}/status")).map_or_else(|_| Process::default(), |text| read(&text))
}

fn read(status: &str) -> Process {
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next());
    let state = field("State:").map(|state| match state {
        "T" | "t" => State::Stopped,
        "Z" | "X" => State::Ended,
        _ => State::Running,
    });
    let kilobytes = field("VmRSS:").and_then(|number| number.parse::<u64>().ok());
    Process { state, resident_bytes: kilobytes.and_then(|number| number.checked_mul(1024)) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests {
    use super::*;
    use accelerate_core::status::{CallRecord, Progress};
    use rstest::rstest;

    const SECOND: u64 = 1_000_000_000;

    /// Rank 5 waits for rank 4, which computes; rank 6 tells nothing, and rank 7 has been killed.
    pub(in crate::status) fn run() -> RunFacts {
        let call = |sequence, began, ended: Option<u64>| CallRecord {
            group: String::new(),
            num_members: 4,
            is_in_background: false,
            op: "all_reduce".to_owned(),
            sequence,
            site: Some(("src/main.rs".to_owned(), 40)),
            began: began * SECOND,
            ended: ended.map(|ended| ended * SECOND),
        };
        let times = (0..5).map(|time| (time * SECOND, 16 * time)).collect();
        let rank = |started, calls| RankStatus {
            owner: Some(started),
            started: Some(started),
            steps: 3,
            progress: Progress { times },
            calls,
            ..RankStatus::default()
        };
        let computing = RankStatus { owner: Some(44), ..rank.clone()(40, vec![call(16, 1, Some(5))]) };
        let silent = RankStatus { started: Some(42), ..RankStatus::default() };
        let killed = RankStatus { started: Some(43), ended: Some(Err(9)), ..RankStatus::default() };
        let ranks = [computing, rank(41, vec![call(17, 6, None)]), silent, killed];
        let command = ["train", "--epochs", "3"].map(str::to_owned).into();
        let (num_processes, num_local_processes) = (16, 4);
        let version = "1.0".to_owned();
        let info = RunInfo {
            version,
            process_id: 39,
            command,
            num_processes,
            first_rank: 4,
            num_local_processes,
            started: SECOND,
            restart_count: 0,
            max_restarts: 0,
        };
        let process = |id| match id {
            44 => Process { state: Some(State::Stopped), resident_bytes: Some(1_200_000_000) },
            41 | 42 => Process { state: Some(State::Running), resident_bytes: Some(1_000_000) },
            other => unreachable!("{other} has ended, or is the shell of another one"),
        };
        RunFacts::told(&info, &ranks, 10 * SECOND, &process)
    }

    #[test]
    fn what_ranks_tell_and_what_the_kernel_says_come_together() {
        let run = run();
        let of = |index: usize| &run.ranks[index];
        assert_eq!((run.launcher, run.elapsed_seconds), (39, 9.0));
        let states: Vec<_> =
            run.ranks.iter().map(|rank| (rank.rank, rank.process_id, rank.state, rank.awaited)).collect();
        let wanted = [
            (4, Some(44), State::Stopped, true),
            (5, Some(41), State::Running, false),
            (6, Some(42), State::Running, false),
            (7, Some(43), State::Ended, false),
        ];
        assert_eq!(states, wanted);
        let call = of(1).call.as_ref().unwrap();
        assert_eq!((call.number, call.seconds, call.site.as_deref()), (17, 4.0, Some("src/main.rs:40")));
        assert_eq!(of(0).last_call.as_ref().map(|call| (call.number, call.seconds)), Some((16, 5.0)));
        assert_eq!((of(1).samples, of(1).samples_per_second), (64, Some(6.4)));
        assert_eq!((of(2).tells, of(2).steps, of(2).samples_per_second), (false, 0, None));
        assert_eq!((of(3).signal.as_deref(), of(3).exit_code, of(3).resident_bytes), (Some("SIGKILL"), None, None));
    }

    #[rstest]
    #[case("Name:\ta b\nState:\tT (stopped)\nVmRSS:\t  12 kB\n", Some(State::Stopped), Some(12_288))]
    #[case("State:\tS (sleeping)\n", Some(State::Running), None)]
    #[case::not_collected("State:\tZ (zombie)\n", Some(State::Ended), None)]
    #[case("VmRSS: 99999999999999999999 kB", None, None)]
    #[case("", None, None)]
    fn the_kernels_words_are_read(#[case] text: &str, #[case] state: Option<State>, #[case] bytes: Option<u64>) {
        let found = read(text);
        assert_eq!((found.state, found.resident_bytes), (state, bytes));
    }
}
