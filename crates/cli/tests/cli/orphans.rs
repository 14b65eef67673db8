//! Nothing that a launch has started outlives it, however it ends.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::support::{Finished, LIVE_ON, Witness, launch_script, named_pipe, obey, send};

const READY: &str = "echo ready >/dev/fd/$WITNESS";
const STUBBORN: &str = "trap '' INT TERM HUP";

/// A rank, a child of it, and a grandchild, none of which ends when asked.
fn family() -> String {
    format!("{STUBBORN}; ({READY}; ({READY}; {LIVE_ON}) & {LIVE_ON}) & {READY}; {LIVE_ON}")
}

#[test]
fn killing_the_launcher_kills_ranks_and_their_children() {
    for num_processes in [1, 2] {
        let mut witness = Witness::new();
        let mut child = witness.start(launch_script(num_processes, &[], &family()));
        witness.wait_for("ready", 3 * num_processes);
        send(&child, Signal::KILL);
        child.wait().unwrap();
        witness.expect_nobody_survives();
    }
}

/// Each safety net holds alone: here the guard is killed first, and the kernel's parent death signal is left.
#[test]
fn without_its_guard_the_launcher_still_takes_its_ranks_along() {
    let mut witness = Witness::new();
    let mut child = witness.start(launch_script(2, &[], &format!("{STUBBORN}; {READY}; {LIVE_ON}")));
    witness.wait_for("ready", 2);
    kill_process(guard_of(child.id()), Signal::KILL).unwrap();
    send(&child, Signal::KILL);
    child.wait().unwrap();
    witness.expect_nobody_survives();
}

/// Somebody may kill it first.
#[test]
fn a_guard_that_is_killed_is_started_again() {
    let mut witness = Witness::new();
    let mut child = witness.start(launch_script(2, &[], &family()));
    witness.wait_for("ready", 6);
    let first = guard_of(child.id());
    kill_process(first, Signal::KILL).unwrap();
    while find_guard_of(child.id()).is_none_or(|guard| guard == first) {
        std::thread::yield_now();
    }
    send(&child, Signal::KILL);
    child.wait().unwrap();
    witness.expect_nobody_survives();
}

/// As `killall -9 accelerate` does: the guard has another name, and takes along what ranks have started.
#[test]
fn killing_all_processes_of_the_launchers_name_leaves_nothing() {
    let mut witness = Witness::new();
    let mut child = witness.start(launch_script(2, &[], &family()));
    witness.wait_for("ready", 6);
    let guard = guard_of(child.id());
    let name = |number: i32| std::fs::read_to_string(format!("/proc/{number}/comm")).unwrap();
    assert_eq!(name(child.id().cast_signed()), "accelerate\n");
    if name(guard.as_raw_nonzero().get()) == "accelerate\n" {
        kill_process(guard, Signal::KILL).unwrap();
    }
    send(&child, Signal::KILL);
    child.wait().unwrap();
    witness.expect_nobody_survives();
}

fn guard_of(launcher: u32) -> Pid {
    find_guard_of(launcher).unwrap()
}

fn find_guard_of(launcher: u32) -> Option<Pid> {
    let children = std::fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let number: i32 = entry.unwrap().file_name().to_str()?.parse().ok()?;
        let stat = std::fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
        let is_child = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse() == Ok(launcher);
        let command = std::fs::read_to_string(format!("/proc/{number}/cmdline")).ok()?;
        (is_child && command.contains("__accelerate_guard")).then(|| Pid::from_raw(number))?
    });
    children.last()
}

/// A daemon is out of reach of signals to groups, but not of its mark. A launch inside a rank belongs to both.
#[test]
fn killing_the_launcher_reaches_daemons_and_launches_within() {
    let mut witness = Witness::new();
    let daemon = format!("setsid sh -c '{READY}; {LIVE_ON}' &");
    let inner = format!("{} launch --num_processes 2 sh -c '{READY}; {LIVE_ON}'", env!("CARGO_BIN_EXE_accelerate"));
    let script = format!("if [ $RANK = 0 ]; then {daemon} {LIVE_ON}; else {inner}; fi");
    let mut child = witness.start(launch_script(2, &[], &script));
    witness.wait_for("ready", 3);
    send(&child, Signal::KILL);
    child.wait().unwrap();
    witness.expect_nobody_survives();
}

/// At whatever moment it happens: the delays sample the start of the launch, they synchronise nothing.
#[test]
fn killing_the_launcher_while_it_starts_leaves_nothing() {
    for step in 0..40 {
        let mut witness = Witness::new();
        let mut child = witness.start(launch_script(2, &[], LIVE_ON));
        std::thread::sleep(Duration::from_micros(250 * step));
        send(&child, Signal::KILL);
        child.wait().unwrap();
        witness.expect_nobody_survives();
    }
}

#[test]
fn a_failed_rank_takes_its_children_along() {
    let mut witness = Witness::new();
    let script = format!("({STUBBORN}; {READY}; {LIVE_ON}) & exit 6");
    let mut command = launch_script(2, &[], &script);
    command.stderr(Stdio::null());
    let mut child = witness.start(command);
    assert_eq!(child.wait().unwrap().code(), Some(6));
    witness.expect_nobody_survives();
}

#[test]
fn children_that_outlive_a_successful_rank_are_ended() {
    for num_processes in [1, 2] {
        let mut witness = Witness::new();
        let mut child = witness.start(launch_script(num_processes, &[], &format!("({LIVE_ON}) & exit 0")));
        assert_eq!(child.wait().unwrap().code(), Some(0));
        witness.expect_nobody_survives();
    }
}

#[test]
fn children_that_outlive_their_rank_are_asked_first() {
    let (_folder, pipe) = named_pipe();
    let script = format!("[ $RANK = 1 ] || {{ ({}) & read line <{pipe}; }}", obey("TERM", "asked", &pipe));
    let mut witness = Witness::new();
    let mut command = launch_script(2, &["--grace_period", "20"], &script);
    command.stdout(Stdio::piped());
    let ended = Finished::from(witness.start(command).wait_with_output().unwrap());
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(0), "[rank 0] asked\n"));
    witness.expect_nobody_survives();
}

#[test]
fn children_that_left_the_group_are_ended_and_mentioned() {
    let (_folder, pipe) = named_pipe();
    let daemon = format!("trap \"\" TERM; echo >{pipe}; {LIVE_ON}");
    let script = format!("[ $RANK = 1 ] || {{ setsid sh -c '{daemon}' & read line <{pipe}; }}");
    let mut witness = Witness::new();
    let mut command = launch_script(2, &[], &script);
    command.stderr(Stdio::piped());
    let ended = Finished::from(witness.start(command).wait_with_output().unwrap());
    ended.expect(0, &[" that ranks had started and left behind"]);
    witness.expect_nobody_survives();
}

#[test]
fn a_rank_that_cannot_start_ends_those_that_did() {
    // Both are told to run a script whose interpreter is a folder: found, executable, and not runnable.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("script");
    std::fs::write(&path, "#!/etc\n").unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let mut witness = Witness::new();
    let mut command = crate::support::launch(2, &[]);
    command.arg(&path).stderr(Stdio::piped());
    let child = witness.start(command);
    let ended = Finished::from(child.wait_with_output().unwrap());
    ended.expect(126, &["cannot run", "script"]);
    witness.expect_nobody_survives();
}

/// What has left its group is waited for at the end of a launch; whoever interrupts that wait means it.
#[test]
fn an_interrupt_while_daemons_are_being_ended_is_obeyed() {
    let (_folder, pipe) = named_pipe();
    let daemon = format!("trap \"echo asked >/dev/fd/$WITNESS\" TERM; echo >{pipe}; {LIVE_ON}");
    let mut witness = Witness::new();
    let script = format!("setsid sh -c '{daemon}' & read line <{pipe}");
    let mut command = launch_script(1, &["--grace_period", "3600"], &script);
    command.stderr(Stdio::piped());
    let child = witness.start(command);
    witness.wait_for("asked", 1);
    send(&child, Signal::INT);
    let ended = Finished::from(child.wait_with_output().unwrap());
    ended.expect(130, &[" that ranks had started and left behind", "error: stopped by SIGINT"]);
    witness.expect_nobody_survives();
}

/// Somebody who waits for the end of a run learns for whom.
#[test]
fn leftovers_that_are_waited_for_are_named() {
    for in_a_group_of_its_own in ["", "setsid"] {
        let (_folder, pipe) = named_pipe();
        let leftover = format!("trap \"\" TERM; echo >{pipe}; {LIVE_ON}");
        let mut witness = Witness::new();
        let script = format!("{in_a_group_of_its_own} sh -c '{leftover}' & read line <{pipe}");
        let mut command = launch_script(1, &["--grace_period", "3600"], &script);
        command.stderr(Stdio::piped());
        let mut child = witness.start(command);
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let told = lines.find(|line| line.contains("waiting for process")).unwrap();
        assert!(told.contains(" (") && told.contains("killed in 35"), "{told}");
        send(&child, Signal::INT);
        assert_eq!(child.wait().unwrap().code(), Some(130), "{}", lines.collect::<String>());
        witness.expect_nobody_survives();
    }
}

/// The guard stays until they are gone, because the launcher may be killed before.
#[test]
fn killing_the_launcher_while_daemons_are_being_ended_leaves_nothing() {
    for num_processes in [1, 2] {
        let (_folder, pipe) = named_pipe();
        let daemon = format!("trap \"echo asked >/dev/fd/$WITNESS\" TERM; echo >{pipe}; {LIVE_ON}");
        let script = format!("[ ${{RANK:-0}} = 1 ] || {{ setsid sh -c '{daemon}' & read line <{pipe}; }}");
        let mut witness = Witness::new();
        let mut child = witness.start(launch_script(num_processes, &["--grace_period", "3600"], &script));
        witness.wait_for("asked", 1);
        send(&child, Signal::KILL);
        child.wait().unwrap();
        witness.expect_nobody_survives();
    }
}

#[test]
fn without_a_grace_period_daemons_are_ended_all_the_same() {
    let (_folder, pipe) = named_pipe();
    let mut witness = Witness::new();
    let script = format!("setsid sh -c 'echo >{pipe}; {LIVE_ON}' & read line <{pipe}");
    let mut child = witness.start(launch_script(1, &["--grace_period", "0"], &script));
    assert_eq!(child.wait().unwrap().code(), Some(0));
    witness.expect_nobody_survives();
}
