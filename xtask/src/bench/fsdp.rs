//! The races of sharded training on two ranks: the time of a step, and peak memory.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::ddp::{NUM_PROCESSES, Report, check_answers, median_step, reports};
use crate::python::Environment;
use crate::race::{Pair, Race};
use crate::{paths, process, ranks};

/// What our sharded step is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rival {
    /// `fully_shard` of torch with gloo, and its fused AdamW.
    FullyShard,
    /// Our own replicated step.
    OwnReplicated,
}

/// One race: what both programs are told.
#[derive(Debug, Clone, Copy)]
struct Contest {
    name: &'static str,
    model: &'static str,
    batch_size: usize,
    rival: Rival,
    goal: f64,
}

/// 12 linear layers of width 1024.
const MLP: Contest =
    Contest { name: "fsdp_step_mlp", model: "mlp", batch_size: 16, rival: Rival::FullyShard, goal: 0.6 };

const CONTESTS: [Contest; 4] = [
    MLP,
    Contest { name: "fsdp_step_mlp_256", batch_size: 256, ..MLP },
    Contest { name: "fsdp_step_transformer", model: "transformer", batch_size: 4, ..MLP },
    Contest { name: "fsdp_vs_ddp", batch_size: 256, rival: Rival::OwnReplicated, goal: 1.25, ..MLP },
];

/// Steps per run, and how many of them are not timed.
const STEPS: usize = 12;
const WARMUP: usize = 3;

/// Runs both sides for `rounds` rounds. Values are milliseconds per step.
pub(super) fn races(environment: &Environment, rounds: usize) -> Result<Vec<Race>> {
    CONTESTS.iter().map(|contest| contest.race(environment, rounds)).collect()
}

impl Contest {
    fn race(&self, environment: &Environment, rounds: usize) -> Result<Race> {
        let mut pairs = Vec::new();
        // The first round of each side fills the page cache and is not counted.
        for round in 0..=rounds {
            let ours = reports(self.ours("shard"))?;
            let rival = self.rival_reports(environment)?;
            check_answers(&ours, &rival).with_context(|| format!("in {}", self.name))?;
            if round > 0 {
                pairs.push(Pair { ours: median_step(&ours), rival: median_step(&rival) });
            }
        }
        Ok(Race { name: self.name, unit: "ms", goal: self.goal, pairs })
    }

    fn ours(&self, engine: &str) -> Command {
        let mut command = ranks::launch(NUM_PROCESSES, &paths::release_binary("fsdp_step"));
        command.args(["--", "--engine", engine]);
        self.with_settings(command)
    }

    fn rival_reports(&self, environment: &Environment) -> Result<Vec<Report>> {
        if self.rival == Rival::OwnReplicated {
            return reports(self.ours("replicate"));
        }
        let mut command = environment.torchrun(NUM_PROCESSES)?;
        command.arg(paths::repository_root().join("bench/rival/fsdp_step.py"));
        reports(self.with_settings(command))
    }

    fn with_settings(&self, mut command: Command) -> Command {
        command.args(["--model", self.model, "--batch_size", &self.batch_size.to_string()]);
        command.args(["--steps", &STEPS.to_string(), "--warmup", &WARMUP.to_string()]);
        command
    }
}

/// Of the transformer in the race for memory: 38.8 million parameters, far more than the activations of one row.
const WIDTH: usize = 512;
/// A layer of it has 12 square matrices; vectors are below a hundredth.
const LARGEST_UNIT_ELEMENTS: usize = 12 * WIDTH * WIDTH;

/// Peak memory of a rank beyond that of an idle one. In the place of a rival stands what full sharding with AdamW
/// should take: 16 bytes per parameter over the ranks, and the largest unit whole. Values are MiB of the larger rank.
pub(super) fn memory(rounds: usize) -> Result<Race> {
    let mut pairs = Vec::new();
    for _ in 0..rounds {
        let mut command = ranks::launch(NUM_PROCESSES, &paths::release_binary("fsdp_step"));
        command.args(["--", "--engine", "shard", "--model", "transformer", "--width", &WIDTH.to_string()]);
        command.args(["--batch_size", "1", "--steps", "5", "--warmup", "1"]);
        let printed = process::read(&mut command)?;
        let ranks: Vec<Pair> = ranks::marked(&printed, "report=").into_iter().map(memory_of).collect::<Result<_>>()?;
        ensure!(ranks.len() == NUM_PROCESSES, "the race is void: {} ranks reported", ranks.len());
        pairs.extend(ranks.into_iter().max_by(|a, b| a.ours.total_cmp(&b.ours)));
    }
    Ok(Race { name: "memory_stage3_w2", unit: "MiB", goal: 1.1, pairs })
}

/// What a rank took, and what it should have taken.
fn memory_of(report: &str) -> Result<Pair> {
    let value: Value = serde_json::from_str(report).with_context(|| format!("a report is not JSON: {report}"))?;
    let number = |name: &str| value[name].as_f64().with_context(|| format!("a report without `{name}`: {report}"));
    ensure!(number("world_size")? == NUM_PROCESSES as f64, "the race is void: a rank trained alone");
    let mib = f64::from(1 << 20);
    let taken = number("peak_resident_bytes")? - number("idle_resident_bytes")?;
    let formula = 16.0 * number("num_parameters")? / NUM_PROCESSES as f64 + (4 * LARGEST_UNIT_ELEMENTS) as f64;
    Ok(Pair { ours: taken / mib, rival: formula / mib })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn memory_counts_from_the_idle_rank() {
        let report = r#"{"world_size": 2, "num_parameters": 1048576, "idle_resident_bytes": 1048576,
            "peak_resident_bytes": 22020096}"#;
        assert_eq!(memory_of(report).unwrap(), Pair { ours: 20.0, rival: 20.0 });
        assert!(memory_of(r#"{"world_size": 1}"#).is_err());
    }
}
