//! Runs that are asked to end: all ranks save and leave after the same step, and what they saved goes on to the bit.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use rstest::rstest;
use rustix::process::{Pid, Signal, kill_process};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread::JoinHandle;
use std::time::SystemTime;

/// The gate is in this step.
const HELD: u64 = 3;

/// A launcher with its ranks, which train.
struct Run {
    child: Child,
    stdout: BufReader<ChildStdout>,
    stderr: JoinHandle<String>,
    printed: String,
}

/// What a run has printed, and how it ended.
struct Ended {
    code: i32,
    printed: String,
    errors: String,
}

fn start(world_size: usize, folder: &Path, environment: &[(&str, &str)]) -> Run {
    let mut command = Command::new(env!("CARGO_BIN_EXE_attack"));
    command
        .args(["--launch", &world_size.to_string(), "--script", "checkpointed"])
        .args(["--program", env!("CARGO_BIN_EXE_conformance"), "--folder"])
        .arg(folder)
        .env("ACCELERATE_USE_CPU", "true")
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let stdout = BufReader::new(child.stdout.take().unwrap());
    let mut stderr = child.stderr.take().unwrap();
    let stderr = std::thread::spawn(move || {
        let mut text = Vec::new();
        stderr.read_to_end(&mut text).unwrap();
        String::from_utf8_lossy(&text).into_owned()
    });
    Run { child, stdout, stderr, printed: String::new() }
}

impl Run {
    /// Reads until rank 0 waits at the gate, and returns the processes of the ranks in order.
    fn until_held(&mut self, world_size: usize) -> Vec<Pid> {
        let held = format!("step {HELD} loss");
        while !self.printed.contains(&held) || self.ranks().len() < world_size {
            let before = self.printed.len();
            self.stdout.read_line(&mut self.printed).unwrap();
            assert!(before < self.printed.len(), "it ended before step {HELD}: {}", self.printed);
        }
        self.ranks().into_values().collect()
    }

    fn ranks(&self) -> BTreeMap<usize, Pid> {
        let lines = self.printed.lines().filter_map(|line| line.split_once("process ")?.1.split_once(" is rank "));
        lines.map(|(process, rank)| (rank.parse().unwrap(), Pid::from_raw(process.parse().unwrap()).unwrap())).collect()
    }

    fn launcher(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32).unwrap()
    }

    fn end(mut self) -> Ended {
        self.stdout.read_to_string(&mut self.printed).unwrap();
        let status = self.child.wait().unwrap();
        let errors = self.stderr.join().unwrap();
        let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap());
        Ended { code, printed: self.printed, errors }
    }
}

impl Ended {
    /// Bits of the loss and of the learning rate after each step.
    fn losses(&self) -> BTreeMap<u64, String> {
        let steps = self.printed.lines().filter_map(|line| line.split_once("step ")?.1.split_once(" loss "));
        steps.map(|(step, bits)| (step.parse().unwrap(), bits.to_owned())).collect()
    }

    /// The step after which all `world_size` ranks have stopped.
    fn last_step(&self, world_size: usize) -> u64 {
        let stops = self.printed.lines().filter_map(|line| line.split_once(" stops after step "));
        let stops: Vec<u64> = stops.map(|(_, step)| step.parse().unwrap()).collect();
        assert_eq!(stops.len(), world_size, "{}\n{}", self.printed, self.errors);
        assert_eq!(BTreeSet::from_iter(&stops).len(), 1, "{}", self.printed);
        assert_eq!(self.losses().keys().last(), stops.first(), "{}", self.printed);
        stops[0]
    }

    fn has_reached_the_end(&self) -> bool {
        self.printed.contains("trained to the end")
    }
}

fn to_the_end(world_size: usize, form: &str, folder: &Path) -> Ended {
    let ended = start(world_size, folder, &[("CHECKPOINTED_FORM", form)]).end();
    assert_eq!(ended.code, 0, "{}", ended.errors);
    assert!(ended.has_reached_the_end(), "{}", ended.printed);
    ended
}

fn gate_in(folder: &Path) -> PathBuf {
    let gate = folder.join("gate");
    assert!(Command::new("mkfifo").arg(&gate).status().unwrap().success());
    gate
}

/// Who gets a signal.
#[derive(Clone, Copy, Debug, PartialEq)]
enum To {
    Launcher,
    LastRank,
    /// As Slurm does it at the end of an allocation: the launcher passes it on to ranks that have got it already.
    Everybody,
}

#[rstest]
#[case::terminated(1, "ddp", To::Launcher, Signal::TERM, 143)]
#[case::terminated(2, "ddp", To::Launcher, Signal::TERM, 143)]
#[case::terminated(3, "full_shard", To::Launcher, Signal::TERM, 143)]
#[case::one_rank_of_two(2, "async", To::LastRank, Signal::TERM, 0)]
#[case::one_rank_of_three(3, "ddp", To::LastRank, Signal::TERM, 0)]
#[case::interrupted(2, "ddp", To::Launcher, Signal::INT, 130)]
#[case::warned_by_slurm(2, "ddp", To::Launcher, Signal::USR1, 0)]
#[case::warned_by_submitit(1, "ddp", To::LastRank, Signal::USR2, 0)]
#[case::ended_by_slurm(2, "ddp", To::Everybody, Signal::TERM, 143)]
fn a_signal_ends_all_ranks_after_the_same_step_and_the_run_goes_on_to_the_bit(
    #[case] world_size: usize,
    #[case] form: &str,
    #[case] to: To,
    #[case] signal: Signal,
    #[case] code: i32,
) {
    let [undisturbed, stopped] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let wanted = to_the_end(world_size, form, undisturbed.path()).losses();
    let gate = gate_in(stopped.path());
    let environment = [("CHECKPOINTED_GATE", gate.to_str().unwrap()), ("CHECKPOINTED_FORM", form)];
    let mut run = start(world_size, stopped.path(), &environment);
    let ranks = run.until_held(world_size);
    let told = match to {
        To::Launcher => vec![run.launcher()],
        To::LastRank => vec![ranks[world_size - 1]],
        To::Everybody => ranks.iter().copied().chain([run.launcher()]).collect(),
    };
    told.into_iter().for_each(|process| kill_process(process, signal).unwrap());
    std::fs::write(&gate, "").unwrap();
    let ended = run.end();
    assert_eq!(ended.code, code, "{}\n{}", ended.printed, ended.errors);
    let last = ended.last_step(world_size);
    assert!(HELD <= last && !ended.has_reached_the_end(), "{}", ended.printed);
    assert!(ended.errors.contains("should_stop is true on all ranks, because rank "), "{}", ended.errors);
    let resumed = to_the_end(world_size, form, stopped.path());
    assert_eq!(resumed.losses().keys().next(), Some(&(last + 1)), "{}", resumed.printed);
    let mut losses = ended.losses();
    losses.extend(resumed.losses());
    assert_eq!(losses, wanted);
}

const PAST: &str = "2020-01-31T18:00:00+01:00";
const FUTURE: &str = "9999-01-31T18:00:00Z";

#[rstest]
#[case::in_the_past(&[("ACCELERATE_STOP_AT", PAST)], true)]
#[case::in_seconds_of_the_past(&[("ACCELERATE_STOP_AT", "1580490000")], true)]
#[case::in_the_future(&[("ACCELERATE_STOP_AT", FUTURE), ("SLURM_JOB_END_TIME", "0")], false)]
#[case::slurm(&[("SLURM_JOB_END_TIME", "1580490000")], true)]
#[case::the_earlier_of_both(&[("ACCELERATE_STOP_AT", FUTURE), ("SLURM_JOB_END_TIME", "1580490000")], true)]
fn a_deadline_ends_all_ranks_after_the_next_step(#[case] environment: &[(&str, &str)], #[case] stops: bool) {
    ends_in_time(environment, stops);
}

/// The run ends tomorrow, and the margin is two days.
#[test]
fn a_margin_that_has_begun_ends_all_ranks_after_the_next_step() {
    const DAY: u64 = 24 * 60 * 60;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    let [tomorrow, two_days] = [now + DAY, 2 * DAY].map(|seconds| seconds.to_string());
    ends_in_time(&[("ACCELERATE_STOP_AT", &tomorrow)], false);
    ends_in_time(&[("ACCELERATE_STOP_AT", &tomorrow), ("ACCELERATE_STOP_MARGIN", &two_days)], true);
}

fn ends_in_time(environment: &[(&str, &str)], stops: bool) {
    let folder = tempfile::tempdir().unwrap();
    let ended = start(2, folder.path(), environment).end();
    assert_eq!(ended.code, 0, "{}", ended.errors);
    assert_eq!(ended.has_reached_the_end(), !stops, "{}", ended.printed);
    if stops {
        assert_eq!(ended.last_step(2), 1);
        assert!(ended.errors.contains(" says that the run ends at "), "{}", ended.errors);
        // Each run does at least one step.
        assert_eq!(start(2, folder.path(), environment).end().last_step(2), 2);
    }
}

#[rstest]
#[case::a_length_of_time("ACCELERATE_STOP_AT", "3600")]
#[case::words("ACCELERATE_STOP_AT", "in an hour")]
#[case::no_offset("ACCELERATE_STOP_AT", "2030-01-31T18:00:00")]
#[case::milliseconds("ACCELERATE_STOP_AT", "1900000000000000")]
#[case::slurm("SLURM_JOB_END_TIME", "soon")]
#[case::margin("ACCELERATE_STOP_MARGIN", "-1")]
#[case::margin_of_more_than_a_year("ACCELERATE_STOP_MARGIN", "1e12")]
fn a_time_that_is_none_is_an_error_that_names_the_variable(#[case] name: &str, #[case] value: &str) {
    let folder = tempfile::tempdir().unwrap();
    let ended = start(2, folder.path(), &[(name, value)]).end();
    assert_eq!(ended.code, 1, "{}", ended.printed);
    assert!(ended.errors.contains(name) && ended.errors.contains(value), "{}", ended.errors);
}

/// Rank 0 is held in the step, so nothing but the signal can end it.
#[test]
fn the_same_signal_once_more_ends_a_rank_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let gate = gate_in(folder.path());
    let mut run = start(2, folder.path(), &[("CHECKPOINTED_GATE", gate.to_str().unwrap())]);
    let ranks = run.until_held(2);
    // The kernel may make one of two signals that come together.
    while kill_process(ranks[0], Signal::TERM).is_ok() && run.child.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
    let ended = run.end();
    assert_eq!(ended.code, 143, "{}", ended.errors);
    assert!(ended.errors.contains("rank 0") && ended.errors.contains("SIGTERM"), "{}", ended.errors);
    assert_eq!(ended.losses().keys().last(), Some(&HELD), "{}", ended.printed);
}

#[test]
fn a_second_signal_to_the_launcher_ends_everything_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let gate = gate_in(folder.path());
    let mut run = start(2, folder.path(), &[("CHECKPOINTED_GATE", gate.to_str().unwrap())]);
    run.until_held(2);
    let launcher = run.launcher();
    while run.child.try_wait().unwrap().is_none() {
        let _ = kill_process(launcher, Signal::TERM);
        std::thread::yield_now();
    }
    let ended = run.end();
    assert_eq!(ended.code, 143, "{}", ended.errors);
    assert_eq!(ended.losses().keys().last(), Some(&HELD), "{}", ended.printed);
}

#[test]
fn a_program_that_never_asks_dies_of_the_signal_as_without_this() {
    let folder = tempfile::tempdir().unwrap();
    let gate = gate_in(folder.path());
    let environment = [("CHECKPOINTED_GATE", gate.to_str().unwrap()), ("CHECKPOINTED_SILENT", "all")];
    let mut run = start(2, folder.path(), &environment);
    run.until_held(2);
    kill_process(run.launcher(), Signal::TERM).unwrap();
    // Nobody opens the gate.
    let ended = run.end();
    assert_eq!(ended.code, 143, "{}", ended.errors);
    assert!(!ended.printed.contains("stops after"), "{}", ended.printed);
    assert_eq!(ended.losses().keys().last(), Some(&HELD), "{}", ended.printed);
}

/// As with any call that one rank makes and another does not; debug mode says which.
#[rstest]
#[case::plain("false", "")]
#[case::in_debug_mode("true", "rank 0: should_stop")]
fn a_rank_that_never_asks_ends_the_run_and_does_not_hang_it(#[case] debug: &str, #[case] words: &str) {
    let folder = tempfile::tempdir().unwrap();
    let environment = [("CHECKPOINTED_SILENT", "1"), ("ACCELERATE_DEBUG_MODE", debug)];
    let ended = start(2, folder.path(), &environment).end();
    assert_ne!(ended.code, 0, "{}", ended.printed);
    assert!(!ended.has_reached_the_end() && ended.errors.contains(words), "{}", ended.errors);
}

/// Each rank asks its own environment and clock. The launcher gives all the same, so here there is none.
#[test]
fn the_deadline_of_one_rank_is_that_of_all() {
    let folder = tempfile::tempdir().unwrap();
    let config = accelerate_launch::LaunchConfig::new(accelerate_launch::Program::Executable("true".into()), 3);
    let port = accelerate_launch::PortReservation::for_config(&config).unwrap().number().to_string();
    let ranks: Vec<Child> = (0..3)
        .map(|rank| {
            let rank = rank.to_string();
            let mut command = Command::new(env!("CARGO_BIN_EXE_conformance"));
            command
                .args(["checkpointed", "--folder"])
                .arg(folder.path())
                .envs([("RANK", &rank), ("LOCAL_RANK", &rank), ("MASTER_PORT", &port)])
                .envs([("WORLD_SIZE", "3"), ("LOCAL_WORLD_SIZE", "3"), ("MASTER_ADDR", "127.0.0.1")])
                .envs([("OMP_NUM_THREADS", "1"), ("ACCELERATE_USE_CPU", "true")])
                .envs((rank == "2").then_some(("ACCELERATE_STOP_AT", PAST)))
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            command.spawn().unwrap()
        })
        .collect();
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        let [printed, errors] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        assert!(output.status.success(), "{errors}");
        assert!(printed.contains(&format!("rank {rank} stops after step 1")), "{printed}");
        let tells =
            errors.contains("because rank 2 says that the run ends at ") && errors.contains("stop_margin is 120 s");
        assert_eq!(tells, rank == 0, "{errors}");
    }
}
