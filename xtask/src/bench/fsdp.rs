//! The races of sharded training on two ranks: the time of a step, and peak memory.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::ddp::{NUM_PROCESSES, Report, check_answers, parse_reports, step_race};
use crate::python::Environment;
use crate::race::{Pair, Race, Races};
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
pub(super) fn races(environment: &Environment, rounds: usize, races: &mut Races) -> Result<()> {
    for contest in &CONTESTS {
        races.add(contest.race(environment, rounds)?);
    }
    Ok(())
}

impl Contest {
    fn race(&self, environment: &Environment, rounds: usize) -> Result<Race> {
        step_race((self.name, self.goal), (NUM_PROCESSES, rounds), || self.ours("3"), || self.rival(environment))
    }

    fn ours(&self, stage: &str) -> Command {
        let mut command = ranks::launch(NUM_PROCESSES, &paths::release_binary("fsdp_step"));
        command.args(["--", "--stage", stage]);
        self.with_settings(command)
    }

    fn rival(&self, environment: &Environment) -> Result<Command> {
        if self.rival == Rival::OwnReplicated {
            return Ok(self.ours("0"));
        }
        let mut command = environment.torchrun(NUM_PROCESSES)?;
        command.arg(paths::repository_root().join("bench/rival/fsdp_step.py"));
        Ok(self.with_settings(command))
    }

    fn with_settings(&self, mut command: Command) -> Command {
        command.args(["--model", self.model, "--batch_size", &self.batch_size.to_string()]);
        command.args(["--steps", &STEPS.to_string(), "--warmup", &WARMUP.to_string()]);
        command
    }
}

/// The smallest GPT-2, whose largest unit holds both embeddings and the last normalisation.
const LARGEST_UNIT_ELEMENTS: usize = (50257 + 1024 + 2) * 768;

/// The races for memory: their names, the stage and the number of ranks.
const MEMORY: [(&str, usize, usize); 8] = [
    ("memory_stage0_w2", 0, 2),
    ("memory_stage1_w2", 1, 2),
    ("memory_stage2_w2", 2, 2),
    ("memory_stage3_w2", 3, 2),
    ("memory_stage0_w4", 0, 4),
    ("memory_stage1_w4", 1, 4),
    ("memory_stage2_w4", 2, 4),
    ("memory_stage3_w4", 3, 4),
];

/// Peak memory of a rank beyond that of an idle one, from building the model over training to saving and loading it. In the
/// place of a rival stands what training in float32 with AdamW should take (Rajbhandari et al., "ZeRO", SC 2020, §3), and the
/// largest unit whole. Values are MiB of the largest rank. Losses have to be those of stage 0 on as many ranks.
pub(super) fn memory(rounds: usize, races: &mut Races) -> Result<()> {
    let mut answers = Vec::new();
    for &(name, stage, num_ranks) in &MEMORY {
        if stage == 0 {
            answers.clear();
        }
        races.add(memory_race(name, stage, num_ranks, rounds, &mut answers)?);
    }
    Ok(())
}

/// `answers` are the reports that losses are compared with; where there are none, the first of this race.
fn memory_race(
    name: &'static str,
    stage: usize,
    num_ranks: usize,
    rounds: usize,
    answers: &mut Vec<Report>,
) -> Result<Race> {
    let mut pairs = Vec::new();
    let folder = paths::target_folder().join("bench/memory");
    for _ in 0..rounds {
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| format!("could not remove {}", folder.display()))?;
        }
        let mut command = ranks::launch(num_ranks, &paths::release_binary("fsdp_step"));
        command.args(["--", "--model", "gpt2", "--stage", &stage.to_string()]);
        command.args(["--batch_size", "1", "--steps", "3", "--warmup", "1", "--folder"]).arg(&folder);
        let printed = process::read(&mut command)?;
        let reports = ranks::marked(&printed, "report=");
        let found = parse_reports(&reports, num_ranks)?;
        if answers.is_empty() {
            *answers = found;
        } else {
            check_answers(&found, answers).with_context(|| format!("in {name}"))?;
        }
        let of_ranks: Vec<Pair> =
            reports.into_iter().map(|report| memory_of(report, stage, num_ranks)).collect::<Result<_>>()?;
        pairs.extend(of_ranks.into_iter().max_by(|a, b| a.ours.total_cmp(&b.ours)));
    }
    fs::remove_dir_all(&folder).with_context(|| format!("could not remove {}", folder.display()))?;
    Ok(Race { name, unit: "MiB", goal: 1.1, pairs })
}

/// What a rank took, and what it should have taken.
fn memory_of(report: &str, stage: usize, num_ranks: usize) -> Result<Pair> {
    let value: Value = serde_json::from_str(report).with_context(|| format!("a report is not JSON: {report}"))?;
    let number = |name: &str| value[name].as_f64().with_context(|| format!("a report without `{name}`: {report}"));
    ensure!(number("world_size")? == num_ranks as f64, "the race is void: a rank trained with others than it should");
    let mib = f64::from(1 << 20);
    let taken = number("peak_resident_bytes")? - number("idle_resident_bytes")?;
    // Bytes of a parameter that every rank has, and that ranks share.
    let (everywhere, shared) = match stage {
        0 => (16.0, 0.0),
        1 => (8.0, 8.0),
        2 => (4.0, 12.0),
        _ => (0.0, 16.0),
    };
    let per_parameter = everywhere + shared / num_ranks as f64;
    let formula = per_parameter * number("num_parameters")? + (4 * LARGEST_UNIT_ELEMENTS) as f64;
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
        let unit = (4 * LARGEST_UNIT_ELEMENTS) as f64 / f64::from(1 << 20);
        for (stage, formula) in [(0, 16.0), (1, 12.0), (2, 10.0), (3, 8.0)] {
            assert_eq!(memory_of(report, stage, 2).unwrap(), Pair { ours: 20.0, rival: formula + unit });
        }
        assert!(memory_of(report, 3, 4).is_err());
        assert!(memory_of(r#"{"world_size": 1}"#, 3, 2).is_err());
    }
}
