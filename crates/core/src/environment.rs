//! Which rank this process is, read from the variables its launcher set.
//!
//! Six families of variables are understood, tried in this order: torchrun's (also set by `accelerate
//! launch`, Kubernetes operators and by hand), Open MPI's, MVAPICH's, MPICH's (also Intel MPI and other
//! process managers with PMI), Slurm's, and the one variable of PMIx. Nothing here reads the real environment: a lookup function is
//! passed in, so every launcher is a table in a test.

mod again;
mod around;
mod boolean;
mod slurm;
mod threads;

pub use again::started_again_by;
pub use around::{InnerLaunch, LAUNCH_ID_VARIABLE, OuterWorld, outer_world, unusable_numbers};
pub use boolean::{parse_flag, str_to_bool};
pub use slurm::first_host;
pub use threads::{MAX_THREADS_PER_CORE, UnusableThreads, check_num_threads};

use crate::error::environment::EnvironmentErrorKind as Kind;
use crate::settings::shortened;
use crate::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// The port at which ranks meet when `MASTER_PORT` says nothing; PyTorch's own default.
pub const DEFAULT_MASTER_PORT: u16 = 29_500;

/// The most processes that a run may have: 2^20. A larger number is a slip of the hand, and lists of ranks would take
/// gigabytes.
pub const MAX_WORLD_SIZE: usize = 1 << 20;

/// The cores that a launcher has put a rank on, such as `0-3,8`. A program that finds it need not choose its own.
pub const CORES_VARIABLE: &str = "ACCELERATE_RANK_CORES";

/// How often a launcher has started the processes of the run before. torchrun's agent and `accelerate launch` set it.
pub const RESTART_COUNT_VARIABLE: &str = "TORCHELASTIC_RESTART_COUNT";

/// How often Kubernetes has started all pods of a JobSet before. The manifests of `accelerate launch --emit` set it.
pub const JOB_SET_RESTARTS_VARIABLE: &str = "JOBSET_RESTART_ATTEMPT";

/// The kind of launcher that started this process.
///
/// ```
/// use accelerate_core::environment::Launcher;
/// assert_eq!(Launcher::OpenMpi.to_string(), "Open MPI");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Launcher {
    /// torchrun, `accelerate launch`, or anything else that sets `RANK` and `WORLD_SIZE`.
    Torchrun,
    /// Open MPI: `OMPI_COMM_WORLD_*`.
    OpenMpi,
    /// MPICH, Intel MPI and other process managers with PMI: `PMI_*`, `MPI_LOCAL*`.
    Mpich,
    /// MVAPICH: `MV2_COMM_WORLD_*`.
    Mvapich,
    /// Slurm's `srun`: `SLURM_*`.
    Slurm,
    /// A process manager that says `PMIX_RANK` and nothing else, such as `prterun`; the size is that of `WORLD_SIZE`.
    Pmix,
}

impl Launcher {
    /// The launcher's name in running text.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Torchrun => "torchrun",
            Self::OpenMpi => "Open MPI",
            Self::Mpich => "MPICH",
            Self::Mvapich => "MVAPICH",
            Self::Slurm => "Slurm",
            Self::Pmix => "PMIx",
        }
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Who this process is among the processes of a run, and where they meet.
///
/// `rank < world_size`, `local_rank < local_world_size <= world_size` hold for every value that
/// [`rank_variables`] returns, and no count is above [`MAX_WORLD_SIZE`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankVariables {
    /// Number of this process among all, from 0.
    pub rank: usize,
    /// Number of this process among those of its machine, from 0.
    pub local_rank: usize,
    /// Count of all processes.
    pub world_size: usize,
    /// Count of the processes on this machine. Where no variable says it and the ranks are on several
    /// machines, the smallest count that `local_rank` allows.
    pub local_world_size: usize,
    /// Host name or address of the machine of rank 0.
    pub master_addr: String,
    /// Port on that machine at which the ranks meet.
    pub master_port: u16,
    /// The launcher whose variables were used.
    pub source: Launcher,
}

/// Reads the rank variables of whichever launcher started this process.
///
/// `None` means that no launcher did: the program runs as a single process. Variables that are set but
/// empty count as not set, apart from the `MASTER_ADDR` of several ranks. Method: the lookups of `PartialState` (`state.py` of the reference), completed
/// by the variables that Slurm's documentation of `srun` lists.
///
/// Within Slurm, two situations look like a distributed start but are not, and give `None`: one task
/// only, and the body of a batch script or a shell of an allocation (there `SLURM_JOB_ID` is set, but `SLURM_STEP_ID` is not or
/// is a number that Slurm keeps for such shells), where a second process would be waited for in vain. Without `MASTER_PORT`, the
/// tasks of a step meet at a port between 10000 and 29999 that follows from the numbers of the job and of the step.
///
/// # Errors
///
/// [`Error::is_environment`]: a variable that is not a number, a count above [`MAX_WORLD_SIZE`], a rank outside its world, one of `RANK` and
/// `WORLD_SIZE` without the other, a `LOCAL_RANK` or `MASTER_ADDR` that is missing and cannot be inferred, an empty
/// `MASTER_ADDR`.
///
/// ```
/// use accelerate_core::environment::{Launcher, rank_variables};
///
/// let lookup = |name: &str| match name {
///     "RANK" | "LOCAL_RANK" => Some("1".to_owned()),
///     "WORLD_SIZE" | "LOCAL_WORLD_SIZE" => Some("2".to_owned()),
///     _ => None,
/// };
/// let ranks = rank_variables(&lookup)?.expect("a launcher's variables are set");
/// assert_eq!((ranks.rank, ranks.world_size, ranks.source), (1, 2, Launcher::Torchrun));
/// assert_eq!((ranks.master_addr.as_str(), ranks.master_port), ("127.0.0.1", 29500));
///
/// assert!(rank_variables(&|_| None)?.is_none());
/// # Ok::<(), accelerate_core::Error>(())
/// ```
pub fn rank_variables(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Option<RankVariables>> {
    let variables = Variables { lookup };
    let claim = match torchrun_claim(&variables)? {
        Some(claim) => Some(claim),
        None => launcher_claim(&variables)?,
    };
    claim.map(|claim| complete(&variables, claim)).transpose()
}

/// How often the processes of this run have been started before: by `accelerate launch --max_restarts` or torchrun
/// ([`RESTART_COUNT_VARIABLE`]), by Slurm, which queues a job again (`SLURM_RESTART_COUNT`), and by a JobSet of Kubernetes
/// ([`JOB_SET_RESTARTS_VARIABLE`]). 0 where nobody says so.
///
/// # Errors
///
/// [`Error::is_environment`]: one of them is no number.
///
/// ```
/// use accelerate_core::environment::restart_count;
/// let lookup = |name: &str| match name {
///     "TORCHELASTIC_RESTART_COUNT" => Some("2".to_owned()),
///     "SLURM_RESTART_COUNT" => Some("1".to_owned()),
///     _ => None,
/// };
/// assert_eq!((restart_count(&lookup)?, restart_count(&|_| None)?), (3, 0));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
pub fn restart_count(lookup: &dyn Fn(&str) -> Option<String>) -> Result<usize> {
    let variables = Variables { lookup };
    let count = |name| variables.number(name, "a whole number of at least 0").map(|count| count.unwrap_or(0_usize));
    let others = count("SLURM_RESTART_COUNT")?.saturating_add(count(JOB_SET_RESTARTS_VARIABLE)?);
    Ok(count(RESTART_COUNT_VARIABLE)?.saturating_add(others))
}

/// The lookup function with readings on top.
struct Variables<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
}

impl Variables<'_> {
    fn text(&self, name: &str) -> Option<String> {
        (self.lookup)(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    fn number<T: FromStr<Err: std::error::Error + Send + Sync + 'static>>(
        &self,
        name: &str,
        wanted: &'static str,
    ) -> Result<Option<T>> {
        let Some(value) = self.text(name) else {
            return Ok(None);
        };
        match value.parse() {
            Ok(number) => Ok(Some(number)),
            Err(cause) => {
                let (name, value) = (name.to_owned(), shortened(&value));
                Err(Error::new(Kind::Value { name, value, wanted }).caused_by(cause))
            }
        }
    }

    /// The reference takes negative numbers for "not distributed"; old scripts set them.
    fn of_torchrun(&self, name: &str) -> Option<String> {
        self.text(name).filter(|value| value.parse::<i64>().map_or(true, |number| number >= 0))
    }

    fn count(&self, name: &str) -> Result<Option<usize>> {
        let wanted = "a whole number from 1 to 1048576";
        match self.number(name, wanted)? {
            Some(count) if !(1..=MAX_WORLD_SIZE).contains(&count) => {
                Err(Kind::Value { name: name.to_owned(), value: count.to_string(), wanted }.into())
            }
            count => Ok(count),
        }
    }

    fn rank(&self, name: &str) -> Result<Option<usize>> {
        self.number(name, "a whole number of at least 0")
    }

    fn first_count(&self, names: &[&'static str]) -> Result<Option<(usize, &'static str)>> {
        for &name in names {
            if let Some(count) = self.count(name)? {
                return Ok(Some((count, name)));
            }
        }
        Ok(None)
    }
}

/// What one family of variables says, before defaults are filled in. Sizes and ranks come with the name
/// of the variable they were read from, for messages.
struct Claim {
    source: Launcher,
    rank: (usize, &'static str),
    world_size: (usize, &'static str),
    local_rank: Option<(usize, &'static str)>,
    local_world_size: Option<(usize, &'static str)>,
    /// Where rank 0 is, if the launcher knows it; `MASTER_ADDR` goes before it.
    master_addr: Option<String>,
    /// Where ranks meet there, if the launcher's numbers say it; `MASTER_PORT` goes before it.
    master_port: Option<u16>,
}

fn torchrun_claim(variables: &Variables<'_>) -> Result<Option<Claim>> {
    let is_said = |name: &str| variables.of_torchrun(name).is_some();
    let world_size = if is_said("WORLD_SIZE") { variables.count("WORLD_SIZE")? } else { None };
    let local_rank = variables.of_torchrun("LOCAL_RANK");
    let rank = if is_said("RANK") { variables.rank("RANK")? } else { None };
    let Some(rank) = rank else {
        return match (world_size, local_rank) {
            // One of MPI and Slurm may know the rank: job scripts often export WORLD_SIZE alone.
            (Some(world_size), _) => match launcher_claim(variables)? {
                Some(claim) if claim.world_size.0 == world_size => Ok(Some(claim)),
                Some(claim) => Err(Kind::SizesDisagree {
                    world_size,
                    launcher: claim.source.as_str(),
                    name: claim.world_size.1.to_owned(),
                    found: claim.world_size.0,
                }
                .into()),
                None if world_size == 1 => Ok(None),
                None => Err(Kind::WorldSizeWithoutRank { world_size }.into()),
            },
            (None, Some(_)) if launcher_claim(variables)?.is_none() => {
                let value = variables.rank("LOCAL_RANK")?.unwrap_or_default();
                Err(Kind::Incomplete { present: "LOCAL_RANK", value, missing: "RANK" }.into())
            }
            (None, _) => Ok(None),
        };
    };
    let Some(world_size) = world_size else {
        // Some clusters export RANK for their own purposes; only without a better source is it an error.
        if launcher_claim(variables)?.is_some() {
            return Ok(None);
        }
        return Err(Kind::Incomplete { present: "RANK", value: rank, missing: "WORLD_SIZE" }.into());
    };
    let local_rank = match local_rank {
        Some(_) => variables.rank("LOCAL_RANK")?.map(|rank| (rank, "LOCAL_RANK")),
        None => None,
    };
    Ok(Some(Claim {
        source: Launcher::Torchrun,
        rank: (rank, "RANK"),
        world_size: (world_size, "WORLD_SIZE"),
        local_rank,
        local_world_size: variables.first_count(&["LOCAL_WORLD_SIZE"])?,
        master_addr: None,
        master_port: None,
    }))
}

/// The names under which one MPI publishes ranks and sizes.
struct MpiNames {
    source: Launcher,
    rank: &'static str,
    size: &'static str,
    local_rank: &'static [&'static str],
    local_size: &'static [&'static str],
}

const MPI_NAMES: [MpiNames; 3] = [
    MpiNames {
        source: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
    },
    MpiNames {
        source: Launcher::Mvapich,
        rank: "MV2_COMM_WORLD_RANK",
        size: "MV2_COMM_WORLD_SIZE",
        local_rank: &["MV2_COMM_WORLD_LOCAL_RANK"],
        local_size: &["MV2_COMM_WORLD_LOCAL_SIZE"],
    },
    MpiNames {
        source: Launcher::Mpich,
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK"],
        local_size: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"],
    },
];

fn launcher_claim(variables: &Variables<'_>) -> Result<Option<Claim>> {
    for names in &MPI_NAMES {
        let (Some(rank), Some(world_size)) = (variables.rank(names.rank)?, variables.count(names.size)?) else {
            continue;
        };
        // `srun --mpi=pmi2` sets these two as well, and Slurm knows more.
        let is_the_same = |claim: &Claim| (claim.rank.0, claim.world_size.0) == (rank, world_size);
        if names.source == Launcher::Mpich
            && let Some(claim) = slurm::claim(variables)?.filter(is_the_same)
        {
            return Ok(Some(claim));
        }
        let mut local_rank = None;
        for &name in names.local_rank {
            local_rank = local_rank.or(variables.rank(name)?.map(|rank| (rank, name)));
        }
        return Ok(Some(Claim {
            source: names.source,
            rank: (rank, names.rank),
            world_size: (world_size, names.size),
            local_rank,
            local_world_size: variables.first_count(names.local_size)?,
            master_addr: None,
            master_port: None,
        }));
    }
    match slurm::claim(variables)? {
        Some(claim) => Ok(Some(claim)),
        None => pmix_claim(variables),
    }
}

/// Managers with PMIx tell each process its number by a variable, and everything else by a protocol.
fn pmix_claim(variables: &Variables<'_>) -> Result<Option<Claim>> {
    let name = "PMIX_RANK";
    let Some(rank) = variables.rank(name)? else { return Ok(None) };
    match variables.first_count(&["WORLD_SIZE"])? {
        Some(world_size) => Ok(Some(Claim {
            source: Launcher::Pmix,
            rank: (rank, name),
            world_size,
            local_rank: variables.rank("PMIX_LOCAL_RANK")?.map(|rank| (rank, "PMIX_LOCAL_RANK")),
            local_world_size: variables.first_count(&["PMIX_LOCAL_SIZE"])?,
            master_addr: None,
            master_port: None,
        })),
        // There are others, and they would each train alone.
        None if rank > 0 => Err(Kind::PmixWithoutSize { rank }.into()),
        None => Ok(None),
    }
}

/// Checks a claim and fills in what it leaves open.
fn complete(variables: &Variables<'_>, claim: Claim) -> Result<RankVariables> {
    let (rank, rank_name) = claim.rank;
    let (world_size, size_name) = claim.world_size;
    check_rank((rank, rank_name), (world_size, size_name))?;
    if let Some((local_world_size, local_name)) = claim.local_world_size
        && local_world_size > world_size
    {
        return Err(Kind::LocalSizeTooLarge {
            local_name: local_name.to_owned(),
            local_world_size,
            name: size_name.to_owned(),
            world_size,
        }
        .into());
    }
    if let (Some(local_rank), Some(local_world_size)) = (claim.local_rank, claim.local_world_size) {
        check_rank(local_rank, local_world_size)?;
    }

    let master_addr = master_addr(variables, world_size)?;
    let one_machine = world_size == 1
        || claim.local_world_size.is_some_and(|(size, _)| size == world_size)
        || master_addr.as_deref().is_some_and(is_loopback);
    let known_local_world_size = claim.local_world_size.map(|(size, _)| size).or(one_machine.then_some(world_size));
    let local_rank = match (claim.local_rank, known_local_world_size) {
        (Some((local_rank, name)), _) => {
            check_rank((local_rank, name), (world_size, size_name))?;
            local_rank
        }
        (None, Some(local_world_size)) => rank % local_world_size,
        (None, None) => return Err(Kind::NoLocalRank { rank, world_size }.into()),
    };
    let master_addr = match master_addr.or(claim.master_addr) {
        Some(address) => address,
        None if one_machine => "127.0.0.1".to_owned(),
        None => return Err(Kind::NoMasterAddress { rank, world_size }.into()),
    };
    Ok(RankVariables {
        rank,
        local_rank,
        world_size,
        local_world_size: known_local_world_size.unwrap_or(local_rank + 1),
        master_addr,
        master_port: master_port(variables)?.or(claim.master_port).unwrap_or(DEFAULT_MASTER_PORT),
        source: claim.source,
    })
}

fn check_rank((rank, name): (usize, &str), (size, size_name): (usize, &str)) -> Result<()> {
    if rank < size {
        return Ok(());
    }
    Err(Kind::RankTooLarge { name: name.to_owned(), rank, size_name: size_name.to_owned(), size }.into())
}

fn is_loopback(address: &str) -> bool {
    address == "localhost" || address.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// An empty address among several ranks is a script whose variable was not filled, so nothing is put in its place.
fn master_addr(variables: &Variables<'_>, world_size: usize) -> Result<Option<String>> {
    let (name, wanted) = ("MASTER_ADDR", "the host name or address of the machine of rank 0");
    match (variables.text(name), (variables.lookup)(name)) {
        (None, Some(value)) if world_size > 1 => {
            Err(Kind::Value { name: name.to_owned(), value: shortened(&value), wanted }.into())
        }
        (text, _) => Ok(text),
    }
}

fn master_port(variables: &Variables<'_>) -> Result<Option<u16>> {
    let (name, wanted) = ("MASTER_PORT", "a port number from 1 to 65535");
    match variables.number(name, wanted)? {
        Some(0) => Err(Kind::Value { name: name.to_owned(), value: "0".to_owned(), wanted }.into()),
        port => Ok(port),
    }
}
