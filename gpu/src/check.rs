//! What a check is, what it is given, and how it says what it found.

use std::cell::Cell;
use std::fs;
use std::os::unix::process::parent_id;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Accelerator, AcceleratorBuilder, Workers};
use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::checks;

/// One thing that is to be seen.
#[derive(Debug)]
pub(crate) struct Check {
    pub(crate) name: &'static str,
    /// What it shows, in one line.
    pub(crate) about: &'static str,
    /// How long it may take.
    pub(crate) limit: Duration,
    pub(crate) run: fn(&Context<'_>) -> Result<Found>,
}

impl Check {
    pub(crate) const fn new(name: &'static str, about: &'static str, run: fn(&Context<'_>) -> Result<Found>) -> Self {
        Self { name, about, limit: Duration::from_secs(60), run }
    }

    /// With so much time, where several processes start one after the other.
    pub(crate) const fn within(self, seconds: u64) -> Self {
        Self { limit: Duration::from_secs(seconds), ..self }
    }
}

/// What a check says when nothing was wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Found {
    /// What was measured, in a few words.
    Figure(String),
    /// It makes no sense on this machine, for this reason.
    NotHere(String),
}

impl Found {
    pub(crate) fn figure(text: impl Into<String>) -> Result<Self> {
        Ok(Self::Figure(text.into()))
    }

    pub(crate) fn not_here(reason: impl Into<String>) -> Result<Self> {
        Ok(Self::NotHere(reason.into()))
    }
}

/// How a check is made to go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Plant {
    /// The first figure that it compares is another one
    Figure,
    /// Its process ends by a signal
    Crash,
    /// Its process never ends
    Hang,
}

/// What the process of a check is told.
#[derive(Debug, Args)]
pub(crate) struct Order {
    /// The check
    pub(crate) name: String,
    /// Whether it runs on the first GPU; else on the CPU
    #[arg(long)]
    pub(crate) cuda: bool,
    /// The file for what it finds
    #[arg(long)]
    pub(crate) answer: PathBuf,
    /// A folder for its own files
    #[arg(long)]
    pub(crate) folder: PathBuf,
    /// A Python that imports torch and Accelerate, if there is one
    #[arg(long)]
    pub(crate) python: Option<PathBuf>,
    /// Where the Python scripts are
    #[arg(long)]
    pub(crate) scripts: PathBuf,
    /// How it is to go wrong
    #[arg(long)]
    pub(crate) plant: Option<Plant>,
}

/// What a check works with.
#[derive(Debug)]
pub(crate) struct Context<'a> {
    pub(crate) device: Device,
    pub(crate) folder: &'a Path,
    pub(crate) workers: &'a Workers,
    python: Option<&'a Path>,
    scripts: &'a Path,
    /// Has a wrong figure been asked for, and not been compared yet?
    is_planted: Cell<bool>,
}

/// Runs the check in this process.
pub(crate) fn obey(order: &Order, workers: &Workers) -> Result<()> {
    end_with_parent()?;
    let check = checks::find(&order.name).with_context(|| format!("there is no check {:?}", order.name))?;
    match order.plant {
        Some(Plant::Crash) => std::process::abort(),
        Some(Plant::Hang) => loop {
            std::thread::park();
        },
        Some(Plant::Figure) | None => {}
    }
    let context = Context {
        device: if order.cuda { Device::Cuda(0) } else { Device::Cpu },
        folder: &order.folder,
        workers,
        python: order.python.as_deref(),
        scripts: &order.scripts,
        is_planted: Cell::new(order.plant == Some(Plant::Figure)),
    };
    let found = (check.run)(&context)?;
    ensure!(!context.is_planted.get(), "the planted figure was compared with nothing: {found:?}");
    fs::write(&order.answer, serde_json::to_string(&found)?)
        .with_context(|| format!("could not write {}", order.answer.display()))
}

/// A runner that is killed ends nothing, and a check that hangs would hold the memory of the GPU for good.
fn end_with_parent() -> Result<()> {
    let parent = parent_id();
    let watch = move || {
        while parent_id() == parent {
            std::thread::sleep(Duration::from_secs(1));
        }
        // What a library does at the end of a process may hang, too.
        std::process::abort();
    };
    std::thread::Builder::new().name("parent-watch".to_owned()).spawn(watch).context("no thread for a watch")?;
    Ok(())
}

impl Context<'_> {
    pub(crate) fn is_cuda(&self) -> bool {
        self.device.is_cuda()
    }

    /// A builder of accelerators on the device of the checks.
    pub(crate) fn builder(&self) -> AcceleratorBuilder {
        Accelerator::builder().cpu(!self.is_cuda())
    }

    pub(crate) fn accelerator(&self) -> Result<Accelerator> {
        Ok(self.builder().build()?)
    }

    /// Fails unless the two numbers are at most `tolerance` apart; returns how far they are.
    pub(crate) fn close(&self, what: &str, found: f64, wanted: f64, tolerance: f64) -> Result<f64> {
        let found = if self.is_planted.take() { found + 2.0 * tolerance + wanted.abs() + 1.0 } else { found };
        let difference = (found - wanted).abs();
        // Not a number is close to nothing.
        ensure!(difference <= tolerance, "{what}: found {found}, wanted {wanted} (at most {tolerance:e} apart)");
        Ok(difference)
    }

    /// The same for lists of numbers; returns the largest difference.
    pub(crate) fn all_close(&self, what: &str, found: &[f64], wanted: &[f64], tolerance: f64) -> Result<f64> {
        ensure!(found.len() == wanted.len(), "{what}: found {} numbers where {} are wanted", found.len(), wanted.len());
        let mut largest = 0f64;
        for (index, (found, wanted)) in found.iter().zip(wanted).enumerate() {
            largest = largest.max(self.close(&format!("{what} {index}"), *found, *wanted, tolerance)?);
        }
        Ok(largest)
    }

    /// Fails unless the elements of two tensors of one shape are at most `tolerance` apart; returns the largest difference.
    pub(crate) fn near(&self, what: &str, found: &Tensor, wanted: &Tensor, tolerance: f64) -> Result<f64> {
        ensure!(found.size() == wanted.size(), "{what}: found {:?}, wanted {:?}", found.size(), wanted.size());
        if found.numel() == 0 {
            return Ok(0.0);
        }
        let double = |tensor: &Tensor| tensor.f_detach()?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double);
        let difference = double(found)?.f_sub(&double(wanted)?)?.f_abs()?.f_max()?.f_double_value(&[])?;
        self.close(&format!("{what}, the largest difference"), difference, 0.0, tolerance)
    }

    /// Fails unless two tensors have the same dtype and the same bits.
    pub(crate) fn same(&self, what: &str, found: &Tensor, wanted: &Tensor) -> Result<()> {
        ensure!(found.kind() == wanted.kind(), "{what}: found {:?}, wanted {:?}", found.kind(), wanted.kind());
        self.near(what, found, wanted, 0.0).map(drop)
    }

    /// What a script of ours prints as JSON, run by the Python with torch and Accelerate. `None` where there is none.
    pub(crate) fn python<T: for<'de> Deserialize<'de>>(&self, script: &str, arguments: &[&str]) -> Result<Option<T>> {
        let Some(mut command) = self.python_command(script, arguments)? else { return Ok(None) };
        let text = printed_by(&mut command, script)?;
        let last = text.lines().next_back().unwrap_or_default();
        serde_json::from_str(last).map(Some).with_context(|| format!("{script} printed {last:?}"))
    }

    /// The command that runs a script of ours for the device of the checks.
    pub(crate) fn python_command(&self, script: &str, arguments: &[&str]) -> Result<Option<Command>> {
        let path = self.scripts.join(script);
        ensure!(path.is_file(), "there is no {}; `--scripts` says where the scripts are", path.display());
        Ok(self.plain_python().map(|mut command| {
            command.arg(&path).args(["--device", self.device_name()]).args(arguments);
            command
        }))
    }

    /// A program that is no script of ours, in the folder of the scripts, so that it can import them.
    pub(crate) fn python_program(&self, program: &str) -> Result<Option<Command>> {
        ensure!(self.scripts.is_dir(), "there is no folder {}; `--scripts` says where it is", self.scripts.display());
        Ok(self.plain_python().map(|mut command| {
            command.args(["-c", program]).current_dir(self.scripts);
            command
        }))
    }

    fn plain_python(&self) -> Option<Command> {
        self.python.map(|python| {
            let mut command = Command::new(python);
            // What Inductor compiles goes when the check does.
            command.env("TORCHINDUCTOR_CACHE_DIR", self.folder.join("inductor"));
            command
        })
    }

    /// As Python calls it.
    pub(crate) fn device_name(&self) -> &'static str {
        if self.is_cuda() { "cuda" } else { "cpu" }
    }
}

/// What a program prints, or why it failed: `what` it was, and its own words.
pub(crate) fn printed_by(command: &mut Command, what: &str) -> Result<String> {
    let output = command.output().with_context(|| format!("could not start {:?}", command.get_program()))?;
    if !output.status.success() {
        bail!("{what} ended with {}:\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Why a comparison with Python is not made.
pub(crate) const NO_PYTHON: &str = "no Python here imports torch 2.11 and accelerate";
