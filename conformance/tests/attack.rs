//! A small share of `cargo xtask soak attack`: one attack of each kind.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use rstest::rstest;
use std::process::Command;

/// Each seed makes an attack of another kind.
#[rstest]
fn an_attacked_run_ends_in_time_names_the_right_rank_and_leaves_whole_files(
    #[values(0, 1, 2, 3, 4, 10, 16, 20)] seed: u64,
) {
    let output = Command::new(env!("CARGO_BIN_EXE_attack"))
        .args(["--program", env!("CARGO_BIN_EXE_conformance"), "--tries", "1", "--seed", &seed.to_string()])
        // The machine may be busy; how quickly is the soak's question.
        .args(["--slack", "60"])
        .output()
        .unwrap();
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    assert!(output.status.success(), "{stdout}\n{stderr}");
}
