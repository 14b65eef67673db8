//! A launcher that another launcher has started several times, such as `mpirun -n 2 accelerate launch` or `srun -n 2` of the same.

use std::fmt;

use super::{Claim, Launcher, MPI_NAMES, Variables, check_rank, launcher_claim, torchrun_claim};
use crate::error::environment::EnvironmentErrorKind as Kind;
use crate::settings::shortened;
use crate::slurm::is_in_step;
use crate::{Error, Result};

/// The variable by which `accelerate launch` marks its processes. What they launch themselves is a run of its own, whatever the
/// variables of their own ranks say.
pub const LAUNCH_ID_VARIABLE: &str = "ACCELERATE_LAUNCH_ID";

/// The ranks that another launcher has made, of which this process is one.
///
/// Its `Display` says which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OuterWorld {
    /// Number of this process among all, from 0.
    pub rank: usize,
    /// Count of all processes, at least 2.
    pub world_size: usize,
    /// Number of this process among those of its machine, where the launcher says it.
    pub local_rank: Option<usize>,
    /// Whose variables say so.
    pub source: Launcher,
    /// The variable with the count.
    size_name: &'static str,
}

impl fmt::Display for OuterWorld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, world_size, size_name, .. } = self;
        write!(f, "rank {rank} of {world_size} ({size_name})")
    }
}

/// What a launch asks for that is itself one of the ranks of an [`OuterWorld`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InnerLaunch<'a> {
    /// How many processes it would start.
    pub num_processes: usize,
    /// The flag by which it would start processes on other machines.
    pub flag_of_machines: Option<&'a str>,
    /// How often it would start them again.
    pub max_restarts: usize,
}

/// The world that another launcher has made around this process: the variables of MPI, of PMI, of a step of Slurm, or `RANK` and
/// `WORLD_SIZE` name more than one process, and no `accelerate launch` has set them.
///
/// `None` in the body of a batch script and in the shell of an allocation, where a launch fills the
/// [allocation](crate::slurm::allocation()); in a shell at a terminal that `srun --pty` has given to one task only; and for variables
/// that do not name a rank of a world: job scripts export them for purposes of their own.
///
/// ```
/// use accelerate_core::environment::outer_world;
/// let of_mpirun = |name: &str| match name {
///     "OMPI_COMM_WORLD_RANK" => Some("1".to_owned()),
///     "OMPI_COMM_WORLD_SIZE" => Some("2".to_owned()),
///     _ => None,
/// };
/// assert_eq!(outer_world(&of_mpirun).expect("two ranks").to_string(), "rank 1 of 2 (OMPI_COMM_WORLD_SIZE)");
/// assert!(outer_world(&|_| None).is_none());
/// ```
pub fn outer_world(lookup: &dyn Fn(&str) -> Option<String>) -> Option<OuterWorld> {
    let variables = Variables { lookup };
    if variables.text(LAUNCH_ID_VARIABLE).is_some() {
        return None;
    }
    // What is wrong with variables of the one is no reason to pass over those of the other. The program tells it.
    let said = |claim: Result<Option<Claim>>| claim.ok().flatten();
    let claim = said(torchrun_claim(&variables)).or_else(|| said(launcher_claim(&variables)))?;
    let ((rank, _), (world_size, size_name)) = (claim.rank, claim.world_size);
    // Of the tasks of such a step one has the terminal, and others that it could meet have ended.
    let is_at_terminal = claim.source == Launcher::Slurm && variables.text("SLURM_PTY_PORT").is_some();
    let is_world = world_size > 1 && rank < world_size && !is_at_terminal;
    let local_rank = claim.local_rank.map(|(local_rank, _)| local_rank);
    is_world.then_some(OuterWorld { rank, world_size, local_rank, source: claim.source, size_name })
}

/// The variables of another launcher that are set and yet name no rank of a world: one of a pair without the other, no number, or a
/// rank outside of its world. A program that finds them refuses to start, and a launch makes a run of its own; whoever starts one
/// should know of it.
///
/// ```
/// use accelerate_core::environment::unusable_numbers;
/// let set = |name: &str| (name == "WORLD_SIZE").then(|| "2".to_owned());
/// assert_eq!(unusable_numbers(&set).as_deref(), Some("WORLD_SIZE=2"));
/// assert_eq!(unusable_numbers(&|_| None), None);
/// ```
pub fn unusable_numbers(lookup: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let variables = Variables { lookup };
    if variables.text(LAUNCH_ID_VARIABLE).is_some() || outer_world(lookup).is_some() {
        return None;
    }
    let of_launchers = MPI_NAMES.iter().flat_map(|names| [names.rank, names.size]).chain(["PMIX_RANK"]);
    let is_refused = match torchrun_claim(&variables) {
        Ok(claim) => claim
            .map_or_else(|| launcher_claim(&variables), |claim| Ok(Some(claim)))
            .map_or(true, |claim| claim.is_some_and(|claim| check_rank(claim.rank, claim.world_size).is_err())),
        Err(_) => true,
    };
    // Outside of a step they are there as well, and name no rank.
    let of_step = is_in_step(lookup).then_some(["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"]).into_iter().flatten();
    let set = ["RANK", "WORLD_SIZE", "LOCAL_RANK"].into_iter().chain(of_launchers).chain(of_step);
    let set: Vec<_> = set.filter_map(|name| Some(format!("{name}={}", shortened(&variables.text(name)?)))).collect();
    (is_refused && !set.is_empty()).then(|| set.join(", "))
}

impl OuterWorld {
    /// May a launch in this place start its process as the rank that it is itself?
    ///
    /// # Errors
    ///
    /// [`Error::is_environment`]: the launch asks for more than that one process, and each of the others would, too.
    ///
    /// ```
    /// use accelerate_core::environment::{InnerLaunch, outer_world};
    /// let pod = |name: &str| Some(if name == "WORLD_SIZE" { "4" } else { "3" }.to_owned()).filter(|_| "WORLD_SIZE RANK".contains(name));
    /// let world = outer_world(&pod).expect("four ranks");
    /// assert!(world.check(InnerLaunch { num_processes: 1, ..Default::default() }).is_ok());
    /// let error = world.check(InnerLaunch { num_processes: 8, ..Default::default() }).unwrap_err();
    /// assert!(error.to_string().contains("--num_machines 4 --machine_rank 3"), "{error}");
    /// ```
    pub fn check(&self, launch: InnerLaunch<'_>) -> Result<()> {
        let Self { rank, world_size, source, .. } = *self;
        let all = launch.num_processes.saturating_mul(world_size);
        let once = match source {
            Launcher::Slurm => "start the launch once, without srun: in the job it starts the processes of all nodes",
            _ => "start the launch once, by itself",
        };
        let (what, cure) = match launch {
            InnerLaunch { flag_of_machines: Some(flag), .. } => {
                (format!("{flag} starts processes on other machines"), once.to_owned())
            }
            InnerLaunch { num_processes, .. } if num_processes != 1 && source == Launcher::Slurm => (
                format!("it would start {num_processes} processes as a run of its own"),
                format!("{once}; or say --num_processes 1 for one process as that rank"),
            ),
            InnerLaunch { num_processes, .. } if num_processes != 1 => (
                format!("it would start {num_processes} processes as a run of its own"),
                format!(
                    "say --num_processes 1 for one process as that rank, or make one run of all these launches with --num_machines \
                     {world_size} --machine_rank {rank} --num_processes {all} and --main_process_ip"
                ),
            ),
            InnerLaunch { max_restarts, .. } if max_restarts > 0 => {
                (format!("--max_restarts {max_restarts} cannot start the other ranks again"), "leave it out".to_owned())
            }
            _ => return Ok(()),
        };
        Err(Error::new(Kind::LaunchWithinWorld { world: self.to_string(), what, cure }))
    }
}
