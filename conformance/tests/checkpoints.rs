//! A small share of `cargo xtask soak checkpoint`: runs are killed at random moments, and go on.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::process::Command;

#[test]
fn a_run_that_is_killed_at_any_moment_goes_on_to_the_bit() {
    let output = Command::new(env!("CARGO_BIN_EXE_attack"))
        .args(["--program", env!("CARGO_BIN_EXE_conformance"), "--checkpoints", "20"])
        .output()
        .unwrap();
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    assert!(output.status.success(), "{stdout}\n{stderr}");
}
