//! Launches on several machines. A script takes the place of `ssh`: it runs the command here, for a host that it pretends to be.

use std::fs;
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use rstest::rstest;
use rustix::io::ioctl_fionread;
use rustix::process::Signal;

use crate::support::{Finished, LIVE_ON, Witness, accelerate, finished, insist, named_pipe, send};

const READY: &str = "echo ready >/dev/fd/$WITNESS";
/// The connection stands and falls with the agent, as that of ssh does.
pub(crate) const CONNECTS: &str = "export HOST=$1; shift; exec sh -c \"$*\"";

/// The place of `ssh`, and where it may write.
pub(crate) struct Ssh {
    folder: tempfile::TempDir,
}

impl Ssh {
    /// `script` finds the host in `$1` and the command after it.
    pub(crate) fn new(script: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ssh");
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        Self { folder }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A launch on these hosts, to be followed by more flags and a program.
    pub(crate) fn launch(&self, hosts: &str) -> Command {
        let mut command = accelerate();
        command.args(["launch", "--main_process_ip", "127.0.0.1", "--hosts", hosts, "--ssh_command"]);
        command.arg(self.path("ssh"));
        command
    }

    pub(crate) fn launch_script(&self, hosts: &str, flags: &[&str], script: &str) -> Command {
        let mut command = self.launch(hosts);
        command.args(flags).args(["sh", "-c", script]);
        command
    }
}

#[test]
fn each_rank_knows_its_place_on_machines_with_unequal_numbers() {
    let script =
        "echo $HOST $LOCAL_RANK/$LOCAL_WORLD_SIZE $RANK/$WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE $MASTER_ADDR";
    let ended = finished(Ssh::new(CONNECTS).launch_script("a:2,b:1,c:3", &[], script));
    ended.expect(0, &[]);
    let wanted = [
        "[rank 0] a 0/2 0/6 0/3 127.0.0.1",
        "[rank 1] a 1/2 1/6 0/3 127.0.0.1",
        "[rank 2] b 0/1 2/6 1/3 127.0.0.1",
        "[rank 3] c 0/3 3/6 2/3 127.0.0.1",
        "[rank 4] c 1/3 4/6 2/3 127.0.0.1",
        "[rank 5] c 2/3 5/6 2/3 127.0.0.1",
    ];
    assert_eq!(ended.sorted_stdout(), wanted);
}

/// Machine 0 chooses it, and all are told.
#[test]
fn all_ranks_have_one_port_and_one_secret_that_no_command_line_shows() {
    let ssh = Ssh::new("echo \"$@\" >>\"${0%/*}/words\"; export HOST=$1; shift; exec sh -c \"$*\"");
    let ended = finished(ssh.launch_script("a:2,b:1", &["--no_prefix"], "echo $MASTER_PORT $ACCELERATE_RUN_SECRET"));
    ended.expect(0, &[]);
    let lines = ended.sorted_stdout();
    assert!(lines.len() == 3 && lines.iter().all(|line| *line == lines[0]), "{lines:?}");
    let (port, secret) = lines[0].split_once(' ').unwrap();
    assert!(port.parse::<u16>().unwrap() > 0 && secret.len() == 64, "{lines:?}");
    let words = fs::read_to_string(ssh.path("words")).unwrap();
    assert!(words.lines().count() == 2 && !words.contains(secret), "{words}");
}

/// Such as by `export ACCELERATE_RUN_SECRET=$(...)` of a program that is not there.
#[test]
fn an_empty_secret_is_none_and_one_is_made() {
    let ssh = Ssh::new(CONNECTS);
    let mut command = ssh.launch_script("a:1,b:1", &["--no_prefix"], "echo ${#ACCELERATE_RUN_SECRET}");
    command.env("ACCELERATE_RUN_SECRET", "");
    let ended = finished(command);
    ended.expect(0, &[]);
    assert_eq!(ended.sorted_stdout(), ["64", "64"]);
}

/// Such as a terminal, which shows what is typed: nothing is told before an agent has greeted.
#[test]
fn what_repeats_its_input_does_not_get_the_secret_into_an_error() {
    let ssh = Ssh::new(&format!("[ \"$1\" = a ] || {{ timeout 0.5 cat; exit 1; }}; {CONNECTS}"));
    let mut command = ssh.launch_script("a:1,b:1", &[], "true");
    command.env("ACCELERATE_RUN_SECRET", "0123456789abcdef0123456789abcdef");
    let ended = finished(command);
    ended.expect(1, &["nothing was started", "b: "]);
    for told in ["Prepare", "ACCELERATE_RUN_SECRET", "0123456789abcdef"] {
        assert!(!ended.stderr.contains(told), "{told} is in {}", ended.stderr);
    }
}

#[test]
fn arguments_and_variables_arrive_byte_by_byte() {
    let ssh = Ssh::new(CONNECTS);
    let arguments = [
        b"two words".to_vec(),
        b"".to_vec(),
        b"$HOME `x` $(y) \\ \" ' '\\'' * ! ; & | < > # ~".to_vec(),
        b"a\nb\tc\r".to_vec(),
        (1..=255).collect(),
    ];
    let mut command = ssh.launch("a:1,b:1");
    command.args(["--no_prefix", "sh", "-c"]);
    command
        .arg(format!("for word; do printf '%s\\0' \"$word\"; done >{}/$RANK", ssh.folder.path().display()))
        .arg("sh");
    command.args(arguments.iter().cloned().map(std::ffi::OsString::from_vec));
    finished(command).expect(0, &[]);
    let wanted: Vec<u8> = arguments.iter().flat_map(|word| [word.as_slice(), b"\0"].concat()).collect();
    for rank in ["0", "1"] {
        assert_eq!(fs::read(ssh.path(rank)).unwrap(), wanted);
    }
}

/// Settings are resolved here, from flags and from variables; what else is set here is of this machine.
#[test]
fn settings_reach_all_machines_and_other_variables_do_not() {
    let ssh = Ssh::new("export HOST=$1; shift; exec env -i HOST=$HOST PATH=\"$PATH\" sh -c \"$*\"");
    let mut command = ssh.launch_script(
        "a:1,b:1",
        &["--mixed_precision", "bf16"],
        "echo $ACCELERATE_MIXED_PRECISION $ACCELERATE_DEBUG_MODE $OF_THIS_MACHINE.",
    );
    command.env("ACCELERATE_DEBUG_MODE", "true").env("OF_THIS_MACHINE", "x");
    assert_eq!(finished(command).sorted_stdout(), ["[rank 0] bf16 true .", "[rank 1] bf16 true ."]);
}

#[test]
fn ranks_run_in_the_working_folder_and_read_nothing() {
    let ssh = Ssh::new(&format!("cd /; {CONNECTS}"));
    let mut command = ssh.launch_script("a:1,b:1", &[], "cat; pwd");
    command.current_dir(ssh.folder.path()).stdin(Stdio::piped());
    let folder = ssh.folder.path().canonicalize().unwrap();
    let wanted = [format!("[rank 0] {}", folder.display()), format!("[rank 1] {}", folder.display())];
    assert_eq!(finished(command).sorted_stdout(), wanted);
}

#[test]
fn a_host_file_and_filters_of_deepspeed_choose_machines() {
    let ssh = Ssh::new(CONNECTS);
    let file = ssh.path("hostfile");
    fs::write(&file, "a slots=1\nb slots=4\nc slots=1\n").unwrap();
    let mut command = accelerate();
    command.args(["launch", "--main_process_ip", "127.0.0.1", "--use_deepspeed", "--zero_stage", "2", "--ssh_command"]);
    command
        .arg(ssh.path("ssh"))
        .arg("--deepspeed_hostfile")
        .arg(&file)
        .args(["--deepspeed_inclusion_filter", "a@b:1,3"]);
    command.args(["sh", "-c", "echo $HOST $RANK $CUDA_VISIBLE_DEVICES"]).env_remove("CUDA_VISIBLE_DEVICES");
    assert_eq!(finished(command).sorted_stdout(), ["[rank 0] a 0", "[rank 1] b 1 1,3", "[rank 2] b 2 1,3"]);
}

#[test]
fn this_machine_needs_no_ssh() {
    let ended = finished(Ssh::new("exit 1").launch_script("localhost:2", &[], "echo $RANK"));
    ended.expect(0, &[]);
    assert_eq!(ended.sorted_stdout(), ["[rank 0] 0", "[rank 1] 1"]);
}

#[test]
fn a_failed_rank_ends_all_machines_and_is_named_with_its_own() {
    let (_folder, pipe) = named_pipe();
    let mut witness = Witness::new();
    let script =
        format!("{READY}; if [ $RANK = 2 ]; then read line <{pipe}; echo the reason >&2; exit 7; fi; {LIVE_ON}");
    let ssh = Ssh::new(CONNECTS);
    let mut command = ssh.launch_script("a:2,b:2", &[], &script);
    command.stderr(Stdio::piped());
    let child = witness.start(command);
    witness.wait_for("ready", 4);
    fs::write(&pipe, "now\n").unwrap();
    let ended = Finished::from(child.wait_with_output().unwrap());
    ended.expect(
        7,
        &[
            "[rank 2] the reason\n",
            "accelerate launch: b: rank 2 exited with code 7; ending 3 ranks still running",
            "error: rank 2 on b (process ",
            "last lines of rank 2:\n    the reason\n",
            "ranks 0-1, 3 were running and have been ended by the launcher",
        ],
    );
    witness.expect_nobody_survives();
}

#[test]
fn a_signal_reaches_the_ranks_of_all_machines() {
    let ssh = Ssh::new(CONNECTS);
    let mut witness = Witness::new();
    let script = format!("trap 'echo asked; exit 0' TERM; {READY}; {LIVE_ON}");
    let mut command = ssh.launch_script("a:1,b:2", &[], &script);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = witness.start(command);
    witness.wait_for("ready", 3);
    send(&child, Signal::TERM);
    let ended = Finished::from(child.wait_with_output().unwrap());
    ended.expect(143, &["SIGTERM received and passed on to 3 ranks", "error: stopped by SIGTERM"]);
    assert_eq!(ended.sorted_stdout(), ["[rank 0] asked", "[rank 1] asked", "[rank 2] asked"]);
    witness.expect_nobody_survives();
}

/// Stopped, it does not end its ranks, and nobody knows of them.
#[test]
fn a_machine_that_does_not_confirm_its_end_is_named() {
    let ssh = Ssh::new(CONNECTS);
    let mut witness = Witness::new();
    let script = format!("[ $HOST = a ] || kill -STOP $PPID; {READY}; {LIVE_ON}");
    let mut command = ssh.launch_script("a:1,b:1", &["--connection_timeout", "2"], &script);
    command.stderr(Stdio::piped());
    let child = witness.start(command);
    witness.wait_for("ready", 2);
    send(&child, Signal::TERM);
    let ended = Finished::from(child.wait_with_output().unwrap());
    ended.expect(143, &["error: stopped by SIGTERM; b did not confirm the end of its ranks"]);
    witness.expect_nobody_survives();
}

#[test]
fn a_second_signal_does_not_wait() {
    let ssh = Ssh::new(CONNECTS);
    let mut witness = Witness::new();
    let script = format!("trap 'echo asked >/dev/fd/$WITNESS' TERM; {READY}; {LIVE_ON}");
    let mut child = witness.start(ssh.launch_script("a:1,b:1", &["--shutdown_grace_period", "3600"], &script));
    witness.wait_for("ready", 2);
    send(&child, Signal::TERM);
    witness.wait_for("asked", 2);
    insist(&mut child, Signal::TERM);
    // Of the signals that it is sent, one may come when it has stopped listening.
    let status = child.wait().unwrap();
    assert!(status.code() == Some(143) || status.signal() == Some(Signal::TERM.as_raw()), "{status}");
    witness.expect_nobody_survives();
}

/// As behind `less`.
#[test]
fn a_launcher_whose_output_nobody_takes_ends_all_machines() {
    let ssh = Ssh::new(CONNECTS);
    let mut witness = Witness::new();
    let (reader, writer) = std::io::pipe().unwrap();
    let mut command = ssh.launch_script("a:1,b:2", &[], &format!("{READY}; yes; {LIVE_ON}"));
    command.stdout(writer).stderr(Stdio::piped());
    let child = witness.start(command);
    witness.wait_for("ready", 3);
    while ioctl_fionread(&reader).unwrap() < 60_000 {
        std::thread::yield_now();
    }
    send(&child, Signal::TERM);
    let ended = Finished::from(child.wait_with_output().unwrap());
    ended.expect(143, &["nobody takes the output", "error: stopped by SIGTERM"]);
    witness.expect_nobody_survives();
}

/// All that is left of the launcher is the end of each agent's input.
#[test]
fn killing_the_launcher_ends_the_ranks_of_all_machines() {
    let ssh = Ssh::new("export HOST=$1; shift; sh -c \"$*\"");
    let mut witness = Witness::new();
    let script = format!("trap '' INT TERM HUP; ({READY}; {LIVE_ON}) & {READY}; {LIVE_ON}");
    let mut child = witness.start(ssh.launch_script("a:1,b:2", &[], &script));
    witness.wait_for("ready", 6);
    send(&child, Signal::KILL);
    child.wait().unwrap();
    witness.expect_nobody_survives();
}

/// As after a cut of the network, of which nobody is told: connections stay open, and say nothing.
#[test]
fn machines_that_hear_nothing_of_the_launcher_end_their_ranks() {
    let ssh = Ssh::new(CONNECTS);
    let (_folder, pipe) = named_pipe();
    let mut witness = Witness::new();
    let script = format!("exec 9>{pipe}; trap '' TERM; {READY}; {LIVE_ON}");
    let mut command = ssh.launch_script("a:1,b:2", &["--connection_timeout", "0.5"], &script);
    command.stderr(Stdio::piped());
    let child = witness.start(command);
    let mut ranks = fs::File::open(&pipe).unwrap();
    witness.wait_for("ready", 3);
    send(&child, Signal::STOP);
    // It ends when no rank has it any more.
    ranks.read_to_end(&mut Vec::new()).unwrap();
    send(&child, Signal::CONT);
    let ended = Finished::from(child.wait_with_output().unwrap());
    ended.expect(1, &["accelerate on that machine has ended its ranks, because it heard nothing from here for 0.5 s"]);
    witness.expect_nobody_survives();
}

/// A launcher that is only slow is there all the same.
#[test]
fn machines_that_hear_of_the_launcher_go_on() {
    let ssh = Ssh::new(CONNECTS);
    let ended = finished(ssh.launch_script("a:1,b:1", &["--connection_timeout", "0.5"], "sleep 2; echo $RANK"));
    ended.expect(0, &[]);
}

/// As a machine that is frozen, or behind a network that drops everything: its connection stays open, and says nothing.
#[test]
fn a_machine_that_says_nothing_any_more_is_named_and_ends_the_others() {
    let ssh = Ssh::new(CONNECTS);
    let mut witness = Witness::new();
    let script = format!("[ $HOST = a ] || kill -STOP $PPID; {LIVE_ON}");
    let mut command = ssh.launch_script("a:1,b:2", &["--connection_timeout", "0.5"], &script);
    command.stderr(Stdio::piped());
    let ended = Finished::from(witness.start(command).wait_with_output().unwrap());
    let words = [
        "b: it says nothing any more; ending 1 rank elsewhere",
        "error: b: it has said nothing for 0.5 s while ranks 1-2 were running",
    ];
    ended.expect(1, &words);
    witness.expect_nobody_survives();
}

/// The launcher waits for whoever reads, and hears nothing of machines that wait for the launcher.
#[test]
fn machines_whose_output_nobody_takes_are_not_lost() {
    let ssh = Ssh::new(CONNECTS);
    let mut witness = Witness::new();
    let line = "x".repeat(99);
    let script = format!("(sleep 2; echo waited >/dev/fd/$WITNESS) & yes {line} | head -n 10000; wait");
    let mut command = ssh.launch_script("a:1,b:1", &["--connection_timeout", "0.5", "--no_prefix"], &script);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = witness.start(command);
    witness.wait_for("waited", 2);
    let ended = Finished::from(child.wait_with_output().unwrap());
    ended.expect(0, &[]);
    assert!(ended.stdout == format!("{line}\n").repeat(20_000), "{} bytes", ended.stdout.len());
}

/// The connection of `b` breaks, by the hand of its own rank; the agent there goes on until it notices.
#[test]
fn a_machine_that_is_lost_is_named_with_the_words_of_ssh() {
    let ssh = Ssh::new(
        "export HOST=$1 SSH_PROCESS=$$; shift; trap 'echo Timeout, server b not responding. >&2; exit 255' USR1; \
         exec 3<&0; sh -c \"$*\" <&3 3<&- & exec 3<&-; wait $!",
    );
    let mut witness = Witness::new();
    let script = format!("if [ $RANK = 2 ]; then kill -USR1 $SSH_PROCESS; fi; {LIVE_ON}");
    let mut command = ssh.launch_script("a:2,b:2", &[], &script);
    command.stderr(Stdio::piped());
    let child = witness.start(command);
    let ended = Finished::from(child.wait_with_output().unwrap());
    ended.expect(
        1,
        &[
            "b: the connection has ended; ending 2 ranks elsewhere",
            "error: b: the connection broke while ranks 2-3 were running (ssh exited with code 255)\n    \
             Timeout, server b not responding.",
        ],
    );
    witness.expect_nobody_survives();
}

/// Such as a multiplexed connection, which outlives what it was made for.
#[test]
fn a_connection_that_stays_without_its_agent_is_a_lost_machine() {
    let ssh = Ssh::new("export HOST=$1; shift; sh -c \"$*\"; exec sleep 600 >/dev/null 2>&1 </dev/null");
    let ended = finished(ssh.launch_script("a:1,b:1", &[], "[ $HOST = a ] || kill -9 $PPID; sleep 600"));
    ended.expect(1, &["b: the connection broke while rank 1 was running"]);
}

#[rstest]
#[case::refused(
    "echo 'connect to host b port 22: Connection refused' >&2; exit 255",
    1,
    "error: nothing was started: b: it could not be connected to (ssh exited with code 255); logging in must work \
     without a question\n    connect to host b port 22: Connection refused"
)]
#[case::not_installed(
    "echo 'sh: accelerate: not found' >&2; exit 127",
    1,
    "b: accelerate did not start there (ssh exited with code 127)"
)]
#[case::another_version(
    "echo accelerate agent 9.9.9; read line",
    1,
    "b: accelerate is of version 9.9.9 there and of 0.1.0 here; install the same version"
)]
#[case::another_program(
    "echo accelerate agent 0.1.0; echo hello; read line",
    1,
    "b: it sent what is no message of accelerate"
)]
#[case::a_liar(
    "echo accelerate agent 0.1.0; echo '{\"Ended\":{\"Succeeded\":[]}}'; read line",
    1,
    "b: it sent news of ranks that have not started; no agent does"
)]
#[case::no_end_of_noise(
    "exec tr '\\0' x </dev/zero",
    1,
    "b: it printed more than 1048576 bytes that are not of accelerate"
)]
fn a_machine_that_cannot_take_part_is_named(#[case] b: &str, #[case] code: i32, #[case] words: &str) {
    let ssh = Ssh::new(&format!("[ $1 = a ] || {{ {b}; }}\n{CONNECTS}"));
    let marker = ssh.path("started");
    let ended = finished(ssh.launch_script("a:1,b:1", &[], &format!("touch {}", marker.display())));
    ended.expect(code, &[words]);
    assert!(!marker.exists(), "a rank was started on the other machine");
}

/// Whatever a login shell prints is not of a rank.
#[test]
fn what_a_remote_shell_prints_does_no_harm() {
    let ssh = Ssh::new(&format!("echo Welcome to $1; printf 'no line end'; echo a warning >&2; {CONNECTS}"));
    let ended = finished(ssh.launch_script("a:1", &[], "echo out; echo err >&2"));
    ended.expect(0, &["accelerate launch: a: a warning\n", "[rank 0] err\n"]);
    assert_eq!(ended.stdout, "[rank 0] out\n");
}

#[rstest]
#[case::program(&[], "no_such_program", 127, "a, b: the program no_such_program was not found")]
#[case::name(
    &["--main_process_ip", "not a name"],
    "true",
    1,
    "the name not a name of the main process's machine has no address there"
)]
fn what_stands_in_the_way_is_told_for_each_machine_before_the_start(
    #[case] flags: &[&str],
    #[case] program: &str,
    #[case] code: i32,
    #[case] words: &str,
) {
    let ssh = Ssh::new(CONNECTS);
    let mut command = accelerate();
    command.args(["launch", "--hosts", "a:1,b:1", "--ssh_command"]).arg(ssh.path("ssh"));
    let flags = if flags.is_empty() { &["--main_process_ip", "127.0.0.1"] } else { flags };
    command.args(flags).arg(program);
    finished(command).expect(code, &["error: nothing was started: a, b: ", words]);
}

#[test]
fn a_port_in_use_is_told_with_its_machine() {
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = holder.local_addr().unwrap().port().to_string();
    let ended = finished(Ssh::new(CONNECTS).launch_script("a:1,b:1", &["--main_process_port", &port], "true"));
    ended.expect(1, &[&format!("error: nothing was started: a: port {port} of --main_process_port is already in use")]);
}

/// Says what a machine says whose ranks would wait at a place that others do not reach, and ends well if it is started. `misses` is
/// what it says of the first machine, `libtorch` what its program would load.
fn stand_in(misses: &str, libtorch: &str) -> String {
    let prepared = format!(
        r#"{{"Prepared":{{"problems":[],"warnings":[],"port":null,"meets_at":null,"num_gpus":0,"versions":{{"program":null,"libtorch":{libtorch}}},"beacon":null,"clock":{{"secs":1,"nanos":0}}}}}}"#
    );
    let reached = format!(
        r#"{{"Reached":{{"problem":null,"shares_folder":null,"misses_first":{misses},"meets_at":"127.0.0.1:1"}}}}"#
    );
    let ended =
        r#"{"Ended":{"Succeeded":[{"rank":1,"process_id":7,"ended":{"Exited":0},"elapsed":{"secs":1,"nanos":0}}]}}"#;
    format!(
        "echo accelerate agent 0.1.0; while read -r line; do case $line in
         *Prepare*) echo '{prepared}';; *Reach*) echo '{reached}';; *Start*) echo '{ended}'; exit;; esac; done; exit"
    )
}

/// Both would wait at the addresses of their own names. The program of the first case may know better than Gloo.
#[rstest]
#[case::another_program(
    "null",
    "null",
    0,
    "accelerate launch: b: a does not reach b at 127.0.0.1, the address of that machine's own name"
)]
#[case::of_this_library(
    "null",
    "\"2.11.0\"",
    1,
    "error: nothing was started: b: a does not reach b at 127.0.0.1, the address"
)]
#[case::the_first("\"no route\"", "\"2.11.0\"", 1, "error: nothing was started: a: b does not reach a at ")]
fn machines_are_looked_for_where_their_ranks_would_wait(
    #[case] misses: &str,
    #[case] libtorch: &str,
    #[case] code: i32,
    #[case] words: &str,
) {
    let ssh = Ssh::new(&format!("[ $1 = a ] || {{ {}; }}\n{CONNECTS}", stand_in(misses, libtorch)));
    let mut command = accelerate();
    // Any address of this machine that is not known to be of no other.
    command.args(["launch", "--hosts", "a:1,b:1", "--main_process_ip", "0.0.0.0", "--ssh_command"]);
    command.arg(ssh.path("ssh")).arg("true").env_remove("GLOO_SOCKET_IFNAME");
    finished(command).expect(code, &[words, "GLOO_SOCKET_IFNAME"]);
}

#[test]
fn machines_that_reach_each_other_both_ways_are_not_told_of() {
    let ssh = Ssh::new(CONNECTS);
    let mut command = accelerate();
    command.args(["launch", "--hosts", "a:1,b:1,c:1", "--main_process_ip", "0.0.0.0", "--ssh_command"]);
    command.arg(ssh.path("ssh")).arg("true").env_remove("GLOO_SOCKET_IFNAME");
    let ended = finished(command);
    ended.expect(0, &[]);
    assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("", ""));
}

/// A file that is looked for leaves no trace.
#[test]
fn a_folder_that_machines_share_is_not_told_of() {
    let ssh = Ssh::new(CONNECTS);
    let mut command = ssh.launch_script("a:1,b:1", &[], "ls -A");
    let folder = tempfile::tempdir().unwrap();
    command.current_dir(folder.path());
    let ended = finished(command);
    ended.expect(0, &[]);
    assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("", ""));
}

/// Ranks then find out by themselves.
#[test]
fn without_preflight_nobody_looks_for_the_port() {
    let ssh = Ssh::new(CONNECTS);
    let mut command = accelerate();
    command.args([
        "launch",
        "--hosts",
        "a:1,b:1",
        "--main_process_ip",
        "not a name",
        "--no_preflight",
        "--ssh_command",
    ]);
    command.arg(ssh.path("ssh")).args(["sh", "-c", "echo $MASTER_ADDR"]);
    assert_eq!(finished(command).sorted_stdout(), ["[rank 0] not a name", "[rank 1] not a name"]);
}

#[test]
fn a_command_that_connects_and_is_not_here_is_no_fault_of_the_machines() {
    let mut command = accelerate();
    command.args(["launch", "--hosts", "a:1,b:1", "--ssh_command", "no_such_ssh -p 22", "true"]);
    let ended = finished(command);
    ended.expect(127, &["error: the command no_such_ssh cannot be run here, by which a, b would be reached"]);
    assert_eq!(ended.stderr.matches("no_such_ssh").count(), 1, "{}", ended.stderr);
}

#[rstest]
#[case(&["--hosts", "a:0"], "--hosts: \"a:0\" does not say a number of processes")]
#[case(&["--hosts=-oProxyCommand=x"], "--hosts: \"-oProxyCommand=x\" is no host")]
#[case(&["--hosts", "a", "--num_machines", "2"], "--num_machines (or --nnodes) is 2, but 1 host is named")]
#[case(&["--hosts", "a:5000"], "machine 0 of 1 is to have 5000 of 5000 processes; one machine may have 4096")]
#[case(&["--hostfile", "/no/such/file"], "the host file /no/such/file cannot be read")]
#[case(&["--hosts", "a", "--ssh_command", "'"], "--ssh_command is \"'\", which is no command")]
fn lists_of_machines_that_make_no_sense_are_refused(#[case] flags: &[&str], #[case] words: &str) {
    let mut command = accelerate();
    command.arg("launch").args(flags).arg("true");
    finished(command).expect(2, &[words]);
}

#[test]
fn a_dry_run_shows_which_ranks_go_where() {
    let ssh = Ssh::new("exit 1");
    let ended = finished(ssh.launch_script("a:2,b:1", &["--dry_run", "--mixed_precision", "bf16"], "true"));
    ended.expect(0, &[]);
    let lines = [
        "3 processes on 2 machines",
        "/sh -c true\n",
        "  WORLD_SIZE=3\n",
        "  ACCELERATE_MIXED_PRECISION=bf16\n",
        "  ACCELERATE_RUN_SECRET=(not shown)\n",
        "  MASTER_PORT=(any free port)\n",
        "a: ranks 0-1, by: ",
        "rank 1 on a:\n",
        "  OMP_NUM_THREADS=(a share of the cores there)\n",
        "b: rank 2, by: ",
        "  RANK=2\n",
    ];
    for words in lines {
        assert!(ended.stdout.contains(words), "{ended:?}");
    }
    let ended = finished(ssh.launch_script("a:2,b:1", &["--dry_run", "--json"], "true"));
    let found: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!((&found["machines"][1]["machine"], &found["machines"][1]["first_rank"]), (&"b".into(), &2.into()));
    assert_eq!(found["machines"][1]["ranks"][0]["environment"]["RANK"], "2");
}
