//! `cargo xtask parity launch`: the whole environment of every rank, under Accelerate's launcher and under the one here.

mod cases;
mod differences;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::Serialize;

use crate::python::{Environment, free_port};
use crate::{paths, process};
use cases::{CASES, Case, Program};
use differences::{Differences, Ranks};

/// Compare the environments that ranks are started with.
#[derive(Debug, Args)]
pub(super) struct Launch {
    /// Only launches whose line contains this text
    #[arg(long)]
    only: Option<String>,
}

/// One launch as the program in Python reads it.
#[derive(Debug, Serialize)]
struct Asked {
    /// The arguments of each machine's launcher.
    machines: Vec<Vec<String>>,
    environment: BTreeMap<&'static str, &'static str>,
    /// Where its launchers print to.
    log: PathBuf,
}

/// Where the launches run, and with what.
struct Place {
    environment: Environment,
    work: PathBuf,
    port: String,
}

pub(super) fn run(arguments: &Launch) -> Result<()> {
    let environment = Environment::ensure()?;
    process::run(&mut process::cargo(&["build", "--release", "--package", "accelerate-cli"]))?;
    println!("reference: {}", environment.versions);
    let work = paths::target_folder().join("parity/launch");
    let place = Place { environment, work, port: free_port()?.to_string() };
    let is_wanted = |case: &&Case| arguments.only.as_ref().is_none_or(|only| case.name().contains(only.as_str()));
    let cases: Vec<_> = CASES.iter().filter(is_wanted).collect();
    ensure!(!cases.is_empty(), "no launch is called so");
    place.ask_reference(&cases)?;

    let mut differences = Differences::default();
    for (index, case) in cases.iter().enumerate() {
        let theirs = read_ranks(&place.folder("theirs", index))?;
        if case.is_proved {
            place.prove(case, index, &theirs)?;
        }
        match (case.refused, place.launch_ours(case, index)) {
            (Some(words), Err(error)) if format!("{error:#}").contains(words) => {
                println!("{}: refused here, as it says; ok", case.name());
            }
            (Some(words), found) => bail!("{}: not refused with the words {words:?}: {found:?}", case.name()),
            (None, found) => {
                let ours = found.with_context(|| case.name())?;
                println!(
                    "{}: {}",
                    case.name(),
                    differences.compare(&case.name(), case.program == Program::Executable, &theirs, &ours)
                );
            }
        }
    }
    print!("{}", differences.table());
    let num_unexplained = differences.num_unexplained();
    println!(
        "parity=launch cases={} proved={} unexplained={num_unexplained} {}",
        cases.len(),
        cases.iter().filter(|case| case.is_proved).count(),
        if num_unexplained == 0 { "ok" } else { "FAILED" },
    );
    if num_unexplained > 0 {
        bail!("{num_unexplained} variables differ without a reason");
    }
    Ok(())
}

impl Place {
    /// Where the ranks of a launch write.
    fn folder(&self, side: &str, index: usize) -> PathBuf {
        self.work.join(side).join(index.to_string())
    }

    /// The arguments of `accelerate launch`, up to those of the program, which writes into a folder that is made anew.
    fn arguments(&self, case: &Case, side: &str, index: usize) -> Result<Vec<Vec<String>>> {
        let folder = self.folder(side, index);
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| format!("could not remove {}", folder.display()))?;
        }
        fs::create_dir_all(&folder).with_context(|| format!("could not create {}", folder.display()))?;
        let mut words: Vec<String> =
            case.flags.split_whitespace().map(|word| word.replace("PORT", &self.port)).collect();
        if !case.flags.contains("PORT") {
            words.extend(["--main_process_port".to_owned(), "0".to_owned()]);
        }
        if !case.file.is_empty() {
            let file = self.work.join(format!("{index}.yaml"));
            fs::write(&file, case.file).with_context(|| format!("could not write {}", file.display()))?;
            words.extend(["--config_file".to_owned(), text(&file)?]);
        }
        let program = match case.program {
            Program::Script => vec![text(&program_file())?],
            Program::Module => vec!["--module".to_owned(), "print_environment".to_owned()],
            Program::Executable => vec!["--no_python".to_owned(), text(&program_file())?],
        };
        let rank = |machine: usize| {
            (case.num_machines > 1).then(|| ["--machine_rank".to_owned(), machine.to_string()]).into_iter().flatten()
        };
        let of_machine =
            |machine| words.iter().cloned().chain(rank(machine)).chain(program.clone()).chain(text(&folder)).collect();
        Ok((0..case.num_machines).map(of_machine).collect())
    }

    /// `program` with the environment that both launchers inherit. Nothing of the user's own is in it.
    fn command(&self, program: impl AsRef<std::ffi::OsStr>, case: Option<&Case>) -> Command {
        let mut command = Command::new(program);
        command.env_clear().env("LANG", "C.UTF-8").env("CUDA_VISIBLE_DEVICES", "").stdin(Stdio::null());
        command.current_dir(paths::repository_root().join("parity"));
        for name in ["PATH", "HOME"] {
            command.envs(std::env::var_os(name).map(|value| (name, value)));
        }
        let python = self.environment.command();
        let of_modules = ["PYTHONPATH", "LD_LIBRARY_PATH", "HF_HOME"];
        command.envs(
            python
                .get_envs()
                .filter_map(|(name, value)| of_modules.iter().any(|of| name == *of).then_some((name, value?))),
        );
        command.envs(case.map_or(&[][..], |case| case.inherited).iter().copied());
        command
    }

    fn python(&self, case: Option<&Case>) -> Command {
        self.command(self.environment.command().get_program(), case)
    }

    /// Runs all launches by Accelerate's launcher.
    fn ask_reference(&self, cases: &[&Case]) -> Result<()> {
        fs::create_dir_all(&self.work).with_context(|| format!("could not create {}", self.work.display()))?;
        let asked: Result<Vec<_>> = cases
            .iter()
            .enumerate()
            .map(|(index, case)| {
                let log = self.work.join(format!("{index}.log"));
                let _ = fs::remove_file(&log);
                let environment = case.inherited.iter().copied().collect();
                Ok(Asked { machines: self.arguments(case, "theirs", index)?, environment, log })
            })
            .collect();
        let file = self.work.join("cases.json");
        fs::write(&file, serde_json::to_string(&asked?)?)?;
        let script = paths::repository_root().join("parity/launch.py");
        process::read(self.python(None).arg(script).arg("--cases").arg(file)).map(drop)
    }

    /// A launcher that begins with nothing gives its ranks what the forked one gave.
    fn prove(&self, case: &Case, index: usize, forked: &Ranks) -> Result<()> {
        for words in self.arguments(case, "fresh", index)? {
            process::read(self.python(Some(case)).args(["-m", "accelerate.commands.launch"]).args(words))?;
        }
        let fresh = read_ranks(&self.folder("fresh", index))?;
        let unstable = differences::between_runs(forked, &fresh);
        ensure!(unstable.is_empty(), "{}: a forked launcher and one from nothing differ in {unstable:?}", case.name());
        Ok(())
    }

    fn launch_ours(&self, case: &Case, index: usize) -> Result<Ranks> {
        let launcher = paths::release_binary("accelerate");
        let arguments = self.arguments(case, "ours", index)?;
        let children: Result<Vec<_>> = arguments
            .iter()
            .map(|words| {
                let mut command = self.command(&launcher, Some(case));
                command.arg("launch").args(words).stdout(Stdio::null()).stderr(Stdio::piped());
                command.spawn().with_context(|| format!("could not start {}", launcher.display()))
            })
            .collect();
        for child in children? {
            let output = child.wait_with_output()?;
            ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
        }
        read_ranks(&self.folder("ours", index))
    }
}

fn program_file() -> PathBuf {
    paths::repository_root().join("parity/print_environment.py")
}

fn text(path: &Path) -> Result<String> {
    Ok(path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?.to_owned())
}

/// What the ranks of a launch wrote, by rank.
fn read_ranks(folder: &Path) -> Result<Ranks> {
    let mut ranks = Ranks::new();
    for entry in fs::read_dir(folder).with_context(|| format!("could not read {}", folder.display()))? {
        let path = entry?.path();
        let rank = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        ranks.insert(rank, serde_json::from_str(&fs::read_to_string(&path)?)?);
    }
    ensure!(!ranks.is_empty(), "no rank wrote into {}", folder.display());
    Ok(ranks)
}

#[cfg(test)]
mod tests {
    use super::cases::CASES;
    use std::collections::BTreeSet;

    #[test]
    fn no_launch_is_compared_twice() {
        let names: BTreeSet<_> = CASES.iter().map(|case| case.name()).collect();
        assert!(names.len() == CASES.len() && CASES.len() >= 40, "{}", CASES.len());
        assert!(CASES.iter().filter(|case| case.is_proved).count() >= 3);
    }
}
