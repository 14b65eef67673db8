//! `accelerate status`: runs are found while they go on, told apart, and gone when they are over, however they end.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

use accelerate_launch::{LaunchConfig, Program, Silent, launch};
use rustix::process::Signal;
use serde_json::Value;

use crate::hosts::{CONNECTS, Ssh};
use crate::support::{Finished, LIVE_ON, Witness, accelerate, finished, launch_script, named_pipe, send};

/// A rank that tells what it is doing, as the library does: that its optimizer has taken so many steps as its rank is.
const TELLING: &str = "exec python3 -c \"import os, struct, sys\n\
    process, descriptor, page = map(int, os.environ['ACCELERATE_STATUS'].split(':'))\n\
    file = os.open(f'/proc/{process}/fd/{descriptor}', os.O_RDWR)\n\
    os.pwrite(file, struct.pack('=QQ', os.getpid(), int(os.environ['RANK'])), 4096 * page)\n\
    open('/dev/fd/' + os.environ['WITNESS'], 'w').write('ready\\n')\n\
    import time\n\
    for _ in range(600): time.sleep(0.05)\"";

fn silent() -> String {
    format!("echo ready >/dev/fd/$WITNESS; {LIVE_ON}")
}

/// A launch whose ranks are ready.
fn started(script: &str, num_processes: usize) -> (Witness, Child) {
    let mut witness = Witness::new();
    let child = witness.start(launch_script(num_processes, &[], script));
    witness.wait_for("ready", num_processes);
    (witness, child)
}

fn end((witness, mut child): (Witness, Child), signal: Signal) {
    send(&child, signal);
    child.wait().unwrap();
    witness.expect_nobody_survives();
}

fn status(arguments: &[&str]) -> Finished {
    let mut command = accelerate();
    command.arg("status").args(arguments);
    finished(command)
}

fn run_of(launcher: u32) -> Value {
    let found = status(&[&launcher.to_string(), "--json"]);
    found.expect(0, &[]);
    let report: Value = serde_json::from_str(&found.stdout).unwrap();
    assert_eq!(report["runs"].as_array().unwrap().len(), 1);
    report["runs"][0].clone()
}

#[test]
fn ranks_of_a_run_are_shown_with_what_they_tell() {
    let launched = started(TELLING, 2);
    let run = run_of(launched.1.id());
    assert_eq!((&run["launcher"], &run["num_processes"]), (&launched.1.id().into(), &2.into()));
    assert!(run["command"][0].as_str().unwrap().ends_with("/sh"));
    for (number, rank) in run["ranks"].as_array().unwrap().iter().enumerate() {
        assert_eq!((&rank["rank"], &rank["steps"]), (&number.into(), &number.into()));
        assert_eq!(
            (&rank["state"], &rank["tells"], &rank["awaited"]),
            (&"running".into(), &true.into(), &false.into())
        );
        assert!(rank["resident_bytes"].as_u64().unwrap() > 1 << 20, "{rank}");
    }
    // A rank leads to its run as well.
    let rank = run["ranks"][1]["process_id"].to_string();
    let text = status(&[&rank]);
    text.expect(0, &[]);
    let columns: Vec<&str> =
        text.stdout.lines().find(|line| line.contains(&rank)).unwrap().split_whitespace().collect();
    assert_eq!(columns[..4], ["1", &rank, "running", "1"], "{text:?}");
    assert!(!text.stdout.contains('\u{1b}'), "no colours without a terminal");
    end(launched, Signal::TERM);
}

/// Nobody waits for it in a call, and yet it holds up the run.
#[test]
fn a_rank_that_is_stopped_is_marked_with_what_lets_it_go_on() {
    let (_folder, pipe) = named_pipe();
    let is_stopped = "grep -q '^State:.T' /proc/$stopped/status";
    let script = format!(
        "if [ $RANK = 0 ]; then echo $$ >{pipe}; kill -STOP $$; \
         else read stopped <{pipe}; until {is_stopped}; do :; done; echo ready >/dev/fd/$WITNESS; fi; {LIVE_ON}"
    );
    let mut witness = Witness::new();
    let child = witness.start(launch_script(2, &[], &script));
    witness.wait_for("ready", 1);
    let stopped = run_of(child.id())["ranks"][0]["process_id"].to_string();
    let shown = status(&[&child.id().to_string()]);
    shown.expect(0, &[]);
    let cure = format!("Rank 0 is stopped by a signal; `kill -CONT {stopped}` lets it go on.\n");
    let row = shown.stdout.lines().find(|line| line.contains(&stopped)).unwrap();
    assert!(row.starts_with('>') && row.contains(" stopped "), "{shown:?}");
    assert!(shown.stdout.contains(&cure) && !shown.stdout.contains("Rank 1 is stopped"), "{shown:?}");
    end((witness, child), Signal::TERM);
}

#[test]
fn programs_that_tell_nothing_are_shown_with_their_processes() {
    let launched = started(&silent(), 2);
    let text = status(&[&launched.1.id().to_string()]);
    text.expect(0, &[]);
    assert_eq!(text.stdout.lines().filter(|line| line.ends_with("not told")).count(), 2, "{text:?}");
    assert!(text.stdout.contains("Nothing is told by ranks 0-1: the program does not use accelerate-rs"), "{text:?}");
    end(launched, Signal::TERM);
}

/// Nothing has to be cleaned up, since there is nothing that could be left.
#[test]
fn a_run_is_gone_with_its_launcher_however_that_ends() {
    for signal in [Signal::TERM, Signal::KILL] {
        let launched = started(&silent(), 1);
        let launcher = launched.1.id();
        run_of(launcher);
        end(launched, signal);
        let gone = status(&[&launcher.to_string()]);
        gone.expect(1, &["accelerate status: error: no run of yours", "lists those that there are"]);
        assert_eq!(gone.stdout, "");
    }
}

#[test]
fn several_runs_are_listed() {
    let launched = [started(&silent(), 1), started(&silent(), 2)];
    let list = status(&[]);
    list.expect(0, &[]);
    let line = |child: &Child| {
        let words = child.id().to_string();
        let line = list.stdout.lines().find(|line| line.trim_start().starts_with(&words));
        line.unwrap_or_else(|| panic!("{words} is missing in\n{}", list.stdout))
            .split_whitespace()
            .nth(1)
            .unwrap()
            .to_owned()
    };
    assert_eq!([line(&launched[0].1), line(&launched[1].1)], ["1", "2"]);
    assert!(list.stdout.ends_with("accelerate status LAUNCHER shows one of them\n"), "{list:?}");
    launched.into_iter().for_each(|launched| end(launched, Signal::TERM));
}

/// A launch within a rank has a file of its own, and its ranks do not write into that of the outer launch.
#[test]
fn a_launch_within_a_rank_is_a_run_of_its_own() {
    let inner = format!("{} launch --num_processes 1 sh -c '{}'", env!("CARGO_BIN_EXE_accelerate"), silent());
    let mut witness = Witness::new();
    let child = witness.start(launch_script(1, &[], &format!("exec {inner}")));
    witness.wait_for("ready", 1);
    let outer = run_of(child.id());
    let inner = outer["ranks"][0]["process_id"].as_u64().unwrap();
    // The number of a process that is both: a rank of the one, and the launcher of the other.
    let found = status(&[&inner.to_string(), "--json"]);
    let report: Value = serde_json::from_str(&found.stdout).unwrap();
    let launchers: Vec<_> =
        report["runs"].as_array().unwrap().iter().map(|run| run["launcher"].as_u64().unwrap()).collect();
    assert_eq!(launchers, [u64::from(child.id()), inner]);
    end((witness, child), Signal::TERM);
}

#[test]
fn watching_ends_with_the_run() {
    let launched = started(&silent(), 1);
    let mut command = accelerate();
    command.args(["status", &launched.1.id().to_string(), "--watch=0.1", "--json"]);
    let mut watching =
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(watching.stdout.take().unwrap()));
    for _ in 0..2 {
        let report: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        assert_eq!(report["runs"][0]["launcher"], launched.1.id());
    }
    end(launched, Signal::TERM);
    assert!(lines.all(|line| line.is_ok()));
    let ended = watching.wait_with_output().unwrap();
    assert!(ended.status.success() && String::from_utf8_lossy(&ended.stderr).contains("the run is over"), "{ended:?}");
}

/// As a notebook or a program does that launches and then goes on: here, the process of this test.
#[test]
fn watching_says_what_it_waits_for_while_a_launcher_lives_on() {
    let (_folder, pipe) = named_pipe();
    let config = LaunchConfig {
        args: vec!["-c".into(), format!("read line <{pipe}").into()],
        ..LaunchConfig::new(Program::Executable("sh".into()), 1)
    };
    let own = std::process::id().to_string();
    std::thread::scope(|scope| {
        let launched = scope.spawn(|| launch(&config, &mut Silent).unwrap());
        let mut command = accelerate();
        command.args(["status", &own, "--watch=0.1"]).stdout(Stdio::piped()).stderr(Stdio::piped());
        while status(&[&own]).code != Some(0) {
            std::thread::yield_now();
        }
        let mut watching = command.spawn().unwrap();
        let mut shown = BufReader::new(watching.stdout.take().unwrap()).lines();
        assert!(shown.any(|line| line.unwrap().contains(&format!("launcher {own}, 1 process"))));
        fs::write(&pipe, "now\n").unwrap();
        launched.join().unwrap();
        let mut told = BufReader::new(watching.stderr.take().unwrap()).lines();
        let wanted =
            format!("the ranks have ended, and their launcher, process {own}, is still there; waiting until it");
        assert!(told.any(|line| line.unwrap().contains(&wanted)));
        send(&watching, Signal::KILL);
        watching.wait().unwrap();
        drop(shown);
    });
}

/// The agents of both machines are on this one, as those of `ssh` to it are.
#[test]
fn the_launcher_of_several_machines_leads_to_the_ranks_of_its_agents_here() {
    let ssh = Ssh::new(CONNECTS);
    let mut witness = Witness::new();
    let child = witness.start(ssh.launch_script("a:1,b:2", &[], &silent()));
    witness.wait_for("ready", 3);
    let run = run_of(child.id());
    assert_eq!((&run["launcher"], &run["launcher_host"]), (&child.id().into(), &Value::Null));
    assert_eq!(run["machines"], serde_json::json!(["a", "b"]));
    let ranks: Vec<_> = run["ranks"].as_array().unwrap().iter().map(|rank| rank["rank"].as_u64().unwrap()).collect();
    assert_eq!(ranks, [0, 1, 2]);
    let agents: Vec<_> =
        run["agents"].as_array().unwrap().iter().map(|agent| (&agent["machine"], &agent["ranks"])).collect();
    assert_eq!(agents, [(&"a".into(), &serde_json::json!([0])), (&"b".into(), &serde_json::json!([1, 2]))]);
    // An agent and a rank lead to the same run.
    for process_id in [&run["agents"][1]["process_id"], &run["ranks"][0]["process_id"]] {
        assert_eq!(run_of(process_id.as_u64().unwrap() as u32)["launcher"], run["launcher"]);
    }
    let agent = &run["agents"][0]["process_id"];
    let text = status(&[&child.id().to_string()]);
    text.expect(0, &[]);
    let wanted = format!("launcher {}, 3 processes on 2 machines, for ", child.id());
    assert!(
        text.stdout.contains(&wanted) && text.stdout.contains(&format!("agent {agent} on a: rank 0\n")),
        "{text:?}"
    );
    // In the list as well, beside another run.
    let other = started(&silent(), 1);
    let list = status(&[]);
    let line = list.stdout.lines().find(|line| line.trim_start().starts_with(&format!("{} ", child.id())));
    assert!(line.is_some_and(|line| line.contains(&format!(" a ({agent}), b ("))), "{list:?}");
    end(other, Signal::TERM);
    end((witness, child), Signal::TERM);
}

/// Here, because the connection does not come about.
#[test]
fn a_launcher_whose_ranks_are_not_here_names_the_machines_to_ask() {
    let (_folder, pipe) = named_pipe();
    let ssh = Ssh::new(&format!("echo connecting >/dev/fd/$WITNESS; read line <{pipe}; exit 255"));
    let mut witness = Witness::new();
    let mut child = witness.start(ssh.launch_script("a:1,b:2", &[], "true"));
    witness.wait_for("connecting", 2);
    let launcher = child.id().to_string();
    let text = status(&[&launcher]);
    text.expect(0, &[]);
    let wanted = "\n\nNone of its 3 ranks is on this machine. Each machine shows its own: ask a, b, such as by `ssh a accelerate status`.\n";
    assert!(text.stdout.ends_with(wanted), "{text:?}");
    send(&child, Signal::TERM);
    child.wait().unwrap();
    status(&[&launcher]).expect(1, &["no run of yours"]);
}

/// A pause is long after a machine was lost, since its ranks may live for as long.
#[test]
fn a_run_that_waits_to_be_started_again_says_so() {
    let (_folder, pipe) = named_pipe();
    let ssh = Ssh::new(
        "export HOST=$1 SSH=$$; shift; trap 'exit 255' USR1
         exec 3<&0; sh -c \"$*\" <&3 3<&- & exec 3<&-; wait $!",
    );
    let script = format!("read line <{pipe}; kill -USR1 $SSH; sleep 600");
    let flags = ["--max_restarts", "2", "--connection_timeout", "3600"];
    let mut command = ssh.launch_script("a:1", &flags, &script);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    fs::write(&pipe, "now\n").unwrap();
    let told = lines.find(|line| line.as_ref().unwrap().contains("restart 1 of 2 begins in ")).unwrap().unwrap();
    let launcher = child.id().to_string();
    let text = status(&[&launcher]);
    text.expect(0, &[]);
    let waits = format!("\nlauncher {launcher}, 1 process, waits to be started again: restart 1 of 2 begins in ");
    assert!(text.stdout.contains(&waits), "{text:?} after {told}");
    assert!(
        text.stdout.contains("\nThe last attempt has failed: a: the connection broke while rank 0 was running"),
        "{text:?}"
    );
    let run = run_of(child.id());
    assert_eq!((&run["restart_count"], run["ranks"].as_array().unwrap().len()), (&1.into(), 0));
    assert!(run["pause"]["seconds"].as_f64().unwrap() > 0.0, "{run}");
    send(&child, Signal::TERM);
    child.wait().unwrap();
    status(&[&launcher]).expect(1, &["no run of yours"]);
}

/// A rank that was named is another process then.
#[test]
fn watching_a_rank_goes_on_after_a_restart() {
    let (_folder, pipe) = named_pipe();
    let script = format!("[ $TORCHELASTIC_RESTART_COUNT = 1 ] || {{ read line <{pipe}; exit 3; }}; {}", silent());
    let mut witness = Witness::new();
    let mut command = launch_script(1, &["--max_restarts", "1"], &format!("echo ready >/dev/fd/$WITNESS; {script}"));
    command.stderr(Stdio::null());
    let child = witness.start(command);
    witness.wait_for("ready", 1);
    let rank = run_of(child.id())["ranks"][0]["process_id"].to_string();
    let mut command = accelerate();
    command.args(["status", &rank, "--watch=0.1", "--json"]);
    let mut watching = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let lines = BufReader::new(watching.stdout.take().unwrap()).lines();
    let mut reports = lines.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
    assert_eq!(reports.next().unwrap()["runs"][0]["restart_count"], 0);
    fs::write(&pipe, "now\n").unwrap();
    assert!(
        reports.any(|report| report["runs"][0]["ranks"][0]["process_id"]
            .as_u64()
            .is_some_and(|id| id.to_string() != rank))
    );
    end((witness, child), Signal::TERM);
    drop(reports);
    watching.wait().unwrap();
}

#[test]
fn a_pause_that_is_none_is_refused() {
    for pause in ["0", "-1", "soon", "inf", "NaN"] {
        status(&[&format!("--watch={pause}")]).expect(2, &["from 0.1 to 86400"]);
    }
}
