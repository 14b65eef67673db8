//! `cargo xtask parity models`: logits, losses and tokens of models with random weights, in Transformers and here.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::Deserialize;

use super::compare::largest_difference;
use crate::python::Environment;
use crate::{libtorch, paths, process, ranks};

/// Compare models with Transformers.
#[derive(Debug, Args)]
pub(super) struct Models {
    /// Only cases whose names contain this
    #[arg(long, default_value = "")]
    only: String,
}

/// What one side computed.
#[derive(Clone, Debug, PartialEq, Deserialize)]
struct Outcome {
    logits: Vec<f64>,
    /// Of models that continue texts.
    loss: Option<f64>,
    greedy: Option<Vec<Vec<i64>>>,
    sampled: Option<Vec<Vec<i64>>>,
}

/// Most that logits and losses may be apart, in float32.
const BOUND: f64 = 1e-5;

pub(super) fn run(arguments: &Models) -> Result<()> {
    libtorch::ensure()?;
    let environment = Environment::with_transformers()?;
    ranks::build()?;
    println!("reference: {}", environment.versions);
    let work = paths::target_folder().join("parity/models");
    if work.exists() {
        fs::remove_dir_all(&work).with_context(|| format!("could not remove {}", work.display()))?;
    }
    let script = paths::repository_root().join("parity/models/run.py");
    process::read(environment.command().arg(script).arg("--output").arg(&work))?;
    let cases = cases(&work, &arguments.only)?;
    ensure!(!cases.is_empty(), "no case contains {:?}", arguments.only);
    process::read(Command::new(paths::release_binary("parity_models")).args(&cases).env("OMP_NUM_THREADS", "1"))?;

    let mut num_different = 0;
    for case in &cases {
        let compared = Comparison::of(&read(case, "ours.json")?, &read(case, "theirs.json")?);
        num_different += usize::from(!compared.is_equal());
        println!("{}", compared.line(&name(case)));
    }
    if num_different > 0 {
        bail!("{num_different} models differ from Transformers");
    }
    Ok(())
}

/// The folders of the cases, by name.
fn cases(work: &Path, only: &str) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(work).with_context(|| format!("could not read {}", work.display()))?;
    let mut cases: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    cases.retain(|case| name(case).contains(only));
    cases.sort();
    Ok(cases)
}

fn name(case: &Path) -> String {
    case.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn read(case: &Path, file: &str) -> Result<Outcome> {
    let path = case.join(file);
    let text = fs::read_to_string(&path).with_context(|| format!("could not read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is not an outcome", path.display()))
}

/// How far both sides are apart.
#[derive(Debug)]
struct Comparison {
    logits: f64,
    /// 0 where there is none on both sides.
    loss: f64,
    /// Whether tokens are the same, where there are some.
    greedy: Option<bool>,
    sampled: Option<bool>,
}

impl Comparison {
    fn of(ours: &Outcome, theirs: &Outcome) -> Self {
        let same = |ours: &Option<Vec<Vec<i64>>>, theirs: &Option<Vec<Vec<i64>>>| match (ours, theirs) {
            (None, None) => None,
            (ours, theirs) => Some(ours == theirs),
        };
        Self {
            logits: largest_difference(&ours.logits, &theirs.logits),
            loss: match (ours.loss, theirs.loss) {
                (None, None) => 0.0,
                (Some(ours), Some(theirs)) => (ours - theirs).abs(),
                _ => f64::NAN,
            },
            greedy: same(&ours.greedy, &theirs.greedy),
            sampled: same(&ours.sampled, &theirs.sampled),
        }
    }

    /// A difference that is not a number is none that is small enough.
    fn is_equal(&self) -> bool {
        self.logits <= BOUND && self.loss <= BOUND && self.greedy != Some(false) && self.sampled != Some(false)
    }

    fn line(&self, name: &str) -> String {
        let tokens = |same: Option<bool>| match same {
            None => "none",
            Some(true) => "same",
            Some(false) => "OTHERS",
        };
        format!(
            "parity=models case={name:<22} logits={:.1e} loss={:.1e} greedy={} sampled={} {}",
            self.logits,
            self.loss,
            tokens(self.greedy),
            tokens(self.sampled),
            if self.is_equal() { "equal" } else { "DIFFERENT" },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_difference_counts() {
        let theirs = Outcome {
            logits: vec![1.0, -2.0],
            loss: Some(0.5),
            greedy: Some(vec![vec![1, 2]]),
            sampled: Some(vec![vec![3, 4]]),
        };
        let rows = [
            (theirs.clone(), true),
            (Outcome { logits: vec![1.0, -2.000_001], ..theirs.clone() }, true),
            (Outcome { logits: vec![1.0, -2.000_1], ..theirs.clone() }, false),
            (Outcome { logits: vec![1.0], ..theirs.clone() }, false),
            (Outcome { logits: vec![1.0, f64::NAN], ..theirs.clone() }, false),
            (Outcome { loss: Some(0.6), ..theirs.clone() }, false),
            (Outcome { loss: None, ..theirs.clone() }, false),
            (Outcome { greedy: Some(vec![vec![1, 3]]), ..theirs.clone() }, false),
            (Outcome { sampled: None, ..theirs.clone() }, false),
        ];
        for (ours, wanted) in rows {
            assert_eq!(Comparison::of(&ours, &theirs).is_equal(), wanted, "{ours:?}");
        }
    }
}
