//! `cargo xtask parity quant`: codes, files and products of quantised weights, here and in bitsandbytes on the CPU.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::python::Environment;
use crate::{libtorch, paths, process, ranks};

/// Most that products may be apart, by the type that they are computed in, of the largest. In float32 it is the factor that bitsandbytes
/// has one digit too few of.
const BOUNDS: [(&str, f64); 3] = [("float32", 4e-5), ("bfloat16", 1.6e-2), ("float16", 2e-3)];

#[derive(Debug, Deserialize)]
struct Case {
    shape: [usize; 2],
    config: BTreeMap<String, serde_json::Value>,
}

/// How one case came out.
#[derive(Debug, Deserialize)]
struct Verdict {
    number: usize,
    /// Are the files the same, tensor by tensor and bit by bit?
    codes: bool,
    /// Are the numbers that codes stand for the same bits?
    numbers: bool,
    train: f64,
    eval: f64,
    gradient: f64,
}

pub(super) fn run() -> Result<()> {
    libtorch::ensure()?;
    let environment = Environment::ensure()?;
    ranks::build()?;
    println!("reference: {}", environment.versions);
    let folder = paths::target_folder().join("parity/quant");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("could not remove {}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("could not make {}", folder.display()))?;
    let python = |what: &str| {
        let mut command = environment.command();
        command.env("TORCHDYNAMO_DISABLE", "1").arg(paths::repository_root().join("parity/quant/compare.py"));
        command.arg(what).arg("--folder").arg(&folder);
        process::read(&mut command)
    };
    python("make")?;
    let mut ours = std::process::Command::new(paths::release_binary("parity_quant"));
    process::read(ours.env("OMP_NUM_THREADS", "1").arg("--folder").arg(&folder))?;
    let printed = python("compare")?;

    let text = fs::read_to_string(folder.join("cases.json")).context("there are no cases")?;
    let cases: Vec<Case> = serde_json::from_str(&text)?;
    let (mut failed, mut num_bits, mut worst) = (0, 0, BTreeMap::<&str, f64>::new());
    let verdicts = ranks::marked(&printed, "case=");
    if verdicts.len() != cases.len() {
        bail!("{} cases were made, and {} compared", cases.len(), verdicts.len());
    }
    for line in verdicts {
        let verdict: Verdict = serde_json::from_str(line).with_context(|| format!("not a verdict: {line}"))?;
        let case = cases.get(verdict.number).context("a verdict on no case")?;
        let dtype = case.config.get("torch_dtype").and_then(|dtype| dtype.as_str()).unwrap_or_default();
        let (name, bound) = *BOUNDS.iter().find(|(name, _)| *name == dtype).context("a case of no type")?;
        let apart = [verdict.train, verdict.eval, verdict.gradient];
        let largest = worst.entry(name).or_default();
        *largest = apart.into_iter().fold(*largest, f64::max);
        // A difference that is not a number is none that is small enough.
        let is_equal = verdict.codes && verdict.numbers && apart.iter().all(|apart| *apart <= bound);
        num_bits += usize::from(verdict.codes && verdict.numbers);
        if !is_equal {
            failed += 1;
            println!("parity=quant shape={:?} {:?} {line} FAILED", case.shape, case.config);
        }
    }
    println!("parity=quant cases={} equal_to_the_bit={num_bits} products_apart={worst:?}", cases.len());
    if failed > 0 {
        bail!("{failed} cases differ from bitsandbytes");
    }
    Ok(())
}
