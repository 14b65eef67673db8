//! `accelerate status` on a machine that has agents of a launcher elsewhere, which another process plays here.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

use accelerate_core::status::{LauncherName, PAGE_BYTES, RunInfo, RunPart};
use serde_json::Value;

use crate::support::accelerate;

/// Keeps a file with what it is told, until nobody says anything any more.
const AGENT: &str = "import os, sys\n\
    file = os.memfd_create('accelerate-status')\n\
    os.write(file, bytes.fromhex(sys.stdin.readline()))\n\
    print('ready', flush=True)\n\
    sys.stdin.read()";

/// An agent with one rank, of an attempt with this number of two.
fn agent(restart_count: usize) -> Child {
    let mut child =
        Command::new("python3").args(["-c", AGENT]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let launcher = LauncherName { host: "head".to_owned(), process_id: 1, id: 7 + restart_count as u64 };
    let info = RunInfo {
        version: "1".to_owned(),
        process_id: child.id(),
        command: vec!["train".to_owned()],
        num_processes: 2,
        first_rank: 1,
        num_local_processes: 1,
        started: accelerate_launch::status::now(),
        restart_count,
        max_restarts: 1,
        part: RunPart::Agent { machine: "b".to_owned(), launcher },
    };
    let pages = [info.encode(), vec![0; PAGE_BYTES]].concat();
    let text: String = pages.iter().map(|byte| format!("{byte:02x}")).collect();
    writeln!(child.stdin.as_mut().unwrap(), "{text}").unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    child
}

fn end(mut agent: Child) {
    drop(agent.stdin.take());
    agent.wait().unwrap();
}

/// In the pause nothing of the run is here.
#[test]
fn watching_goes_on_with_the_next_agent_of_the_launcher() {
    let first = agent(0);
    let mut command = accelerate();
    command.args(["status", &first.id().to_string(), "--watch=0.1", "--json"]);
    let mut watching = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(watching.stdout.take().unwrap()).lines();
    let mut reports = lines.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
    let mut messages = BufReader::new(watching.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert_eq!(reports.next().unwrap()["runs"][0]["restart_count"], 0);
    end(first);
    let told = messages.next().unwrap();
    assert!(told.contains("waiting for restart 1 of 1, which their launcher, process 1 on head, may begin"), "{told}");
    let second = agent(1);
    assert!(reports.any(|report| report["runs"][0]["restart_count"] == 1));
    end(second);
    let told = messages.next().unwrap();
    assert!(told.contains("the run is over"), "{told}");
    assert!(watching.wait().unwrap().success());
}
