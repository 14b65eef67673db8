//! Slurm's variables: which task of which step this is, and the first host of the step.

use super::{Claim, Launcher, Variables};
use crate::Result;
use crate::slurm::{SlurmVariables, expand_hosts};

/// The claim of a task that `srun` started; see [`super::rank_variables`] for what does not count as one.
pub(super) fn claim(variables: &Variables<'_>) -> Result<Option<Claim>> {
    let Some(rank) = variables.rank("SLURM_PROCID")? else {
        return Ok(None);
    };
    let Some((world_size, size_name)) =
        variables.first_count(&["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"])?
    else {
        return Ok(None);
    };
    // Both mark a process that Slurm itself has started, in a job whose tasks do not run yet.
    let slurm = SlurmVariables::new(variables.lookup);
    let is_shell_of_job = variables.text("SLURM_JOB_ID").is_some() && slurm.step().is_none();
    if world_size == 1 || is_shell_of_job {
        return Ok(None);
    }
    let is_one_machine =
        variables.first_count(&["SLURM_STEP_NUM_NODES", "SLURM_NNODES"])?.is_some_and(|(count, _)| count == 1);
    let hosts = slurm.hosts(&["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"])?;
    // On one machine nobody else has to reach them, and the name of the machine need not resolve.
    let master_addr = hosts.filter(|_| !is_one_machine).and_then(|hosts| hosts.into_iter().next());
    Ok(Some(Claim {
        source: Launcher::Slurm,
        rank: (rank, "SLURM_PROCID"),
        world_size: (world_size, size_name),
        local_rank: variables.rank("SLURM_LOCALID")?.map(|rank| (rank, "SLURM_LOCALID")),
        local_world_size: tasks_here(variables, world_size)?,
        master_addr,
        master_port: port(variables),
    }))
}

/// How many tasks of the step run on this machine, and the variable that says so.
fn tasks_here(variables: &Variables<'_>, world_size: usize) -> Result<Option<(usize, &'static str)>> {
    // The exact per-machine list goes first: SLURM_NTASKS_PER_NODE is what was asked for, and the last
    // machine may have fewer.
    if let Some(node) = variables.rank("SLURM_NODEID")? {
        for name in ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"] {
            let tasks = SlurmVariables::new(variables.lookup).tasks_per_node(name);
            if let Some(tasks) = tasks.and_then(|tasks| tasks.get(node).copied()) {
                return Ok(Some((tasks, name)));
            }
        }
    }
    if let Some((asked, name)) = variables.first_count(&["SLURM_NTASKS_PER_NODE"])? {
        return Ok(Some((asked.min(world_size), name)));
    }
    match variables.first_count(&["SLURM_STEP_NUM_NODES", "SLURM_NNODES"])? {
        Some((1, name)) => Ok(Some((world_size, name))),
        _ => Ok(None),
    }
}

/// The first host of a Slurm host list, for which see [`expand_hosts`]: `node[03-05,7]` gives `node03`.
///
/// ```
/// use accelerate_core::environment::first_host;
/// assert_eq!(first_host("node[03-05,7],login1").as_deref(), Some("node03"));
/// assert_eq!(first_host("node[03-05").as_deref(), None);
/// ```
pub fn first_host(list: &str) -> Option<String> {
    expand_hosts(list)?.into_iter().next()
}

/// The first port of those at which the tasks of a step meet, and how many there are. They are below those that kernels give to
/// outgoing connections.
const FIRST_PORT: u16 = 10_000;
const NUM_PORTS: u64 = 20_000;
/// The steps of a job that have ports of their own, before they meet those of the next job.
const STEPS_PER_JOB: u64 = 16;

/// Where the tasks of a step meet if `MASTER_PORT` says nothing: another port for each job and each step, so that those on one
/// machine do not meet each other. All tasks find the same.
fn port(variables: &Variables<'_>) -> Option<u16> {
    let number = |name: &str| variables.text(name)?.parse::<u64>().ok();
    let (job, step) = (number("SLURM_JOB_ID")?, number("SLURM_STEP_ID").unwrap_or_default());
    let offset = job.wrapping_mul(STEPS_PER_JOB).wrapping_add(step) % NUM_PORTS;
    Some(FIRST_PORT + u16::try_from(offset).ok()?)
}
