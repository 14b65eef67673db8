//! Everything but launching.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Command;

use rstest::rstest;

use crate::support::{accelerate, finished};

#[test]
fn the_version_is_that_of_the_package() {
    let mut command = accelerate();
    command.arg("--version");
    let version = finished(command);
    assert_eq!(version.stdout, format!("accelerate {}\n", env!("CARGO_PKG_VERSION")));
    version.expect(0, &[]);
}

/// Python Accelerate installs accelerate-launch, accelerate-config and others beside accelerate.
#[rstest]
#[case("accelerate-launch", &["--help"], 0, "Usage: accelerate launch")]
#[case("accelerate-launch", &["--num_processes", "4", "--emit", "slurm", "train"], 0, "exec accelerate launch --num_processes 4 train")]
#[case("accelerate-estimate-memory", &["-h"], 0, "Usage: accelerate estimate-memory")]
#[case("accelerate-config", &["validate", "no.yaml"], 1, "accelerate config: error: ")]
#[case("accelerate-merge-weights", &["--nonsense"], 2, "accelerate merge-weights: error: ")]
#[case("accelerate-2.0", &["--version"], 0, "accelerate ")]
#[case("accelerate-nonsense", &["config", "--help"], 0, "Write, check and explain configuration files.")]
#[case("speed-launch", &["config", "--help"], 0, "Write, check and explain configuration files.")]
fn a_link_with_the_name_of_a_command_is_that_command(
    #[case] name: &str,
    #[case] words: &[&str],
    #[case] code: i32,
    #[case] wanted: &str,
) {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join(name);
    symlink(env!("CARGO_BIN_EXE_accelerate"), &link).unwrap();
    let mut command = Command::new(&link);
    command.args(words).current_dir(folder.path());
    let found = finished(command);
    assert_eq!(found.code, Some(code), "{found:?}");
    assert!(format!("{}{}", found.stdout, found.stderr).contains(wanted), "{found:?}");
}

#[test]
fn without_a_command_there_is_help_and_an_error_code() {
    finished(accelerate())
        .expect(2, &["Usage", "setup", "new", "doctor", "launch", "env", "estimate-memory", "completions"]);
}

#[test]
fn help_teaches_by_example() {
    let mut command = accelerate();
    command.args(["launch", "--help"]);
    let help = finished(command);
    help.expect(0, &[]);
    assert!(help.stdout.contains("accelerate launch --num_processes 2 target/release/train --epochs 3"), "{help:?}");
}

#[test]
fn help_of_a_command_is_there_under_both_names() {
    let [by_name, by_flag] = [["help", "launch"], ["launch", "--help"]].map(|words| {
        let mut command = accelerate();
        command.args(words);
        finished(command)
    });
    by_name.expect(0, &[]);
    assert_eq!(by_name.stdout, by_flag.stdout);
}

#[test]
fn the_environment_report_has_every_fact_and_no_secret() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("build-version"), "2.11.0+cpu\n").unwrap();
    let mut command = accelerate();
    command
        .arg("env")
        .env("LIBTORCH", folder.path())
        .env("ACCELERATE_MIXED_PRECISION", "bf16")
        .env("ACCELERATE_ROLE", "a\n- GPU: ten\x1b[31m")
        .env("HF_TOKEN", "hf_secret")
        .env("ACCELERATE_API_KEY", "hf_secret")
        .env("ACCELERATE_TPU_ENV", "WANDB=hf_secret")
        .env("ACCELERATE_DB_PASSWORD", "hf_secret")
        .env("NCCL_AUTH_token", "hf_secret");
    let report = finished(command);
    report.expect(0, &[]);
    for name in ["accelerate version", "libtorch", "platform", "processor", "memory", "GPU", "Python", "environment"] {
        let line = report.stdout.lines().find(|line| line.starts_with(&format!("- {name}: ")));
        assert!(line.is_some_and(|line| !line.ends_with("unknown")), "{name} in\n{}", report.stdout);
    }
    // It is a folder without libraries.
    let libtorch = format!("LIBTORCH points at `{}`, which is not a libtorch", folder.path().display());
    assert!(report.stdout.contains(&libtorch), "{}", report.stdout);
    assert!(report.stdout.contains("ACCELERATE_MIXED_PRECISION=bf16"));
    assert!(!report.stdout.contains("hf_secret"));
    // A variable cannot write lines of the report.
    assert!(report.stdout.contains("ACCELERATE_ROLE=a\\n- GPU: ten\\u{1b}[31m"), "{}", report.stdout);
    for name in ["ACCELERATE_API_KEY", "ACCELERATE_TPU_ENV", "ACCELERATE_DB_PASSWORD", "NCCL_AUTH_token"] {
        assert!(report.stdout.contains(&format!("{name}=(not shown)")), "{}", report.stdout);
    }
    assert!(!report.stdout.contains("HF_TOKEN"));
}

/// A virtual environment whose Python is this script.
#[rstest]
#[case("echo 'Python 3.11.7'", "3.11.7 in {}/bin/python")]
#[case("echo PyPy 7", "PyPy 7 in {}/bin/python")]
#[case("printf '\\033[31m3\\n4'", " [31m3 in {}/bin/python")]
#[case("exit 3", "unknown version in {}/bin/python")]
#[case("yes", "unknown version in {}/bin/python: ")]
fn the_environment_report_has_the_version_of_python(#[case] script: &str, #[case] wanted: &str) {
    let folder = tempfile::tempdir().unwrap();
    let python = folder.path().join("bin/python");
    std::fs::create_dir(folder.path().join("bin")).unwrap();
    std::fs::write(&python, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = accelerate();
    command.arg("env").env("VIRTUAL_ENV", folder.path());
    let report = finished(command);
    report.expect(0, &[]);
    let line = report.stdout.lines().find_map(|line| line.strip_prefix("- Python: ")).unwrap_or_default();
    assert!(line.starts_with(&wanted.replace("{}", &folder.path().display().to_string())), "{line}");
}

#[test]
fn completions_know_the_flags() {
    for shell in ["bash", "zsh", "fish"] {
        let mut command = accelerate();
        command.args(["completions", shell]);
        let script = finished(command);
        script.expect(0, &[]);
        assert!(script.stdout.contains("num_processes"), "{shell}");
    }
}
