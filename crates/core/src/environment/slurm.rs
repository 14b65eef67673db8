//! Slurm's variables: which task of which step this is, and the first host of the step.

use super::{Claim, Launcher, Variables};
use crate::Result;
use crate::error::environment::EnvironmentErrorKind as Kind;
use crate::settings::shortened;

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
    let batch_script = variables.text("SLURM_JOB_ID").is_some() && variables.text("SLURM_STEP_ID").is_none();
    if world_size == 1 || batch_script {
        return Ok(None);
    }
    let master_addr = match ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"]
        .into_iter()
        .find_map(|name| variables.text(name).map(|value| (name, value)))
    {
        Some((name, value)) => match first_host(&value) {
            Some(host) => Some(host),
            None => {
                return Err(Kind::HostList { name: name.to_owned(), value: shortened(&value) }.into());
            }
        },
        None => None,
    };
    Ok(Some(Claim {
        source: Launcher::Slurm,
        rank: (rank, "SLURM_PROCID"),
        world_size: (world_size, size_name),
        local_rank: variables.rank("SLURM_LOCALID")?.map(|rank| (rank, "SLURM_LOCALID")),
        local_world_size: tasks_here(variables, world_size)?,
        master_addr,
    }))
}

/// How many tasks of the step run on this machine, and the variable that says so.
fn tasks_here(variables: &Variables<'_>, world_size: usize) -> Result<Option<(usize, &'static str)>> {
    // The exact per-machine list goes first: SLURM_NTASKS_PER_NODE is what was asked for, and the last
    // machine may have fewer.
    if let Some(node) = variables.rank("SLURM_NODEID")? {
        for name in ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"] {
            if let Some(tasks) = variables.text(name).and_then(|list| tasks_of_node(&list, node)) {
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

/// Entry `node` of a list such as `2(x3),1`, which stands for 2, 2, 2, 1.
fn tasks_of_node(list: &str, node: usize) -> Option<usize> {
    let mut first_node_of_entry = 0_usize;
    for entry in list.split(',') {
        let (tasks, repeats) = match entry.trim().split_once("(x") {
            Some((tasks, repeats)) => (tasks, repeats.strip_suffix(')')?.parse().ok()?),
            None => (entry.trim(), 1_usize),
        };
        let next = first_node_of_entry.saturating_add(repeats);
        if node < next {
            return tasks.parse().ok().filter(|&tasks| tasks > 0);
        }
        first_node_of_entry = next;
    }
    None
}

/// The first host of a Slurm host list: `node[03-05,7]` gives `node03`, `a1,b2` gives `a1`.
///
/// Several brackets in one name take the first of each (`rack[1-2]node[5-6]` gives `rack1node5`). `None`
/// when the text is no host list: empty, a bracket without its partner, or nothing in it.
///
/// ```
/// use accelerate_core::environment::first_host;
/// assert_eq!(first_host("node[03-05,7],login1").as_deref(), Some("node03"));
/// assert_eq!(first_host("node[03-05").as_deref(), None);
/// ```
pub fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.trim();
    loop {
        let end = rest.find(['[', ']', ',']).unwrap_or(rest.len());
        host.push_str(&rest[..end]);
        match rest[end..].chars().next() {
            Some('[') => {
                let (inside, after) = rest[end + 1..].split_once(']')?;
                let first = inside.split([',', '-']).next()?.trim();
                if first.is_empty() || !first.chars().all(|digit| digit.is_ascii_digit()) {
                    return None;
                }
                host.push_str(first);
                rest = after;
            }
            Some(']') => return None,
            _ => break,
        }
    }
    let is_host = !host.is_empty() && !host.contains(char::is_whitespace);
    is_host.then_some(host)
}
