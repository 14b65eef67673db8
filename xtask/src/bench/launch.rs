//! The races of the command line: from the launcher's start to its end, and the size of its file.

use std::fs;
use std::process::Command;
use std::time::Instant;

use anyhow::{Result, ensure};

use crate::python::Environment;
use crate::race::{Pair, Race};
use crate::{paths, process, ranks};

/// How many ranks are started.
const NUM_PROCESSES: usize = 2;

/// The most that the file of the command may have without symbols, in MiB.
const MOST_MIB: f64 = 12.0;

/// Runs all of them for `rounds` rounds. Values are seconds, but for the size.
pub(super) fn races(environment: &Environment, rounds: usize) -> Result<Vec<Race>> {
    let mut races = commands(environment, rounds)?;
    let noop = race(environment, rounds, "launch_noop", "noop", 0.01, |rank| {
        format!("rank={rank} world_size={NUM_PROCESSES}")
    })?;
    // Ranks contribute 1 and 2.
    let collective = race(environment, rounds, "launch_first_collective", "first_collective", 0.25, |rank| {
        format!("rank={rank} world_size={NUM_PROCESSES} sum=3")
    })?;
    races.extend([noop, collective, size()?]);
    Ok(races)
}

/// Help, and one process that a configuration file describes.
fn commands(environment: &Environment, rounds: usize) -> Result<Vec<Race>> {
    let folder = paths::target_folder().join("bench");
    fs::create_dir_all(&folder)?;
    let file = folder.join("launch.yaml");
    fs::write(&file, CONFIG_FILE)?;
    let file = file.to_string_lossy();
    let help = ["launch", "--help"];
    let one = ["launch", "--config_file", &file, "--no_python", "echo", "launched"];
    Ok(vec![
        command(environment, rounds, "launch_help", &help, "--num_processes")?,
        command(environment, rounds, "launch_config_file", &one, "launched")?,
    ])
}

/// What Python Accelerate's wizard writes for one process on the CPU.
const CONFIG_FILE: &str = "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: 'NO'\n\
    enable_cpu_affinity: false\nmachine_rank: 0\nmain_training_function: main\nmixed_precision: 'no'\n\
    num_machines: 1\nnum_processes: 1\nuse_cpu: true\n";

/// The same words for both commands; `answer` is in what both print.
fn command(environment: &Environment, rounds: usize, name: &'static str, words: &[&str], answer: &str) -> Result<Race> {
    let mut pairs = Vec::new();
    for round in 0..=rounds {
        let mut ours = Command::new(paths::release_binary("accelerate"));
        let ours = timed(ours.args(words), &[answer])?;
        let mut rival = environment.command();
        let rival = timed(rival.args(["-m", "accelerate.commands.accelerate_cli"]).args(words), &[answer])?;
        if round > 0 {
            pairs.push(Pair { ours, rival });
        }
    }
    Ok(Race { name, unit: "s", goal: 0.01, pairs })
}

/// The size of the command without symbols, over what it may have.
fn size() -> Result<Race> {
    let stripped = paths::target_folder().join("bench/accelerate-stripped");
    process::run(Command::new("strip").arg("-o").arg(&stripped).arg(paths::release_binary("accelerate")))?;
    let ours = fs::metadata(&stripped)?.len() as f64 / f64::from(1 << 20);
    Ok(Race { name: "launch_binary", unit: "MiB", goal: 1.0, pairs: vec![Pair { ours, rival: MOST_MIB }] })
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
    let answers: Vec<_> = (0..NUM_PROCESSES).map(answer).collect();
    timed(&mut command, &answers.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Runs the command and checks that it printed all of `answers`.
fn timed(command: &mut Command, answers: &[&str]) -> Result<f64> {
    let started = Instant::now();
    let printed = process::read(command)?;
    let seconds = started.elapsed().as_secs_f64();
    for answer in answers {
        ensure!(printed.contains(answer), "the race is void: nobody printed `{answer}`, but:\n{printed}");
    }
    Ok(seconds)
}
