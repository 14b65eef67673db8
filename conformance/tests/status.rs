//! What ranks tell of themselves is read from outside while they wait, and belongs to the story when one of them fails.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate_core::status::{RankActivity, RankStatus, awaited_ranks, samples_per_second};
use accelerate_launch::status::{Run, now, runs};
use accelerate_launch::{LaunchConfig, Outcome, Program, Silent, launch};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

const NUM_PROCESSES: usize = 3;

/// Ranks of which number 1 keeps the others waiting, until `folder/gate` is opened for writing.
fn start(folder: &Path) -> JoinHandle<accelerate_launch::Result<Outcome>> {
    assert!(Command::new("mkfifo").arg(folder.join("gate")).status().unwrap().success());
    let config = LaunchConfig {
        args: vec!["awaited_rank".into(), "--folder".into(), folder.into()],
        environment: vec![("ACCELERATE_USE_CPU".into(), "true".into())],
        num_cpu_threads_per_process: Some(1),
        ..LaunchConfig::new(Program::Executable(env!("CARGO_BIN_EXE_conformance").into()), NUM_PROCESSES)
    };
    thread::spawn(move || launch(&config, &mut Silent))
}

/// Is the rank in the call that rank 1 does not come to?
fn is_waiting(rank: &RankStatus) -> bool {
    matches!(rank.activity(now()), RankActivity::InCall { call, .. } if call.op == "all_reduce" && is_of_script(&call.site))
}

fn is_of_script(site: &Option<String>) -> bool {
    site.as_ref().is_some_and(|site| site.starts_with("conformance/src/awaited.rs:"))
}

fn has_trained(rank: &RankStatus) -> bool {
    rank.steps == 3 && matches!(rank.activity(now()), RankActivity::Computing { .. })
}

/// The run in this folder, once rank 1 has trained and the others wait for it.
fn once_they_wait(folder: &Path) -> Run {
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        let is_of_folder = |run: &Run| run.info.command.iter().any(|word| Path::new(word) == folder);
        if let Some(run) = runs().unwrap().into_iter().find(is_of_folder) {
            let ranks = run.ranks();
            if is_waiting(&ranks[0]) && has_trained(&ranks[1]) && is_waiting(&ranks[2]) {
                return run;
            }
            assert!(Instant::now() < deadline, "{ranks:#?}");
        }
        assert!(Instant::now() < deadline, "there is no such run");
        thread::park_timeout(Duration::from_millis(5));
    }
}

#[test]
fn a_run_that_hangs_is_read_from_outside_until_it_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let launched = start(folder.path());
    let run = once_they_wait(folder.path());
    assert_eq!((run.info.num_processes, run.info.process_id), (NUM_PROCESSES, std::process::id()));
    let ranks = run.ranks();
    let awaited = awaited_ranks(&ranks, ranks.len(), now(), Duration::ZERO);
    assert_eq!(awaited, [false, true, false], "{ranks:#?}");
    for rank in &ranks {
        assert!(rank.owner.is_some() && rank.owner == rank.started && rank.ended.is_none(), "{rank:#?}");
        // Two rows for each rank in a step.
        assert_eq!((rank.steps, rank.progress.samples()), (3, 2 * 3 * NUM_PROCESSES as u64));
        assert!(samples_per_second(&rank.progress, now()).is_some_and(|number| number > 0.0));
    }
    match ranks[1].activity(now()) {
        RankActivity::Computing { after: Some((call, _)) } => assert!(is_of_script(&call.site), "{call}"),
        other => panic!("{other:?}"),
    }
    File::options().write(true).open(folder.path().join("gate")).unwrap();
    launched.join().unwrap().unwrap();
    assert!(run.ranks().iter().all(|rank| rank.ended == Some(Ok(0))), "they have told until the end");
    // The launcher is this process, which has opened it as a reader, too.
    let info = run.info.clone();
    drop(run);
    assert!(!runs().unwrap().iter().any(|other| other.info == info), "the launcher has let go of it");
}

#[test]
fn a_rank_that_is_killed_is_told_of_with_the_calls_of_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let launched = start(folder.path());
    let run = once_they_wait(folder.path());
    let process = run.ranks()[1].owner.and_then(|id| Pid::from_raw(id.cast_signed())).unwrap();
    kill_process(process, Signal::KILL).unwrap();
    let error = launched.join().unwrap().unwrap_err();
    let failure = error.failure().unwrap();
    assert_eq!((failure.rank, failure.ended.exit_code()), (1, 137));
    let text = failure.to_string();
    let line =
        |words: &str| text.lines().find(|line| line.contains(words)).unwrap_or_else(|| panic!("{text}")).to_owned();
    let waiting = line("ranks 0, 2 were in all_reduce (collective ");
    assert!(waiting.contains(" at conformance/src/awaited.rs:") && waiting.ends_with(" s"), "{waiting}");
    let own = line("rank 1 was computing, ");
    assert!(own.contains(" s after ") && own.contains(" at conformance/src/awaited.rs:"), "{own}");
}
