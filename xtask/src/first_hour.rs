//! `cargo xtask first-hour`: what somebody types first, outside of this repository, with the time of each step.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;
use std::{env, fs, iter};

use accelerate_setup::{Libtorch, Origin};
use anyhow::{Context, Result, bail};
use clap::Args;

use crate::{libtorch, paths, process};

/// The lines that the README and the page on installation tell a user to type, in a shell. A rule of `cargo xtask tidy` compares.
pub(crate) const LINES: [&str; 3] = [INSTALL, NEW, TEST];
const INSTALL: &str = "cargo install --locked --path crates/cli";
const NEW: &str = "accelerate new demo";
const TEST: &str = "cd demo && cargo test";

/// The line that the project's own README names next.
pub(crate) const LAUNCH: &str = "accelerate launch --num_processes 2 demo";

/// Install `accelerate`, make a project outside of this repository, test it and launch it, with the time of each step.
///
/// Types the lines of the README with no variable set; where LIBTORCH names the libtorch to use, only `new` is told. `accelerate`
/// is installed into the folder, from the builds of this clone. A LIBTORCH that is wrong has to be refused before anything is
/// written or compiled, and in the project it compiles nothing again. The project is built from nothing, unless --folder names
/// a folder in which this has run before.
#[derive(Debug, Default, Args)]
pub(crate) struct Arguments {
    /// What the project trains, if not what `accelerate new` does by default
    #[arg(long, value_parser = ["nlp", "cv", "lm"])]
    template: Option<String>,
    /// Where to work, in place of a folder that is removed afterwards; what is built there is used again the next time
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let libtorch = libtorch::ensure()?;
    let own = env::temp_dir().join(format!("accelerate-first-hour-{}", std::process::id()));
    let folder = std::path::absolute(arguments.folder.as_ref().unwrap_or(&own))?;
    let outcome = take_steps(&folder, arguments.template.as_deref(), &libtorch);
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
fn take_steps(folder: &Path, template: Option<&str>, libtorch: &Libtorch) -> Result<Vec<(String, f64)>> {
    let (project, target) = (folder.join("demo"), folder.join("target"));
    if project.exists() {
        fs::remove_dir_all(&project).with_context(|| format!("could not remove {}", project.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("could not create {}", folder.display()))?;
    let search_path = search_path(folder)?;
    let typed = |line: &str| {
        let mut command = process::shell(line);
        command.current_dir(folder).env("PATH", &search_path);
        forget_this_repository(&mut command);
        command
    };

    let mut install = typed(INSTALL);
    install.env("CARGO_INSTALL_ROOT", folder).current_dir(paths::repository_root());
    let mut steps = vec![timed(INSTALL, || process::run(&mut install))?];

    let new = template.map_or_else(|| NEW.to_owned(), |template| format!("{NEW} --template {template}"));
    let wrong = folder.join("no-libtorch");
    let mut refused = typed(&new);
    refused.env("LIBTORCH", &wrong);
    steps.push(timed(&format!("{new}, with a wrong LIBTORCH"), || refuse_wrong_libtorch(refused, &project))?);
    let mut make = typed(&new);
    if libtorch.origin == Origin::Variable {
        make.env("LIBTORCH", &libtorch.folder);
    }
    steps.push(timed(&new, || process::run(&mut make))?);

    // The versions that were fetched for this repository: others would need a network, and be others every day.
    let lock = paths::repository_root().join("Cargo.lock");
    fs::copy(&lock, project.join("Cargo.lock")).with_context(|| format!("could not copy {}", lock.display()))?;
    let mut test = typed(TEST);
    test.env("CARGO_TARGET_DIR", &target);
    steps.push(timed(TEST, || process::run(&mut test))?);

    // Cargo's configuration in the project names the libtorch that was linked, so what another shell says compiles nothing again.
    test.env("LIBTORCH", &wrong);
    steps.push(timed(&format!("{TEST}, with a wrong LIBTORCH"), || process::run(&mut test))?);

    // The folder of builds outlives the project, so that a second run is quick; the launcher has to be told of it.
    let mut launch = typed(LAUNCH);
    launch.env("CARGO_TARGET_DIR", &target).current_dir(&project);
    steps.push(timed(LAUNCH, || process::run(&mut launch))?);
    Ok(steps)
}

/// Where a shell looks for programs: first where `accelerate` is installed, and not in the user's own folder of programs.
fn search_path(folder: &Path) -> Result<OsString> {
    let inherited = env::var_os("PATH").unwrap_or_default();
    env::join_paths(iter::once(folder.join("bin")).chain(env::split_paths(&inherited)))
        .with_context(|| format!("{} cannot be searched for programs; name another --folder", folder.display()))
}

fn timed(step: &str, take: impl FnOnce() -> Result<()>) -> Result<(String, f64)> {
    let started_at = Instant::now();
    take()?;
    Ok((step.to_owned(), started_at.elapsed().as_secs_f64()))
}

/// Where LIBTORCH leads nowhere, `new` says so with the cure, and leaves no project whose build could begin.
fn refuse_wrong_libtorch(mut new: Command, project: &Path) -> Result<()> {
    let output = new.output().context("could not start `accelerate new`")?;
    let said = String::from_utf8_lossy(&output.stderr);
    let is_clear =
        ["error: LIBTORCH", "where there is nothing", "unset LIBTORCH"].iter().all(|part| said.contains(part));
    if output.status.success() || !is_clear {
        bail!("`accelerate new` with a wrong LIBTORCH ended with {}, and said:\n{said}", output.status);
    }
    match project.exists() {
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
