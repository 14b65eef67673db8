//! What is known of a run and its processes.

use std::fs;
use std::time::Duration;

use accelerate_core::files::in_one_line;
use accelerate_core::status::{RankActivity, RankStatus, RunInfo, RunPart, awaited_ranks, samples_per_second};
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
    /// The name of the launcher's machine, if that is not this one.
    pub(super) launcher_host: Option<String>,
    pub(super) version: String,
    pub(super) command: Vec<String>,
    pub(super) num_processes: usize,
    /// Since these ranks were started; in a pause, since it began.
    pub(super) elapsed_seconds: f64,
    /// How often it was started before, after failures; in a pause, with the start that comes.
    pub(super) restart_count: usize,
    pub(super) max_restarts: usize,
    /// Between a failure and the next start.
    pub(super) pause: Option<PauseFacts>,
    /// All machines with agents of the launcher, as far as this one knows them; of very many, the first.
    pub(super) machines: Vec<String>,
    /// `null`: only a launcher that is on this machine knows how many there are.
    pub(super) num_machines: Option<usize>,
    /// The agents of this machine.
    pub(super) agents: Vec<AgentFacts>,
    /// Those of this machine.
    pub(super) ranks: Vec<RankFacts>,
}

/// An agent, as JSON has it.
#[derive(Debug, Serialize)]
pub(super) struct AgentFacts {
    pub(super) process_id: u32,
    /// What the launcher calls its machine.
    pub(super) machine: String,
    pub(super) ranks: Vec<usize>,
}

/// What comes after a failure, as JSON has it.
#[derive(Debug, Serialize)]
pub(super) struct PauseFacts {
    /// Until the next start.
    pub(super) seconds: f64,
    /// What the last attempt died of.
    pub(super) cause: String,
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
    /// `None` of no parts at all.
    pub(super) fn of(parts: &[Run]) -> Option<Self> {
        let parts: Vec<_> = parts.iter().map(|part| (&part.info, part.ranks())).collect();
        Self::told(&parts, now(), &process)
    }

    /// From what the parts of a run and their ranks tell and, by `process`, the kernel. The first part speaks for all.
    fn told(parts: &[(&RunInfo, Vec<RankStatus>)], now: u64, process: &dyn Fn(u32) -> Process) -> Option<Self> {
        let (info, _) = parts.first()?;
        let numbers = parts.iter().flat_map(|(info, ranks)| numbers(info.first_rank, ranks.len()));
        let ranks: Vec<RankStatus> = parts.iter().flat_map(|(_, ranks)| ranks.iter().cloned()).collect();
        let awaited = awaited_ranks(&ranks, info.num_processes, now, LONG);
        let ranks = numbers
            .zip(&ranks)
            .zip(awaited)
            .map(|((rank, status), awaited)| RankFacts { awaited, ..RankFacts::of(rank, status, now, process) });
        let ranks = with_stopped_ones(ranks.collect());
        let agents: Vec<AgentFacts> = parts.iter().filter_map(|(info, _)| AgentFacts::of(info)).collect();
        let (launcher, launcher_host) = match &info.part {
            RunPart::Agent { launcher, .. } => (launcher.process_id, Some(in_one_line(&launcher.host))),
            _ => (info.process_id, None),
        };
        let (machines, num_machines) = match &info.part {
            RunPart::LauncherOfAgents { machines, num_machines, .. } => {
                (machines.iter().map(|machine| in_one_line(machine)).collect(), Some(*num_machines))
            }
            _ => (agents.iter().map(|agent| agent.machine.clone()).collect(), None),
        };
        let pause = match &info.part {
            RunPart::Pause { until, cause } => {
                Some(PauseFacts { seconds: seconds(until.saturating_sub(now)), cause: in_one_line(cause) })
            }
            _ => None,
        };
        Some(Self {
            launcher,
            launcher_host,
            version: in_one_line(&info.version),
            command: info.command.iter().map(|word| in_one_line(word)).collect(),
            num_processes: info.num_processes,
            elapsed_seconds: seconds(now.saturating_sub(info.started)),
            restart_count: info.restart_count,
            max_restarts: info.max_restarts,
            pause,
            machines,
            num_machines,
            agents,
            ranks,
        })
    }
}

/// The numbers of so many ranks. What was read may be nonsense, so nothing is beyond all numbers.
fn numbers(first_rank: usize, num_ranks: usize) -> impl Iterator<Item = usize> {
    (0..num_ranks).map(move |index| first_rank.saturating_add(index))
}

fn seconds(nanoseconds: u64) -> f64 {
    Duration::from_nanos(nanoseconds).as_secs_f64()
}

impl AgentFacts {
    fn of(info: &RunInfo) -> Option<Self> {
        let RunPart::Agent { machine, .. } = &info.part else { return None };
        let ranks = numbers(info.first_rank, info.num_local_processes).collect();
        Some(Self { process_id: info.process_id, machine: in_one_line(machine), ranks })
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

/// A rank that is stopped inside of a call has come to it, and keeps those waiting that are in theirs.
fn with_stopped_ones(mut ranks: Vec<RankFacts>) -> Vec<RankFacts> {
    let waits = |rank: &RankFacts| {
        let has_waited = rank.call.as_ref().is_some_and(|call| LONG.as_secs_f64() <= call.seconds);
        has_waited && rank.state == State::Running
    };
    if ranks.iter().any(waits) {
        ranks.iter_mut().filter(|rank| rank.state == State::Stopped).for_each(|rank| rank.awaited = true);
    }
    ranks
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
    use accelerate_core::status::{CallRecord, LauncherName, Progress};
    use rstest::rstest;

    const SECOND: u64 = 1_000_000_000;

    fn info(first_rank: usize, num_local_processes: usize, part: RunPart) -> RunInfo {
        RunInfo {
            version: "1.0".to_owned(),
            process_id: 39,
            command: ["train", "--epochs", "3"].map(str::to_owned).into(),
            num_processes: 16,
            first_rank,
            num_local_processes,
            started: SECOND,
            restart_count: 0,
            max_restarts: 0,
            part,
        }
    }

    /// The agent of process 50 for a machine of this name.
    fn agent(machine: &str, first_rank: usize, num_local_processes: usize) -> RunInfo {
        let launcher = LauncherName { host: "head\n".to_owned(), process_id: 39, id: 7 };
        let part = RunPart::Agent { machine: machine.to_owned(), launcher };
        RunInfo { process_id: 50, ..info(first_rank, num_local_processes, part) }
    }

    fn no_process(_: u32) -> Process {
        Process::default()
    }

    /// A launcher of four machines, with those of them that are here.
    pub(in crate::status) fn run_on_machines(here: &[(&str, usize)]) -> RunFacts {
        let machines = ["a", "b", "c", "d"].map(str::to_owned).into();
        let launcher = info(0, 0, RunPart::LauncherOfAgents { id: 7, machines, num_machines: 4 });
        let agents: Vec<_> = here.iter().map(|&(machine, first_rank)| agent(machine, first_rank, 2)).collect();
        let parts = agents.iter().map(|agent| (agent, vec![RankStatus::default(); 2]));
        let parts: Vec<_> = std::iter::once((&launcher, Vec::new())).chain(parts).collect();
        RunFacts::told(&parts, 10 * SECOND, &no_process).unwrap()
    }

    /// The agent of a launcher that is on another machine.
    pub(in crate::status) fn run_of_an_agent() -> RunFacts {
        let info = agent("b", 4, 2);
        RunFacts::told(&[(&info, vec![RankStatus::default(); 2])], 10 * SECOND, &no_process).unwrap()
    }

    /// Four seconds before it is started again.
    pub(in crate::status) fn run_in_a_pause() -> RunFacts {
        let cause = "rank 1 exited with code 3\u{1b}".to_owned();
        let part = RunPart::Pause { until: 14 * SECOND, cause };
        let info = RunInfo { restart_count: 2, max_restarts: 3, ..info(0, 0, part) };
        RunFacts::told(&[(&info, Vec::new())], 10 * SECOND, &no_process).unwrap()
    }

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
        let process = |id| match id {
            44 => Process { state: Some(State::Stopped), resident_bytes: Some(1_200_000_000) },
            41 | 42 => Process { state: Some(State::Running), resident_bytes: Some(1_000_000) },
            other => unreachable!("{other} has ended, or is the shell of another one"),
        };
        RunFacts::told(&[(&info(4, 4, RunPart::Launcher), ranks.into())], 10 * SECOND, &process).unwrap()
    }

    /// `kill -STOP` in the middle of a call: whoever asks for those that are awaited finds it.
    #[test]
    fn a_rank_that_is_stopped_in_a_call_is_awaited_by_those_in_theirs() {
        let rank = |state, seconds: f64| {
            let call = CallFacts { op: "all_reduce".to_owned(), number: 2, site: None, seconds };
            let mut run = run();
            RankFacts { state, call: Some(call), awaited: false, ..run.ranks.swap_remove(1) }
        };
        let long = LONG.as_secs_f64();
        for (seconds, other, wanted) in
            [(long, State::Running, true), (long, State::Stopped, false), (0.0, State::Running, false)]
        {
            let ranks = with_stopped_ones(vec![rank(State::Stopped, long), rank(other, seconds)]);
            assert_eq!(ranks[0].awaited, wanted, "{seconds} {other:?}");
        }
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

    #[test]
    fn what_agents_tell_is_one_run_with_what_their_launcher_does() {
        let run = run_on_machines(&[("a", 0), ("c", 5)]);
        assert_eq!((run.launcher, run.launcher_host.as_deref(), run.num_machines), (39, None, Some(4)));
        assert_eq!(run.ranks.iter().map(|rank| rank.rank).collect::<Vec<_>>(), [0, 1, 5, 6]);
        let agents: Vec<_> = run.agents.iter().map(|agent| (agent.machine.as_str(), agent.ranks.as_slice())).collect();
        assert_eq!(agents, [("a", &[0, 1][..]), ("c", &[5, 6])]);
        assert_eq!(run.machines, ["a", "b", "c", "d"]);
        // Of a launcher elsewhere there is what its agent knows, in a form that cannot steer a terminal.
        let run = run_of_an_agent();
        assert_eq!((run.launcher, run.launcher_host.as_deref(), run.num_machines), (39, Some("head\\n"), None));
        assert_eq!(run.machines, ["b"]);
    }

    /// Somebody may have written over what the launcher says.
    #[test]
    fn numbers_that_no_run_has_are_shown_and_break_nothing() {
        let all = usize::MAX;
        let info = RunInfo {
            num_processes: all,
            started: u64::MAX,
            restart_count: all,
            ..info(all - 2, 2, RunPart::Launcher)
        };
        let run = RunFacts::told(&[(&info, vec![RankStatus::default(); 2])], SECOND, &no_process).unwrap();
        assert_eq!(run.ranks.iter().map(|rank| rank.rank).collect::<Vec<_>>(), [all - 2, all - 1]);
        assert_eq!(run.elapsed_seconds, 0.0);
        let pause = RunPart::Pause { until: u64::MAX, cause: String::new() };
        let run =
            RunFacts::told(&[(&RunInfo { part: pause, num_local_processes: 0, ..info }, Vec::new())], 0, &no_process);
        assert!(run.unwrap().pause.unwrap().seconds.is_finite());
    }

    #[test]
    fn a_run_in_a_pause_says_how_long_and_why() {
        let run = run_in_a_pause();
        let pause = run.pause.unwrap();
        assert_eq!((pause.seconds, pause.cause.as_str()), (4.0, "rank 1 exited with code 3\\u{1b}"));
        assert!(run.ranks.is_empty() && run.agents.is_empty());
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
