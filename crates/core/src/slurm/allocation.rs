//! Which machines an allocation has, and how many processes each of them gets.

use super::SlurmVariables;
use crate::environment::MAX_WORLD_SIZE;
use crate::error::environment::EnvironmentErrorKind as Kind;
use crate::settings::shortened;
use crate::{Error, Result};
use std::fmt;

/// An allocation that this process is in, in a shell or a batch script: the processes are still to be started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// The number of the job.
    pub job_id: String,
    /// Its machines, in Slurm's order.
    pub nodes: Vec<Node>,
    /// What the numbers of processes come from.
    pub per_node: PerNode,
    /// What Slurm calls the machine that this process runs on. It does not say so to the shell of `salloc`, which is on a login node
    /// unless the site has it otherwise.
    pub own_node: Option<String>,
}

/// A machine of an allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its name, which other machines can resolve.
    pub name: String,
    /// How many processes run on it.
    pub num_processes: usize,
}

/// Why each machine has as many processes as it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PerNode {
    /// `--num_processes` is divided.
    Said,
    /// One for each GPU of the job.
    Gpus,
    /// The tasks that the job was submitted with.
    Tasks,
    /// The job asks for neither.
    One,
}

impl fmt::Display for PerNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Said => "--num_processes",
            Self::Gpus => "one for each GPU of the job",
            Self::Tasks => "the tasks of the job",
            Self::One => "the job says neither GPUs nor tasks, so one for each node",
        })
    }
}

impl Allocation {
    /// How many processes there are.
    pub fn num_processes(&self) -> usize {
        self.nodes.iter().map(|node| node.num_processes).sum()
    }

    /// Is its only machine this one, which has the name `this_machine` for itself?
    pub fn is_on(&self, this_machine: &str) -> bool {
        let own = self.own_node.as_deref().unwrap_or(this_machine);
        matches!(&*self.nodes, [node] if node.name == own)
    }
}

/// `node1: 4, node2: 2`, and at most four of them.
impl fmt::Display for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MOST: usize = 4;
        let shown = self.nodes.iter().take(MOST).map(|node| format!("{} on {}", node.num_processes, node.name));
        f.write_str(&shown.collect::<Vec<_>>().join(", "))?;
        match self.nodes.len().saturating_sub(MOST) {
            0 => Ok(()),
            more => write!(f, ", and so on for {more} more nodes"),
        }
    }
}

/// Did `srun` start this process? Then its task is to be, and not to start, the processes of the job.
pub fn is_in_step(lookup: &dyn Fn(&str) -> Option<String>) -> bool {
    SlurmVariables::new(lookup).step().is_some()
}

/// The allocation around this process; `None` outside of one, and in a task that `srun` has started.
///
/// Each machine gets its share of `num_processes`, the first ones one more where that does not divide. Without it: one for each GPU
/// that the job asks for, unless the processes stay on the CPU (`use_cpu`); else as many as the job has tasks there; else one.
///
/// # Errors
///
/// [`Error::is_environment`]: a host list or a number that is none, several nodes without a list
/// of them, and fewer processes than machines.
///
/// ```
/// use accelerate_core::slurm::allocation;
/// let lookup = |name: &str| match name {
///     "SLURM_JOB_ID" => Some("12".to_owned()),
///     "SLURM_JOB_NODELIST" => Some("n[1-2]".to_owned()),
///     _ => None,
/// };
/// let allocation = allocation(&lookup, Some(3), false)?.expect("a job with nodes");
/// assert_eq!(allocation.to_string(), "2 on n1, 1 on n2");
/// # Ok::<(), accelerate_core::Error>(())
/// ```
pub fn allocation(
    lookup: &dyn Fn(&str) -> Option<String>,
    num_processes: Option<usize>,
    use_cpu: bool,
) -> Result<Option<Allocation>> {
    let variables = SlurmVariables::new(lookup);
    let Some(job_id) = variables.text("SLURM_JOB_ID").or_else(|| variables.text("SLURM_JOBID")) else {
        return Ok(None);
    };
    if variables.step().is_some() {
        return Ok(None);
    }
    let Some(names) = variables.hosts(&["SLURM_JOB_NODELIST", "SLURM_NODELIST"])? else {
        let count = |variable| Some((variable, variables.text(variable)?.parse::<usize>().ok()?));
        let counted = ["SLURM_JOB_NUM_NODES", "SLURM_NNODES"].into_iter().find_map(count);
        return match counted {
            // The others would stay idle, and nobody would know.
            Some((variable, num_nodes)) if num_nodes > 1 => {
                Err(Kind::NoNodeList { job_id, variable, num_nodes }.into())
            }
            _ => Ok(None),
        };
    };
    let (counts, per_node) = match num_processes {
        Some(num_processes) => (divided(num_processes, names.len())?, PerNode::Said),
        None => counts(variables, names.len(), use_cpu)?,
    };
    if counts.iter().try_fold(0_usize, |sum, count| sum.checked_add(*count)).is_none_or(|sum| sum > MAX_WORLD_SIZE) {
        return Err(Kind::TooManyProcesses { job_id, most: MAX_WORLD_SIZE }.into());
    }
    let own_node = variables.text("SLURMD_NODENAME");
    let nodes = names.into_iter().zip(counts).map(|(name, num_processes)| Node { name, num_processes }).collect();
    Ok(Some(Allocation { job_id, nodes, per_node, own_node }))
}

fn divided(num_processes: usize, num_nodes: usize) -> Result<Vec<usize>> {
    if num_processes < num_nodes {
        return Err(Kind::FewerProcessesThanNodes { num_processes, num_nodes }.into());
    }
    let (each, first) = (num_processes / num_nodes, num_processes % num_nodes);
    Ok((0..num_nodes).map(|node| each + usize::from(node < first)).collect())
}

fn counts(variables: SlurmVariables<'_>, num_nodes: usize, use_cpu: bool) -> Result<(Vec<usize>, PerNode)> {
    if !use_cpu && let Some(num_gpus) = gpus_per_node(variables, num_nodes)? {
        return Ok((vec![num_gpus; num_nodes], PerNode::Gpus));
    }
    // Where nobody has asked for tasks, Slurm says how many there could be.
    let is_asked = ["SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"].iter().any(|name| variables.text(name).is_some());
    let tasks = variables.tasks_per_node("SLURM_TASKS_PER_NODE").filter(|tasks| is_asked && tasks.len() == num_nodes);
    if let Some(tasks) = tasks {
        return Ok((tasks, PerNode::Tasks));
    }
    Ok((vec![1; num_nodes], PerNode::One))
}

/// `None` for a job without GPUs. Slurm says to a launch how many there are on each node only where it was asked so; of `--gpus`,
/// nodes may get unequal numbers, of which that of this node is known.
fn gpus_per_node(variables: SlurmVariables<'_>, num_nodes: usize) -> Result<Option<usize>> {
    let number = |name: &str| variables.text(name).map(|value| gpus(name, &value)).transpose();
    let (each, here, all) = (number("SLURM_GPUS_PER_NODE")?, number("SLURM_GPUS_ON_NODE")?, number("SLURM_GPUS")?);
    let found = match (each, here, all) {
        (Some(each), _, _) => Some(each),
        (None, here, Some(all)) if num_nodes > 1 => {
            let equal = all / num_nodes;
            if all % num_nodes != 0 || here.is_some_and(|here| here != equal) {
                return Err(Kind::UnequalGpus { all, num_nodes, here }.into());
            }
            Some(equal)
        }
        (None, here, all) => here.or(all),
    };
    Ok(found.filter(|num_gpus| *num_gpus > 0))
}

/// `4`, `a100:4` and `a100:2,v100:2` are 4.
fn gpus(name: &str, value: &str) -> Result<usize> {
    let count = |entry: &str| entry.rsplit(':').next().and_then(|count| count.trim().parse::<usize>().ok());
    let wanted = "a number of GPUs, such as 4 or a100:4";
    let error = || Error::new(Kind::Value { name: name.to_owned(), value: shortened(value), wanted });
    let sum = value.split(',').try_fold(0_usize, |sum, entry| sum.checked_add(count(entry)?));
    sum.filter(|sum| *sum <= MAX_WORLD_SIZE).ok_or_else(error)
}
