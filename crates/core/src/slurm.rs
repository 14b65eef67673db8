//! Slurm: what its variables say of an allocation, and the batch script of a run.

mod allocation;
mod batch;
mod hosts;
mod job;

pub use allocation::{Allocation, Node, PerNode, allocation, is_in_step};
pub use batch::{BatchJob, job_name};
pub use hosts::expand_hosts;
pub use job::Job;

use crate::Result;
use crate::environment::MAX_WORLD_SIZE;
use crate::error::environment::EnvironmentErrorKind as Kind;
use crate::settings::shortened;

/// Steps that nobody has started with `srun`: shells of an allocation, and what Slurm itself runs. They have the numbers
/// from here on.
const FIRST_RESERVED_STEP: u32 = 0xffff_fff0;

/// The variables of Slurm, from a lookup function.
#[derive(Clone, Copy)]
pub(crate) struct SlurmVariables<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
}

impl<'a> SlurmVariables<'a> {
    pub(crate) fn new(lookup: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self { lookup }
    }

    pub(crate) fn text(self, name: &str) -> Option<String> {
        (self.lookup)(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    /// The hosts of the first of these variables that is set.
    pub(crate) fn hosts(self, names: &[&str]) -> Result<Option<Vec<String>>> {
        let Some((name, value)) = names.iter().find_map(|name| self.text(name).map(|value| (*name, value))) else {
            return Ok(None);
        };
        match expand_hosts(&value) {
            Some(hosts) => Ok(Some(hosts)),
            None => Err(Kind::HostList { name: name.to_owned(), value: shortened(&value) }.into()),
        }
    }

    /// The step that this process was started in by `srun`.
    pub(crate) fn step(self) -> Option<u32> {
        let step = self.text("SLURM_STEP_ID").or_else(|| self.text("SLURM_STEPID"))?;
        step.parse().ok().filter(|step| *step < FIRST_RESERVED_STEP)
    }

    /// How many tasks each node has: `2(x3),1` is 2, 2, 2, 1. `None` for what is no such list.
    pub(crate) fn tasks_per_node(self, name: &str) -> Option<Vec<usize>> {
        let list = self.text(name)?;
        let mut tasks = Vec::new();
        for entry in list.split(',') {
            let (count, repeats) = match entry.trim().split_once("(x") {
                Some((count, repeats)) => (count, repeats.strip_suffix(')')?.parse().ok()?),
                None => (entry.trim(), 1_usize),
            };
            let count: usize = count.parse().ok().filter(|count| *count > 0)?;
            if repeats > MAX_WORLD_SIZE - tasks.len() {
                return None;
            }
            tasks.extend(std::iter::repeat_n(count, repeats));
        }
        Some(tasks)
    }
}
