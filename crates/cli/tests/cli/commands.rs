//! Everything but launching.

use crate::support::{accelerate, finished};

#[test]
fn the_version_is_that_of_the_package() {
    let mut command = accelerate();
    command.arg("--version");
    let version = finished(command);
    assert_eq!(version.stdout, format!("accelerate {}\n", env!("CARGO_PKG_VERSION")));
    version.expect(0, &[]);
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
