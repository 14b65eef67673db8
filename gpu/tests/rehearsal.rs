//! A small share of the rehearsal, and what is said where checks go wrong.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

struct Ran {
    output: Output,
    text: String,
    report: Value,
}

/// Runs the program on the CPU, whatever this machine has, and without Python.
fn run(arguments: &[&str]) -> Ran {
    ran(program().arg("--rehearse").args(arguments))
}

fn program() -> Command {
    let mut program = Command::new(env!("CARGO_BIN_EXE_gpu-checks"));
    // Other tests run beside these, and threads of all of them would wait for each other.
    program.env("OMP_NUM_THREADS", "1");
    program
}

fn ran(command: &mut Command) -> Ran {
    let folder = tempfile::tempdir().unwrap();
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("python");
    command.args(["--python", "no-such-python", "--commit", "abc", "--output"]).arg(folder.path());
    let output = command.arg("--scripts").arg(scripts).output().unwrap();
    let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    Ran { output, text: read("report.txt"), report: serde_json::from_str(&read("report.json")).unwrap() }
}

fn result(report: &Value, check: &str) -> (String, String) {
    let rows = report["rows"].as_array().unwrap();
    let row = rows.iter().find(|row| row["check"] == check).unwrap_or_else(|| panic!("no {check} in {report:#}"));
    (row["result"].as_str().unwrap().to_owned(), row["figure"].as_str().unwrap().to_owned())
}

#[test]
fn checks_run_and_both_reports_say_that_it_was_a_rehearsal() {
    let checks = ["dropout", "fp16_scaler", "memory", "python_fp32", "cuda_graphs", "race_gpt2", "exported"];
    let only = checks.map(|check| ["--only", check]).concat();
    let Ran { output, text, report } = run(&only);
    assert_eq!(output.status.code(), Some(0), "{text}");
    let (state, figure) = result(&report, "dropout");
    assert!(state == "passed" && figure.contains("% kept"), "{text}");
    assert_eq!(result(&report, "fp16_scaler").0, "passed", "{text}");
    let (state, figure) = result(&report, "memory");
    assert!(state == "not_here" && figure.starts_with("because "), "{text}");
    assert_eq!(result(&report, "python_fp32").0, "not_here", "{text}");
    for (check, words) in [("cuda_graphs", "needs a GPU"), ("race_gpt2", "no Python"), ("exported", "because ")] {
        let (state, figure) = result(&report, check);
        assert!(state == "not_here" && figure.contains(words), "{text}");
    }
    assert_eq!(report["rows"].as_array().unwrap().len(), 7);
    assert_eq!(report["is_rehearsal"], true);
    assert_eq!(report["machine"]["commit"], "abc");
    for key in ["system", "processor", "gpu", "driver", "libtorch", "python", "date"] {
        assert!(report["machine"][key].as_str().is_some_and(|value| !value.is_empty()), "{key}: {report:#}");
    }
    assert!(report["machine"]["libtorch"].as_str().unwrap().starts_with("2.11.0"), "{report:#}");
    for printed in [&text, &String::from_utf8_lossy(&output.stdout).into_owned()] {
        assert!(printed.contains("prove nothing about a GPU") && printed.contains("dropout"), "{printed}");
    }
}

#[test]
fn a_planted_failure_is_reported_as_what_it_is_and_the_rest_goes_on() {
    for (plant, budget, state, words) in [
        ("dropout=figure", "480", "failed", "wanted"),
        ("dropout=crash", "480", "crashed", "SIGABRT"),
        // It may take more than the time for all, so that this was too short, for what the runner knows.
        ("dropout=hang", "8", "no_time", "s were left for it of the time for all checks"),
        ("streams=figure", "480", "failed", "plain, one stream aside: loss of step 0: found"),
        // Where a check makes no sense, a wrong figure cannot be told from a right one.
        ("cuda_graphs=figure", "480", "failed", "compared with nothing"),
        ("race_small=figure", "480", "failed", "compared with nothing"),
    ] {
        let (check, _) = plant.split_once('=').unwrap();
        let arguments = ["--only", "generators", "--only", check, "--plant", plant, "--budget", budget];
        let Ran { output, text, report } = run(&arguments);
        assert_eq!(output.status.code(), Some(1), "{plant}: {text}");
        let (found, figure) = result(&report, check);
        assert!(found == state && figure.contains(words), "{plant}: {text}");
        assert_eq!(result(&report, "generators").0, "passed", "{plant}: {text}");
    }
}

#[test]
fn checks_without_time_are_not_run_and_count_as_failures() {
    let Ran { output, text, report } = run(&["--only", "generators", "--only", "dropout", "--budget", "0"]);
    assert_eq!(output.status.code(), Some(1), "{text}");
    for check in ["generators", "dropout"] {
        assert_eq!(result(&report, check).0, "no_time", "{text}");
    }
}

/// Its driver does not fit, for instance: then nothing of what was to be seen has been seen.
#[test]
fn a_gpu_that_is_not_used_is_a_failure_unless_that_was_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let driver = folder.path().join("nvidia-smi");
    std::fs::write(&driver, "#!/bin/sh\necho a GPU\n").unwrap();
    std::fs::set_permissions(&driver, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    for (arguments, code) in [(&["--only", "generators"][..], 1), (&["--only", "generators", "--rehearse"], 0)] {
        let Ran { output, text, report } =
            ran(program().args(arguments).env("PATH", &path).env("CUDA_VISIBLE_DEVICES", ""));
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert_eq!(text.contains("does not see the GPU"), code == 1, "{text}");
        assert_eq!(report["machine"]["gpu"], "a GPU");
        assert_eq!(result(&report, "generators").0, "passed", "{text}");
    }
}

#[test]
fn a_device_that_cannot_be_looked_for_is_reported_and_the_rest_goes_on() {
    let arguments = ["--rehearse", "--only", "generators"];
    let Ran { output, text, report } = ran(program().args(arguments).env("ACCELERATE_TORCH_DEVICE", "cuda:99"));
    assert_eq!(output.status.code(), Some(1), "{text}");
    let (state, figure) = result(&report, "probe");
    assert!(state == "failed" && figure.contains("cuda:99"), "{text}");
    assert_eq!(result(&report, "generators").0, "passed", "{text}");
}

#[test]
fn names_are_listed_and_unknown_ones_refused() {
    let list = program().arg("--list").output().unwrap();
    assert!(String::from_utf8_lossy(&list.stdout).lines().count() > 20);
    for arguments in [["--only", "droput"], ["--plant", "droput=crash"], ["--plant", "dropout=cramp"]] {
        let refused = program().args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && (said.contains("droput") || said.contains("cramp")), "{said}");
    }
}

/// On a GPU it would hold memory for good.
#[test]
fn a_check_that_hangs_ends_with_the_runner_that_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = program();
    command.args(["--rehearse", "--only", "dropout", "--plant", "dropout=hang", "--python", "none", "--output"]);
    let mut runner = command.arg(folder.path()).stdout(Stdio::null()).spawn().unwrap();
    let children = format!("/proc/{0}/task/{0}/children", runner.id());
    let check = wait_for(|| {
        let children = std::fs::read_to_string(&children).unwrap();
        children.split_whitespace().find(|child| has_watch(child)).map(str::to_owned)
    });
    runner.kill().unwrap();
    runner.wait().unwrap();
    // One that has ended, and that nobody has asked for its end, has no arguments.
    wait_for(|| std::fs::read(format!("/proc/{check}/cmdline")).map_or(true, |it| it.is_empty()).then_some(()));
}

/// Has the process a thread that looks whether its parent is there?
fn has_watch(process: &str) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{process}/task")) else { return false };
    let name =
        |thread: std::io::Result<std::fs::DirEntry>| std::fs::read_to_string(thread.ok()?.path().join("comm")).ok();
    threads.filter_map(name).any(|name| name.trim_end() == "parent-watch")
}

/// The limit of the test's own time ends what never comes.
fn wait_for<T>(mut look: impl FnMut() -> Option<T>) -> T {
    loop {
        match look() {
            Some(found) => return found,
            None => std::thread::yield_now(),
        }
    }
}
