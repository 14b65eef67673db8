//! The races of data loading: how long a batch takes, from memory, with work, from rank 0.

use std::process::Command;

use anyhow::{Result, ensure};
use serde_json::Value;

use super::Goal;
use crate::python::Environment;
use crate::race::{Pair, Race, Races};
use crate::{paths, process, ranks};

/// One race: what both programs are told.
#[derive(Debug, Clone, Copy)]
struct Contest {
    name: &'static str,
    mode: &'static str,
    num_workers: usize,
    batches: usize,
    num_processes: usize,
    goal: Goal,
}

/// Batches of 32 rows in memory, fetched by the main thread of one process.
const MEMORY: Contest = Contest {
    name: "loader_memory_w0",
    mode: "memory",
    num_workers: 0,
    batches: 500,
    num_processes: 1,
    goal: Goal::Ratio(0.25),
};

const CONTESTS: [Contest; 7] = [
    MEMORY,
    Contest { name: "loader_memory_w2", num_workers: 2, goal: Goal::Ratio(0.03), ..MEMORY },
    Contest { name: "loader_work_w2", mode: "work", num_workers: 2, batches: 20, goal: Goal::Ratio(1.0), ..MEMORY },
    Contest { name: "loader_skip", mode: "skip", batches: 1, goal: Goal::Micros(1000.0), ..MEMORY },
    Contest { name: "loader_first_batch", mode: "first-batch", goal: Goal::Micros(2000.0), ..MEMORY },
    Contest { num_processes: 2, ..DISPATCH },
    Contest { name: "loader_dispatch_4", num_processes: 4, ..DISPATCH },
];

const DISPATCH: Contest =
    Contest { name: "loader_dispatch_2", mode: "dispatch", batches: 300, goal: Goal::Ratio(0.3), ..MEMORY };

/// Runs both sides for `rounds` rounds. Values are microseconds: per batch, or until the first one.
pub(super) fn races(environment: &Environment, rounds: usize, races: &mut Races) -> Result<()> {
    for contest in &CONTESTS {
        races.add(contest.race(environment, rounds)?);
    }
    Ok(())
}

impl Contest {
    fn race(&self, environment: &Environment, rounds: usize) -> Result<Race> {
        let mut pairs = Vec::new();
        // The first round of each side fills the page cache and is not counted.
        for round in 0..=rounds {
            let ours = self.reports(self.ours())?;
            let rival = self.reports(self.rival(environment)?)?;
            check_answers(self.name, &ours, &rival)?;
            if round > 0 {
                pairs.push(Pair { ours: slowest(&ours), rival: slowest(&rival) });
            }
        }
        Ok(Race { name: self.name, unit: "us", goal: self.goal.ratio(&pairs), pairs })
    }

    fn ours(&self) -> Command {
        let mut command = ranks::launch(self.num_processes, &paths::release_binary("loader"));
        command.arg("--");
        self.with_settings(command)
    }

    fn rival(&self, environment: &Environment) -> Result<Command> {
        let mut command = environment.torchrun(self.num_processes)?;
        command.arg(paths::repository_root().join("bench/rival/loader.py"));
        Ok(self.with_settings(command))
    }

    fn with_settings(&self, mut command: Command) -> Command {
        command.args(["--mode", self.mode, "--num_workers", &self.num_workers.to_string()]);
        command.args(["--batches", &self.batches.to_string()]);
        command
    }

    fn reports(&self, mut command: Command) -> Result<Vec<Report>> {
        let printed = process::read(&mut command)?;
        let mut reports = all_reports(&printed)?;
        reports.sort_by_key(|report| report.rank);
        let found: Vec<u64> = reports.iter().map(|report| report.rank).collect();
        let wanted: Vec<u64> = (0..self.num_processes as u64).collect();
        ensure!(found == wanted, "the race is void: ranks {found:?} reported, not {wanted:?}");
        Ok(reports)
    }
}

/// What one rank reports.
#[derive(Debug, PartialEq)]
struct Report {
    rank: u64,
    micros: f64,
    sum: i64,
}

/// Every report in what the ranks printed. Lines of ranks that print at the same moment can run into each other.
fn all_reports(printed: &str) -> Result<Vec<Report>> {
    printed.split("report=").skip(1).map(parse_report).collect()
}

/// The report that `text` begins with.
fn parse_report(text: &str) -> Result<Report> {
    let value: Value = match serde_json::Deserializer::from_str(text).into_iter().next() {
        Some(value) => value?,
        None => Value::Null,
    };
    let (rank, micros, sum) = (value["rank"].as_u64(), value["micros"].as_f64(), value["sum"].as_i64());
    match (rank, micros, sum) {
        (Some(rank), Some(micros), Some(sum)) => Ok(Report { rank, micros, sum }),
        _ => anyhow::bail!("a rank's report lacks rank, micros or sum: {text}"),
    }
}

/// Both sides must have read the same before their times are compared.
fn check_answers(name: &str, ours: &[Report], rival: &[Report]) -> Result<()> {
    for (our, their) in ours.iter().zip(rival) {
        let (rank, our, their) = (our.rank, our.sum, their.sum);
        ensure!(our == their, "the race {name} is void: rank {rank} read tokens of sum {our} here and {their} there");
    }
    Ok(())
}

/// All ranks wait for the last one.
fn slowest(reports: &[Report]) -> f64 {
    reports.iter().map(|report| report.micros).fold(0.0, f64::max)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn report(rank: u64, micros: f64, sum: i64) -> Report {
        Report { rank, micros, sum }
    }

    #[test]
    fn a_report_is_read() {
        let text = r#"{"rank": 1, "world_size": 2, "micros": 12.5, "sum": 77}"#;
        assert_eq!(parse_report(text).unwrap(), report(1, 12.5, 77));
        let joined = format!("noise\nreport={text}report={text}\n\n");
        assert_eq!(all_reports(&joined).unwrap(), [report(1, 12.5, 77), report(1, 12.5, 77)]);
        assert!(parse_report("").is_err());
        assert!(parse_report(r#"{"rank": 1}"#).is_err());
    }

    #[test]
    fn other_rows_void_the_race_and_the_slowest_rank_counts() {
        let ours = [report(0, 1.0, 5), report(1, 3.0, 6)];
        check_answers("loader", &ours, &[report(0, 9.0, 5), report(1, 9.0, 6)]).unwrap();
        let message = check_answers("loader", &ours, &[report(0, 9.0, 5), report(1, 9.0, 7)]).unwrap_err().to_string();
        assert!(message.contains("rank 1") && message.contains("6 here and 7 there"), "{message}");
        assert_eq!(slowest(&ours), 3.0);
    }
}
