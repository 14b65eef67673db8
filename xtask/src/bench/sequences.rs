//! The races of ranks that divide sequences: attention whose heads and tokens two ranks exchange, beside the same through torch's
//! all-to-all, and what a rank takes of the memory that one rank takes for a text of 16384 tokens.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::ddp::step_race;
use crate::python::Environment;
use crate::race::{Pair, Race, Races};
use crate::{paths, process, ranks};

/// What both sides compute, and how often.
const ATTENTION: [&str; 12] =
    ["--batch_size", "4", "--length", "512", "--heads", "8", "--head_dim", "64", "--steps", "24", "--warmup", "4"];

/// How far apart answers may be, of their size: sums of float32 in another order.
const TOLERANCE: f64 = 1e-4;

/// Runs both sides for `rounds` rounds. Values are milliseconds per pass.
pub(super) fn attention(environment: &Environment, rounds: usize, races: &mut Races) -> Result<()> {
    let ours = || {
        let mut command = ranks::launch(2, &paths::release_binary("sp_attention"));
        command.arg("--").args(ATTENTION);
        command
    };
    let rival = || {
        let mut command = environment.torchrun(2)?;
        command.arg(paths::repository_root().join("bench/rival/sp_attention.py")).args(ATTENTION);
        Ok(command)
    };
    races.add(step_race(("sp_step", 0.8), (2, rounds), ours, rival)?);
    Ok(())
}

/// Two ranks beside one, by the same program. Values are MiB of a rank on top of what was there before.
pub(super) fn memory(rounds: usize, races: &mut Races) -> Result<()> {
    let mut pairs = Vec::new();
    for _ in 0..rounds {
        let (ours, answer) = taken(2)?;
        let (rival, wanted) = taken(1)?;
        let is_near = |(a, b): (&f64, &f64)| (a - b).abs() <= TOLERANCE * b.abs();
        ensure!(
            answer.len() == 2 && answer.len() == wanted.len() && answer.iter().zip(&wanted).all(is_near),
            "the race is void: loss and norm of gradients are {answer:?}, and those of one rank are {wanted:?}"
        );
        pairs.push(Pair { ours, rival });
    }
    races.add(Race { name: "cp_memory", unit: "MiB", goal: 0.6, pairs });
    Ok(())
}

/// MiB of the rank that took most, and the answer.
fn taken(num_processes: usize) -> Result<(f64, Vec<f64>)> {
    let mut command: Command = ranks::launch(num_processes, &paths::release_binary("cp_memory"));
    command.args(["--", "--length", "16384", "--cp_size"]).arg(num_processes.to_string());
    let printed = process::read(&mut command)?;
    let texts = ranks::marked(&printed, "report=");
    ensure!(texts.len() == num_processes, "{num_processes} reports were expected, and {} came", texts.len());
    let (mut most, mut answer) = (0f64, Vec::new());
    for text in texts {
        let value: Value = serde_json::from_str(text).with_context(|| format!("a report is not JSON: {text}"))?;
        let bytes = value["taken_bytes"].as_f64().with_context(|| format!("a report without `taken_bytes`: {text}"))?;
        most = most.max(bytes / f64::from(1 << 20));
        answer = value["answer"].as_array().map_or(&[][..], Vec::as_slice).iter().filter_map(Value::as_f64).collect();
    }
    Ok((most, answer))
}
