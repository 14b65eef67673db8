//! The races `launch_noop` and `launch_first_collective`: from the launcher's start to its end.

use std::process::Command;
use std::time::Instant;

use anyhow::{Result, ensure};

use crate::python::Environment;
use crate::race::{Pair, Race};
use crate::{paths, process, ranks};

/// How many ranks are started.
const NUM_PROCESSES: usize = 2;

/// Runs both races for `rounds` rounds. Values are seconds.
pub(super) fn races(environment: &Environment, rounds: usize) -> Result<Vec<Race>> {
    let noop = race(environment, rounds, "launch_noop", "noop", 0.05, |rank| {
        format!("rank={rank} world_size={NUM_PROCESSES}")
    })?;
    // Ranks contribute 1 and 2.
    let collective = race(environment, rounds, "launch_first_collective", "first_collective", 0.25, |rank| {
        format!("rank={rank} world_size={NUM_PROCESSES} sum=3")
    })?;
    Ok(vec![noop, collective])
}

fn race(
    environment: &Environment,
    rounds: usize,
    name: &'static str,
    program: &str,
    goal: f64,
    answer: impl Fn(usize) -> String,
) -> Result<Race> {
    let script = paths::repository_root().join(format!("bench/rival/{program}.py"));
    let mut pairs = Vec::new();
    // The first round of each side fills the page cache and is not counted.
    for round in 0..=rounds {
        let ours = seconds(ranks::launch(NUM_PROCESSES, &paths::release_binary(program)), &answer)?;
        let mut rival = environment.torchrun(NUM_PROCESSES)?;
        rival.arg(&script);
        let rival = seconds(rival, &answer)?;
        if round > 0 {
            pairs.push(Pair { ours, rival });
        }
    }
    Ok(Race { name, unit: "s", goal, pairs })
}

/// Runs the command and checks that each rank printed its answer.
fn seconds(mut command: Command, answer: &impl Fn(usize) -> String) -> Result<f64> {
    let started = Instant::now();
    let printed = process::read(&mut command)?;
    let seconds = started.elapsed().as_secs_f64();
    for rank in 0..NUM_PROCESSES {
        let answer = answer(rank);
        ensure!(printed.contains(&answer), "the race is void: no rank printed `{answer}`, but:\n{printed}");
    }
    Ok(seconds)
}
