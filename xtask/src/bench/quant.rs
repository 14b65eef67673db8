//! The races of layers with weights of 4 and 8 bits against bitsandbytes on the CPU, one thread each.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use super::step::{Report, check_answers_within};
use crate::python::Environment;
use crate::race::{Pair, Race, Races};
use crate::{paths, ranks};

/// One race: what both programs are told.
#[derive(Debug, Clone, Copy)]
struct Contest {
    name: &'static str,
    mode: &'static str,
    rows: usize,
    steps: usize,
    warmup: usize,
    /// What the rival is told besides.
    rival: &'static [&'static str],
    goal: f64,
    /// The part of the mean square of outputs that sides may be apart.
    tolerance: f64,
}

const NF4: Contest = Contest {
    name: "quant_nf4_m1",
    mode: "nf4",
    rows: 1,
    steps: 60,
    warmup: 10,
    rival: &[],
    goal: 0.9,
    tolerance: 1e-3,
};

const CONTESTS: [Contest; 6] = [
    // Both sides round the table to bfloat16, and the rival its scales as well: 0.0004 below the mean square of exact weights here, and
    // 0.0008 above it there.
    Contest { rival: &["--way", "fused"], tolerance: 3e-3, ..NF4 },
    Contest { name: "quant_nf4_m64", rows: 64, steps: 15, warmup: 3, goal: 0.6, ..NF4 },
    Contest { name: "quant_nf4_m512", rows: 512, steps: 7, warmup: 2, goal: 0.6, ..NF4 },
    Contest { name: "quant_int8_m64", mode: "int8", rows: 64, steps: 20, warmup: 5, goal: 0.8, ..NF4 },
    Contest { name: "quantize_nf4", mode: "quantize", steps: 4, warmup: 1, goal: 0.05, ..NF4 },
    Contest { name: "load_quantized", mode: "load", steps: 2, warmup: 1, goal: 0.3, ..NF4 },
];

/// Runs both sides for `rounds` rounds. Values are microseconds.
pub(super) fn races(environment: &Environment, rounds: usize, races: &mut Races) -> Result<()> {
    for contest in CONTESTS {
        let mut pairs = Vec::new();
        // The first round of each side fills the page cache and is not counted.
        for round in 0..=rounds {
            let ours = Report::of(contest.ours())?;
            let rival = Report::of(contest.theirs(environment))?;
            check_answers_within(contest.tolerance, contest.name, ours.answer, rival.answer)?;
            if round > 0 {
                pairs.push(Pair { ours: ours.micros, rival: rival.micros });
            }
        }
        races.add(Race { name: contest.name, unit: "us", goal: contest.goal, pairs });
    }
    Ok(())
}

impl Contest {
    fn ours(&self) -> Command {
        let mut command = ranks::launch(1, &paths::release_binary("quant"));
        command.arg("--");
        self.with_settings(command)
    }

    fn theirs(&self, environment: &Environment) -> Command {
        let mut command = environment.command();
        command.env("TORCHDYNAMO_DISABLE", "1").arg(paths::repository_root().join("bench/rival/quant.py"));
        command.args(self.rival);
        self.with_settings(command)
    }

    fn with_settings(&self, mut command: Command) -> Command {
        let numbers = [("--rows", self.rows), ("--steps", self.steps), ("--warmup", self.warmup)];
        command.args(["--mode", self.mode]).arg("--folder").arg(folder());
        for (flag, number) in numbers {
            command.args([flag, &number.to_string()]);
        }
        command
    }
}

fn folder() -> PathBuf {
    paths::target_folder().join("bench/quant")
}
