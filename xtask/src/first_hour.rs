//! `cargo xtask first-hour`: what somebody types first, outside of this repository, with the time of each step.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;
use std::{env, fs};

use anyhow::{Context, Result};
use clap::Args;

use crate::{paths, process};

/// Make a project outside of this repository, test it and launch it in two processes, with the time of each step.
///
/// Runs `accelerate new demo`, `cargo test` and `accelerate launch --num_processes 2` with no variable set. Everything is
/// built from nothing, unless --folder names a folder in which this has run before.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// What the project trains: nlp, cv or lm
    #[arg(long, default_value = "nlp")]
    template: String,
    /// Where to work, in place of a folder that is removed afterwards; what is built there is used again the next time
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    process::run(&mut process::cargo(&["build", "--package", "accelerate-cli"]))?;
    let own = env::temp_dir().join(format!("accelerate-first-hour-{}", std::process::id()));
    let folder = std::path::absolute(arguments.folder.as_ref().unwrap_or(&own))?;
    let outcome = take_steps(&folder, &arguments.template);
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
fn take_steps(folder: &Path, template: &str) -> Result<Vec<(&'static str, f64)>> {
    let project = folder.join("demo");
    if project.exists() {
        fs::remove_dir_all(&project).with_context(|| format!("could not remove {}", project.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("could not create {}", folder.display()))?;
    let accelerate = paths::target_folder().join("debug").join(format!("accelerate{}", env::consts::EXE_SUFFIX));
    let target = folder.join("target");

    let mut new = Command::new(&accelerate);
    new.args(["new", "demo", "--template", template, "--accelerate"]).arg(paths::repository_root()).current_dir(folder);
    let mut test = process::cargo(&["test", "--target-dir"]);
    test.arg(&target).current_dir(&project);
    let mut launch = Command::new(&accelerate);
    // The folder of builds outlives the project, so that a second run is quick; the launcher has to be told of it.
    launch.args(["launch", "--num_processes", "2", "demo"]).env("CARGO_TARGET_DIR", &target).current_dir(&project);

    let steps =
        [("accelerate new demo", new), ("cargo test", test), ("accelerate launch --num_processes 2 demo", launch)];
    let timed = |(step, mut command): (_, Command)| {
        forget_this_repository(&mut command);
        let started_at = Instant::now();
        process::run(&mut command)?;
        Ok((step, started_at.elapsed().as_secs_f64()))
    };
    steps.into_iter().map(timed).collect()
}

/// Variables that cargo sets for programs of this repository, and that a user elsewhere does not have.
fn forget_this_repository(command: &mut Command) {
    for name in ["LIBTORCH", "TORCH_FR_BUFFER_SIZE", "LD_LIBRARY_PATH"] {
        command.env_remove(name);
    }
}
