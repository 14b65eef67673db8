//! The races `allreduce_1k` to `allreduce_100m`: sums of so many bytes of float32 over two ranks of one machine, beside torch over
//! Gloo.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::python::Environment;
use crate::race::{Pair, Race, Races};
use crate::{paths, process, ranks};

const NUM_PROCESSES: usize = 2;

/// The part after `allreduce_`, the race, and its goal.
const RACES: [(&str, &str, f64); 5] = [
    ("1k", "allreduce_1k", 0.02),
    ("1m", "allreduce_1m", 0.1),
    ("4m", "allreduce_4m", 0.1),
    ("25m", "allreduce_25m", 0.33),
    ("100m", "allreduce_100m", 0.33),
];

/// Largest difference of two sums of squares, as a part of them: the numbers themselves are made by two libraries.
const ANSWER_BOUND: f64 = 1e-6;

/// What the ranks have measured of one size.
#[derive(Debug, PartialEq)]
struct Report {
    micros: f64,
    answer: f64,
}

/// Runs both sides for `rounds` rounds. Values are microseconds of the slower rank.
pub(super) fn races(environment: &Environment, rounds: usize, races: &mut Races) -> Result<()> {
    let mut pairs: [Vec<Pair>; RACES.len()] = Default::default();
    // The first round of each side fills the page cache and is not counted.
    for round in 0..=rounds {
        let ours = reports(ranks::launch(NUM_PROCESSES, &paths::release_binary("collectives")))?;
        let mut rival = environment.torchrun(NUM_PROCESSES)?;
        rival.arg(paths::repository_root().join("bench/rival/collectives.py"));
        let rival = reports(rival)?;
        for (pairs, (our, their)) in pairs.iter_mut().zip(ours.iter().zip(&rival)) {
            check_answers(our, their)?;
            if round > 0 {
                pairs.push(Pair { ours: our.micros, rival: their.micros });
            }
        }
    }
    races.extend(RACES.iter().zip(pairs).map(|(&(_, name, goal), pairs)| Race { name, unit: "µs", goal, pairs }));
    Ok(())
}

fn reports(mut command: Command) -> Result<Vec<Report>> {
    let printed = process::read(&mut command)?;
    let texts = ranks::marked(&printed, "report=");
    RACES.iter().map(|(name, ..)| report(&texts, name)).collect()
}

/// What all ranks say of one size.
fn report(texts: &[&str], name: &str) -> Result<Report> {
    let mut found = Vec::new();
    for text in texts {
        let value: Value = serde_json::from_str(text).with_context(|| format!("a report is not JSON: {text}"))?;
        if value["name"] == name {
            ensure!(value["world_size"] == NUM_PROCESSES, "the race is void: {text} is not of {NUM_PROCESSES} ranks");
            let number = |key: &str| value[key].as_f64().with_context(|| format!("a report without `{key}`: {text}"));
            found.push(Report { micros: number("micros")?, answer: number("answer")? });
        }
    }
    ensure!(found.len() == NUM_PROCESSES, "the race is void: {} ranks have reported {name}", found.len());
    let answer = found[0].answer;
    ensure!(found.iter().all(|report| report.answer == answer), "the race is void: ranks have other sums of {name}");
    Ok(Report { micros: found.iter().map(|report| report.micros).fold(0.0, f64::max), answer })
}

fn check_answers(ours: &Report, rival: &Report) -> Result<()> {
    let (ours, rival) = (ours.answer, rival.answer);
    ensure!(
        (ours - rival).abs() <= ANSWER_BOUND * rival.abs(),
        "the race is void: the sum of squares is {ours} here and {rival} there"
    );
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_slower_rank_counts_and_ranks_have_to_agree() {
        let text = |micros: f64, answer: f64| {
            format!(r#"{{"name": "1k", "world_size": 2, "micros": {micros}, "answer": {answer}}}"#)
        };
        let (one, other, wrong) = (text(3.0, 0.5), text(4.0, 0.5), text(4.0, 0.6));
        assert_eq!(report(&[&one, &other], "1k").unwrap(), Report { micros: 4.0, answer: 0.5 });
        for texts in [vec![one.as_str()], vec![&one, &wrong], vec![r#"{"name": "1k", "world_size": 1}"#]] {
            assert!(report(&texts, "1k").is_err(), "{texts:?}");
        }
        assert!(report(&[&one, &other], "1m").is_err());
    }

    #[test]
    fn different_answers_void_the_race() {
        let report = |answer| Report { micros: 1.0, answer };
        check_answers(&report(1.0), &report(1.000_000_1)).unwrap();
        assert!(check_answers(&report(1.0), &report(1.001)).is_err());
        assert!(check_answers(&report(f64::NAN), &report(1.0)).is_err());
    }
}
