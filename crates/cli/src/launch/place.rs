//! Where the processes of a launch are started: here, on machines that are named, or on those of an allocation.

use std::error::Error;

use accelerate_core::config::{LaunchPlace, RunConfig};
use accelerate_core::environment::{InnerLaunch, Launcher, OuterWorld, outer_world, unusable_numbers};
use accelerate_core::hosts::{MachineSource, machine_rank};
use accelerate_core::settings::Origin;
use accelerate_launch::{AgentCommand, LaunchConfig};

use super::hosts;
use super::slurm::{ClusterFlags, allocated};
use crate::config_file;
use crate::resolve::{Resolved, num_processes};

/// Where the processes of a launch are started.
#[derive(Default)]
pub(super) struct Place {
    /// How each of several machines is reached; `None` for this machine alone.
    pub(super) agents: Option<Vec<AgentCommand>>,
    /// The only process takes the place that another launcher has given this one.
    pub(super) outer_world: Option<OuterWorld>,
    /// What somebody should know of the choice.
    pub(super) notices: Vec<String>,
}

impl Place {
    /// `config` as a launch needs it here.
    pub(super) fn fitted(&self, config: LaunchConfig) -> LaunchConfig {
        let is_one_machine = self.agents.is_none() && config.num_machines == 1;
        let main_process_ip = config.main_process_ip.clone().filter(|_| !is_one_machine);
        LaunchConfig { outer_world: self.outer_world, main_process_ip, ..config }
    }

    /// What was said and changes nothing here.
    pub(super) fn unused(&self, run: &RunConfig, config: &LaunchConfig, has_preflight: bool) -> Vec<String> {
        let is_on_machines = self.agents.is_some();
        let place = LaunchPlace { is_on_machines, is_alone: !is_on_machines && !config.is_numbered() };
        let preflight = "--no_preflight has no effect: no machines are named on which processes are started from here";
        let preflight = (!has_preflight && !is_on_machines).then(|| preflight.to_owned());
        run.unused_in(place).iter().map(ToString::to_string).chain(preflight).collect()
    }
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
    let agents = hosts::agents(&resolved.run)?;
    let allocation = match agents {
        Some(_) => None,
        None => allocated::of_run(&resolved.run, &config_file::variable)?,
    };
    let world = outer_world(&config_file::variable)
        .filter(|_| agents.is_some() || resolved.run.cluster.num_machines == 1)
        // Job scripts export RANK and WORLD_SIZE for the programs that they start, and an allocation says more.
        .filter(|world| allocation.is_none() || world.source != Launcher::Torchrun);
    if let Some(world) = world {
        world.check(InnerLaunch {
            num_processes: num_processes(&resolved.run),
            flag_of_machines: agents.and_then(|_| hosts::flag_of_machines(&resolved.run)),
            max_restarts: resolved.run.cluster.max_restarts,
        })?;
        let notice = format!("starting the process as {world}, as another launcher has numbered it");
        let notices = (world.rank == 0).then_some(notice).into_iter().chain(unused(MachineSource::EachByItself)?);
        return Ok((resolved, Place { outer_world: Some(world), notices: notices.collect(), ..Place::default() }));
    }
    if let Some(agents) = agents {
        let notices = unused(MachineSource::Hosts { num_hosts: agents.len() })?;
        return Ok((resolved, Place { agents: Some(agents), notices, ..Place::default() }));
    }
    let Some(allocation) = allocation else {
        let mut notices = unused(MachineSource::EachByItself)?;
        if resolved.run.cluster.num_machines == 1 {
            notices.extend(unusable_numbers(&config_file::variable).map(|numbers| {
                format!(
                    "{numbers}: this names no rank of another launcher and has no effect, so this is a run of its own"
                )
            }));
        }
        notices.extend(number_machine(&mut resolved.run)?);
        return Ok((resolved, Place { notices, ..Place::default() }));
    };
    let found = MachineSource::SlurmJob { job_id: &allocation.job_id, num_nodes: allocation.nodes.len() };
    let mut place = allocated::place(&allocation);
    place.notices.extend(unused(found)?);
    resolved.run.cluster.num_processes = Some(allocation.num_processes());
    resolved.run.cluster.num_machines = allocation.nodes.len();
    Ok((resolved, place))
}

/// Which of several machines this one is, that a command on each starts.
fn number_machine(run: &mut RunConfig) -> Result<Option<String>, Box<dyn Error>> {
    let num_machines = run.cluster.num_machines;
    if num_machines == 1 {
        return Ok(None);
    }
    if *run.origin("machine_rank") == Origin::Default {
        let found = machine_rank(num_machines, &config_file::variable)?;
        run.derive("the number of this node (SLURM_NODEID)", |run| run.cluster.machine_rank = found);
        return Ok(Some(format!(
            "--machine_rank was not given, this is machine {found} of {num_machines} (SLURM_NODEID)"
        )));
    }
    Ok((run.cluster.rdzv_backend == "c10d").then(|| {
        let (found, origin) = (run.cluster.machine_rank, run.origin("machine_rank"));
        format!("rdzv_backend c10d assigns no numbers to machines here: this is machine {found}, as machine_rank says ({origin})")
    }))
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
