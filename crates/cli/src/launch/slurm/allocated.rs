//! A launch within an allocation of Slurm: from its nodes to the agents that `srun` starts on them.

use std::error::Error;
use std::ffi::OsString;

use accelerate_core::config::{Lookup, RunConfig};
use accelerate_core::environment::LAUNCH_ID_VARIABLE;
use accelerate_core::slurm::{Allocation, allocation};
use accelerate_launch::{AGENT_SCRIPT, AgentCommand};

use crate::launch::hosts;
use crate::launch::place::Place;

/// The allocation that a launch is to fill; `None` outside of one, and where machines are started one by one.
///
/// # Errors
///
/// Variables that contradict each other, or what was said.
pub(in crate::launch) fn of_run(run: &RunConfig, lookup: Lookup<'_>) -> Result<Option<Allocation>, Box<dyn Error>> {
    let cluster = &run.cluster;
    let is_one_by_one = cluster.machine_rank > 0 || cluster.main_process_ip.is_some();
    if is_one_by_one || lookup(LAUNCH_ID_VARIABLE).is_some() {
        return Ok(None);
    }
    Ok(allocation(lookup, cluster.num_processes, cluster.use_cpu)?)
}

/// Where its processes are started: here, if this is the only node, else by a step of its own on each, so that every node is heard
/// by itself.
pub(in crate::launch) fn place(allocation: &Allocation) -> Place {
    let is_here = allocation.is_on(&hosts::this_machine());
    Place {
        agents: (!is_here).then(|| agents(allocation)),
        outer_world: None,
        notices: vec![format!("in Slurm job {}, starting {allocation} ({})", allocation.job_id, allocation.per_node)],
    }
}

fn agents(allocation: &Allocation) -> Vec<AgentCommand> {
    let agents = allocation.nodes.iter().map(|node| AgentCommand {
        machine: node.name.clone(),
        address: node.name.clone(),
        command: srun(&node.name),
        num_processes: node.num_processes,
        environment: Vec::new(),
    });
    agents.collect()
}

/// All that the job has on the node is the agent's: it shares it out itself. Of the job's own wishes for tasks nothing is left.
fn srun(node: &str) -> Vec<OsString> {
    let node = format!("--nodelist={node}");
    let flags =
        ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", &node, "--overlap", "--mpi=none", "--cpu-bind=quiet,none"];
    let words = ["srun", "--quiet"].into_iter().chain(flags).chain(["sh", "-c", AGENT_SCRIPT]);
    words.map(OsString::from).collect()
}
