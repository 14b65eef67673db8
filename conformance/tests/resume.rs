//! Runs that are killed at any batch and resumed on another number of ranks see every row of the epoch once.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate_launch::{LaunchConfig, Program, Silent, launch};
use rstest::rstest;
use serde_json::{Value, json};

/// Numbers that look random and are the same in every run of the test.
fn numbers(mut state: u64) -> impl FnMut(usize) -> usize {
    move |below| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    }
}

/// Thirteen kills for each of four sources: 52 in all.
#[rstest]
fn no_row_is_lost_and_none_comes_twice(#[values("seedable", "random", "stream", "dispatched")] source: &str) {
    const NUM_KILLS: usize = 13;
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    let mut below = numbers(source.len() as u64);
    let mut kills = 0;
    while kills < NUM_KILLS {
        let _ = std::fs::remove_file(file("progress.json"));
        loop {
            let plan = json!({"source": source, "die_after": 1 + below(4), "rank": below(3),
                "before_writing": below(2) == 0, "seed": below(1000)});
            std::fs::write(file("plan.json"), plan.to_string()).unwrap();
            let program = Program::Executable(env!("CARGO_BIN_EXE_conformance").into());
            let config = LaunchConfig {
                args: vec!["killed_and_resumed".into(), "--folder".into(), folder.path().into()],
                environment: vec![("ACCELERATE_USE_CPU".into(), "true".into())],
                num_cpu_threads_per_process: Some(1),
                ..LaunchConfig::new(program, 1 + below(3))
            };
            match launch(&config, &mut Silent) {
                Ok(_) => break,
                Err(error) => {
                    let text = format!("{error}");
                    assert!(text.contains("SIGABRT"), "{plan}: {text}\n{:#?}", error.failure());
                    kills += 1;
                }
            }
        }
        let progress: Value = serde_json::from_slice(&std::fs::read(file("progress.json")).unwrap()).unwrap();
        assert_eq!(progress["done"], true);
        let mut seen: Vec<i64> = serde_json::from_value(progress["seen"].clone()).unwrap();
        seen.sort_unstable();
        assert_eq!(seen, (0..97).collect::<Vec<_>>(), "{source}, {kills} kills so far");
    }
}
