//! The launcher is told to stop, or to go on although somebody wants it to stop.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use rstest::rstest;
use rustix::io::ioctl_fionread;
use rustix::process::Signal;

use crate::support::{
    Finished, LIVE_ON, WITNESS_FILE, Witness, accelerate, finished, insist, launch_script, obey, send,
};

const READY: &str = "echo ready >/dev/fd/$WITNESS";

#[test]
fn the_signal_is_passed_on_and_becomes_the_exit_code() {
    for (signal, name, code) in [(Signal::INT, "INT", 130), (Signal::TERM, "TERM", 143), (Signal::HUP, "HUP", 129)] {
        let mut witness = Witness::new();
        let mut command = launch_script(2, &[], &obey(name, "obeyed", WITNESS_FILE));
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = witness.start(command);
        witness.wait_for("ready", 2);
        send(&child, signal);
        let ended = Finished::from(child.wait_with_output().unwrap());
        ended
            .expect(code, &[&format!("SIG{name} received and passed on to 2 ranks"), &format!("stopped by SIG{name}")]);
        assert_eq!(ended.sorted_stdout(), ["[rank 0] obeyed", "[rank 1] obeyed"]);
        witness.expect_nobody_survives();
    }
}

/// A single process writes by itself, and is not at a terminal here.
#[test]
fn one_process_is_stopped_in_the_same_way() {
    for (signal, name, code) in [(Signal::INT, "INT", 130), (Signal::TERM, "TERM", 143)] {
        let mut witness = Witness::new();
        let mut command = launch_script(1, &[], &obey(name, "obeyed", WITNESS_FILE));
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = witness.start(command);
        witness.wait_for("ready", 1);
        send(&child, signal);
        let ended = Finished::from(child.wait_with_output().unwrap());
        ended.expect(code, &[&format!("error: stopped by SIG{name}")]);
        assert_eq!(ended.stdout, "obeyed\n");
        witness.expect_nobody_survives();
    }
}

/// `timeout` signals its child and then the group of its child; a session that ends sends `SIGTERM` and `SIGHUP`. The ranks have the time
/// to save that they have after one signal.
#[test]
fn a_request_that_comes_twice_is_no_second_one() {
    for (num_processes, again) in [(1, Signal::TERM), (2, Signal::TERM), (2, Signal::HUP)] {
        let mut witness = Witness::new();
        // The first signal is obeyed after a moment, in which the second one has come.
        let script = format!("trap 'sleep 0.4; echo saved; exit 0' TERM HUP; {READY}; {LIVE_ON}");
        let mut command = launch_script(num_processes, &["--shutdown_grace_period", "60"], &script);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = witness.start(command);
        witness.wait_for("ready", num_processes);
        send(&child, Signal::TERM);
        send(&child, again);
        let ended = Finished::from(child.wait_with_output().unwrap());
        assert_eq!(ended.stdout.matches("saved").count(), num_processes, "{}", ended.stderr);
        assert!(matches!(ended.code, Some(143 | 129)), "{:?} {}", ended.code, ended.stderr);
        witness.expect_nobody_survives();
    }
}

#[test]
fn ranks_that_do_not_care_about_the_signal_just_end() {
    let mut witness = Witness::new();
    let mut command = launch_script(2, &[], &format!("{READY}; {LIVE_ON}"));
    command.stderr(Stdio::null());
    let mut child = witness.start(command);
    witness.wait_for("ready", 2);
    send(&child, Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(143));
    witness.expect_nobody_survives();
}

#[test]
fn ranks_that_refuse_are_made_to_after_the_grace_period() {
    let mut witness = Witness::new();
    let script = format!("trap '' INT TERM HUP; {READY}; {LIVE_ON}");
    let mut command = launch_script(2, &["--shutdown_grace_period", "0.1"], &script);
    command.stderr(Stdio::null());
    let mut child = witness.start(command);
    witness.wait_for("ready", 2);
    send(&child, Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(143));
    witness.expect_nobody_survives();
}

/// Rank 0 is killed, rank 1 does not save, and rank 2 does.
#[test]
fn what_goes_wrong_during_a_stop_is_told() {
    let mut witness = Witness::new();
    let script =
        format!("case $RANK in 0) trap '' TERM;; 1) trap 'exit 4' TERM;; 2) trap exit TERM;; esac; {READY}; {LIVE_ON}");
    let mut command = launch_script(3, &["--shutdown_grace_period", "2"], &script);
    command.stderr(Stdio::piped());
    let child = witness.start(command);
    witness.wait_for("ready", 3);
    send(&child, Signal::TERM);
    let ended = Finished::from(child.wait_with_output().unwrap());
    let told = "error: stopped by SIGTERM\n  rank 0 did not end within 2 s and was killed; raise --shutdown_grace_period if that is \
                too short\n  told to stop, rank 1 exited with code 4\n";
    ended.expect(143, &[told]);
    witness.expect_nobody_survives();
}

#[test]
fn a_second_interrupt_does_not_wait() {
    let mut witness = Witness::new();
    let script = format!("trap '' INT TERM HUP; {READY}; {LIVE_ON}");
    let mut command = launch_script(2, &["--shutdown_grace_period", "3600"], &script);
    command.stderr(Stdio::piped());
    let mut child = witness.start(command);
    witness.wait_for("ready", 2);
    send(&child, Signal::INT);
    // Its notice says that the first one has been taken.
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut notice = String::new();
    stderr.read_line(&mut notice).unwrap();
    assert!(notice.contains("a second one ends everything at once"), "{notice}");
    insist(&mut child, Signal::INT);
    // Of the signals that it is sent, one may come when it has stopped listening.
    let status = child.wait().unwrap();
    assert!(status.code() == Some(130) || status.signal() == Some(Signal::INT.as_raw()), "{status}");
    let told = stderr.lines().map(Result::unwrap).collect::<Vec<_>>().join("\n");
    assert!(
        told.contains("SIGINT received after another request to end; 2 ranks that were still running are killed"),
        "{told}"
    );
    witness.expect_nobody_survives();
}

/// As behind `less`, which shows its first page. What ranks still have to say does not keep them from saving.
#[rstest]
#[case::of_ranks(false)]
#[case::and_its_own(true)]
fn a_launcher_whose_output_nobody_takes_obeys(#[case] has_its_own: bool) {
    const ALMOST_FULL: u64 = (64 << 10) - 4096;
    let (reader, writer) = std::io::pipe().unwrap();
    let mut witness = Witness::new();
    let script = format!("trap 'yes | head -n 100000; echo saved >/dev/fd/$WITNESS; exit' TERM; yes; {LIVE_ON}");
    let mut command = launch_script(2, &[], &script);
    let errors = if has_its_own { Stdio::from(writer.try_clone().unwrap()) } else { Stdio::piped() };
    command.stdout(writer).stderr(errors);
    let child = witness.start(command);
    while ioctl_fionread(&reader).unwrap() < ALMOST_FULL {
        std::thread::yield_now();
    }
    send(&child, Signal::TERM);
    witness.wait_for("saved", 2);
    let ended = Finished::from(child.wait_with_output().unwrap());
    let told: &[&str] = if has_its_own { &[] } else { &["nobody takes the output", "stopped by SIGTERM"] };
    ended.expect(143, told);
    witness.expect_nobody_survives();
}

/// Whoever reads, however slowly, gets everything.
#[test]
fn output_that_somebody_takes_is_not_left_after_a_signal() {
    let mut witness = Witness::new();
    let script = format!("trap 'yes line | head -n 100000; exit' TERM; {READY}; {LIVE_ON}");
    let mut command = launch_script(2, &["--no_prefix"], &script);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = witness.start(command);
    witness.wait_for("ready", 2);
    send(&child, Signal::TERM);
    let ended = Finished::from(child.wait_with_output().unwrap());
    ended.expect(143, &[]);
    assert!(ended.stdout == "line\n".repeat(200_000), "{} bytes", ended.stdout.len());
}

#[test]
fn a_hangup_does_not_reach_a_launch_under_nohup() {
    for (num_processes, num_lines) in [(1, 1), (2, 2)] {
        let mut witness = Witness::new();
        let inner = launch_script(num_processes, &[], &format!("{READY}; read line; {READY}"));
        let mut command = Command::new("env");
        command.args(["--ignore-signal=HUP", "env"]).args(inner.get_args().skip(1));
        command.stdin(Stdio::piped()).stderr(Stdio::piped());
        let mut child = witness.start(command);
        witness.wait_for("ready", num_lines);
        send(&child, Signal::HUP);
        child.stdin.take().unwrap().write_all(b"go on\n").unwrap();
        witness.wait_for("ready", num_lines);
        let ended = Finished::from(child.wait_with_output().unwrap());
        ended.expect(0, &[]);
        witness.expect_nobody_survives();
    }
}

/// Some supervisors start their children so; the end of ranks must be noticed all the same.
#[test]
fn a_launch_that_inherits_ignored_child_signals_still_sees_its_ranks_end() {
    let inner = launch_script(2, &[], "exit 3");
    let mut command = Command::new("env");
    command.args(["--ignore-signal=CHLD", "env"]).args(inner.get_args());
    Finished::from(command.output().unwrap()).expect(3, &["exited with code 3"]);
}

#[test]
fn user_signals_reach_the_program() {
    let mut witness = Witness::new();
    let mut command = launch_script(2, &[], &obey("USR1", "saved", WITNESS_FILE));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = witness.start(command);
    witness.wait_for("ready", 2);
    send(&child, Signal::USR1);
    let ended = Finished::from(child.wait_with_output().unwrap());
    ended.expect(0, &[]);
    assert_eq!(ended.sorted_stdout(), ["[rank 0] saved", "[rank 1] saved"]);
}

/// The command where no job and no other launcher may start it again, whoever runs the tests.
fn first_start() -> Command {
    let mut command = launch_script(1, &[], "echo started");
    let of_starters = ["ACCELERATE_LAUNCH_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_JOBID"];
    for name in of_starters.into_iter().chain(["KUBERNETES_SERVICE_HOST", "PBS_JOBID", "LSB_JOBID"]) {
        command.env_remove(name);
    }
    command
}

/// A slip in the year, or a variable of a shell of yesterday.
#[test]
fn an_end_that_has_passed_is_refused() {
    let passed = "which has passed: it is 2";
    for form in [&["--stop_at=2020-01-31T18:00:00+01:00"][..], &["--emit", "slurm", "--stop_at", "1580490000"]] {
        let mut command = accelerate();
        command.arg("launch").args(form).arg("true");
        for (name, _) in first_start().get_envs().filter(|(_, value)| value.is_none()) {
            command.env_remove(name);
        }
        let refused = finished(command);
        let flag = "stop_at is 2020-01-31T17:00:00Z (flag --stop_at), ";
        refused.expect(2, &[&format!("{flag}{passed}"), "Z now; name a later moment, or leave it out"]);
        assert_eq!(refused.stdout, "");
    }
    let mut command = first_start();
    command.env("ACCELERATE_STOP_AT", "2020-01-31T18:00:00+01:00");
    let refused = finished(command);
    refused.expect(2, &["(environment variable ACCELERATE_STOP_AT), which has passed"]);
    assert_eq!(refused.stdout, "");
    let mut command = first_start();
    command.env("ACCELERATE_STOP_AT", "9999-01-31T18:00:00+01:00");
    assert_eq!(finished(command).stdout, "started\n");
}

/// A job that is queued again has the flags of its first start. With an error it would never be done.
#[rstest]
#[case("SLURM_JOB_ID", "")]
#[case("PBS_JOBID", "12.server")]
#[case("KUBERNETES_SERVICE_HOST", "10.0.0.1")]
#[case("ACCELERATE_LAUNCH_ID", "7-a")]
fn a_later_start_whose_end_has_passed_is_told_of_it(#[case] name: &str, #[case] value: &str) {
    let mut command = first_start();
    command.env("ACCELERATE_STOP_AT", "2020-01-31T18:00:00+01:00");
    // A number of a job without the nodes of one would be an error of its own.
    let (name, value) = if value.is_empty() { ("SLURM_JOBID", "12") } else { (name, value) };
    command.env(name, value);
    if name == "SLURM_JOBID" {
        command.envs([("SLURM_JOB_NODELIST", "n1"), ("SLURM_JOB_NUM_NODES", "1"), ("SLURMD_NODENAME", "n1")]);
    }
    let told = finished(command);
    told.expect(0, &["stop_at is 2020-01-31T17:00:00Z (environment", &format!("Z now; {name} says that this may be")]);
    assert_eq!(told.stdout, "started\n");
}
