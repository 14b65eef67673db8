//! The races of a model whose weights are on a disk: a forward pass with and without the files in the page cache.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::python::Environment;
use crate::race::{Pair, Race, Races};
use crate::{paths, process, ranks};

/// How far sums of absolute outputs of both sides may be apart: their products are those of one libtorch.
const TOLERANCE: f64 = 1e-6;

/// Runs both sides for `rounds` rounds, each with one cold pass and several warm ones. Values are milliseconds.
pub(super) fn races(environment: &Environment, rounds: usize, races: &mut Races) -> Result<()> {
    let folder = paths::target_folder().join("bench/big_model");
    if !folder.join("index.json").is_file() {
        fs::create_dir_all(&folder).with_context(|| format!("could not make {}", folder.display()))?;
        process::run(rival(environment).arg("--make").arg("--folder").arg(&folder))?;
    }
    // What is not on the disk yet is not dropped with the page cache.
    process::run(Command::new("sync").arg("--file-system").arg(&folder))?;
    let (mut warm, mut cold) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        let sides = [0, 1].map(|turn| {
            // Each side is the first in every other round.
            let is_ours = (round + turn) % 2 == 0;
            let mut command = if is_ours { ours() } else { rival(environment) };
            process::read(command.arg("--folder").arg(&folder)).and_then(|printed| report(&printed))
        });
        let [first, second] = sides;
        let (ours, rival) = if round % 2 == 0 { (first?, second?) } else { (second?, first?) };
        check_answers(&ours, &rival)?;
        warm.push(Pair { ours: ours.warm, rival: rival.warm });
        cold.push(Pair { ours: ours.cold, rival: rival.cold });
    }
    races.add(Race { name: "offload_forward_warm", unit: "ms", goal: 0.4, pairs: warm });
    races.add(Race { name: "offload_forward_cold", unit: "ms", goal: 0.75, pairs: cold });
    Ok(())
}

fn ours() -> Command {
    let mut command = Command::new(paths::release_binary("big_model"));
    command.env("OMP_NUM_THREADS", "1");
    command
}

fn rival(environment: &Environment) -> Command {
    let mut command = environment.command();
    command.arg(paths::repository_root().join("bench/rival/big_model.py"));
    command
}

/// What one side reports.
#[derive(Debug, PartialEq)]
struct Report {
    cold: f64,
    warm: f64,
    answer: f64,
}

fn report(printed: &str) -> Result<Report> {
    let text = *ranks::marked(printed, "report=").first().context("a side reported nothing")?;
    let value: Value = serde_json::from_str(text).with_context(|| format!("a report is not JSON: {text}"))?;
    let answers = value["answers"].as_array().with_context(|| format!("a report without answers: {text}"))?;
    ensure!(answers.len() == 1, "the race is void: passes of one side have given different answers: {text}");
    match (value["cold"].as_f64(), value["warm"].as_f64(), answers[0].as_f64()) {
        (Some(cold), Some(warm), Some(answer)) => Ok(Report { cold, warm, answer }),
        _ => bail!("a report lacks cold, warm or an answer: {text}"),
    }
}

fn check_answers(ours: &Report, rival: &Report) -> Result<()> {
    let (our, their) = (ours.answer, rival.answer);
    let is_same = (our - their).abs() <= TOLERANCE * their.abs() && their != 0.0;
    ensure!(is_same, "the race is void: outputs sum up to {our} here and to {their} there");
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn sides_with_other_answers_are_void() {
        let ours = report("report={\"cold\": 3.0, \"warm\": 1.5, \"answers\": [100.0]}").unwrap();
        assert_eq!(ours, Report { cold: 3.0, warm: 1.5, answer: 100.0 });
        check_answers(
            &ours,
            &Report {
                answer: 100.000_01,
                ..report("report={\"cold\": 1.0, \"warm\": 1.0, \"answers\": [1.0]}").unwrap()
            },
        )
        .unwrap();
        for answer in [100.001, 0.0, f64::NAN] {
            assert!(check_answers(&ours, &Report { cold: 1.0, warm: 1.0, answer }).is_err());
        }
        for text in ["", "report={}", "report={\"cold\": 3.0, \"warm\": 1.5, \"answers\": [1.0, 2.0]}"] {
            assert!(report(text).is_err(), "{text}");
        }
    }
}
