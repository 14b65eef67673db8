//! Programs that launch their own functions: results come back, failures are named, mistakes are refused, nothing is left.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use rstest::rstest;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

/// Of a run that knows no other.
fn program(path: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(path);
    command.args(arguments).env("ACCELERATE_USE_CPU", "true").env("OMP_NUM_THREADS", "1").stdin(Stdio::null());
    for name in ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ACCELERATE_NUM_PROCESSES"] {
        command.env_remove(name);
    }
    command
}

fn launching(case: &str) -> Command {
    program(env!("CARGO_BIN_EXE_launching"), &[case])
}

/// Whether it ended well, and what it said.
fn outcome(mut command: Command) -> (bool, String) {
    let output = command.output().unwrap();
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    (output.status.success(), said)
}

#[rstest]
#[case("sums", &["sums: [(0, [1.5, -2.5])]", "sums: [(0, [2.5, -1.5]), (1, [2.5, -1.5])]", "(2, [4.5, 0.5])]"])]
#[case("precision", &["precision: [\"bf16\", \"bf16\"]", "precision: [\"no\", \"no\"]"])]
#[case("prefixed", &["<default 0> a line\n", "<default 1> a line\n"])]
#[case("input", &["input: [0, 0]"])]
#[case("nested", &["launching::functions::basic was to be launched inside a process that a launcher has started itself"])]
#[case("starts_program", &["sums: [(0, [2.5, -1.5]), (1, [2.5, -1.5])]"])]
fn results_come_back(#[case] case: &str, #[case] expected: &[&str]) {
    let (is_success, said) = outcome(launching(case));
    assert!(is_success, "{said}");
    for expected in expected {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    let own = said.lines().filter(|line| line.starts_with("main of process")).count();
    assert_eq!(own, 1, "no worker process comes to what main does otherwise: {said}");
}

#[rstest]
#[case("fails", &["launching::functions::fails failed: rank 1 (process ", "exited with code 1", "Error: row 3 has no label"])]
#[case("panics", &["launching::functions::panics failed: rank 0 (process ", "exited with code 101", "a panic of the function"])]
#[case("exits", &["rank 0 ended with code 0 before launching::functions::exits had returned"])]
#[case("answers_once", &["restart 1 of 1 begins now", "rank 0 ended with code 0 before launching::functions::answers_once had returned"])]
#[case("unreached", &["rank 0 ended with code 0 before launching::functions::basic had returned", "main of a new process"])]
#[case("unregistered", &["launching::functions::unregistered is not among the functions of workers! (launching::functions::basic, "])]
#[case("twice", &["workers! has launching::functions::twice more than once"])]
#[case("unreadable", &["the argument of launching::functions::unreadable cannot be read again", "a table is wanted"])]
#[case("no_processes", &["num_processes is 0, but at least 1"])]
#[case("unsaid_processes", &["num_processes is not given"])]
#[case("accelerator", &["this process holds 1 accelerator, ", "this process holds 2 accelerators, "])]
fn failures_are_named_and_mistakes_refused(#[case] case: &str, #[case] expected: &[&str]) {
    let (is_success, said) = outcome(launching(case));
    assert!(!is_success, "{said}");
    for expected in expected {
        assert!(said.contains(expected), "{expected}: {said}");
    }
}

#[test]
fn nothing_outlives_a_program_that_is_killed() {
    let mut program = launching("sleeps").stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(program.stdout.take().unwrap()).lines().map(Result::unwrap);
    let started = lines.filter_map(|line| line.split_once("started ").map(|(_, numbers)| numbers.to_owned()));
    // Of both processes and of what they have started.
    let numbers: Vec<i32> = started
        .take(2)
        .flat_map(|pair| pair.split(' ').map(|number| number.parse().unwrap()).collect::<Vec<_>>())
        .collect();
    let running: Vec<_> = numbers
        .iter()
        .map(|number| pidfd_open(Pid::from_raw(*number).unwrap(), PidfdFlags::empty()).unwrap())
        .collect();
    assert_eq!(running.len(), 4);
    program.kill().unwrap();
    program.wait().unwrap();
    for (number, process) in numbers.iter().zip(&running) {
        let limit = Timespec { tv_sec: 30, tv_nsec: 0 };
        let num_ended = poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&limit)).unwrap();
        assert_eq!(num_ended, 1, "process {number} lives on");
    }
}

#[rstest]
fn test_notebook(#[values(1, 2, 3)] num_processes: usize) {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["test_notebook", "--folder", folder.path().to_str().unwrap()];
    let mut command = program(env!("CARGO_BIN_EXE_conformance"), &arguments);
    command.env("ACCELERATE_NUM_PROCESSES", num_processes.to_string());
    let (is_success, said) = outcome(command);
    assert!(is_success && said.contains("test_notebook: all checks passed\n"), "{said}");
}

/// Runs the cell in a process that does what a kernel does.
#[rstest]
#[case(true, &["trained: Ok([[5, 6], [5, 6]])", "cell::fails failed: rank 1 (process ", "Error: row 3 has no label", "this process holds 1 accelerator, "])]
// Whoever else loads a library: a new process of that program would not.
#[case(false, &["trained: Err(the function is in the library ", "libcell.so, which no new process of this program would load"])]
fn functions_of_a_library_are_launched_by_its_kernel(#[case] is_kernel: bool, #[case] expected: &[&str]) {
    let cell = Path::new(env!("CARGO_BIN_EXE_conformance")).with_file_name("examples").join("libcell.so");
    if !cell.is_file() {
        eprintln!(
            "skipped, because {} is not there; `cargo build -p conformance --example cell` makes it",
            cell.display()
        );
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let kernel = folder.path().join("kernel");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/kernel.c");
    assert!(Command::new("cc").arg("-o").arg(&kernel).args([source, "-ldl"]).status().unwrap().success());
    let mut kernel = program(kernel.to_str().unwrap(), &[]);
    if is_kernel {
        kernel.env("EVCXR_IS_RUNTIME", "1");
    }
    let mut kernel = kernel.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    writeln!(kernel.stdin.take().unwrap(), "LOAD_AND_RUN {} run_cell", cell.display()).unwrap();
    let output = kernel.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success() && said.matches("the cell has ended").count() == 1, "{said}");
    for expected in expected {
        assert!(said.contains(expected), "{expected}: {said}");
    }
}
