//! The race `tiled_loss_memory`: what the loss of a text of 16384 tokens takes in tiles, beside torch with all logits at once.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::python::Environment;
use crate::race::{Pair, Race, Races};
use crate::{paths, process, ranks};

/// The median ratio that counts as won.
const GOAL: f64 = 0.25;

/// What both sides compute.
const SETTINGS: [&str; 6] = ["--length", "16384", "--width", "256", "--vocabulary", "8192"];

/// How far apart answers may be, of their size: sums of float32 in another order.
const TOLERANCE: f64 = 1e-4;

/// Runs both sides for `rounds` rounds. Values are MiB on top of what was there before.
pub(super) fn races(environment: &Environment, rounds: usize, races: &mut Races) -> Result<()> {
    let mut pairs = Vec::new();
    for _ in 0..rounds {
        let mut ours = Command::new(paths::release_binary("tiled_loss"));
        ours.args(SETTINGS).args(["--tiles", "32"]);
        let mut rival = environment.command();
        rival.arg(paths::repository_root().join("bench/rival/tiled_loss.py")).args(SETTINGS);
        let ((ours, answer), (rival, wanted)) = (report(ours)?, report(rival)?);
        let is_near = |(a, b): (&f64, &f64)| (a - b).abs() <= TOLERANCE * b.abs();
        ensure!(
            answer.len() == 3 && answer.len() == wanted.len() && answer.iter().zip(&wanted).all(is_near),
            "the race is void: loss and norms of gradients are {answer:?}, and the rival's are {wanted:?}"
        );
        pairs.push(Pair { ours, rival });
    }
    races.add(Race { name: "tiled_loss_memory", unit: "MiB", goal: GOAL, pairs });
    Ok(())
}

/// MiB, and the answer.
fn report(mut command: Command) -> Result<(f64, Vec<f64>)> {
    let printed = process::read(&mut command)?;
    let texts = ranks::marked(&printed, "report=");
    let [text] = texts[..] else { anyhow::bail!("one report was expected, and {} came", texts.len()) };
    let value: Value = serde_json::from_str(text).with_context(|| format!("a report is not JSON: {text}"))?;
    let bytes = value["taken_bytes"].as_f64().with_context(|| format!("a report without `taken_bytes`: {text}"))?;
    let answer = value["answer"].as_array().map(Vec::as_slice).unwrap_or_default();
    Ok((bytes / f64::from(1 << 20), answer.iter().filter_map(Value::as_f64).collect()))
}
