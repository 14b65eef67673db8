//! A small share of `cargo xtask soak launch`: runs with restarts are struck, on one machine.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use rstest::rstest;
use std::process::Command;

/// The launcher is killed, a rank is stopped, and a rank is killed.
#[rstest]
fn a_struck_run_starts_again_and_ends_as_one_that_nobody_disturbed(#[values(5, 10, 15)] seed: u64) {
    let output = Command::new(env!("CARGO_BIN_EXE_attack"))
        .args(["--program", env!("CARGO_BIN_EXE_conformance"), "--launches", "1", "--one-machine"])
        // The machine may be busy; how quickly is the soak's question.
        .args(["--slack", "60", "--seed", &seed.to_string()])
        .output()
        .unwrap();
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    assert!(output.status.success(), "{stdout}\n{stderr}");
}
