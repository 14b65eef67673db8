//! Restarts on several machines, on all of them or on those that are left.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;

use crate::hosts::{CONNECTS, Ssh};
use crate::support::{Finished, finished, named_pipe};

const WHO: &str = "echo attempt $TORCHELASTIC_RESTART_COUNT: $HOST $RANK/$WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE";
/// No connection to the hosts of which there is a file.
const UNLESS_GONE: &str = "[ ! -e \"${0%/*}/gone_$1\" ] || { echo No route to host $1. >&2; exit 255; }";
const REFUSED: &str = "it could not be connected to (ssh exited with code 255)";

#[test]
fn all_machines_start_again_by_new_connections() {
    let ssh = Ssh::new(&format!("echo $1 >>\"${{0%/*}}/connections\"; {CONNECTS}"));
    let secrets = ssh.path("secrets");
    let script = format!(
        "{WHO}; echo $TORCHELASTIC_RESTART_COUNT $ACCELERATE_RUN_SECRET >>{}
         [ $RANK$TORCHELASTIC_RESTART_COUNT != 20 ] || exit 3; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || sleep 600",
        secrets.display()
    );
    let ended = finished(ssh.launch_script("a:1,b:2", &["--max_restarts", "2"], &script));
    ended.expect(
        0,
        &["accelerate launch: rank 2 on b (process ", "exited with code 3", "; restart 1 of 2 begins now\n"],
    );
    let lines: Vec<_> = ended.sorted_stdout().into_iter().filter(|line| line.contains("attempt 1")).collect();
    let wanted = ["[rank 0] attempt 1: a 0/3 0/2", "[rank 1] attempt 1: b 1/3 1/2", "[rank 2] attempt 1: b 2/3 1/2"];
    assert_eq!(lines, wanted);
    let secrets: BTreeSet<_> = fs::read_to_string(secrets).unwrap().lines().map(str::to_owned).collect();
    let values: BTreeSet<_> = secrets.iter().map(|line| line.split_once(' ').unwrap().1).collect();
    assert_eq!((secrets.len(), values.len()), (2, 2), "one for each attempt: {secrets:?}");
    let connections = fs::read_to_string(ssh.path("connections")).unwrap();
    assert_eq!((connections.matches('a').count(), connections.matches('b').count()), (2, 2));
}

/// It is lost while it runs, and cannot be reached again; the line that one of its ranks had begun stands by itself.
#[test]
fn a_run_goes_on_without_a_machine_that_is_lost() {
    let (_folder, pipe) = named_pipe();
    let ssh = Ssh::new(&format!(
        "{UNLESS_GONE}
         export HOST=$1 SSH=$$ GONE=\"${{0%/*}}/gone_$1\"; shift; trap 'touch $GONE; exit 255' USR1
         exec 3<&0; sh -c \"$*\" <&3 3<&- & exec 3<&-; wait $!"
    ));
    let script = format!(
        "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && {{ {WHO}; exit 0; }}
         [ $HOST = b ] && {{ printf 'a line\nhalf'; read line <{pipe}; kill -USR1 $SSH; }}; sleep 600"
    );
    let flags = ["--max_restarts", "1", "--nnodes", "2:3", "--connection_timeout", "4"];
    let mut command = ssh.launch_script("a:1,b:1,c:2", &flags, &script);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut lines = String::new();
    stdout.read_line(&mut lines).unwrap();
    fs::write(&pipe, "now\n").unwrap();
    stdout.read_to_string(&mut lines).unwrap();
    let ended = Finished { stdout: lines, ..Finished::from(child.wait_with_output().unwrap()) };
    let told = [
        "accelerate launch: b: the connection broke while rank 1 was running (ssh exited with code 255); restart 1 of 1 begins in 5.5 s, \
         when no rank can be left where nobody is heard\n",
        &format!("accelerate launch: b: left out, so 2 machines start 3 processes without it, because {REFUSED}"),
    ];
    ended.expect(0, &told);
    let wanted = [
        "[rank 0] attempt 1: a 0/3 0/2",
        "[rank 1] a line",
        "[rank 1] attempt 1: c 1/3 1/2",
        "[rank 1] half",
        "[rank 2] attempt 1: c 2/3 1/2",
    ];
    assert_eq!(ended.sorted_stdout(), wanted);
}

/// Its agent is stopped, so nobody knows of its rank when the patience with it has ended. What a machine does that is lost while its
/// ranks run, it does as well: it ends them by itself, and the restart comes after that.
#[test]
fn a_machine_that_falls_silent_while_it_is_told_to_end_is_waited_for() {
    let (_folder, pipe) = named_pipe();
    let script = format!(
        "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && {{ {WHO}; exit 0; }}
         [ $HOST = b ] && {{ kill -STOP $PPID; echo >{pipe}; exec sleep 600; }}
         read line <{pipe}; exit 3"
    );
    let flags = ["--max_restarts", "1", "--grace_period", "0.5", "--connection_timeout", "2"];
    let ended = finished(Ssh::new(CONNECTS).launch_script("a:1,b:1", &flags, &script));
    let told = [
        "accelerate launch: b: it did not say in time that its ranks have ended",
        "exited with code 3 after ",
        "; restart 1 of 1 begins in 3 s, when no rank can be left where nobody is heard\n",
    ];
    ended.expect(0, &told);
    assert_eq!(ended.sorted_stdout(), ["[rank 0] attempt 1: a 0/2 0/2", "[rank 1] attempt 1: b 1/2 1/2"]);
}

/// What is there in the place of its agent is heard all the time, so nobody may take its rank for one that ends by itself.
#[test]
fn nothing_starts_beside_ranks_of_which_a_machine_that_is_heard_has_not_said_that_they_have_ended() {
    let agent = "echo accelerate agent 0.1.0; read order
        echo '{\"Prepared\":{\"problems\":[],\"warnings\":[],\"port\":null,\"meets_at\":null,\"num_gpus\":0,\"versions\":{\"program\":null,\
        \"libtorch\":null},\"beacon\":null,\"clock\":{\"secs\":1,\"nanos\":0}}}'
        while echo '\"Beat\"'; do sleep 0.2; done";
    let ssh = Ssh::new(&format!("[ $1 = a ] || {{ {agent}; }}\n{CONNECTS}"));
    let flags = ["--max_restarts", "1", "--grace_period", "0.1", "--no_preflight"];
    let ended = finished(ssh.launch_script("a:1,b:1", &flags, "exit 3"));
    let told = [
        "accelerate launch: b: it did not say in time that its ranks have ended",
        "error: rank 0 on a (process ",
        "\n  not restarted: b did not say that its ranks have ended, and others would have run beside them\n",
    ];
    ended.expect(3, &told);
}

/// The ranks of the others meet on the first of them.
#[test]
fn a_run_may_begin_without_a_machine_if_that_is_said() {
    let ssh = Ssh::new(&format!("{UNLESS_GONE}; {CONNECTS}"));
    fs::write(ssh.path("gone_a"), "").unwrap();
    let launch = |flags: &[&str]| {
        let mut command = crate::support::accelerate();
        command.args(["launch", "--hosts", "a:4,b:1,c:1", "--no_preflight", "--no_prefix", "--ssh_command"]);
        command.arg(ssh.path("ssh")).args(flags).args(["sh", "-c", "echo $MASTER_ADDR $RANK/$WORLD_SIZE"]);
        finished(command)
    };
    let ended = launch(&["--min_machines", "2"]);
    ended.expect(0, &[&format!("a: left out, so 2 machines start 2 processes without it, because {REFUSED}")]);
    assert_eq!(ended.sorted_stdout(), ["b 0/2", "b 1/2"]);
    for flags in [&[][..], &["--min_machines", "3"], &["--max_restarts", "5"]] {
        let ended = launch(flags);
        ended.expect(1, &[&format!("error: nothing was started: a: {REFUSED}")]);
        assert_eq!(ended.stdout, "", "{flags:?}");
    }
}

#[test]
fn too_few_machines_end_the_run_with_the_cause() {
    let ssh = Ssh::new(&format!("{UNLESS_GONE}; {CONNECTS}"));
    ["gone_b", "gone_c"].iter().for_each(|name| fs::write(ssh.path(name), "").unwrap());
    let ended = finished(ssh.launch_script("a:1,b:1,c:1", &["--nnodes", "2:3"], "echo started"));
    ended.expect(1, &["error: nothing was started:\n", &format!("\n  b: {REFUSED}"), &format!("\n  c: {REFUSED}")]);
    assert!(!ended.stderr.contains("left out") && ended.stdout.is_empty(), "{ended:?}");
}

/// A machine that needs a moment, such as one that boots, is there again at the next restart.
#[test]
fn each_restart_tries_all_machines() {
    let ssh = Ssh::new(&format!(
        "echo $1 >>\"${{0%/*}}/connections\"
         [ $1 = b ] && [ $(grep -c b \"${{0%/*}}/connections\") = 2 ] && exit 255
         {CONNECTS}"
    ));
    let script =
        format!("[ $TORCHELASTIC_RESTART_COUNT = 2 ] && {{ {WHO}; exit 0; }}; [ $RANK = 0 ] && exit 6; sleep 600");
    let ended = finished(ssh.launch_script("a:1,b:1", &["--max_restarts", "2"], &script));
    ended.expect(
        0,
        &[
            "rank 0 on a (process ",
            "; restart 1 of 2 begins now\n",
            &format!("nothing was started: b: {REFUSED}; logging in must work without a question; restart 2 of 2 begins in 1 s\n"),
        ],
    );
    assert_eq!(ended.sorted_stdout(), ["[rank 0] attempt 2: a 0/2 0/2", "[rank 1] attempt 2: b 1/2 1/2"]);
}

/// The first machine cannot be reached after the first attempt, so that the others have other ranks.
#[test]
fn files_of_all_attempts_are_in_one_folder_for_each_machine() {
    let folder = tempfile::tempdir().unwrap();
    let ssh = Ssh::new(&format!("{UNLESS_GONE}; {CONNECTS}"));
    let tee = ["--tee", "1", "--log_dir", folder.path().to_str().unwrap()];
    let flags = [&["--max_restarts", "1", "--nnodes", "2:3"][..], &tee].concat();
    let (_pipe, pipe) = named_pipe();
    let script = format!(
        "{WHO}; [ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0
         if [ $HOST = a ]; then read line <{pipe}; read line <{pipe}; touch {}; exit 1; fi
         exec 9<>{pipe}; echo >&9; exec sleep 600",
        ssh.path("gone_a").display()
    );
    finished(ssh.launch_script("a:1,b:1,c:1", &flags, &script)).expect(0, &["a: left out, so 2 machines start"]);
    let mut found = Vec::new();
    for run in fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap()) {
        let machine = run.file_name().to_str().unwrap().rsplit_once('_').unwrap().1.to_owned();
        for attempt in 0..2 {
            let file = run.path().join(format!("attempt_{attempt}/0/stdout.log"));
            found.extend(fs::read_to_string(file).ok().map(|text| (machine.clone(), text)));
        }
    }
    found.sort();
    let wanted = [
        ("0", "attempt 0: a 0/3 0/3\n"),
        ("1", "attempt 0: b 1/3 1/3\n"),
        ("1", "attempt 1: b 0/2 0/2\n"),
        ("2", "attempt 0: c 2/3 2/3\n"),
        ("2", "attempt 1: c 1/2 1/2\n"),
    ];
    assert_eq!(found, wanted.map(|(machine, text)| (machine.to_owned(), text.to_owned())));
}
