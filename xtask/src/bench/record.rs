//! Keeps a run: `bench/runs/<date>-<machine>[-<number>]/{README.md,raw.csv,summary.md}`.

use std::fmt::Write;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::python::Environment;
use crate::race::Race;
use crate::{libtorch, paths, process};

/// Writes the run and returns its folder, a new one: no run is ever written over.
pub(super) fn write(environment: &Environment, races: &[Race]) -> Result<PathBuf> {
    let date = process::read(Command::new("date").arg("+%Y-%m-%d"))?.trim().to_owned();
    let processor = processor();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let runs = paths::repository_root().join("bench/runs");
    let folder = new_folder(&runs, &format!("{date}-{cores}-core-{}", slug(&processor)))?;
    fs::write(folder.join("summary.md"), summary(races))?;
    fs::write(folder.join("raw.csv"), raw_csv(races))?;
    let commit = process::read(
        Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).current_dir(paths::repository_root()),
    );
    let rustc = process::read(Command::new("rustc").arg("--version"))?;
    let readme = format!(
        "# Races of {date}\n\n\
         - machine: {cores} cores, {processor}, {memory}\n\
         - this project: commit {commit}, {rustc}, libtorch {version}, release build, started by its own `accelerate launch`\n\
         - rival: {rival}, started by `python -m torch.distributed.run` (`accelerate launch --cpu` starts one process)\n\
         - one thread per rank on both sides (`OMP_NUM_THREADS=1`); page cache warm: the first round of each side is not counted\n\
         - the rival runs with stand-ins for CUDA libraries where the real ones are not installed, which makes it lighter\n\
         - both sides in turns in one run; answers checked in every round; ratio = ours / rival\n",
        memory = memory(),
        commit = commit.as_deref().map(str::trim).unwrap_or("unknown"),
        rustc = rustc.trim(),
        version = libtorch::VERSION,
        rival = environment.versions,
    );
    fs::write(folder.join("README.md"), readme)?;
    Ok(folder)
}

/// Makes a folder of that name, or of that name and the first number from 2 on that is free.
fn new_folder(parent: &Path, name: &str) -> Result<PathBuf> {
    fs::create_dir_all(parent).with_context(|| format!("could not create {}", parent.display()))?;
    let names = std::iter::once(name.to_owned()).chain((2..).map(|number| format!("{name}-{number}")));
    for folder in names.map(|name| parent.join(name)) {
        match fs::create_dir(&folder) {
            Ok(()) => return Ok(folder),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error).with_context(|| format!("could not create {}", folder.display())),
        }
    }
    bail!("every number has been given to a run of {name}")
}

fn raw_csv(races: &[Race]) -> String {
    let mut text = "race,unit,round,ours,rival,ratio\n".to_owned();
    for race in races {
        for (round, pair) in race.pairs.iter().enumerate() {
            let ratio = pair.ours / pair.rival;
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{},{},{},{},{},{ratio}", race.name, race.unit, round + 1, pair.ours, pair.rival);
        }
    }
    text
}

/// The printed lines, as they were printed.
fn summary(races: &[Race]) -> String {
    let rounds: usize = races.iter().map(|race| race.pairs.len()).sum();
    let lines: String = races.iter().map(|race| format!("{race}\n")).collect();
    format!(
        "# Summary\n\n{rounds} rounds are in `raw.csv`. A goal is met when the ratio is at most the goal.\n\n```text\n{lines}```\n"
    )
}

fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    model.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}

fn memory() -> String {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kibibytes =
        text.lines().find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse::<u64>().ok());
    kibibytes.map_or_else(|| "memory unknown".to_owned(), |kibibytes| format!("{} GiB of memory", kibibytes >> 20))
}

/// `Intel(R) Xeon(R) CPU @ 2.50GHz` is `intel-xeon-cpu-2.50ghz`.
fn slug(name: &str) -> String {
    let plain = name.replace("(R)", " ").replace("(TM)", " ").to_lowercase();
    let words = plain.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '.');
    words.filter(|word| !word.is_empty()).collect::<Vec<_>>().join("-")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::race::Pair;

    fn race(name: &'static str, ours: f64) -> Race {
        Race { name, unit: "s", goal: 1.0, pairs: vec![Pair { ours, rival: 2.0 }] }
    }

    #[test]
    fn a_machine_name_is_made_of_words() {
        assert_eq!(slug("Intel(R) Xeon(R) CPU @ 2.50GHz"), "intel-xeon-cpu-2.50ghz");
        assert_eq!(slug("x86_64"), "x86-64");
    }

    #[test]
    fn every_round_and_every_line_is_kept() {
        let races = [race("ddp_step", 1.0), race("launch_noop", 3.0)];
        assert_eq!(
            raw_csv(&races),
            "race,unit,round,ours,rival,ratio\nddp_step,s,1,1,2,0.5\nlaunch_noop,s,1,3,2,1.5\n"
        );
        let summary = summary(&races);
        assert!(summary.contains("2 rounds") && summary.contains("race=launch_noop ours=3.0000"), "{summary}");
    }

    #[test]
    fn a_later_run_of_the_day_gets_a_folder_of_its_own() {
        let parent = tempfile::tempdir().unwrap();
        let make = || new_folder(parent.path(), "2026-11-20-2-core").unwrap();
        let names = [make(), make(), make()].map(|folder| folder.file_name().unwrap().to_string_lossy().into_owned());
        assert_eq!(names, ["2026-11-20-2-core", "2026-11-20-2-core-2", "2026-11-20-2-core-3"]);
    }
}
