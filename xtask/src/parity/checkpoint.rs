//! `cargo xtask parity checkpoint`: a run that is saved by one side goes on with the other one, through
//! `accelerate checkpoint convert`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::python::Environment;
use crate::{libtorch, paths, process, ranks};

/// Convert checkpoints in both directions, and go on with each.
#[derive(Debug, Args)]
pub(super) struct Checkpoint {
    /// Steps before the checkpoint, and as many after it
    #[arg(long, default_value_t = 3)]
    steps: usize,
    /// Optimizers, out of adamw and sgd
    #[arg(long, value_delimiter = ',', default_values_t = ["adamw".to_owned(), "sgd".to_owned()])]
    optimizers: Vec<String>,
}

/// Where rows go through another order of additions, losses may differ by so much of their size.
const BOUND: f64 = 1e-6;

pub(super) fn run(arguments: &Checkpoint) -> Result<()> {
    libtorch::ensure()?;
    let environment = Environment::ensure()?;
    ranks::build()?;
    println!("reference: {}", environment.versions);
    let mut num_failed = 0;
    for optimizer in &arguments.optimizers {
        let folder = paths::target_folder().join("parity/checkpoint").join(optimizer);
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| format!("could not remove {}", folder.display()))?;
        }
        fs::create_dir_all(&folder).with_context(|| format!("could not create {}", folder.display()))?;
        let case = Case { environment: &environment, optimizer, steps: arguments.steps, folder };
        for (what, outcome) in [("from_python", case.python_first()), ("to_python", case.ours_first())] {
            match outcome {
                Ok(difference) => println!(
                    "parity=checkpoint direction={what} optimizer={optimizer} steps={} max_loss_rel_diff={difference:.3e} ok",
                    arguments.steps
                ),
                Err(error) => {
                    num_failed += 1;
                    println!("parity=checkpoint direction={what} optimizer={optimizer} FAILED: {error:#}");
                }
            }
        }
    }
    if num_failed > 0 {
        bail!("{num_failed} checkpoints did not go on as they were saved");
    }
    Ok(())
}

/// Who trains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Python,
    Rust,
}

struct Case<'a> {
    environment: &'a Environment,
    optimizer: &'a str,
    steps: usize,
    folder: PathBuf,
}

impl Case<'_> {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Python saves. It goes on here, and there again, to the bit, after being converted forth and back.
    fn python_first(&self) -> Result<f64> {
        self.train(Side::Python, None, Some("p/saved"))?;
        let wanted = self.train(Side::Python, Some("p/saved"), None)?;
        let names = self.path("names.txt");
        self.convert("p/saved", "p/here", &["--parameter_names".as_ref(), names.as_os_str()])?;
        self.accelerate(&["checkpoint".as_ref(), "verify".as_ref(), self.path("p/here").as_os_str()])?;
        self.convert("p/here", "p/back", &[])?;
        let again = self.train(Side::Python, Some("p/back"), None)?;
        ensure!(again == wanted, "Python goes on with {again:?} after both ways, and {wanted:?} without");
        largest_difference(&self.train(Side::Rust, Some("p/here"), None)?, &wanted)
    }

    /// It is saved here. Python goes on, and saves again what it has loaded, which is the same to the bit.
    fn ours_first(&self) -> Result<f64> {
        self.train(Side::Rust, None, Some("r/saved"))?;
        let wanted = self.train(Side::Rust, Some("r/saved"), None)?;
        self.convert("r/saved", "r/there", &[])?;
        let found = self.train(Side::Python, Some("r/there"), None)?;
        self.train_steps(Side::Python, Some("r/there"), Some("r/resaved"), 0)?;
        self.convert("r/resaved", "r/back", &[])?;
        let [saved, back] = ["r/saved", "r/back"].map(|name| self.path(name));
        self.same_tensors(&saved, &back)?;
        largest_difference(&found, &wanted)
    }

    /// Parameters, moments and random numbers are equal to the bit. Settings of groups have more names in Python.
    fn same_tensors(&self, one: &Path, other: &Path) -> Result<()> {
        for object in ["model", "optimizer", "random_states"] {
            let file = format!("{object}.safetensors");
            let [found, wanted] = [other, one].map(|folder| fs::read(folder.join(&file)));
            ensure!(found? == wanted?, "{file} is another one after Python has loaded and saved it");
        }
        Ok(())
    }

    /// The losses of the steps after those that were saved, or of the first ones.
    fn train(&self, side: Side, load: Option<&str>, save: Option<&str>) -> Result<Vec<f32>> {
        self.train_steps(side, load, save, self.steps)
    }

    fn train_steps(&self, side: Side, load: Option<&str>, save: Option<&str>, steps: usize) -> Result<Vec<f32>> {
        let losses = self.path("losses.json");
        let mut command = match side {
            Side::Python => {
                let mut command = self.environment.command();
                command
                    .arg(paths::repository_root().join("parity/checkpoint.py"))
                    .arg("--names")
                    .arg(self.path("names.txt"));
                command
            }
            Side::Rust => {
                let mut command = Command::new(paths::release_binary("parity_checkpoint"));
                command.env("OMP_NUM_THREADS", "1");
                command
            }
        };
        let first = if load.is_some() { self.steps } else { 0 };
        command.args(["--optimizer", self.optimizer, "--first", &first.to_string(), "--steps", &steps.to_string()]);
        command.arg("--losses").arg(&losses);
        for (flag, folder) in [("--load", load), ("--save", save)] {
            if let Some(folder) = folder {
                command.arg(flag).arg(self.path(folder));
            }
        }
        process::read(&mut command)?;
        let text = fs::read_to_string(&losses).with_context(|| format!("could not read {}", losses.display()))?;
        let digits: Vec<String> = serde_json::from_str(&text).context("the losses are no JSON")?;
        digits.iter().map(|digits| Ok(f32::from_bits(u32::from_str_radix(digits, 16)?))).collect()
    }

    fn convert(&self, source: &str, destination: &str, flags: &[&std::ffi::OsStr]) -> Result<()> {
        let [source, destination] = [source, destination].map(|name| self.path(name));
        let mut words: Vec<&std::ffi::OsStr> = vec!["checkpoint".as_ref(), "convert".as_ref()];
        words.extend([source.as_os_str(), destination.as_os_str()]);
        words.extend(flags);
        self.accelerate(&words)
    }

    fn accelerate(&self, words: &[&std::ffi::OsStr]) -> Result<()> {
        process::read(Command::new(paths::release_binary("accelerate")).args(words)).map(drop)
    }
}

/// Of the size of the losses. More than the bound is an error.
fn largest_difference(found: &[f32], wanted: &[f32]) -> Result<f64> {
    ensure!(found.len() == wanted.len(), "{} losses, and {} are wanted", found.len(), wanted.len());
    let differences = found.iter().zip(wanted).map(|(found, wanted)| f64::from((found - wanted).abs() / wanted.abs()));
    let largest = differences.fold(0.0, |one: f64, other| if other > one || other.is_nan() { other } else { one });
    ensure!(largest <= BOUND, "losses {found:?}, and {wanted:?} are wanted");
    Ok(largest)
}
