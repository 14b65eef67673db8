//! Who this process is: rank, device, and the group of its peers.

mod affinity;
mod device;
mod presence;
mod process_control;
mod rendezvous;
mod split;
mod stop_signals;
mod threads;

pub(crate) use presence::PRESENCE;
pub use split::{SplitBetweenProcesses, SplitOptions};
pub(crate) use stop_signals::name as signal_name;

use crate::error::{Result, StateError};
use crate::group::Group;
use crate::messages;
use crate::status::Status;
use accelerate_core::config::{InitProcessGroupKwargs, PartialRunConfig, RunConfig, Sources};
use accelerate_core::environment::{CORES_VARIABLE, RankVariables, rank_variables, restart_count};
use accelerate_core::names::DistributedType;
use presence::Presence;
use std::fmt;
use std::sync::{Arc, OnceLock};
use stop_signals::StopSignals;
use tch::Device;

/// What a process knows of its run (`PartialState` of the reference, `state.py`).
///
/// It is an ordinary value, made once and passed on: nothing is global, so one program can hold several,
/// for example one per thread in a test. Clones share one group.
///
/// Method: a process belongs to a run when a launcher's variables say so (`accelerate launch`, torchrun,
/// Open MPI, MPICH, MVAPICH or Slurm), on the CPU as well as on GPUs. Otherwise it is alone.
///
/// ```
/// use accelerate::{PartialState, PartialStateOptions};
///
/// let state = PartialState::new(&PartialStateOptions { cpu: true, ..Default::default() })?;
/// assert_eq!((state.process_index(), state.num_processes()), (0, 1));
/// assert!(state.is_main_process() && !state.use_distributed());
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct PartialState(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    device: Device,
    backend: Option<&'static str>,
    distributed_type: DistributedType,
    group: Group,
    /// What others can read of this process.
    status: Status,
    local_process_index: usize,
    num_local_processes: usize,
    /// As the environment of this process says it.
    restart_count: usize,
    /// There from the moment on at which the program first asks.
    stop_signals: Arc<OnceLock<StopSignals>>,
    /// For the place of this process in its run, not for ranks that are threads of a test.
    presence: Option<Arc<Presence>>,
}

/// The lines that the reference prints, for logs and reports.
///
/// ```
/// use accelerate::{PartialState, PartialStateOptions};
///
/// let state = PartialState::new(&PartialStateOptions { cpu: true, ..Default::default() })?;
/// let lines = "Distributed environment: NO\nNum processes: 1\nProcess index: 0\nLocal process index: 0\nDevice: cpu\n";
/// assert_eq!(state.to_string(), lines);
/// # Ok::<(), accelerate::Error>(())
/// ```
impl fmt::Display for PartialState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Distributed environment: {}", self.distributed_type())?;
        if let Some(backend) = self.0.backend {
            write!(f, "  Backend: {backend}")?;
        }
        writeln!(f, "\nNum processes: {}", self.num_processes())?;
        writeln!(f, "Process index: {}", self.process_index())?;
        writeln!(f, "Local process index: {}", self.local_process_index())?;
        match self.device() {
            Device::Cuda(index) => writeln!(f, "Device: cuda:{index}"),
            other => writeln!(f, "Device: {}", format!("{other:?}").to_lowercase()),
        }
    }
}

/// How [`PartialState::new`] finds this process's place.
///
/// ```
/// assert!(!accelerate::PartialStateOptions::default().cpu);
/// ```
#[derive(Clone, Debug, Default)]
pub struct PartialStateOptions {
    /// Stay on the CPU even where GPUs are present? Default false: as the environment says.
    pub cpu: bool,
    /// How the processes meet, and how long they wait for each other.
    pub kwargs: InitProcessGroupKwargs,
}

/// Reads one variable of the environment; tests pass tables instead.
pub(crate) type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The real environment. What is not Unicode in a value is replaced, so that the value is refused where it would count, and not taken for
/// one that is not there.
pub(crate) fn process_environment(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

impl Inner {
    fn alone(device: Device, restart_count: usize, status: Status) -> Self {
        Self {
            device,
            backend: None,
            distributed_type: DistributedType::No,
            group: Group::single_process(),
            status,
            local_process_index: 0,
            num_local_processes: 1,
            restart_count,
            stop_signals: Arc::default(),
            presence: None,
        }
    }
}

impl PartialState {
    /// Finds this process's place in its run and connects it with its peers.
    ///
    /// Collective in a run of several processes: it returns when all have arrived.
    ///
    /// # Errors
    /// Variables that contradict each other; a port that is taken; ranks that do not arrive within
    /// `kwargs.timeout`, each named.
    pub fn new(options: &PartialStateOptions) -> Result<Self> {
        let mut code = PartialRunConfig { process_group: options.kwargs.clone(), ..Default::default() };
        code.cluster.use_cpu = options.cpu.then_some(true);
        let environment: Lookup<'_> = &process_environment;
        let config = RunConfig::resolve(Sources { code, environment: Some(environment), ..Default::default() })?;
        messages::set_log_level(config.cluster.log_level);
        Self::join(&config, environment)
    }

    /// Joins the processes that a launcher's variables speak of. Collective.
    pub(crate) fn join(config: &RunConfig, lookup: Lookup<'_>) -> Result<Self> {
        let cluster = &config.cluster;
        // Libraries of mathematics load parts of themselves later, and end the process where they cannot.
        std::env::current_dir().map_err(|source| StateError::NoWorkingFolder { source })?;
        let ranks = rank_variables(lookup)?;
        let local_rank = ranks.as_ref().map_or(0, |ranks| ranks.local_rank);
        let num_local_processes = ranks.as_ref().map_or(1, |ranks| ranks.local_world_size);
        let num_cores = std::thread::available_parallelism().map_or(1, usize::from);
        let unusable_threads = threads::settle(num_cores, num_local_processes, lookup);
        // Of the cores that a launcher has chosen, a share would be a share of a share.
        let cores = lookup(CORES_VARIABLE).filter(|_| cluster.enable_cpu_affinity);
        let is_bound = cores.as_deref().is_some_and(affinity::is_kept_on);
        if cluster.enable_cpu_affinity && !is_bound {
            affinity::pin(local_rank, num_local_processes)?;
        }
        let wanted = cluster.torch_device.as_deref().map(|name| (name, config.origin("torch_device")));
        let device = device::choose(cluster.use_cpu, wanted, local_rank)?;
        let ranks = ranks.filter(|ranks| ranks.world_size > 1);
        if let Some(ranks) = &ranks {
            messages::set_rank(ranks.rank);
        }
        if let Some(unusable) = unusable_threads {
            messages::warning!("{unusable}");
        }
        if let Some(cores) = cores.filter(|_| !is_bound) {
            messages::warning!(
                "{CORES_VARIABLE} is {cores:?}, which are not the cores of this process, so it is left aside and the process \
                 chooses its share of those that it may use; the variable is a launcher's, and was inherited from another run"
            );
        }
        let mut inner = match ranks {
            Some(ranks) => Self::distributed(device, &ranks, config, lookup)?,
            None => Inner::alone(device, restart_count(lookup)?, Status::of_process(lookup)),
        };
        inner.presence = Some(Arc::new(Presence::show()));
        Ok(Self(Arc::new(inner)))
    }

    fn distributed(device: Device, ranks: &RankVariables, config: &RunConfig, lookup: Lookup<'_>) -> Result<Inner> {
        let backend = device::backend(device, config.process_group.backend.as_deref())?;
        let status = Status::of_process(lookup);
        let group = rendezvous::connect(ranks, device, backend, config, lookup, &status)?;
        let distributed_type = if device.is_cuda() { DistributedType::MultiGpu } else { DistributedType::MultiCpu };
        Ok(Inner {
            device,
            backend: Some(backend),
            distributed_type,
            group,
            status,
            local_process_index: ranks.local_rank,
            num_local_processes: ranks.local_world_size,
            restart_count: restart_count(lookup)?,
            stop_signals: Arc::default(),
            presence: None,
        })
    }

    #[cfg(test)]
    pub(crate) fn single_process(device: Device) -> Self {
        Self(Arc::new(Inner::alone(device, 0, Status::default())))
    }

    /// A rank of a group that exists already, all on this machine's CPU.
    pub(crate) fn of_group(group: Group) -> Self {
        let (rank, world_size) = (group.rank(), group.world_size());
        let distributed_type = if world_size > 1 { DistributedType::MultiCpu } else { DistributedType::No };
        Self(Arc::new(Inner {
            device: Device::Cpu,
            backend: (world_size > 1).then_some("gloo"),
            distributed_type,
            group,
            status: Status::default(),
            local_process_index: rank,
            num_local_processes: world_size,
            restart_count: 0,
            stop_signals: Arc::default(),
            presence: None,
        }))
    }

    /// This process among the same peers, connected by another group.
    pub(crate) fn with_group(&self, group: Group) -> Self {
        let Inner {
            device, backend, distributed_type, local_process_index, num_local_processes, restart_count, ..
        } = *self.0;
        let (stop_signals, status) = (Arc::clone(&self.0.stop_signals), self.0.status.clone());
        let presence = self.0.presence.clone();
        Self(Arc::new(Inner {
            device,
            backend,
            distributed_type,
            group,
            status,
            local_process_index,
            num_local_processes,
            restart_count,
            stop_signals,
            presence,
        }))
    }

    /// The first signal by which this process was asked to end, if one has come since this was called for the first time. That
    /// call is collective, so that all ranks listen or none does.
    pub(crate) fn stop_signal(&self) -> Result<Option<i32>> {
        if self.0.stop_signals.get().is_none() {
            let listening = StopSignals::listen().map_err(|source| StateError::NoSignals { source }.into());
            let listening = self.group().agree_on_success("should_stop", listening)?;
            // Clones may ask at the same time; one listener is as good as the other.
            let _ = self.0.stop_signals.set(listening);
        }
        Ok(self.0.stop_signals.get().and_then(StopSignals::first))
    }

    /// How often this process's launcher says that the run was started before.
    pub(crate) fn own_restart_count(&self) -> usize {
        self.0.restart_count
    }

    /// What others can read of this process.
    pub(crate) fn status(&self) -> &Status {
        &self.0.status
    }

    /// The device this process computes on.
    pub fn device(&self) -> Device {
        self.0.device
    }

    /// `gloo` or `nccl`; `None` in a run of one process.
    pub fn backend(&self) -> Option<&str> {
        self.0.backend
    }

    /// How the processes of the run work together.
    pub fn distributed_type(&self) -> DistributedType {
        self.0.distributed_type
    }

    /// All processes of the run.
    pub fn group(&self) -> &Group {
        &self.0.group
    }

    /// Count of all processes.
    pub fn num_processes(&self) -> usize {
        self.0.group.world_size()
    }

    /// Number of this process among all, from 0.
    pub fn process_index(&self) -> usize {
        self.0.group.rank()
    }

    /// Number of this process among those of its machine, from 0.
    pub fn local_process_index(&self) -> usize {
        self.0.local_process_index
    }

    /// Count of the processes on this machine.
    pub fn num_local_processes(&self) -> usize {
        self.0.num_local_processes
    }

    /// Does the run have more than one process?
    pub fn use_distributed(&self) -> bool {
        self.num_processes() > 1
    }
}
