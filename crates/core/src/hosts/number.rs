//! Whether as many machines are there as a run is to have.

use std::fmt;

use crate::Result;
use crate::error::hosts::{HostsErrorKind as Kind, hosts_are};
use crate::names::counted;

/// Of how many machines a run is to be made. `--nnodes MIN:MAX` says both numbers.
///
/// ```
/// use accelerate_core::hosts::{MachineSource, NumMachines};
/// let range = NumMachines { most: Some(4), least: Some(2) };
/// assert!(range.check(MachineSource::Hosts { num_hosts: 4 })?.is_none());
/// let unused = range.check(MachineSource::Hosts { num_hosts: 2 })?.expect("nobody can join later");
/// assert!(unused.to_string().starts_with("num_machines (or --nnodes) is 4, but 2 hosts are named"));
/// assert!(range.check(MachineSource::EachByItself).is_err());
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NumMachines {
    /// `--num_machines`; `None` where nobody has said it. Files that name one machine do not say it: every file of the reference has
    /// a number.
    pub most: Option<usize>,
    /// `--min_machines`: with how many of them the run may begin, and go on.
    pub least: Option<usize>,
}

/// What says which machines a run has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MachineSource<'a> {
    /// `--hosts` or a host file.
    Hosts {
        /// How many are named.
        num_hosts: usize,
    },
    /// The Slurm job around the launch.
    SlurmJob {
        /// The number of the job.
        job_id: &'a str,
        /// How many nodes it has.
        num_nodes: usize,
    },
    /// Nothing: a command on each machine starts the processes of that one.
    EachByItself,
}

/// A number of machines that changes nothing. Its `Display` says so, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnusedNumber(String);

impl fmt::Display for UnusedNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl NumMachines {
    /// Compares what was asked for with what is there. Machines do not join a run later, as they may under torchrun, so an upper
    /// end of a range that is not reached changes nothing.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): too few machines, or more than were asked for; a range of machines that are
    /// started one by one, none of which could go on without the others.
    pub fn check(self, source: MachineSource<'_>) -> Result<Option<UnusedNumber>> {
        match source {
            MachineSource::Hosts { num_hosts } => self.check_hosts(num_hosts),
            MachineSource::SlurmJob { job_id, num_nodes } => self.check_nodes(job_id, num_nodes),
            MachineSource::EachByItself => self.check_without_list(),
        }
    }

    fn check_hosts(self, found: usize) -> Result<Option<UnusedNumber>> {
        let said = self.most.unwrap_or(found);
        match self.least {
            Some(least) if least > found => return Err(Kind::MinMachines { least, found }.into()),
            _ if self.is_wrong(found) => return Err(Kind::NumMachines { said, found }.into()),
            _ => {}
        }
        let unused = format!(
            "num_machines (or --nnodes) is {said}, but {} named, and no others can join a run later as under torchrun, so this number has no \
             effect; name as many hosts, or say {found}",
            hosts_are(found)
        );
        Ok((said > found).then_some(UnusedNumber(unused)))
    }

    fn check_nodes(self, job_id: &str, found: usize) -> Result<Option<UnusedNumber>> {
        let (said, job_id) = (self.most.unwrap_or(found), job_id.to_owned());
        match self.least {
            Some(least) if least > found => return Err(Kind::MinNodes { least, job_id, found }.into()),
            _ if self.is_wrong(found) => return Err(Kind::NumNodes { said, job_id, found }.into()),
            _ => {}
        }
        let unused = format!(
            "num_machines (or --nnodes) is {said}, but the Slurm job {job_id} has {}, and no others can join a run later, so this number \
             has no effect; ask Slurm for as many, or say {found}",
            counted(found, "node")
        );
        Ok((said > found).then_some(UnusedNumber(unused)))
    }

    /// Where fewer will do, `found` need not be all of them.
    fn is_wrong(self, found: usize) -> bool {
        self.most.is_some_and(|most| self.least.map_or(most != found, |_| found > most))
    }

    fn check_without_list(self) -> Result<Option<UnusedNumber>> {
        let most = self.most.unwrap_or(1);
        match self.least {
            None => Ok(None),
            Some(least) if least > most => Err(Kind::LeastAboveMost { least, most }.into()),
            Some(least) if least < most => Err(Kind::RangeWithoutList { least, most }.into()),
            Some(least) => Ok(Some(UnusedNumber(format!(
                "min_machines (or MIN of --nnodes MIN:MAX) is {least}, which has no effect here: only of machines that \
                 --hosts, --hostfile or a Slurm job names some can be left out; name them, or leave it out"
            )))),
        }
    }
}
