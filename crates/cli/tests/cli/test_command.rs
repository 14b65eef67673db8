//! `accelerate test` launches check after check, and reports each.

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use rustix::process::Signal;

use crate::support::{Finished, LIVE_ON, Witness, accelerate, send};

/// A program of checks, one of which fails on rank 1, and what `accelerate test` says of it.
fn test(arguments: &[&str]) -> Finished {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("checks");
    let script = "#!/bin/sh\n[ -d \"$3\" ] || exit 9\n\
                  if [ $1 = test_ops ] && [ ${RANK-0} = 1 ]; then echo 'sums differ' >&2; exit 3; fi\n";
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_accelerate"));
    command.args(["test", "--program"]).arg(&program).args(arguments).env("HF_HOME", folder.path());
    Finished::from(command.output().unwrap())
}

#[test]
fn checks_that_pass_have_a_line_each() {
    let ended = test(&["--cpu", "--num_processes", "3", "--checks", "test_sync,test_metrics"]);
    let words: Vec<_> = ended.stdout.lines().map(|line| line.split_whitespace().take(2).collect::<Vec<_>>()).collect();
    assert_eq!(words, [["ok", "test_sync"], ["ok", "test_metrics"], ["2", "passed,"]], "{}", ended.stdout);
    assert!(ended.stdout.contains("2 passed, 0 failed, on 3 processes"), "{}", ended.stdout);
    ended.expect(0, &[]);
}

#[test]
fn a_check_that_fails_is_shown_with_what_was_said_last_and_the_others_go_on() {
    let ended = test(&["--cpu"]);
    let failed = ended.stdout.lines().filter(|line| line.starts_with("FAIL")).count();
    assert!(failed == 1 && ended.stdout.contains("FAIL  test_ops"), "{}", ended.stdout);
    assert!(ended.stdout.contains("rank 1") && ended.stdout.contains("sums differ"), "{}", ended.stdout);
    assert!(ended.stdout.contains("11 passed, 1 failed, on 2 processes"), "{}", ended.stdout);
    ended.expect(1, &[]);
}

#[test]
fn a_program_that_is_not_there_is_one_error_with_the_command_that_builds_it() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_accelerate"));
    let folder = tempfile::tempdir().unwrap();
    command.args(["test", "--cpu"]).current_dir(folder.path()).env("HF_HOME", folder.path()).env("PATH", folder.path());
    let ended = Finished::from(command.output().unwrap());
    assert_eq!(ended.stdout, "");
    ended.expect(2, &["conformance", "cargo build --release --package conformance"]);
}

/// To stop the checks is no failure of one, and the others do not go on.
#[test]
fn a_signal_stops_all_checks_and_becomes_the_exit_code() {
    for (signal, name, code) in [(Signal::INT, "SIGINT", 130), (Signal::TERM, "SIGTERM", 143)] {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("checks");
        let script = format!("#!/bin/sh\nif [ $1 = test_sync ]; then echo ready >/dev/fd/$WITNESS; {LIVE_ON}; fi\n");
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut command = accelerate();
        command.args(["test", "--cpu", "--num_processes", "2", "--program"]).arg(&program);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut witness = Witness::new();
        let child = witness.start(command);
        witness.wait_for("ready", 2);
        send(&child, signal);
        let ended = Finished::from(child.wait_with_output().unwrap());
        let told = format!("error: stopped by {name} during test_sync; before it 1 passed and 0 failed");
        ended.expect(code, &[&told]);
        assert!(!ended.stdout.contains("FAIL") && !ended.stdout.contains("test_ops"), "{}", ended.stdout);
        witness.expect_nobody_survives();
    }
}

/// Who pipes the report into a pager and leaves it still learns by the code how the checks went.
#[test]
fn checks_go_on_when_nobody_reads_their_report() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("checks");
    std::fs::write(&program, "#!/bin/sh\n[ $1 != test_kwargs_handlers ]\n").unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = accelerate();
    command.args(["test", "--cpu", "--program"]).arg(&program).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take());
    let ended = Finished::from(child.wait_with_output().unwrap());
    ended.expect(1, &[]);
    assert_eq!(ended.stderr, "");
}
