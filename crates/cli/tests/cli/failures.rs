//! A rank fails: who, how, why, and what becomes of the others.

use std::process::{Command, Stdio};

use crate::support::{Finished, LIVE_ON, Witness, finished, launch_script, named_pipe, obey};

#[test]
fn the_exit_code_is_that_of_the_failed_rank() {
    let ended = finished(launch_script(3, &[], "[ $RANK = 1 ] && { echo the reason >&2; exit 7; }; sleep 30"));
    ended.expect(
        7,
        &[
            "[rank 1] the reason\n",
            "error: rank 1 (process ",
            ") exited with code 7 after ",
            "last lines of rank 1:\n    the reason\n",
            "ranks 0, 2 were running and have been ended by the launcher",
        ],
    );
}

#[test]
fn one_process_hands_on_its_code_too() {
    finished(launch_script(1, &[], "exit 5")).expect(5, &["rank 0 (process ", "exited with code 5"]);
    finished(launch_script(1, &[], "kill -SEGV $$")).expect(128 + 11, &["SIGSEGV"]);
}

#[test]
fn signals_are_shown_by_name_and_become_128_plus_their_number() {
    for (name, number) in [("KILL", 9), ("SEGV", 11), ("ABRT", 6), ("TERM", 15)] {
        let ended = finished(launch_script(2, &[], &format!("[ $RANK = 0 ] && kill -{name} $$; sleep 30")));
        ended.expect(128 + number, &["rank 0 (process ", &format!("was ended by SIG{name} ({number})")]);
        if name == "KILL" {
            ended.expect(137, &["memory"]);
        }
    }
}

#[test]
fn others_are_asked_to_end_first() {
    let (_folder, pipe) = named_pipe();
    let obey = obey("TERM", "asked politely", &pipe);
    let script = format!("[ $RANK = 1 ] && {{ read line <{pipe}; exit 9; }}; {obey}");
    let mut witness = Witness::new();
    let mut command = launch_script(2, &["--grace_period", "20"], &script);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let ended = Finished::from(witness.start(command).wait_with_output().unwrap());
    ended.expect(9, &["rank 0 was running and has been ended by the launcher"]);
    assert_eq!(ended.stdout, "[rank 0] asked politely\n");
    witness.expect_nobody_survives();
}

#[test]
fn others_that_refuse_to_end_are_made_to() {
    let (_folder, pipe) = named_pipe();
    let script = format!(
        "trap '' TERM INT HUP; exec 8<>{pipe}; if [ $RANK = 1 ]; then read a <&8; read b <&8; exit 3; fi; \
         echo >&8; {LIVE_ON}"
    );
    let mut witness = Witness::new();
    let mut command = launch_script(3, &[], &script);
    command.stderr(Stdio::piped());
    let ended = Finished::from(witness.start(command).wait_with_output().unwrap());
    ended.expect(3, &["rank 1 exited with code 3; ending 2 ranks still running"]);
    witness.expect_nobody_survives();
}

/// A stopped process cannot obey before it goes on; it must not hold up the end for as long as the grace period.
#[test]
fn a_stopped_rank_goes_on_and_is_ended_too() {
    let (_folder, pipe) = named_pipe();
    let is_stopped = "grep -q '^State:.T' /proc/$stopped/status";
    let script = format!(
        "if [ $RANK = 0 ]; then echo $$ >{pipe}; kill -STOP $$; {LIVE_ON}; \
         else read stopped <{pipe}; until {is_stopped}; do :; done; exit 4; fi"
    );
    let mut witness = Witness::new();
    let mut command = launch_script(2, &["--grace_period", "3600"], &script);
    command.stderr(Stdio::piped());
    let ended = Finished::from(witness.start(command).wait_with_output().unwrap());
    ended.expect(4, &["rank 0 was stopped by a signal such as SIGSTOP, and did nothing"]);
    witness.expect_nobody_survives();
}

#[test]
fn of_two_failures_at_once_the_crash_is_the_cause() {
    // Rank 0 fails as soon as its peer is gone, as a collective would.
    let (_folder, pipe) = named_pipe();
    let script = format!("if [ $RANK = 0 ]; then cat {pipe} >/dev/null; exit 1; else exec 9>{pipe}; kill -SEGV $$; fi");
    finished(launch_script(2, &[], &script)).expect(139, &["error: rank 1 (process "]);
}

#[test]
fn quiet_means_one_line() {
    let ended = finished(launch_script(2, &["-q"], "[ $RANK = 1 ] && exit 3; sleep 30"));
    ended.expect(3, &["rank 1 (process "]);
    assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
}

#[test]
fn the_last_lines_are_readable() {
    let script = "i=0; while [ $i -lt 100 ]; do echo line $i; i=$((i+1)); done; \
                  printf '\\r10%%\\r\\033[2K90%%\\n' >&2; printf '\\033[31mred\\033[0m' >&2; [ $RANK = 0 ] || exit 1; sleep 30";
    let ended = finished(launch_script(2, &[], script));
    let report = ended.stderr.split_once("last lines of rank 1:\n").unwrap().1;
    let lines: Vec<_> = report.lines().take_while(|line| line.starts_with("    ")).map(str::trim).collect();
    assert_eq!(lines.len(), 20);
    assert!(lines.contains(&"line 99") && !lines.contains(&"line 79"), "{lines:?}");
    assert!(lines.contains(&"90%") && lines.contains(&"red"), "{lines:?}");
}

/// As with RUST_BACKTRACE=1: what went wrong stands above a list that is longer than what is shown.
#[test]
fn the_message_of_a_panic_is_shown_and_not_its_backtrace() {
    let script = "echo \"thread 'main' panicked at src/main.rs:2:5:\" >&2; echo no room >&2; \
                  echo 'stack backtrace:' >&2; i=0; while [ $i -lt 60 ]; do echo \"  $i: some::function\" >&2; \
                  echo '     at ./src/main.rs:7:5' >&2; i=$((i+1)); done; exit 101";
    let ended = finished(launch_script(2, &[], script));
    ended.expect(
        101,
        &["panicked at src/main.rs:2:5:\n    no room\n    stack backtrace:\n      ... (120 lines of a backtrace)\n"],
    );
}

/// A limit of the shell below which the launch begins, and what it then says.
fn limited(limit: &str, num_processes: usize, flags: &[&str], script: &str) -> Finished {
    let inner = launch_script(num_processes, flags, script);
    let mut command = Command::new("sh");
    command.args(["-c", &format!("ulimit {limit}; exec \"$@\""), "sh", "env"]).args(inner.get_args());
    command.env("HF_HOME", "none");
    finished(command)
}

/// The ranks that had been started already are not taken for ranks that failed.
#[test]
fn a_limit_of_open_files_is_named_with_its_cure() {
    let ended = limited("-n 16", 30, &[], "sleep 30");
    ended.expect(1, &["could not be started, because this user may have no more open files", "ulimit -n", "caused by"]);
    assert_eq!(ended.stderr.lines().count(), 2, "{}", ended.stderr);
}

/// The kernel ends a process that writes on into a file that is too long for this user; the launcher is not one of them.
#[test]
fn a_limit_of_the_length_of_files_ends_no_launch() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--tee", "1", "--log_dir", folder.path().to_str().unwrap()];
    let ended = limited("-f 1", 2, &flags, "head -c 100000 /dev/zero | tr '\\0' a; echo; echo end");
    ended.expect(0, &["stdout.log cannot be written (File too large", "the processes go on without it"]);
    assert_eq!(ended.stdout.matches("] end\n").count(), 2);
}
