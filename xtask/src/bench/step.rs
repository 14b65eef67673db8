//! The races of the training step and of the optimizer, in one process.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::Goal;
use crate::parity::exported;
use crate::python::Environment;
use crate::race::{Pair, Race, Races};
use crate::{paths, process, ranks};

/// One race: what both programs are told.
#[derive(Debug, Clone, Copy)]
pub(super) struct Contest {
    name: &'static str,
    /// `bench/src/bin/<program>.rs` against `bench/rival/<program>.py`.
    program: &'static str,
    mode: &'static str,
    steps: usize,
    warmup: usize,
    /// The rival's AdamW is asked to be fused.
    rival_fused: bool,
    goal: Goal,
}

const STEP: Contest = Contest {
    name: "step_small_fused",
    program: "step",
    mode: "step",
    steps: 3000,
    warmup: 300,
    rival_fused: true,
    goal: Goal::Ratio(0.4),
};

/// `cargo xtask bench step`.
pub(super) const STEPS: [Contest; 3] = [
    STEP,
    Contest { name: "step_small_default", rival_fused: false, goal: Goal::Ratio(0.3), ..STEP },
    Contest { name: "prepare_tax", mode: "tax", steps: 800, warmup: 100, goal: Goal::Micros(10.0), ..STEP },
];

// The rival's optimizer is always fused here.
const OPTIMIZER: Contest = Contest {
    name: "optimizer_small",
    program: "optimizer",
    mode: "small",
    steps: 400,
    warmup: 50,
    rival_fused: false,
    goal: Goal::Ratio(0.5),
};

/// `cargo xtask bench optimizer`.
pub(super) const OPTIMIZERS: [Contest; 3] = [
    OPTIMIZER,
    Contest { name: "optimizer_large", mode: "large", steps: 25, warmup: 5, goal: Goal::Ratio(1.0), ..OPTIMIZER },
    Contest { name: "optimizer_sweep", mode: "sweep", steps: 15, warmup: 3, goal: Goal::Ratio(0.6), ..OPTIMIZER },
];

/// Runs both sides for `rounds` rounds. Values are microseconds per step.
pub(super) fn races(environment: &Environment, rounds: usize, contests: &[Contest], races: &mut Races) -> Result<()> {
    for contest in contests {
        races.add(contest.race(environment, rounds)?);
    }
    Ok(())
}

/// A step of a model that was compiled, beside the same model as it is here, and compiled by `torch.compile` under Python
/// Accelerate. Values are microseconds per step.
pub(super) fn compiled(environment: &Environment, rounds: usize, races: &mut Races) -> Result<()> {
    let rival_folder = paths::repository_root().join("bench/rival");
    let folder = paths::target_folder().join("bench");
    std::fs::create_dir_all(&folder).with_context(|| format!("could not create {}", folder.display()))?;
    let package = folder.join("compiled_step.pt2");
    let inputs = ["float32[32,64]".to_owned(), "int64[32]".to_owned()];
    exported::export(environment, &rival_folder, "compiled_step:model", &inputs, &package)?;
    // With many more steps on one batch, gradients are all but rounding, which AdamW magnifies, and answers part.
    let steps = ["--steps", "600", "--warmup", "100"];
    let (mut eager, mut torch) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        let ours = |package: Option<&Path>| {
            let mut command = ranks::launch(1, &paths::release_binary("compiled_step"));
            command.arg("--").args(steps);
            if let Some(package) = package {
                command.arg("--package").arg(package);
            }
            Report::of(command)
        };
        let (compiled, as_it_is) = (ours(Some(&package))?, ours(None)?);
        let mut command = environment.torchrun(1)?;
        command.arg(rival_folder.join("compiled_step.py")).args(steps).env("TORCHINDUCTOR_VEC_ISA_OK", "1");
        let rival = Report::of(command)?;
        check_answers("compiled_step", compiled.answer, as_it_is.answer)?;
        check_answers("compiled_step_torch", compiled.answer, rival.answer)?;
        if round > 0 {
            eager.push(Pair { ours: compiled.micros, rival: as_it_is.micros });
            torch.push(Pair { ours: compiled.micros, rival: rival.micros });
        }
    }
    races.extend([
        Race { name: "compiled_step", unit: "us", goal: 0.6, pairs: eager },
        Race { name: "compiled_step_torch", unit: "us", goal: 1.0, pairs: torch },
    ]);
    Ok(())
}

impl Contest {
    fn race(&self, environment: &Environment, rounds: usize) -> Result<Race> {
        let mut pairs = Vec::new();
        // The first round of each side fills the page cache and is not counted.
        for round in 0..=rounds {
            let ours = Report::of(self.ours())?;
            let rival = Report::of(self.rival(environment)?)?;
            check_answers(self.name, ours.answer, rival.answer)?;
            if round > 0 {
                pairs.push(Pair { ours: ours.micros, rival: rival.micros });
            }
        }
        Ok(Race { name: self.name, unit: "us", goal: self.goal.ratio(&pairs), pairs })
    }

    fn ours(&self) -> Command {
        let mut command = ranks::launch(1, &paths::release_binary(self.program));
        command.arg("--");
        self.with_settings(command)
    }

    fn rival(&self, environment: &Environment) -> Result<Command> {
        let mut command = environment.torchrun(1)?;
        command.arg(paths::repository_root().join(format!("bench/rival/{}.py", self.program)));
        let mut command = self.with_settings(command);
        if self.rival_fused {
            command.arg("--fused");
        }
        Ok(command)
    }

    fn with_settings(&self, mut command: Command) -> Command {
        command.args(["--mode", self.mode, "--steps", &self.steps.to_string()]);
        command.args(["--warmup", &self.warmup.to_string()]);
        command
    }
}

/// What a program reports.
#[derive(Debug, PartialEq)]
pub(super) struct Report {
    pub(super) micros: f64,
    pub(super) answer: f64,
}

impl Report {
    pub(super) fn of(mut command: Command) -> Result<Report> {
        let printed = process::read(&mut command)?;
        let text = *ranks::marked(&printed, "report=").first().context("the program reported nothing")?;
        let value: Value = serde_json::from_str(text).with_context(|| format!("a report is not JSON: {text}"))?;
        let number = |name: &str| value[name].as_f64().with_context(|| format!("a report without `{name}`: {text}"));
        Ok(Report { micros: number("micros")?, answer: number("answer")? })
    }
}

/// Sums in another order differ in the last digits, another gradient or rule differs in the first.
pub(super) fn check_answers(name: &str, ours: f64, rival: f64) -> Result<()> {
    check_answers_within(1e-3, name, ours, rival)
}

/// The same with the part of the answer that sides may be apart, where they round differently.
pub(super) fn check_answers_within(tolerance: f64, name: &str, ours: f64, rival: f64) -> Result<()> {
    let agree = (ours - rival).abs() <= tolerance * rival.abs();
    ensure!(agree, "the race {name} is void: parameters of mean square {ours} here and {rival} there");
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn other_parameters_void_the_race() {
        check_answers("step", 0.25, 0.250_1).unwrap();
        let message = check_answers("step", 0.25, 0.26).unwrap_err().to_string();
        assert!(message.contains("0.25 here and 0.26 there"), "{message}");
        assert!(check_answers("step", f64::NAN, 0.26).is_err());
    }
}
