//! Which of several machines this is, where a command on each starts the processes of that one.

use crate::Result;
use crate::error::hosts::HostsErrorKind as Kind;
use crate::slurm::is_in_step;

/// The number of this machine among `num_machines`, where nobody has said a machine_rank: that of the node, in a step of Slurm with
/// as many nodes.
///
/// # Errors
///
/// [`Error::is_config`](crate::Error::is_config): nothing says which machine this is. Each of them would take itself for machine 0.
///
/// ```
/// use accelerate_core::hosts::machine_rank;
/// let node = |name: &str| match name {
///     "SLURM_STEP_ID" => Some("0".to_owned()),
///     "SLURM_NNODES" => Some("2".to_owned()),
///     "SLURM_NODEID" => Some("1".to_owned()),
///     _ => None,
/// };
/// assert_eq!(machine_rank(2, &node)?, 1);
/// assert!(machine_rank(3, &node).is_err());
/// # Ok::<(), accelerate_core::Error>(())
/// ```
pub fn machine_rank(num_machines: usize, lookup: &dyn Fn(&str) -> Option<String>) -> Result<usize> {
    let number = |name: &str| lookup(name)?.trim().parse::<usize>().ok();
    // In a batch script, which runs on the first node only, the number is 0 wherever the others would be started.
    let is_of_step = is_in_step(lookup) && number("SLURM_NNODES") == Some(num_machines);
    let node = number("SLURM_NODEID").filter(|node| is_of_step && *node < num_machines);
    node.ok_or_else(|| Kind::NoMachineRank { num_machines }.into())
}
