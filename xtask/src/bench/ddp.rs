//! The races `ddp_step` and `ddp_memory`: data-parallel training of a small BERT on two ranks.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde_json::Value;

use crate::parity::make_case;
use crate::python::Environment;
use crate::race::{Pair, Race, Races, median};
use crate::{paths, process, ranks};

/// How many ranks train.
pub(super) const NUM_PROCESSES: usize = 2;
/// Rows per rank and step.
const BATCH_SIZE: usize = 8;
/// Largest difference of two losses of the same step and rank. A few dozen steps of training widen
/// rounding differences; another batch or another gradient is far outside.
const LOSS_BOUND: f64 = 1e-4;

/// How long each side trains, and what it trains with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Args)]
pub(super) struct Settings {
    /// Steps per run, the warm-up included
    #[arg(long, default_value_t = 60)]
    steps: usize,
    /// Steps that are not timed
    #[arg(long, default_value_t = 10)]
    warmup: usize,
    /// Give the rival PyTorch's fused AdamW instead of its default, which is slower on a CPU
    #[arg(long = "rival_fused")]
    rival_fused: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { steps: 60, warmup: 10, rival_fused: false }
    }
}

/// What one rank reports.
#[derive(Debug, PartialEq)]
pub(super) struct Report {
    rank: u64,
    step_ms: Vec<f64>,
    peak_resident_mib: f64,
    losses: Vec<f64>,
}

/// Runs both sides for `rounds` rounds. Values are milliseconds, and MiB of the larger rank.
pub(super) fn races(environment: &Environment, rounds: usize, settings: &Settings, races: &mut Races) -> Result<()> {
    ensure!(settings.steps > settings.warmup, "no step is left to time: raise --steps above --warmup");
    let case = paths::target_folder().join("bench/case");
    make_case(environment, &case, settings.steps * BATCH_SIZE * NUM_PROCESSES)?;
    let (mut step, mut memory) = (Vec::new(), Vec::new());
    // The first round of each side fills the page cache and is not counted.
    for round in 0..=rounds {
        let ours = reports(ours(&case, settings), NUM_PROCESSES)?;
        let rival = reports(rival(environment, &case, settings)?, NUM_PROCESSES)?;
        check_answers(&ours, &rival)?;
        if round > 0 {
            step.push(Pair { ours: median_step(&ours), rival: median_step(&rival) });
            memory.push(Pair { ours: peak(&ours), rival: peak(&rival) });
        }
    }
    races.extend([
        Race { name: "ddp_step", unit: "ms", goal: 1.0, pairs: step },
        Race { name: "ddp_memory", unit: "MiB", goal: 0.8, pairs: memory },
    ]);
    Ok(())
}

/// One race of steps, of commands that report as [`reports`] reads it. Values are milliseconds per step.
pub(super) fn step_race(
    (name, goal): (&'static str, f64),
    (num_processes, rounds): (usize, usize),
    ours: impl Fn() -> Command,
    rival: impl Fn() -> Result<Command>,
) -> Result<Race> {
    let mut pairs = Vec::new();
    // The first round of each side fills the page cache and is not counted.
    for round in 0..=rounds {
        let ours = reports(ours(), num_processes)?;
        let rival = reports(rival()?, num_processes)?;
        check_answers(&ours, &rival).with_context(|| format!("in {name}"))?;
        if round > 0 {
            pairs.push(Pair { ours: median_step(&ours), rival: median_step(&rival) });
        }
    }
    Ok(Race { name, unit: "ms", goal, pairs })
}

fn ours(case: &Path, settings: &Settings) -> Command {
    let mut command = ranks::launch(NUM_PROCESSES, &paths::release_binary("ddp_step"));
    command.arg("--");
    with_settings(command, case, settings, "adamw")
}

fn rival(environment: &Environment, case: &Path, settings: &Settings) -> Result<Command> {
    let mut command = environment.torchrun(NUM_PROCESSES)?;
    command.arg(paths::repository_root().join("bench/rival/ddp_step.py"));
    let optimizer = if settings.rival_fused { "adamw" } else { "adamw_default" };
    Ok(with_settings(command, case, settings, optimizer))
}

fn with_settings(mut command: Command, case: &Path, settings: &Settings, optimizer: &str) -> Command {
    command.arg("--case").arg(case).args(["--optimizer", optimizer]);
    command.args(["--steps", &settings.steps.to_string(), "--warmup", &settings.warmup.to_string()]);
    command.args(["--batch_size", &BATCH_SIZE.to_string()]);
    command
}

/// Runs the command and reads what its ranks report, in the order of ranks.
fn reports(mut command: Command, num_processes: usize) -> Result<Vec<Report>> {
    let printed = process::read(&mut command)?;
    parse_reports(&ranks::marked(&printed, "report="), num_processes)
}

/// In the order of ranks, all of which must be there.
pub(super) fn parse_reports(texts: &[&str], num_ranks: usize) -> Result<Vec<Report>> {
    let mut reports: Vec<Report> = texts.iter().map(|text| parse_report(text, num_ranks)).collect::<Result<_>>()?;
    reports.sort_by_key(|report| report.rank);
    let ranks: Vec<u64> = reports.iter().map(|report| report.rank).collect();
    ensure!(
        ranks.iter().copied().eq(0..num_ranks as u64),
        "the race is void: ranks {ranks:?} reported, and not each of {num_ranks} once"
    );
    Ok(reports)
}

fn parse_report(text: &str, num_ranks: usize) -> Result<Report> {
    let value: Value = serde_json::from_str(text).with_context(|| format!("a rank's report is not JSON: {text}"))?;
    let numbers = |name: &str| -> Result<Vec<f64>> {
        let list = value.get(name).and_then(Value::as_array).with_context(|| format!("a report without `{name}`"))?;
        list.iter().map(|number| number.as_f64().with_context(|| format!("`{name}` has {number}"))).collect()
    };
    let number =
        |name: &str| value.get(name).and_then(Value::as_u64).with_context(|| format!("a report without `{name}`"));
    ensure!(number("world_size")? == num_ranks as u64, "the race is void: a rank trained alone, or with others");
    Ok(Report {
        rank: number("rank")?,
        step_ms: numbers("step_ms")?,
        peak_resident_mib: number("peak_resident_bytes")? as f64 / f64::from(1 << 20),
        losses: numbers("losses")?,
    })
}

/// Both sides must have computed the same before their times are compared.
pub(super) fn check_answers(ours: &[Report], rival: &[Report]) -> Result<()> {
    for (our, their) in ours.iter().zip(rival) {
        let rank = our.rank;
        let (our_steps, their_steps) = (our.losses.len(), their.losses.len());
        ensure!(
            our_steps == their_steps,
            "the race is void: rank {rank} ran {our_steps} steps here, {their_steps} there"
        );
        for (step, (our_loss, their_loss)) in our.losses.iter().zip(&their.losses).enumerate() {
            ensure!(
                (our_loss - their_loss).abs() <= LOSS_BOUND,
                "the race is void: loss of rank {rank} at step {step} is {our_loss} here and {their_loss} there"
            );
        }
    }
    Ok(())
}

/// Of all timed steps of all ranks.
fn median_step(reports: &[Report]) -> f64 {
    median(reports.iter().flat_map(|report| report.step_ms.iter().copied()).collect())
}

fn peak(reports: &[Report]) -> f64 {
    reports.iter().map(|report| report.peak_resident_mib).fold(0.0, f64::max)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn report(rank: u64, losses: &[f64]) -> Report {
        Report { rank, step_ms: vec![1.0, 2.0, 9.0], peak_resident_mib: 100.0 + rank as f64, losses: losses.to_vec() }
    }

    #[test]
    fn a_report_is_read() {
        let text = r#"{"rank": 1, "world_size": 2, "step_ms": [1.5], "peak_resident_bytes": 1048576, "losses": [0.5]}"#;
        let want = Report { rank: 1, step_ms: vec![1.5], peak_resident_mib: 1.0, losses: vec![0.5] };
        assert_eq!(parse_report(text, 2).unwrap(), want);
        assert!(parse_reports(&[text], 2).unwrap_err().to_string().contains("ranks [1] reported"));
        assert!(parse_reports(&[text, text], 2).is_err());
        let first = text.replace(r#""rank": 1"#, r#""rank": 0"#);
        assert_eq!(parse_reports(&[text, &first], 2).unwrap()[1], want);
    }

    #[test]
    fn a_rank_that_trained_alone_voids_the_race() {
        let text = r#"{"rank": 0, "world_size": 1, "step_ms": [], "peak_resident_bytes": 1, "losses": []}"#;
        assert!(parse_report(text, 2).unwrap_err().to_string().contains("trained alone"));
    }

    #[test]
    fn different_answers_void_the_race() {
        let rival = [report(0, &[0.5, 0.4]), report(1, &[0.3, 0.2])];
        check_answers(&[report(0, &[0.5, 0.40001]), report(1, &[0.3, 0.2])], &rival).unwrap();
        for wrong in [[0.3, 0.21], [0.3, f64::NAN]] {
            let message = check_answers(&[report(0, &[0.5, 0.4]), report(1, &wrong)], &rival).unwrap_err().to_string();
            assert!(message.contains("rank 1 at step 1"), "{message}");
        }
        assert!(check_answers(&[report(0, &[0.5])], &rival).is_err());
    }

    #[test]
    fn the_step_is_the_median_and_the_memory_the_maximum() {
        let reports = [report(0, &[]), report(1, &[])];
        assert_eq!((median_step(&reports), peak(&reports)), (2.0, 101.0));
    }
}
