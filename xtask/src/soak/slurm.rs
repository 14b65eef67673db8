//! `cargo xtask soak slurm`: the tests that need a Slurm, with one that is downloaded for them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::{libtorch, paths, process};

/// What two nodes and a controller are made of, besides what any Debian has.
const PACKAGES: [&str; 7] =
    ["slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "libmunge2", "libhwloc15", "libnuma1"];

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// A built nlp_example to train with, in place of building it
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let folder = ensure()?;
    let program = match &arguments.program {
        Some(program) => program.canonicalize().with_context(|| format!("there is no {}", program.display()))?,
        None => {
            libtorch::ensure()?;
            process::run(&mut process::cargo(&["build", "--release", "--package", "nlp_example"]))?;
            paths::release_binary("nlp_example")
        }
    };
    let mut tests = process::cargo(&["test", "--package", "accelerate-cli", "--test", "cli"]);
    tests.args(["--", "slurm::", "--test-threads", "1"]);
    tests.env("ACCELERATE_TEST_SLURM", folder).env("ACCELERATE_TEST_PROGRAM", program);
    process::run(&mut tests)
}

/// The folder with the unpacked packages. It gets its name when everything is in it.
fn ensure() -> Result<PathBuf> {
    let folder = paths::cache_folder()?.join("slurm");
    if folder.is_dir() {
        return Ok(folder);
    }
    let partial = folder.with_extension("partial");
    if partial.is_dir() {
        fs::remove_dir_all(&partial).with_context(|| format!("could not remove {}", partial.display()))?;
    }
    fs::create_dir_all(&partial).with_context(|| format!("could not make {}", partial.display()))?;
    let mut download = Command::new("apt-get");
    download.arg("download").args(PACKAGES).current_dir(&partial);
    process::run(&mut download).context("Slurm comes from the packages of Debian 12 or a system like it")?;
    for package in packages(&partial)? {
        process::run(Command::new("dpkg").arg("-x").arg(&package).arg(&partial))?;
        fs::remove_file(&package).with_context(|| format!("could not remove {}", package.display()))?;
    }
    fs::rename(&partial, &folder).with_context(|| format!("could not make {}", folder.display()))?;
    Ok(folder)
}

fn packages(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("could not read {}", folder.display()))?;
    let paths: Vec<_> = entries.map(|entry| entry.map(|entry| entry.path())).collect::<std::io::Result<_>>()?;
    let packages: Vec<_> = paths.into_iter().filter(|path| path.extension().is_some_and(|end| end == "deb")).collect();
    match packages.len() == PACKAGES.len() {
        true => Ok(packages),
        false => bail!("apt-get has brought {} packages of {}", packages.len(), PACKAGES.len()),
    }
}
