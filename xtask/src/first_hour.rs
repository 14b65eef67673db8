//! `cargo xtask first-hour`: what somebody types first, outside of this repository, with the time of each step.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;
use std::{env, fs};

use accelerate_setup::{Libtorch, Origin};
use anyhow::{Context, Result, bail};
use clap::Args;

use crate::{libtorch, paths, process};

/// Make a project outside of this repository, test it and launch it in two processes, with the time of each step.
///
/// Runs `accelerate new demo`, `cargo test` and `accelerate launch --num_processes 2 demo` with no variable set; where LIBTORCH
/// names the libtorch to use, only `new` is told. A LIBTORCH that is wrong has to be refused before anything is written or
/// compiled, and in the project it compiles nothing again. Everything is built from nothing, unless --folder names a folder in which this has run before.
#[derive(Debug, Default, Args)]
pub(crate) struct Arguments {
    /// What the project trains: nlp (the default), cv or lm
    #[arg(long)]
    template: Option<String>,
    /// Where to work, in place of a folder that is removed afterwards; what is built there is used again the next time
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let libtorch = libtorch::ensure()?;
    process::run(&mut process::cargo(&["build", "--package", "accelerate-cli"]))?;
    let own = env::temp_dir().join(format!("accelerate-first-hour-{}", std::process::id()));
    let folder = std::path::absolute(arguments.folder.as_ref().unwrap_or(&own))?;
    let outcome = take_steps(&folder, arguments.template.as_deref().unwrap_or("nlp"), &libtorch);
    if arguments.folder.is_none() {
        fs::remove_dir_all(&own).with_context(|| format!("could not remove {}", own.display()))?;
    }
    let steps = outcome?;
    println!("| step | s |\n|---|---|");
    for (step, seconds) in steps {
        println!("| {step} | {seconds:.1} |");
    }
    Ok(())
}

/// Each step and its seconds.
fn take_steps(folder: &Path, template: &str, libtorch: &Libtorch) -> Result<Vec<(&'static str, f64)>> {
    let (project, target) = (folder.join("demo"), folder.join("target"));
    if project.exists() {
        fs::remove_dir_all(&project).with_context(|| format!("could not remove {}", project.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("could not create {}", folder.display()))?;
    let accelerate = paths::target_folder().join("debug").join(format!("accelerate{}", env::consts::EXE_SUFFIX));
    let command = |words: &[&str]| {
        let mut command = Command::new(&accelerate);
        command.args(words);
        forget_this_repository(&mut command);
        command
    };

    let new = || {
        let mut new = command(&["new", "demo", "--template", template, "--accelerate"]);
        new.arg(paths::repository_root()).current_dir(folder);
        new
    };
    let mut steps = vec![timed("accelerate new demo, with a wrong LIBTORCH", || refuse_wrong_libtorch(new(), folder))?];
    let mut new = new();
    if libtorch.origin == Origin::Variable {
        new.env("LIBTORCH", &libtorch.folder);
    }
    steps.push(timed("accelerate new demo", || process::run(&mut new))?);

    // The versions that were fetched for this repository: others would need a network, and be others every day.
    let lock = paths::repository_root().join("Cargo.lock");
    fs::copy(&lock, project.join("Cargo.lock")).with_context(|| format!("could not copy {}", lock.display()))?;
    let mut test = process::cargo(&["test", "--target-dir"]);
    test.arg(&target).current_dir(&project);
    forget_this_repository(&mut test);
    steps.push(timed("cargo test", || process::run(&mut test))?);

    // It names the libtorch that was linked, so what another shell says compiles nothing again.
    test.env("LIBTORCH", folder.join("no-libtorch"));
    steps.push(timed("cargo test, with a wrong LIBTORCH", || process::run(&mut test))?);

    // The folder of builds outlives the project, so that a second run is quick; the launcher has to be told of it.
    let mut launch = command(&["launch", "--num_processes", "2", "demo"]);
    launch.env("CARGO_TARGET_DIR", &target).current_dir(&project);
    steps.push(timed("accelerate launch --num_processes 2 demo", || process::run(&mut launch))?);
    Ok(steps)
}

fn timed(step: &'static str, take: impl FnOnce() -> Result<()>) -> Result<(&'static str, f64)> {
    let started_at = Instant::now();
    take()?;
    Ok((step, started_at.elapsed().as_secs_f64()))
}

/// Where LIBTORCH leads nowhere, `new` says so with the cure, and leaves no project whose build could begin.
fn refuse_wrong_libtorch(mut new: Command, folder: &Path) -> Result<()> {
    let output =
        new.env("LIBTORCH", folder.join("no-libtorch")).output().context("could not start `accelerate new`")?;
    let said = String::from_utf8_lossy(&output.stderr);
    let is_clear =
        ["error: LIBTORCH", "where there is nothing", "unset LIBTORCH"].iter().all(|part| said.contains(part));
    if output.status.success() || !is_clear {
        bail!("`accelerate new` with a wrong LIBTORCH ended with {}, and said:\n{said}", output.status);
    }
    match folder.join("demo").exists() {
        true => bail!("`accelerate new` left a project although LIBTORCH is wrong"),
        false => Ok(()),
    }
}

/// Variables that cargo sets for programs of this repository, and that a user elsewhere does not have.
fn forget_this_repository(command: &mut Command) {
    for name in ["LIBTORCH", "TORCH_FR_BUFFER_SIZE", "LD_LIBRARY_PATH"] {
        command.env_remove(name);
    }
}
