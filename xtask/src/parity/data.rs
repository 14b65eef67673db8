//! `cargo xtask parity data`: which rank gets which rows, in Python and here.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::python::Environment;
use crate::{libtorch, paths, process, ranks};

/// Compare the rows that every rank gets.
#[derive(Debug, Args)]
pub(super) struct Data {
    /// Numbers of ranks
    #[arg(long = "world_sizes", value_delimiter = ',', default_values_t = [1, 2, 3, 4])]
    world_sizes: Vec<usize>,
}

/// One configuration of a loader; both programs read it.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Case {
    kind: &'static str,
    rows: usize,
    batch_size: usize,
    drop_last: bool,
    shuffle: &'static str,
    split_batches: bool,
    even_batches: bool,
    dispatch_batches: bool,
    seed: u64,
    /// Batches to leave out in the first epoch.
    skip: usize,
    /// Gather every batch for metrics: possible where all ranks have one.
    metrics: bool,
}

/// What one rank saw: batches by epoch, and the rows of metrics by epoch.
#[derive(Clone, Debug, PartialEq, Deserialize)]
struct Outcome {
    epochs: Vec<Vec<Vec<i64>>>,
    metrics: Vec<Vec<i64>>,
    /// Why it could not be done.
    #[serde(default)]
    error: Option<String>,
}

/// Why the reference is not followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    Fails,
    EmptyBatch,
    Metrics,
    SameEpoch,
}

impl Fault {
    fn reason(self) -> &'static str {
        match self {
            Self::Fails => "the reference's dispatcher fails where there is no whole round; here the pass is empty",
            Self::EmptyBatch => "the reference hands out an empty batch; here rows go round until every rank has one",
            Self::SameEpoch => "the reference repeats the order of a resumed epoch in the next one; here epochs go on",
            Self::Metrics => "the reference's metrics count fillers, or lose rows; here every row counts once",
        }
    }
}

#[derive(Debug, PartialEq)]
enum Verdict {
    Equal,
    ByDesign(Fault),
    Different,
}

pub(super) fn run(arguments: &Data) -> Result<()> {
    libtorch::ensure()?;
    let environment = Environment::ensure()?;
    ranks::build()?;
    let work = paths::target_folder().join("parity/data");
    if work.exists() {
        fs::remove_dir_all(&work).with_context(|| format!("could not remove {}", work.display()))?;
    }
    fs::create_dir_all(&work)?;
    println!("reference: {}", environment.versions);
    let cases = cases();
    let file = work.join("cases.json");
    fs::write(&file, serde_json::to_string(&cases)?)?;

    let (mut num_different, mut shown) = (0, Vec::new());
    for &world_size in &arguments.world_sizes {
        let (theirs, ours) = (work.join(format!("python{world_size}")), work.join(format!("rust{world_size}")));
        let mut command = environment.torchrun(world_size)?;
        command.arg(paths::repository_root().join("parity/data_streams.py"));
        record(command, &file, world_size, &theirs)?;
        let mut command = ranks::launch(world_size, &paths::release_binary("parity_data"));
        command.arg("--");
        record(command, &file, world_size, &ours)?;
        let (theirs, ours) = (read(&theirs, world_size)?, read(&ours, world_size)?);
        num_different += report(&cases, world_size, &theirs, &ours, &mut shown);
    }
    if num_different > 0 {
        bail!("{num_different} cases differ from Python Accelerate without a reason");
    }
    Ok(())
}

/// Prints the line of a world size, every case that differs, and one example of each known fault that was not `shown`
/// yet; returns how many cases differ without a reason.
fn report(
    cases: &[Case],
    world_size: usize,
    theirs: &[Vec<Outcome>],
    ours: &[Vec<Outcome>],
    shown: &mut Vec<Fault>,
) -> usize {
    let verdicts: Vec<Verdict> =
        cases.iter().enumerate().map(|(at, case)| judge(case, &of_case(theirs, at), &of_case(ours, at))).collect();
    let count = |wanted: fn(&Verdict) -> bool| verdicts.iter().filter(|verdict| wanted(verdict)).count();
    let different = count(|verdict| *verdict == Verdict::Different);
    println!(
        "parity=data world_size={world_size} cases={} equal={} differ_by_design={} different={different} {}",
        cases.len(),
        count(|verdict| *verdict == Verdict::Equal),
        count(|verdict| matches!(verdict, Verdict::ByDesign(_))),
        if different == 0 { "ok" } else { "FAILED" },
    );
    for (at, verdict) in verdicts.iter().enumerate() {
        match verdict {
            Verdict::Equal => continue,
            Verdict::ByDesign(fault) if shown.contains(fault) => continue,
            Verdict::ByDesign(fault) => {
                shown.push(*fault);
                println!("  {}, for example:", fault.reason());
            }
            Verdict::Different => {}
        }
        println!("  {:?}\n    theirs {:?}\n    ours   {:?}", cases[at], of_case(theirs, at), of_case(ours, at));
    }
    different
}

/// Both programs take the same arguments and write the same files.
fn record(mut command: std::process::Command, cases: &Path, world_size: usize, output: &Path) -> Result<()> {
    command.arg("--cases").arg(cases).args(["--world_size", &world_size.to_string()]).arg("--output").arg(output);
    process::read(&mut command).map(drop)
}

/// By rank and case.
fn read(folder: &Path, world_size: usize) -> Result<Vec<Vec<Outcome>>> {
    let read = |rank: usize| -> Result<Vec<Outcome>> {
        let path = folder.join(format!("rank{rank}.json"));
        let text = fs::read_to_string(&path).with_context(|| format!("could not read {}", path.display()))?;
        Ok(serde_json::from_str(&text)?)
    };
    let ranks = (0..world_size).map(read).collect::<Result<Vec<_>>>()?;
    ensure!(ranks.iter().all(|cases| cases.len() == ranks[0].len()), "the ranks ran different numbers of cases");
    Ok(ranks)
}

fn of_case(ranks: &[Vec<Outcome>], at: usize) -> Vec<Outcome> {
    ranks.iter().map(|cases| cases[at].clone()).collect()
}

/// The grid: kinds of dataset, orders, and every way of sharing them.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let both = [false, true];
    let mut add = |case: Case| {
        // The reference's dispatcher hands out empty batches here, and its metrics then wait for ever.
        let metrics = case.metrics && !(case.dispatch_batches && case.rows == 1);
        cases.push(Case { seed: 1000 + cases.len() as u64, metrics, ..case });
    };
    for rows in [1, 7, 16, 23, 48] {
        for split_batches in both {
            for drop_last in both {
                // Divisible by every number of ranks.
                let batch_size = if split_batches { 12 } else { 3 };
                let case = Case {
                    kind: "map",
                    rows,
                    batch_size,
                    drop_last,
                    shuffle: "no",
                    split_batches,
                    even_batches: true,
                    dispatch_batches: false,
                    seed: 0,
                    skip: 0,
                    metrics: true,
                };
                for shuffle in ["no", "random", "seedable"] {
                    let case = Case { shuffle, ..case.clone() };
                    add(Case { even_batches: false, metrics: false, ..case.clone() });
                    add(Case { skip: 1, ..case.clone() });
                    add(Case { dispatch_batches: true, ..case.clone() });
                    add(case);
                }
                for dispatch_batches in both {
                    add(Case { kind: "stream", dispatch_batches, ..case.clone() });
                }
            }
        }
        for even_batches in both {
            // Batches of unequal size cannot be gathered.
            add(Case {
                kind: "ragged",
                rows,
                batch_size: 1,
                drop_last: false,
                shuffle: "no",
                split_batches: false,
                even_batches,
                dispatch_batches: false,
                seed: 0,
                skip: 0,
                metrics: false,
            });
        }
    }
    cases
}

fn judge(case: &Case, theirs: &[Outcome], ours: &[Outcome]) -> Verdict {
    if theirs == ours {
        return Verdict::Equal;
    }
    let epoch = |outcomes: &[Outcome], epoch: usize| {
        outcomes.iter().map(|outcome| outcome.epochs[epoch].clone()).collect::<Vec<_>>()
    };
    let same_batches = |at| epoch(theirs, at) == epoch(ours, at);
    let fails = |outcomes: &[Outcome]| outcomes.iter().any(|outcome| outcome.error.is_some());
    if fails(theirs) && !fails(ours) && metrics_are_exact(case, ours) {
        return Verdict::ByDesign(Fault::Fails);
    }
    let has_empty_batch =
        |outcomes: &[Outcome]| outcomes.iter().flat_map(|outcome| &outcome.epochs).flatten().any(Vec::is_empty);
    if has_empty_batch(theirs) && !has_empty_batch(ours) && metrics_are_exact(case, ours) {
        return Verdict::ByDesign(Fault::EmptyBatch);
    }
    let shuffles_anew = case.shuffle == "seedable" && case.skip > 0;
    if shuffles_anew && same_batches(0) && !same_batches(1) && metrics_are_exact(case, ours) {
        return Verdict::ByDesign(Fault::SameEpoch);
    }
    if same_batches(0) && same_batches(1) && !metrics_are_exact(case, theirs) && metrics_are_exact(case, ours) {
        return Verdict::ByDesign(Fault::Metrics);
    }
    Verdict::Different
}

/// Did metrics see what the ranks saw, each row once?
fn metrics_are_exact(case: &Case, outcomes: &[Outcome]) -> bool {
    (0..2).all(|epoch| {
        let mut seen: Vec<i64> =
            outcomes.iter().flat_map(|outcome| outcome.epochs[epoch].iter().flatten().copied()).collect();
        seen.sort_unstable();
        seen.dedup();
        if !case.metrics {
            return case.drop_last || seen.len() == case.rows;
        }
        if case.skip > 0 && epoch == 0 {
            // Fillers of the last round come from the rows that were skipped, so they are told by their number.
            let round = if case.split_batches { case.batch_size } else { case.batch_size * outcomes.len() };
            let usable = if case.drop_last { case.rows / round * round } else { case.rows };
            return outcomes.iter().all(|outcome| {
                let mut once = outcome.metrics[epoch].clone();
                once.sort_unstable();
                once.dedup();
                once.len() == outcome.metrics[epoch].len() && once.len() == usable.saturating_sub(case.skip * round)
            });
        }
        outcomes.iter().all(|outcome| {
            let mut metrics = outcome.metrics[epoch].clone();
            metrics.sort_unstable();
            metrics == seen
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(batches: &[&[i64]], metrics: &[i64]) -> Outcome {
        let batches: Vec<Vec<i64>> = batches.iter().map(|batch| batch.to_vec()).collect();
        Outcome {
            epochs: vec![batches.clone(), batches],
            metrics: vec![metrics.to_vec(), metrics.to_vec()],
            error: None,
        }
    }

    #[test]
    fn the_grid_is_large_and_no_case_comes_twice() {
        let cases = cases();
        assert!(cases.len() >= 200, "{}", cases.len());
        for (at, case) in cases.iter().enumerate() {
            let same = |other: &&Case| Case { seed: 0, ..(*other).clone() } == Case { seed: 0, ..case.clone() };
            assert_eq!(cases.iter().filter(same).count(), 1, "case {at}");
        }
    }

    #[test]
    fn only_known_faults_are_excused() {
        let case = &cases()[3];
        let right = [outcome(&[&[0, 1]], &[0, 1, 2]), outcome(&[&[2, 0]], &[0, 1, 2])];
        assert_eq!(judge(case, &right, &right), Verdict::Equal);
        let counted_twice = [outcome(&[&[0, 1]], &[0, 1, 2, 0]), outcome(&[&[2, 0]], &[0, 1, 2, 0])];
        assert_eq!(judge(case, &counted_twice, &right), Verdict::ByDesign(Fault::Metrics));
        assert_eq!(judge(case, &right, &counted_twice), Verdict::Different);
        let empty = [outcome(&[&[0, 1, 2]], &[0, 1, 2]), outcome(&[&[]], &[0, 1, 2])];
        assert_eq!(judge(case, &empty, &right), Verdict::ByDesign(Fault::EmptyBatch));
        let other = [outcome(&[&[1, 0]], &[0, 1, 2]), outcome(&[&[2, 0]], &[0, 1, 2])];
        assert_eq!(judge(case, &right, &other), Verdict::Different);
    }
}
