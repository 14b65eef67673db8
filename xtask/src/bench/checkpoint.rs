//! The races of checkpoints: 512 MiB of state of two ranks, saved and loaded, and the metadata of a model in many files.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::Goal;
use crate::python::Environment;
use crate::race::{Pair, Race, Races, median};
use crate::{paths, process, ranks};

const NUM_PROCESSES: usize = 2;
/// How often a run saves, and how often it loads.
const TIMES: usize = 3;
/// How often a run reads an index.
const INDEX_TIMES: usize = 20;
/// What one of two ranks writes of the state.
const SHARD_MIB: f64 = 256.0;

/// Runs both sides for `rounds` rounds. Values are milliseconds, MiB of the larger rank, and for the index microseconds.
pub(super) fn races(environment: &Environment, rounds: usize, races: &mut Races) -> Result<()> {
    let folder = paths::target_folder().join("bench/checkpoint");
    races.extend(state_races(environment, rounds, &folder)?);
    races.extend(async_races(environment, rounds, &folder)?);
    races.add(index_race(environment, rounds, &folder)?);
    remove(&folder)
}

fn state_races(environment: &Environment, rounds: usize, folder: &Path) -> Result<Vec<Race>> {
    let (mut save, mut save_accelerate, mut load, mut memory) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    // The first round of each side fills the page cache and is not counted.
    for round in 0..=rounds {
        let ours = State::of(ours("state", TIMES, folder), folder)?;
        let distributed = State::of(rival(environment, "state", "distributed", folder)?, folder)?;
        let accelerate = State::of(rival(environment, "state", "accelerate", folder)?, folder)?;
        for other in [&distributed, &accelerate] {
            check_answers(&ours.answer, &other.answer)?;
        }
        if round > 0 {
            save.push(Pair { ours: ours.save_ms, rival: distributed.save_ms });
            save_accelerate.push(Pair { ours: ours.save_ms, rival: accelerate.save_ms });
            load.push(Pair { ours: ours.load_ms, rival: distributed.load_ms.min(accelerate.load_ms) });
            memory.push(Pair { ours: ours.grown_mib, rival: SHARD_MIB });
        }
    }
    Ok(vec![
        Race { name: "checkpoint_save", unit: "ms", goal: 0.6, pairs: save },
        Race { name: "checkpoint_save_accelerate", unit: "ms", goal: 1.0, pairs: save_accelerate },
        Race { name: "checkpoint_load_warm", unit: "ms", goal: 0.75, pairs: load },
        Race { name: "checkpoint_save_memory", unit: "MiB", goal: 1.0, pairs: memory },
    ])
}

/// Saves in the background: what the call takes on the slower rank, and what a step takes while the files are written, beside one
/// while nothing is.
fn async_races(environment: &Environment, rounds: usize, folder: &Path) -> Result<Vec<Race>> {
    let (mut stall, mut step) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        let ours = reports(ours("async", TIMES, folder), folder)?;
        let rival = reports(rival(environment, "async", "distributed", folder)?, folder)?;
        if round > 0 {
            stall.push(Pair { ours: slowest(&ours, "stall_ms")?, rival: slowest(&rival, "stall_ms")? });
            step.push(Pair { ours: slowest(&ours, "writing_ms")?, rival: slowest(&ours, "quiet_ms")? });
        }
    }
    Ok(vec![
        Race { name: "checkpoint_async_stall", unit: "ms", goal: 0.9, pairs: stall },
        Race { name: "checkpoint_step_slowdown", unit: "ms", goal: 1.1, pairs: step },
    ])
}

/// The median of a rank's times, of the rank where it is largest.
fn slowest(reports: &[Value], name: &str) -> Result<f64> {
    let medians = reports.iter().map(|report| Ok(median(numbers(report, name)?))).collect::<Result<Vec<_>>>()?;
    Ok(medians.into_iter().fold(0.0, f64::max))
}

/// Our program makes the files that both sides read.
fn index_race(environment: &Environment, rounds: usize, folder: &Path) -> Result<Race> {
    let index = |mut command: Command| {
        let printed = process::read(&mut command)?;
        let report = *ranks::marked(&printed, "report=").first().context("the program reported nothing")?;
        let value = parse(report)?;
        Ok::<f64, anyhow::Error>(median(numbers(&value, "index_ms")?) * 1e3)
    };
    let mut pairs = Vec::new();
    renew(folder)?;
    for round in 0..=rounds {
        let ours = index(with_settings(launched(1, &["--mode", "index"]), INDEX_TIMES, folder))?;
        let mut command = environment.command();
        command.arg(paths::repository_root().join("bench/rival/checkpoint.py")).args(["--mode", "index"]);
        let rival = index(with_settings(command, INDEX_TIMES, folder))?;
        if round > 0 {
            pairs.push(Pair { ours, rival });
        }
    }
    // At most 20 ms.
    Ok(Race { name: "checkpoint_index", unit: "us", goal: Goal::Micros(20_000.0).ratio(&pairs), pairs })
}

fn launched(num_processes: usize, arguments: &[&str]) -> Command {
    let mut command = ranks::launch(num_processes, &paths::release_binary("checkpoint"));
    command.arg("--").args(arguments);
    command
}

fn ours(mode: &str, times: usize, folder: &Path) -> Command {
    with_settings(launched(NUM_PROCESSES, &["--mode", mode]), times, folder)
}

fn rival(environment: &Environment, mode: &str, way: &str, folder: &Path) -> Result<Command> {
    let mut command = environment.torchrun(NUM_PROCESSES)?;
    command.arg(paths::repository_root().join("bench/rival/checkpoint.py")).args(["--mode", mode, "--way", way]);
    Ok(with_settings(command, TIMES, folder))
}

fn with_settings(mut command: Command, times: usize, folder: &Path) -> Command {
    command.arg("--folder").arg(folder).args(["--times", &times.to_string()]);
    command
}

fn remove(folder: &Path) -> Result<()> {
    match folder.exists() {
        true => fs::remove_dir_all(folder).with_context(|| format!("could not remove {}", folder.display())),
        false => Ok(()),
    }
}

/// Nothing of the run before is left, neither in the folder nor on its way to the disk.
fn renew(folder: &Path) -> Result<()> {
    remove(folder)?;
    fs::create_dir_all(folder).with_context(|| format!("could not make {}", folder.display()))?;
    process::read(&mut Command::new("sync")).map(drop)
}

/// What the ranks of a run report.
#[derive(Debug, PartialEq)]
struct State {
    /// Medians of the run. Ranks wait for each other, so that the first one's times are those of all.
    save_ms: f64,
    load_ms: f64,
    /// Of the larger rank.
    grown_mib: f64,
    answer: Vec<f64>,
}

impl State {
    fn of(command: Command, folder: &Path) -> Result<State> {
        State::new(&reports(command, folder)?)
    }

    fn new(reports: &[Value]) -> Result<State> {
        let mut grown_mib: f64 = 0.0;
        for report in reports {
            let grown_bytes = report["grown_bytes"].as_f64().context("a report without `grown_bytes`")?;
            grown_mib = grown_mib.max(grown_bytes / f64::from(1 << 20));
        }
        let answers = reports.iter().map(|report| numbers(report, "answer")).collect::<Result<Vec<_>>>()?;
        ensure!(answers.windows(2).all(|pair| pair[0] == pair[1]), "the race is void: ranks disagree: {answers:?}");
        Ok(State {
            save_ms: median(numbers(&reports[0], "save_ms")?),
            load_ms: median(numbers(&reports[0], "load_ms")?),
            grown_mib,
            answer: numbers(&reports[0], "answer")?,
        })
    }
}

/// Runs the command in an empty folder, and returns the reports of all ranks.
fn reports(mut command: Command, folder: &Path) -> Result<Vec<Value>> {
    renew(folder)?;
    let printed = process::read(&mut command)?;
    of_all_ranks(&ranks::marked(&printed, "report="))
}

/// In the order of ranks, all of which must be there.
fn of_all_ranks(reports: &[&str]) -> Result<Vec<Value>> {
    let mut reports: Vec<Value> = reports.iter().map(|report| parse(report)).collect::<Result<_>>()?;
    reports.sort_by_key(|report| report["rank"].as_u64());
    let place = |report: &Value| (report["rank"].as_u64(), report["world_size"].as_u64());
    let found: Vec<_> = reports.iter().map(place).collect();
    let wanted = (0..NUM_PROCESSES as u64).map(|rank| (Some(rank), Some(NUM_PROCESSES as u64)));
    ensure!(found.iter().copied().eq(wanted), "the race is void: ranks {found:?} reported");
    Ok(reports)
}

fn parse(report: &str) -> Result<Value> {
    serde_json::from_str(report).with_context(|| format!("a report is not JSON: {report}"))
}

fn numbers(report: &Value, name: &str) -> Result<Vec<f64>> {
    let list = report[name].as_array().with_context(|| format!("a report without `{name}`: {report}"))?;
    list.iter().map(|number| number.as_f64().with_context(|| format!("`{name}` has {number}"))).collect()
}

/// Each side has made sure that what it loaded is what it saved. Both have to have saved the same.
fn check_answers(ours: &[f64], rival: &[f64]) -> Result<()> {
    let agree = |(ours, rival): (&f64, &f64)| (ours - rival).abs() <= 1e-3 * rival.abs();
    ensure!(
        ours.len() == rival.len() && ours.iter().zip(rival).all(agree),
        "the race is void: state of mean squares {ours:?} here and {rival:?} there"
    );
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn report(rank: usize, save_ms: f64, answer: f64) -> String {
        format!(
            r#"{{"rank": {rank}, "world_size": 2, "save_ms": [{save_ms}, 9.0, 1.0], "load_ms": [2.0],
               "grown_bytes": {}, "answer": [{answer}]}}"#,
            (rank + 1) << 20
        )
    }

    #[test]
    fn times_are_those_of_the_first_rank_and_memory_is_that_of_the_larger() {
        let (first, second) = (report(0, 3.0, 0.5), report(1, 4.0, 0.5));
        let want = State { save_ms: 3.0, load_ms: 2.0, grown_mib: 2.0, answer: vec![0.5] };
        assert_eq!(State::new(&of_all_ranks(&[&second, &first]).unwrap()).unwrap(), want);
    }

    #[test]
    fn a_rank_that_is_missing_or_has_another_state_voids_the_race() {
        let (first, second) = (report(0, 3.0, 0.5), report(1, 4.0, 0.25));
        for reports in [vec![&*first], vec![&*first, &*first], vec![&*first, &*second]] {
            let state = of_all_ranks(&reports).and_then(|reports| State::new(&reports));
            assert!(state.unwrap_err().to_string().contains("the race is void"));
        }
    }

    #[test]
    fn another_state_than_the_rivals_voids_the_race() {
        check_answers(&[0.25], &[0.250_01]).unwrap();
        for wrong in [&[0.26][..], &[f64::NAN], &[]] {
            assert!(check_answers(wrong, &[0.25]).unwrap_err().to_string().contains("void"));
        }
    }
}
