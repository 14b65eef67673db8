//! `cargo xtask parity data`: which rank gets which rows, in Python and here.

mod cases;
mod verdict;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::Deserialize;

use crate::python::Environment;
use crate::{libtorch, paths, process, ranks};
use cases::{Case, cases};
use verdict::{Fault, Verdict, judge};

/// Compare the rows that every rank gets.
#[derive(Debug, Args)]
pub(super) struct Data {
    /// Numbers of ranks
    #[arg(long = "world_sizes", value_delimiter = ',', default_values_t = [1, 2, 3, 5, 7])]
    world_sizes: Vec<usize>,
}

/// What one rank saw: batches by epoch, and the rows of metrics by epoch.
#[derive(Clone, Debug, PartialEq, Deserialize)]
struct Outcome {
    epochs: Vec<Vec<Vec<i64>>>,
    metrics: Vec<Vec<i64>>,
    /// What the default generator gives next: shows whether both sides have drawn equally often.
    next_draw: i64,
    /// Why it could not be done.
    #[serde(default)]
    error: Option<String>,
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
    let (mut num_different, mut shown) = (0, Vec::new());
    for &world_size in &arguments.world_sizes {
        let cases = cases(world_size);
        let file = work.join(format!("cases{world_size}.json"));
        fs::write(&file, serde_json::to_string(&cases)?)?;
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
