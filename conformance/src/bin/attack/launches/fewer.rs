//! A run that goes on without a machine that is lost for good. With fewer processes a step has fewer rows, so the losses are not
//! those of the run that had them all. They have to be those of a run of as many processes, on one machine, that nobody disturbs
//! and that goes on from a copy of what was saved when the machine was lost.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use super::network::address;
use super::plan::Plan;
use super::trial::check_losses_from;
use crate::checkpoints::{Losses, losses, printed_to_the_end};

/// What was saved when all ranks had ended.
pub(super) struct Saved(TempDir);

impl Saved {
    pub(super) fn of(folder: &Path) -> Result<Self> {
        let copy = tempfile::tempdir()?;
        copy_folder(folder, copy.path()).context("what was saved cannot be copied")?;
        Ok(Self(copy))
    }

    /// Compares what was printed with both runs, and who was left out.
    pub(super) fn check(&self, plan: &Plan, program: &Path, printed: &str, expected: &Losses) -> Result<()> {
        ensure!(printed.matches("; restart ").count() == 1, "it was not started again once:\n{printed}");
        let machines = plan.ranks.len() - 1;
        let processes = plan.world_size() - plan.ranks[plan.machine];
        let (are, is_one) = (if machines == 1 { " starts" } else { "s start" }, processes == 1);
        let wanted = format!(
            "{}: left out, so {machines} machine{are} {processes} process{} without it",
            address(plan.machine),
            if is_one { "" } else { "es" }
        );
        let found = printed.split_once(&wanted);
        // Nothing that was printed before the pause comes after this.
        let (before, after) = found.with_context(|| format!("{wanted:?} was not said:\n{printed}"))?;

        let undisturbed = printed_to_the_end(program, "ddp", processes, self.0.path())?;
        let goes_on_from = |printed: &str| {
            let line = printed.lines().find_map(|line| Some(line.split_once("goes on from ")?.1.to_owned()));
            line.and_then(|line| Some(Path::new(&line).file_name()?.to_owned()))
        };
        ensure!(
            goes_on_from(after) == goes_on_from(&undisturbed),
            "it went on from {:?}, and not from {:?}:\n{printed}",
            goes_on_from(after),
            goes_on_from(&undisturbed)
        );
        let last = check_losses_from(0, before, expected)?;
        let rest = losses(&undisturbed);
        let first = rest.keys().next().copied().unwrap_or_default();
        // What is printed may not have been saved, and what is saved may not have been printed yet.
        ensure!(last <= first && first <= last + 2, "it went on with step {first} after step {last}:\n{printed}");
        let end = check_losses_from(last, after, &rest)?;
        ensure!(rest.keys().next_back() == Some(&end), "the last step is {end}:\n{printed}");
        Ok(())
    }
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target: PathBuf = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            std::fs::create_dir(&target)?;
            copy_folder(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), &target)?;
        }
    }
    Ok(())
}
