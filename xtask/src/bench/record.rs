//! Keeps a run: `bench/runs/<date>-<machine>/{README.md,raw.csv,summary.md}`.

use std::fmt::Write;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::python::Environment;
use crate::race::Race;
use crate::{libtorch, paths, process};

/// Writes the run and returns its folder. A second run on one day replaces only the races it ran again.
pub(super) fn write(environment: &Environment, races: &[Race]) -> Result<PathBuf> {
    let date = process::read(Command::new("date").arg("+%Y-%m-%d"))?.trim().to_owned();
    let processor = processor();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let folder = paths::repository_root().join(format!("bench/runs/{date}-{cores}-core-{}", slug(&processor)));
    fs::create_dir_all(&folder).with_context(|| format!("could not create {}", folder.display()))?;
    let old = fs::read_to_string(folder.join("raw.csv")).unwrap_or_default();
    let raw = raw_csv(&old, races);
    fs::write(
        folder.join("summary.md"),
        summary(&raw, races, &fs::read_to_string(folder.join("summary.md")).unwrap_or_default()),
    )?;
    fs::write(folder.join("raw.csv"), raw)?;
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

const HEADER: &str = "race,unit,round,ours,rival,ratio";

/// The old rows of other races, then the new rows.
fn raw_csv(old: &str, races: &[Race]) -> String {
    let is_kept = |line: &&str| {
        let name = line.split(',').next().unwrap_or_default();
        *line != HEADER && !races.iter().any(|race| race.name == name)
    };
    let mut text = format!("{HEADER}\n");
    for line in old.lines().filter(is_kept) {
        text.push_str(line);
        text.push('\n');
    }
    for race in races {
        for (round, pair) in race.pairs.iter().enumerate() {
            let ratio = pair.ours / pair.rival;
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{},{},{},{},{},{ratio}", race.name, race.unit, round + 1, pair.ours, pair.rival);
        }
    }
    text
}

/// The printed lines, as they were printed; lines of other races in an earlier summary stay.
fn summary(raw: &str, races: &[Race], old: &str) -> String {
    let kept = old.lines().filter(|line| {
        line.strip_prefix("race=")
            .is_some_and(|rest| !races.iter().any(|race| rest.starts_with(&format!("{} ", race.name))))
    });
    let mut text = format!(
        "# Summary\n\n{} rounds are in `raw.csv`. A goal is met when the ratio is at most the goal.\n\n```text\n",
        raw.lines().count() - 1
    );
    for line in kept.map(str::to_owned).chain(races.iter().map(Race::to_string)) {
        text.push_str(&line);
        text.push('\n');
    }
    text.push_str("```\n");
    text
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
    fn a_later_run_replaces_its_own_races_only() {
        let first = raw_csv("", &[race("ddp_step", 1.0), race("launch_noop", 1.0)]);
        let second = raw_csv(&first, &[race("ddp_step", 3.0)]);
        assert_eq!(second, format!("{HEADER}\nlaunch_noop,s,1,1,2,0.5\nddp_step,s,1,3,2,1.5\n"));
        let summary_text =
            summary(&second, &[race("ddp_step", 3.0)], &summary(&first, &[race("launch_noop", 1.0)], ""));
        assert_eq!(summary_text.matches("race=").count(), 2);
        assert!(
            summary_text.contains("race=launch_noop ours=1.0000") && summary_text.contains("race=ddp_step ours=3.0000")
        );
    }
}
