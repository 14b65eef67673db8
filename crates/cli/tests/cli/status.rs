//! `accelerate status`: runs are found while they go on, told apart, and gone when they are over, however they end.

use std::process::Child;

use rustix::process::Signal;
use serde_json::Value;

use crate::support::{Finished, LIVE_ON, Witness, accelerate, finished, launch_script, send};

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

#[test]
fn a_pause_that_is_none_is_refused() {
    for pause in ["0", "-1", "soon", "inf", "NaN"] {
        status(&[&format!("--watch={pause}")]).expect(2, &["from 0.1 to 86400"]);
    }
}
