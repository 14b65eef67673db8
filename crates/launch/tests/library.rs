//! Launching from within a process that lives on: no helper, no adoption, other children beside the ranks.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::io;
use std::process::Command;
use std::time::Duration;

use accelerate_launch::{
    Capture, Ended, Error, LaunchConfig, Notice, Outcome, Program, Reporter, Source, Stream, launch,
};

/// Keeps everything it is told.
#[derive(Default)]
struct Collector {
    output: BTreeMap<(usize, Stream), Vec<u8>>,
    num_closed: usize,
    notices: Vec<Notice>,
    fails_at: Option<&'static str>,
}

impl Collector {
    fn text(&self, rank: usize, stream: Stream) -> &str {
        self.output.get(&(rank, stream)).map_or("", |bytes| std::str::from_utf8(bytes).unwrap())
    }
}

impl Reporter for Collector {
    fn output(&mut self, source: Source, bytes: &[u8]) -> io::Result<()> {
        let collected = self.output.entry((source.rank, source.stream)).or_default();
        collected.extend_from_slice(bytes);
        match self.fails_at {
            Some(words) if String::from_utf8_lossy(collected).contains(words) => Err(io::ErrorKind::StorageFull.into()),
            _ => Ok(()),
        }
    }

    fn closed(&mut self, _: Source) -> io::Result<()> {
        self.num_closed += 1;
        Ok(())
    }

    fn notice(&mut self, notice: &Notice) -> io::Result<()> {
        self.notices.push(notice.clone());
        Ok(())
    }
}

#[test]
fn every_rank_reads_all_of_what_it_is_given_and_then_the_end() {
    for num_processes in [1, 3] {
        // More than a pipe holds.
        let config = LaunchConfig { input: Some(vec![b'x'; 200_000]), ..config(num_processes, "wc -c") };
        let (collector, outcome) = collected(&config);
        outcome.unwrap();
        for rank in 0..num_processes {
            assert_eq!(collector.text(rank, Stream::Stdout).trim(), "200000");
        }
    }
}

fn config(num_processes: usize, script: &str) -> LaunchConfig {
    LaunchConfig {
        args: vec!["-c".into(), script.into()],
        capture: Capture::Always,
        ..LaunchConfig::new(Program::Executable("sh".into()), num_processes)
    }
}

fn collected(config: &LaunchConfig) -> (Collector, Result<Outcome, Error>) {
    let mut collector = Collector::default();
    let outcome = launch(config, &mut collector);
    (collector, outcome)
}

#[test]
fn a_reporter_gets_every_byte_and_the_end_of_each_stream() {
    let (collector, outcome) = collected(&config(2, "echo out $RANK; printf 'err %s' $RANK >&2"));
    for rank in 0..2 {
        assert_eq!(collector.text(rank, Stream::Stdout), format!("out {rank}\n"));
        assert_eq!(collector.text(rank, Stream::Stderr), format!("err {rank}"));
    }
    assert_eq!((collector.num_closed, collector.notices.len()), (4, 0));
    let ranks = outcome.unwrap().ranks;
    assert_eq!(
        ranks.iter().map(|rank| (rank.rank, rank.ended)).collect::<Vec<_>>(),
        [(0, Ended::Exited(0)), (1, Ended::Exited(0))]
    );
}

#[test]
fn one_process_can_be_captured_too() {
    let (collector, outcome) = collected(&config(1, "echo ${RANK-not distributed}"));
    assert_eq!(collector.text(0, Stream::Stdout), "not distributed\n");
    assert!(outcome.is_ok());
}

#[test]
fn a_failure_says_who_and_why() {
    let (collector, outcome) = collected(&config(3, "[ $RANK = 2 ] && { echo reason; exit 4; }; exec sleep 30"));
    let error = outcome.unwrap_err();
    assert!(error.is_child_failed());
    assert_eq!((error.rank(), error.exit_code()), (Some(2), 4));
    let failure = error.failure().unwrap();
    assert_eq!((failure.ended, failure.last_lines.as_slice()), (Ended::Exited(4), &["reason".to_string()][..]));
    assert!(failure.others.iter().all(|other| other.was_told_to));
    assert_eq!(collector.notices, [Notice::RankFailed { rank: 2, ended: Ended::Exited(4), num_others: 2 }]);
}

/// Nothing adopts what is left here, so every group must be dealt with as a group.
#[test]
fn stubborn_groups_are_gone_when_the_launch_returns() {
    let folder = tempfile::tempdir().unwrap();
    // Rank 1 fails once rank 0 is deaf.
    let deaf = folder.path().join("deaf");
    let script = format!(
        "trap '' TERM; (while :; do sleep 0.05; done) & \
         if [ $RANK = 0 ]; then : >'{0}'; else until [ -e '{0}' ]; do sleep 0.01; done; exit 1; fi; wait",
        deaf.display()
    );
    let config = LaunchConfig { grace_period: Duration::from_millis(100), ..config(2, &script) };
    let error = collected(&config).1.unwrap_err();
    let failure = error.failure().unwrap();
    assert_eq!(failure.others[0].ended, Ended::Signalled { signal: 9, core_dumped: false });
    // The kernel may still be at it.
    while has_living_members(failure.process_id) {
        std::thread::yield_now();
    }
}

/// Of a process group. Killed members may remain as zombies until whoever inherits them collects them.
fn has_living_members(group: u32) -> bool {
    std::fs::read_dir("/proc").unwrap().any(|entry| {
        let stat = std::fs::read_to_string(entry.unwrap().path().join("stat")).unwrap_or_default();
        let fields: Vec<_> = stat.rsplit_once(')').map_or(Vec::new(), |(_, rest)| rest.split_whitespace().collect());
        matches!(fields[..], [state, _, own_group, ..] if own_group == group.to_string() && state != "Z")
    })
}

#[test]
fn a_reporter_that_fails_ends_the_launch() {
    let mut collector = Collector { fails_at: Some("stop"), ..Collector::default() };
    let error = launch(&config(2, "echo stop; exec sleep 30"), &mut collector).unwrap_err();
    assert!(error.is_output_closed(), "{error:?}");
    assert_eq!(error.exit_code(), 141);
}

#[test]
fn children_of_the_host_are_left_alone() {
    let mut other = Command::new("sleep").arg("30").spawn().unwrap();
    collected(&config(2, "exit 3")).1.unwrap_err();
    assert!(other.try_wait().unwrap().is_none());
    other.kill().unwrap();
    other.wait().unwrap();
}

#[test]
fn launches_can_run_side_by_side_and_one_after_another() {
    std::thread::scope(|scope| {
        let launches: Vec<_> = (0..4)
            .map(|number| {
                scope.spawn(move || {
                    for round in 0..5 {
                        let (collector, outcome) = collected(&config(2, &format!("echo {number} {round}")));
                        assert!(outcome.is_ok());
                        assert_eq!(collector.text(1, Stream::Stdout), format!("{number} {round}\n"));
                    }
                })
            })
            .collect();
        for launch in launches {
            launch.join().unwrap();
        }
    });
}

/// Run as a process of its own by the test below: it launches, and afterwards sends itself a signal.
#[test]
fn after_a_launch_interrupts_work_as_before() {
    const ROLE: &str = "ACCELERATE_TEST_INTERRUPTS_ITSELF";
    if std::env::var_os(ROLE).is_some() {
        assert!(collected(&config(1, "true")).1.is_ok());
        signal_hook::low_level::raise(signal_hook::consts::SIGTERM).unwrap();
        panic!("survived its own SIGTERM");
    }
    use std::os::unix::process::ExitStatusExt;
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "after_a_launch_interrupts_work_as_before"])
        .env(ROLE, "1")
        .output()
        .unwrap()
        .status;
    assert_eq!(status.signal(), Some(signal_hook::consts::SIGTERM));
}

/// Whoever launches several things, one after another, must learn that somebody wants it to stop.
#[test]
fn an_interrupt_while_a_failed_launch_is_being_ended_is_told_beside_the_failure() {
    struct Interrupting;

    impl Reporter for Interrupting {
        fn output(&mut self, _: Source, _: &[u8]) -> io::Result<()> {
            Ok(())
        }

        fn notice(&mut self, notice: &Notice) -> io::Result<()> {
            match notice {
                Notice::RankFailed { .. } => signal_hook::low_level::raise(signal_hook::consts::SIGINT),
                _ => Ok(()),
            }
        }
    }

    let script = "if [ $RANK = 1 ]; then exit 3; fi; trap '' TERM INT; while :; do sleep 0.05; done";
    let config = LaunchConfig { grace_period: Duration::from_secs(3600), ..config(2, script) };
    let error = launch(&config, &mut Interrupting).unwrap_err();
    assert!(error.is_child_failed(), "{error}");
    assert_eq!((error.exit_code(), error.stopped_by()), (3, Some(2)));
}

#[test]
fn a_launch_that_is_restarted_tells_of_it() {
    let folder = tempfile::tempdir().unwrap();
    // Rank 1 fails once rank 0 is there too.
    let script = format!(
        "echo begun >&2; cd {0}; mkdir $RANK 2>/dev/null || exec echo again
         [ $RANK = 0 ] && exec sleep 30; until [ -d 0 ]; do :; done; exit 3",
        folder.path().display()
    );
    let (collector, outcome) = collected(&LaunchConfig { max_restarts: 3, ..config(2, &script) });
    let outcome = outcome.unwrap();
    assert_eq!((outcome.num_restarts, outcome.ranks.len()), (1, 2));
    assert_eq!(collector.text(1, Stream::Stdout), "again\n");
    // Both streams of both ranks, once in each attempt.
    assert_eq!(collector.num_closed, 8);
    match &collector.notices[..] {
        [Notice::RankFailed { rank: 1, .. }, Notice::Restarting { cause, restart, max_restarts, after, .. }] => {
            assert!(cause.starts_with("rank 1 (process "), "{cause}");
            assert_eq!((*restart, *max_restarts, *after), (1, 3, Duration::ZERO));
        }
        other => panic!("{other:?}"),
    }
}

/// As those of a run whose launcher has been started again itself.
#[test]
fn attempts_are_counted_on_from_those_before() {
    let script = "[ $TORCHELASTIC_RESTART_COUNT = 3 ] && exit 4; exit 5";
    let config = LaunchConfig { max_restarts: 1, restart_count: 3, ..config(1, script) };
    let error = launch(&config, &mut Collector::default()).unwrap_err();
    assert_eq!((error.exit_code(), error.restarts().num_restarts()), (5, 1));
    assert_eq!(error.restarts().to_string(), "attempt 3 had failed: rank 0 exited with code 4");
}

/// Nobody has asked for one.
#[test]
fn without_restarts_nothing_is_said_of_them() {
    for code in [1, 2] {
        let error = launch(&config(1, &format!("exit {code}")), &mut Collector::default()).unwrap_err();
        assert_eq!((error.restarts().num_restarts(), error.restarts().to_string()), (0, String::new()));
    }
}

#[test]
fn a_reporter_that_fails_is_no_reason_to_start_again() {
    let mut collector = Collector { fails_at: Some("stop"), ..Collector::default() };
    let config = LaunchConfig { max_restarts: 3, ..config(2, "echo stop; exec sleep 30") };
    let error = launch(&config, &mut collector).unwrap_err();
    assert!(error.is_output_closed() && error.restarts().num_restarts() == 0, "{error:?}");
}
