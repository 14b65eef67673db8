//! What a launch is asked to do: a plain value, no behaviour beyond checking itself.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use accelerate_core::config::{RunConfig, Tee};
use accelerate_core::environment::{MAX_WORLD_SIZE, OuterWorld};
use accelerate_core::hosts::{MachineSource, NumMachines};
use accelerate_core::names::counted;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::reference::Reference;

/// Which ranks of a run are on one machine.
///
/// ```
/// use accelerate_launch::{LaunchConfig, LocalRanks, Program};
/// // Machine 1 of two, which have one process and three.
/// let config = LaunchConfig {
///     num_machines: 2,
///     machine_rank: 1,
///     main_process_ip: Some("10.0.0.1".into()),
///     local_ranks: Some(LocalRanks { first_rank: 1, num_processes: 3 }),
///     ..LaunchConfig::new(Program::Executable("true".into()), 4)
/// };
/// assert!(config.check().is_ok());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalRanks {
    /// The rank of the first process on this machine.
    pub first_rank: usize,
    /// How many processes there are on this machine.
    pub num_processes: usize,
}

/// Everything [`launch`](crate::launch) needs to know. Make one with [`LaunchConfig::new`] and change fields.
///
/// ```
/// use accelerate_launch::{LaunchConfig, Program};
///
/// let config = LaunchConfig {
///     num_cpu_threads_per_process: Some(2),
///     args: vec!["--epochs".into(), "3".into()],
///     ..LaunchConfig::new(Program::guess("target/release/train".as_ref()), 2)
/// };
/// assert!(config.check().is_ok());
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LaunchConfig {
    /// What every rank runs.
    pub program: Program,
    /// Arguments of the program, the same for every rank.
    pub args: Vec<OsString>,
    /// Number of ranks over all machines together, at most [`MAX_WORLD_SIZE`], and [`MAX_LOCAL_PROCESSES`] on each.
    pub num_processes: usize,
    /// Number of machines. Each is started with the same values apart from [`machine_rank`](Self::machine_rank).
    pub num_machines: usize,
    /// Which machine this is, counted from 0. Machine 0 holds rank 0 and the rendezvous.
    pub machine_rank: usize,
    /// The ranks of this machine, where machines have unequal numbers of processes. `None` divides the ranks evenly.
    pub local_ranks: Option<LocalRanks>,
    /// Address of machine 0. `None` means `127.0.0.1`, which only one machine can use.
    pub main_process_ip: Option<String>,
    /// TCP port of the rendezvous on machine 0. `None` or 0 means any free port on one machine; on several
    /// machines `None` means 29500, and 0 is an error because the machines could not agree.
    pub main_process_port: Option<u16>,
    /// `OMP_NUM_THREADS` for the ranks. `None` leaves an inherited value alone; without one, several ranks
    /// share the cores of this machine evenly and one rank keeps its libraries' own default.
    pub num_cpu_threads_per_process: Option<usize>,
    /// Keep each rank on cores of its own: its share of those near its GPU, or without one of all that this process may use.
    /// Needs a [`helper`](Self::helper).
    pub enable_cpu_affinity: bool,
    /// The ranks compute on the CPU, so no GPU decides which cores are theirs.
    pub use_cpu: bool,
    /// What the ranks are called in `ROLE_NAME`.
    pub role: String,
    /// Which output is written to files as well.
    pub tee: Tee,
    /// The folder in which each launch makes one of its own for the files of [`tee`](Self::tee). `None` means the folder for
    /// temporary files, and no folder at all unless there is something to write.
    #[serde(with = "crate::hosts::optional_path")]
    pub log_dir: Option<PathBuf>,
    /// What that folder of its own is called. `None`: as torchrun does, `none_` and something random. All attempts of a run have
    /// one folder, with `attempt_0`, `attempt_1`, ... in it.
    pub log_name: Option<String>,
    /// How often the ranks are started again after one has failed, or a machine was lost.
    pub max_restarts: usize,
    /// How often they have been started before. [`launch`](crate::launch()) counts on from here.
    pub restart_count: usize,
    /// Another launcher, such as `mpirun`, has made this process a rank of this world, and the one process of this launch takes its
    /// place: it finds the numbers that this process has.
    #[serde(skip)]
    pub outer_world: Option<OuterWorld>,
    /// With how many of several machines a run may begin, and go on after a restart, where others cannot take part. `None`: with
    /// all of them only.
    pub min_machines: Option<usize>,
    /// More environment variables for every rank. They win over everything the launcher sets.
    pub environment: Vec<(OsString, OsString)>,
    /// What programs would find besides under Python Accelerate's launcher.
    pub reference: Reference,
    /// Whether the ranks' output passes through the launcher.
    pub capture: Capture,
    /// How long the other ranks get between `SIGTERM` and `SIGKILL` after one has failed.
    pub grace_period: Duration,
    /// How long the ranks get to end by themselves after this process was told to stop. A program that
    /// saves then, because it asks `should_stop`, may need more than the default of 10 s (that of `docker stop`).
    pub shutdown_grace_period: Duration,
    /// On several machines: how long one of them waits for a sign of life of the launcher before it ends its ranks.
    pub connection_timeout: Duration,
    /// The executable that makes ranks die with their launcher; see [`helper`](crate::helper).
    #[serde(skip)]
    pub helper: Option<Helper>,
    /// The first local rank may read the standard input of this process, unless that is a terminal and there are others.
    pub hands_on_input: bool,
    /// What every rank reads from its standard input, in the place of what [`hands_on_input`](Self::hands_on_input) says.
    pub input: Option<Vec<u8>>,
    /// This process does nothing but this launch. It then adopts and ends descendants that escaped from
    /// their rank's process group; a host with children of its own must leave this false.
    pub dedicated_process: bool,
}

/// The most processes that one launcher starts: 4096. More than these find neither cores nor file handles on a machine.
pub const MAX_LOCAL_PROCESSES: usize = 1 << 12;

impl LaunchConfig {
    /// A launch of `program` on `num_processes` ranks of this machine, everything else at its default.
    pub fn new(program: Program, num_processes: usize) -> Self {
        Self {
            program,
            args: Vec::new(),
            num_processes,
            num_machines: 1,
            machine_rank: 0,
            local_ranks: None,
            main_process_ip: None,
            main_process_port: None,
            num_cpu_threads_per_process: None,
            enable_cpu_affinity: false,
            use_cpu: false,
            role: "default".to_owned(),
            tee: Tee::default(),
            log_dir: None,
            log_name: None,
            max_restarts: 0,
            restart_count: 0,
            outer_world: None,
            min_machines: None,
            environment: Vec::new(),
            reference: Reference::default(),
            capture: Capture::Automatic,
            grace_period: Duration::from_millis(500),
            shutdown_grace_period: Duration::from_secs(10),
            connection_timeout: Duration::from_secs(30),
            helper: None,
            hands_on_input: true,
            input: None,
            dedicated_process: false,
        }
    }

    /// A launch of `program` on `num_processes` ranks as `config` says: machines, threads, and the variables by which the
    /// ranks learn what flags and files said to the launcher, and what they would find under Python Accelerate's. `num_processes` of `config` is not looked at, because its
    /// default is the number of GPUs.
    ///
    /// ```
    /// use accelerate_core::config::{PartialRunConfig, RunConfig, Sources};
    /// use accelerate_launch::{LaunchConfig, Program};
    /// let mut code = PartialRunConfig::default();
    /// code.cluster.num_machines = Some(2);
    /// let config = RunConfig::resolve(Sources { code, ..Default::default() })?;
    /// let launch = LaunchConfig::of_run(&config, Program::Executable("train".into()), 4);
    /// assert_eq!((launch.num_machines, launch.num_local_processes()), (2, 2));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn of_run(config: &RunConfig, program: Program, num_processes: usize) -> Self {
        let cluster = &config.cluster;
        let mut environment: Vec<(OsString, OsString)> =
            config.variables().into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        if let Some(gpu_ids) = cluster.gpu_ids.as_ref().filter(|gpu_ids| !gpu_ids.eq_ignore_ascii_case("all")) {
            environment.push(("CUDA_VISIBLE_DEVICES".into(), gpu_ids.into()));
        }
        Self {
            num_machines: cluster.num_machines,
            machine_rank: cluster.machine_rank,
            main_process_ip: cluster.main_process_ip.clone(),
            main_process_port: cluster.main_process_port,
            num_cpu_threads_per_process: cluster.num_cpu_threads_per_process,
            enable_cpu_affinity: cluster.enable_cpu_affinity,
            use_cpu: cluster.use_cpu,
            role: cluster.role.clone(),
            tee: cluster.tee.clone(),
            log_dir: cluster.log_dir.clone(),
            max_restarts: cluster.max_restarts,
            min_machines: cluster.min_machines,
            shutdown_grace_period: cluster.shutdown_grace_period,
            connection_timeout: cluster.connection_timeout,
            environment,
            reference: Reference::of_run(config, &program, num_processes),
            ..Self::new(program, num_processes)
        }
    }

    /// Do the processes learn their numbers? One process on one machine does not, unless it may have had others beside it, or is
    /// in Python and sharded.
    ///
    /// ```
    /// use accelerate_launch::{LaunchConfig, Program};
    /// let config = |num_processes| LaunchConfig::new(Program::Executable("train".into()), num_processes);
    /// assert_eq!((config(1).is_numbered(), config(2).is_numbered()), (false, true));
    /// ```
    pub fn is_numbered(&self) -> bool {
        // A run that goes on with fewer machines may come down to one process, which had numbers before.
        let may_shrink = self.min_machines.is_some() && self.local_ranks.is_some();
        let is_several = self.num_processes > 1 || may_shrink || self.reference.numbers_a_single_process();
        is_several && self.outer_world.is_none()
    }

    /// Count of all ranks, those among them that another launcher has started.
    pub fn world_size(&self) -> usize {
        self.outer_world.map_or(self.num_processes, |world| world.world_size)
    }

    /// Number of ranks on this machine. Exact after [`check`](Self::check).
    pub fn num_local_processes(&self) -> usize {
        self.local_ranks.map_or(self.num_processes / self.num_machines.max(1), |local| local.num_processes)
    }

    /// The rank of the first process on this machine. Exact after [`check`](Self::check).
    pub fn first_rank(&self) -> usize {
        if let Some(world) = &self.outer_world {
            return world.rank;
        }
        let evenly = || self.machine_rank.saturating_mul(self.num_local_processes());
        self.local_ranks.map_or_else(evenly, |local| local.first_rank)
    }

    /// Rejects counts that are zero, do not divide, or contradict each other.
    ///
    /// # Errors
    ///
    /// [`Error::is_invalid_configuration`], naming the flag, the value and the cure.
    ///
    /// ```
    /// use accelerate_launch::{LaunchConfig, Program};
    /// let config = LaunchConfig { num_machines: 2, main_process_ip: Some("10.0.0.1".into()),
    ///     ..LaunchConfig::new(Program::Executable("true".into()), 5) };
    /// assert!(config.check().unwrap_err().to_string().contains("--num_processes 5"));
    /// ```
    pub fn check(&self) -> Result<()> {
        let Self { num_processes, num_machines, .. } = *self;
        let invalid = |problem: String| Err(Error::invalid_configuration(problem));
        if num_processes == 0 {
            return invalid("--num_processes is 0, but at least 1 process is needed to run anything".into());
        }
        if num_machines == 0 {
            return invalid("--num_machines is 0; it counts this machine too, so 1 is the least".into());
        }
        self.check_restarts()?;
        // Numbers of processes of each machine were said where the machines were named.
        if let Some(local) = self.local_ranks
            && (local.num_processes > MAX_LOCAL_PROCESSES || num_processes > MAX_WORLD_SIZE)
        {
            return invalid(format!(
                "machine {} of {num_machines} is to have {} of {num_processes} processes; one machine may have \
                 {MAX_LOCAL_PROCESSES} and a run {MAX_WORLD_SIZE}, so name smaller numbers with the hosts, or more machines",
                self.machine_rank, local.num_processes
            ));
        }
        if num_processes.max(num_machines) > MAX_WORLD_SIZE {
            return invalid(format!(
                "--num_processes {num_processes} on --num_machines {num_machines} is more than the {MAX_WORLD_SIZE} that a run \
                 may have"
            ));
        }
        if self.num_local_processes() > MAX_LOCAL_PROCESSES {
            return invalid(format!(
                "--num_processes {num_processes} on --num_machines {num_machines} is more than the {MAX_LOCAL_PROCESSES} that \
                 one machine may have; use a smaller --num_processes, or more machines"
            ));
        }
        self.check_machines()?;
        if self.main_process_ip.as_ref().is_some_and(|address| address.trim().is_empty()) {
            return invalid(
                "--main_process_ip is empty; name the address of machine 0, or leave it out on one machine".into(),
            );
        }
        if self.connection_timeout.is_zero() {
            return invalid("--connection_timeout is 0, but machines need some time to hear of the launcher".into());
        }
        if self.num_cpu_threads_per_process == Some(0) {
            return invalid("--num_cpu_threads_per_process is 0, but it must be at least 1".into());
        }
        self.check_ranks()
    }

    /// What is said of this machine among several.
    fn check_machines(&self) -> Result<()> {
        let Self { num_processes, num_machines, machine_rank, .. } = *self;
        let invalid = |problem: String| Err(Error::invalid_configuration(problem));
        if machine_rank >= num_machines {
            return invalid(format!(
                "--machine_rank {machine_rank} is out of range: the numbers of {} go from 0 to {}",
                counted(num_machines, "machine"),
                num_machines - 1
            ));
        }
        if let Some(LocalRanks { first_rank, num_processes: num_local }) = self.local_ranks {
            let end = first_rank.checked_add(num_local);
            if num_local == 0 || end.is_none_or(|end| end > num_processes) {
                return invalid(format!(
                    "this machine is to have {} from rank {first_rank} on, but the run has {num_processes}; at least 1 is \
                     needed, and all of them must be ranks of the run",
                    counted(num_local, "process")
                ));
            }
        } else if !num_processes.is_multiple_of(num_machines) {
            let below = num_processes - num_processes % num_machines;
            let above = below + num_machines;
            let choices = if below == 0 { format!("{above}") } else { format!("{below} or {above}") };
            return invalid(format!(
                "--num_processes {num_processes} counts the processes of all machines together and does not divide \
                 by --num_machines {num_machines}; use {choices}"
            ));
        }
        if num_machines > 1 {
            if self.main_process_ip.is_none() {
                return invalid(format!(
                    "{num_machines} machines can only find each other with --main_process_ip, the address of \
                     machine 0, given on every machine; or name all of them with --hosts, and start them from one place"
                ));
            }
            if self.main_process_port == Some(0) {
                return invalid(format!(
                    "--main_process_port 0 (any free port) cannot work on {num_machines} machines: they could not \
                     agree on the number; name the same port on every machine"
                ));
            }
        }
        Ok(())
    }

    /// Only who has started all machines can restart them, and leave some out.
    fn check_restarts(&self) -> Result<()> {
        let invalid = |problem: String| Err(Error::invalid_configuration(problem));
        let source = match self.local_ranks {
            Some(_) => MachineSource::Hosts { num_hosts: self.num_machines },
            None => MachineSource::EachByItself,
        };
        let wanted = NumMachines { most: Some(self.num_machines), least: self.min_machines };
        wanted.check(source).map_err(|error| Error::invalid_configuration(error.to_string()))?;
        let is_one_by_one = self.num_machines > 1 && self.local_ranks.is_none();
        if self.max_restarts > 0 && is_one_by_one {
            return invalid(format!(
                "--max_restarts {} needs one launcher for all machines, and here each is started by a command of its own; start all \
                 of them from one place by --hosts, or leave --max_restarts out",
                self.max_restarts
            ));
        }
        Ok(())
    }

    /// What is said of single ranks.
    fn check_ranks(&self) -> Result<()> {
        let invalid = |problem: String| Err(Error::invalid_configuration(problem));
        let num_local = self.num_local_processes();
        if let Some(local_rank) = self.tee.last_named().filter(|local_rank| *local_rank >= num_local) {
            return invalid(format!(
                "--tee names the local rank {local_rank}, but those of this machine are numbered from 0 to {}",
                num_local.saturating_sub(1)
            ));
        }
        if self.log_dir.as_ref().is_some_and(|folder| folder.as_os_str().is_empty()) {
            return invalid("--log_dir is empty; name a folder, or leave it out".into());
        }
        if self.enable_cpu_affinity && self.helper.as_ref().is_none_or(|helper| helper.only_guards) {
            return invalid(
                "enable_cpu_affinity needs LaunchConfig::helper, which binds each rank to its cores".into(),
            );
        }
        Ok(())
    }
}

/// What a rank runs.
///
/// ```
/// use accelerate_launch::Program;
/// assert!(Program::PythonModule("package.train".into()).is_python());
/// assert_eq!(Program::Executable("train".into()).name(), "train");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Program {
    /// A binary or a script with a `#!` line: a path, or a name that is looked up in `PATH`.
    Executable(OsString),
    /// A Python file, run by the interpreter of the active environment.
    PythonScript(#[serde(with = "crate::hosts::path")] PathBuf),
    /// A Python module, run as `python -m name`.
    PythonModule(OsString),
}

impl Program {
    /// A file that ends in `.py` is a Python script, anything else is run directly.
    ///
    /// ```
    /// use accelerate_launch::Program;
    /// assert_eq!(Program::guess("train.py".as_ref()), Program::PythonScript("train.py".into()));
    /// assert_eq!(Program::guess("./train".as_ref()), Program::Executable("./train".into()));
    /// ```
    pub fn guess(target: &Path) -> Self {
        if target.extension().is_some_and(|extension| extension == "py") {
            Self::PythonScript(target.to_path_buf())
        } else {
            Self::Executable(target.as_os_str().to_os_string())
        }
    }

    /// The path or name as the user gave it.
    pub fn name(&self) -> &std::ffi::OsStr {
        match self {
            Self::Executable(name) | Self::PythonModule(name) => name,
            Self::PythonScript(path) => path.as_os_str(),
        }
    }

    /// Runs under a Python interpreter. An executable does if it is called `python`, `python3` or `python3.` and a number.
    ///
    /// ```
    /// use accelerate_launch::Program;
    /// assert!(Program::Executable("/usr/bin/python3.11".into()).is_python());
    /// assert!(!Program::Executable("pythonic".into()).is_python());
    /// ```
    pub fn is_python(&self) -> bool {
        let Self::Executable(name) = self else { return true };
        let name = Path::new(name).file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
        let version = name.strip_prefix("python").map(|version| version.strip_prefix('3').unwrap_or(version));
        let is_version = |rest: &str| {
            let number = rest.strip_prefix('.').unwrap_or_default();
            rest.is_empty() || (!number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
        };
        version.is_some_and(is_version)
    }
}

/// Whether the output of the ranks passes through the launcher.
///
/// ```
/// assert_eq!(accelerate_launch::Capture::default(), accelerate_launch::Capture::Automatic);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Capture {
    /// Several ranks: yes. One rank: no, it keeps the terminal, a debugger and progress bars included; but yes where its output is
    /// copied to files, or where it may be restarted and its standard input is no terminal.
    #[default]
    Automatic,
    /// Always, so that a [`Reporter`](crate::Reporter) sees every byte.
    Always,
}

/// An executable that plays the roles of [`helper`](crate::helper) when asked to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Helper {
    /// Path of the executable. Its `main` must begin with [`helper::run_if_asked`](crate::helper::run_if_asked).
    pub executable: PathBuf,
    /// It only guards, and ranks are started directly: programs that tie themselves to their launcher. `false` by default.
    pub only_guards: bool,
}

impl Helper {
    /// The running executable itself, even when its file has been replaced on disk meanwhile.
    ///
    /// ```
    /// assert!(accelerate_launch::Helper::this_executable().executable.is_absolute());
    /// ```
    pub fn this_executable() -> Self {
        Self { executable: PathBuf::from("/proc/self/exe"), only_guards: false }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(0, 1, 0, None, None, "at least 1")]
    #[case(2, 0, 0, None, None, "--num_machines is 0")]
    #[case(usize::MAX, 1, 0, None, None, "more than the")]
    #[case(1_000_000_000, 1, 0, None, None, "more than the 1048576")]
    #[case(1_000_000, 1, 0, None, None, "4096 that one machine may have")]
    #[case(4, 2, 0, Some(" "), None, "--main_process_ip is empty")]
    #[case(4, 1, 0, Some(""), None, "--main_process_ip is empty")]
    #[case(usize::MAX, 2, 0, Some("a"), None, "more than the")]
    #[case(5, 2, 0, Some("a"), None, "use 4 or 6")]
    #[case(1, 2, 0, Some("a"), None, "use 2")]
    #[case(4, 2, 2, Some("a"), None, "the numbers of 2 machines go from 0 to 1")]
    #[case(4, 2, 0, None, None, "--main_process_ip")]
    #[case(4, 2, 0, Some("a"), Some(0), "same port on every machine")]
    fn contradictions_are_errors(
        #[case] num_processes: usize,
        #[case] num_machines: usize,
        #[case] machine_rank: usize,
        #[case] main_process_ip: Option<&str>,
        #[case] main_process_port: Option<u16>,
        #[case] words: &str,
    ) {
        let config = LaunchConfig {
            num_machines,
            machine_rank,
            main_process_ip: main_process_ip.map(str::to_string),
            main_process_port,
            ..LaunchConfig::new(Program::Executable("train".into()), num_processes)
        };
        let error = config.check().unwrap_err();
        assert!(error.is_invalid_configuration() && error.to_string().contains(words), "{error}");
    }

    #[rstest]
    #[case::one_machine(1, 3, None, false, None)]
    #[case::all_from_one_place(2, 3, Some(1), true, None)]
    #[case::one_by_one(2, 3, None, false, Some("--max_restarts 3 needs one launcher for all machines"))]
    #[case::one_by_one(2, 0, Some(1), false, Some("a range of machines, 1 to 2 (--nnodes 1:2), needs one launcher"))]
    #[case::none_left_out(2, 0, Some(2), false, None)]
    #[case::more_than_there_are(
        2,
        0,
        Some(3),
        true,
        Some("--min_machines (or MIN of --nnodes MIN:MAX) is 3, but 2 hosts are named")
    )]
    #[case::more_than_there_are(
        1,
        0,
        Some(2),
        false,
        Some("--min_machines (or MIN of --nnodes MIN:MAX) is 2 and --num_machines 1")
    )]
    fn only_one_launcher_of_all_machines_restarts_them(
        #[case] num_machines: usize,
        #[case] max_restarts: usize,
        #[case] min_machines: Option<usize>,
        #[case] is_from_one_place: bool,
        #[case] words: Option<&str>,
    ) {
        let config = LaunchConfig {
            num_machines,
            max_restarts,
            min_machines,
            main_process_ip: Some("a".into()),
            local_ranks: is_from_one_place.then_some(LocalRanks { first_rank: 0, num_processes: 1 }),
            ..LaunchConfig::new(Program::Executable("train".into()), 2)
        };
        let text = config.check().err().map(|error| error.to_string());
        assert_eq!(text.is_some(), words.is_some(), "{text:?}");
        assert!(text.unwrap_or_default().contains(words.unwrap_or_default()));
    }

    /// Neither an address nor another number of processes would make it possible.
    #[test]
    fn a_range_without_a_list_is_told_before_what_single_commands_lack() {
        let config = LaunchConfig {
            num_machines: 2,
            min_machines: Some(1),
            ..LaunchConfig::new(Program::Executable("train".into()), 1)
        };
        let text = config.check().unwrap_err().to_string();
        assert!(text.contains("--hosts") && text.contains("--nnodes 1:2"), "{text}");
        assert!(!text.contains("--main_process_ip") && !text.contains("--num_processes"), "{text}");
    }
}
