//! Where the processes of a launch are started: here, on machines that are named, or on those of an allocation.

use std::error::Error;

use accelerate_core::hosts::MachineSource;
use accelerate_launch::AgentCommand;

use super::hosts;
use super::slurm::{ClusterFlags, allocated};
use crate::config_file;
use crate::resolve::Resolved;

/// Where the processes of a launch are started.
#[derive(Default)]
pub(super) struct Place {
    /// How each of several machines is reached; `None` for this machine alone.
    pub(super) agents: Option<Vec<AgentCommand>>,
    /// What somebody should know of the choice.
    pub(super) notices: Vec<String>,
}

/// Machines that are named, or those of an allocation, which then says the number of processes. A job that is yet to be made has
/// neither.
pub(super) fn placed(mut resolved: Resolved, cluster: &ClusterFlags) -> Result<(Resolved, Place), Box<dyn Error>> {
    cluster.check()?;
    if cluster.is_asked() {
        return match hosts::flag_of_machines(&resolved.run) {
            Some(flag) => Err(TwoPlaces { flag }.into()),
            None => Ok((resolved, Place::default())),
        };
    }
    let wanted = hosts::num_machines(&resolved.run);
    let unused = |source| -> Result<Vec<String>, Box<dyn Error>> {
        Ok(wanted.check(source)?.map(|unused| unused.to_string()).into_iter().collect())
    };
    if let Some(agents) = hosts::agents(&resolved.run)? {
        let notices = unused(MachineSource::Hosts { num_hosts: agents.len() })?;
        return Ok((resolved, Place { agents: Some(agents), notices }));
    }
    let Some(allocation) = allocated::of_run(&resolved.run, &config_file::variable)? else {
        let notices = unused(MachineSource::EachByItself)?;
        return Ok((resolved, Place { notices, ..Place::default() }));
    };
    let found = MachineSource::SlurmJob { job_id: &allocation.job_id, num_nodes: allocation.nodes.len() };
    let mut place = allocated::place(&allocation);
    place.notices.extend(unused(found)?);
    resolved.run.cluster.num_processes = Some(allocation.num_processes());
    resolved.run.cluster.num_machines = allocation.nodes.len();
    Ok((resolved, place))
}

/// Machines are named, and a job has its own.
#[derive(Debug, thiserror::Error)]
#[error("{flag} says on which machines a launch takes place, and so does the job of a cluster; leave it out")]
struct TwoPlaces {
    flag: &'static str,
}

/// Where there is no folder, libtorch ends a process while it loads.
#[derive(Debug, thiserror::Error)]
#[error("the working folder cannot be used; change to one that exists")]
struct NoWorkingFolder {
    source: std::io::Error,
}

/// # Errors
///
/// The working folder has been deleted, or is one that this user may not look into.
pub(crate) fn check_working_folder() -> Result<(), Box<dyn Error>> {
    std::env::current_dir().map(drop).map_err(|source| NoWorkingFolder { source }.into())
}
