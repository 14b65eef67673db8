//! `cargo xtask soak fuzz`: inputs that nobody thought of, for every reader of what comes from outside.
//!
//! The targets are programs with libFuzzer in them, which are built and started here as cargo-fuzz would, so that
//! nothing has to be installed but a nightly toolchain: only its compiler counts what an input reaches.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;
use toml::{Table, Value};

use crate::{libtorch, paths, process};

/// The folder of the targets, which is a workspace of its own.
const FOLDER: &str = "fuzz";
const TOOLCHAIN: &str = "nightly";
/// What cargo-fuzz gives to the compiler where it uses no sanitizer.
const COMPILER_FLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
                              -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
                              -Cllvm-args=-sanitizer-coverage-pc-table \
                              -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing";
/// A reader that needs more than this for a small input, or longer, has a fault.
const LIMITS: [&str; 2] = ["-rss_limit_mb=1024", "-timeout=5"];

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// How long each target runs, in seconds
    #[arg(long, default_value_t = 600)]
    seconds: u64,
    /// Run this target only; may be given several times. Without it all run, one after the other
    #[arg(long, value_name = "NAME")]
    target: Vec<String>,
}

/// A program of the folder.
#[derive(Debug, PartialEq, Eq)]
struct Target {
    name: String,
    /// Features of the package that it needs; those that need any need libtorch.
    features: Vec<String>,
}

pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let folder = paths::repository_root().join(FOLDER);
    let manifest = folder.join("Cargo.toml");
    let text = fs::read_to_string(&manifest).with_context(|| format!("could not read {}", manifest.display()))?;
    let targets = chosen(targets_of(&text)?, &arguments.target)?;
    let machine = machine()?;
    if targets.iter().any(|target| !target.features.is_empty()) {
        libtorch::ensure()?;
    }
    build(&manifest, &machine, &targets)?;
    let programs = paths::target_folder().join(&machine).join("release");
    let mut failed = Vec::new();
    for Target { name, .. } in &targets {
        // The others shall have their time, too.
        if let Err(error) = search(&programs.join(name), &folder.join("seeds").join(name), arguments.seconds) {
            eprintln!("error: {error:#}");
            failed.push(name.as_str());
        }
    }
    if !failed.is_empty() {
        let inputs = found_folder();
        bail!("faults in {}; the inputs are in {}", failed.join(", "), inputs.display());
    }
    Ok(())
}

/// The programs of a manifest, in its order.
fn targets_of(manifest: &str) -> Result<Vec<Target>> {
    let manifest: Table = manifest.parse().context("the manifest of the targets is not TOML")?;
    let programs = manifest.get("bin").and_then(Value::as_array).into_iter().flatten();
    let target = |program: &Value| {
        let features = program.get("required-features").and_then(Value::as_array).into_iter().flatten();
        let features = features.filter_map(|feature| Some(feature.as_str()?.to_owned())).collect();
        Some(Target { name: program.get("name")?.as_str()?.to_owned(), features })
    };
    Ok(programs.filter_map(target).collect())
}

/// All of them, or those that are named.
fn chosen(all: Vec<Target>, names: &[String]) -> Result<Vec<Target>> {
    if let Some(unknown) = names.iter().find(|name| !all.iter().any(|target| target.name == **name)) {
        let known: Vec<&str> = all.iter().map(|target| target.name.as_str()).collect();
        bail!("there is no target {unknown:?}; there are {}", known.join(", "));
    }
    Ok(all.into_iter().filter(|target| names.is_empty() || names.contains(&target.name)).collect())
}

/// What rustc calls this machine. With its name build scripts are built apart, without the flags of the targets.
fn machine() -> Result<String> {
    let mut question = Command::new("rustup");
    question.args(["run", TOOLCHAIN, "rustc", "--version", "--verbose"]);
    let answer = process::read(&mut question).context(
        "`cargo xtask soak fuzz` needs a nightly toolchain, whose compiler counts what an input reaches: \
         `rustup toolchain install nightly --profile minimal`",
    )?;
    let host = answer.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).context("the nightly compiler does not say for which machine it is")
}

fn build(manifest: &Path, machine: &str, targets: &[Target]) -> Result<()> {
    // What this program was started with belongs to another toolchain.
    let with_our_environment = process::cargo::<&str>(&[]);
    let mut cargo = Command::new("rustup");
    for (name, value) in with_our_environment.get_envs() {
        match value {
            Some(value) => cargo.env(name, value),
            None => cargo.env_remove(name),
        };
    }
    cargo.current_dir(paths::repository_root());
    cargo.args(["run", TOOLCHAIN, "cargo", "build", "--release", "--target", machine]);
    cargo.arg("--manifest-path").arg(manifest).arg("--target-dir").arg(paths::target_folder());
    for Target { name, features } in targets {
        cargo.args(["--bin", name]);
        features.iter().for_each(|feature| {
            cargo.args(["--features", feature]);
        });
    }
    process::run(cargo.env("RUSTFLAGS", COMPILER_FLAGS))
}

/// Where inputs are kept that a target fails with.
fn found_folder() -> PathBuf {
    paths::target_folder().join("fuzz").join("artifacts")
}

/// Runs a target. It begins with the seeds and with what reached something new in earlier runs.
fn search(program: &Path, seeds: &Path, seconds: u64) -> Result<()> {
    let name = program.file_name().unwrap_or_default();
    let corpus = paths::target_folder().join("fuzz").join("corpus").join(name);
    let found = found_folder().join(name);
    for folder in [&corpus, &found] {
        fs::create_dir_all(folder).with_context(|| format!("could not create {}", folder.display()))?;
    }
    let mut target = Command::new(program);
    // New inputs go to the first folder.
    target.arg(&corpus).arg(seeds).arg(format!("-max_total_time={seconds}")).args(LIMITS);
    target.args(["-print_final_stats=1", &format!("-artifact_prefix={}/", found.display())]);
    process::run(&mut target)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn manifest() -> String {
        fs::read_to_string(paths::repository_root().join(FOLDER).join("Cargo.toml")).unwrap()
    }

    #[test]
    fn every_target_has_a_source_and_seeds() {
        let folder = paths::repository_root().join(FOLDER);
        let mut names: Vec<String> = targets_of(&manifest()).unwrap().into_iter().map(|target| target.name).collect();
        names.sort();
        let mut sources: Vec<String> = fs::read_dir(folder.join("fuzz_targets"))
            .unwrap()
            .map(|entry| entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned())
            .collect();
        sources.sort();
        assert_eq!(names, sources);
        for name in names {
            assert!(
                fs::read_dir(folder.join("seeds").join(&name)).is_ok_and(|mut files| files.next().is_some()),
                "{name}"
            );
        }
    }

    #[test]
    fn targets_are_chosen_by_name() {
        let all = || targets_of(&manifest()).unwrap();
        let named = |name: &str| chosen(all(), &[name.to_owned()]);
        assert_eq!(chosen(all(), &[]).unwrap(), all());
        assert_eq!(named("header").unwrap(), [Target { name: "header".to_owned(), features: Vec::new() }]);
        assert_eq!(named("csv").unwrap()[0].features, ["rows"]);
        let error = named("heder").unwrap_err().to_string();
        assert!(error.contains("no target \"heder\"") && error.contains("header"), "{error}");
    }
}
