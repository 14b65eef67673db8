//! What a launcher asks: how many processes, where, in which precision.

use super::process_group::{duration_of_seconds, seconds_of_duration};
use super::{MixedPrecision, RendezvousOptions, Tee};
use crate::Result;
use crate::environment::MAX_WORLD_SIZE;
use crate::error::config::ConfigErrorKind as Kind;
use crate::names::{ComputeEnvironment, DistributedType, LogLevel};
use crate::settings::SettingValue;
use crate::settings::record::record;
use serde::{Deserialize, Deserializer, Serializer};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

const NO_TPU: &str = "libtorch without Python has no TPU; leave it out";
pub(super) const NO_SAGEMAKER: &str =
    "Amazon SageMaker is not available; write a file for LOCAL_MACHINE, without the keys of SageMaker";
const NO_MPIRUN: &str = "start the program with mpirun itself: its variables are understood";

record! {
    /// The top level of a configuration file, and what the flags of `accelerate launch` say besides plugins
    /// (`ClusterConfig` of the reference, `commands/config/config_args.py`).
    ///
    /// ```
    /// use accelerate_core::config::{ClusterConfig, ClusterSettings};
    /// let settings = ClusterSettings::from(ClusterConfig { num_processes: Some(4), ..Default::default() });
    /// assert_eq!((settings.num_processes, settings.num_machines), (Some(4), 1));
    /// ```
    ClusterConfig => ClusterSettings, section "", keys "", variables "ACCELERATE_" {
        /// Where processes run: LOCAL_MACHINE.
        ///
        /// Amazon SageMaker is not available.
        compute_environment: ComputeEnvironment = ComputeEnvironment::LocalMachine => setting().launcher()
            .refused(NO_SAGEMAKER);
        /// How processes work together, such as MULTI_GPU, MULTI_CPU, FSDP or DEEPSPEED.
        ///
        /// Default: as devices and the other settings say. NO is one process.
        distributed_type: DistributedType => setting().launcher();
        /// Precision of the computation, for a program that does not choose one itself: no, fp16, bf16, fp8.
        ///
        /// Default "no".
        mixed_precision: MixedPrecision = MixedPrecision::No => setting().flag("mixed_precision");
        /// Keep the program on the CPU even if there is a GPU.
        use_cpu: bool = false => setting().flag("cpu").flag_aliases(&["use_cpu"]).switch();
        /// Compare every call between processes before it is made, and list what each process calls where they differ.
        ///
        /// The accelerator's calls on tensors are always compared. With this, all others are, too, those of the library as well.
        debug: bool = false => setting().variable("ACCELERATE_DEBUG_MODE").flag("debug").switch();
        /// Number of processes, counted over all machines.
        ///
        /// Without it: one per NVIDIA GPU that CUDA_VISIBLE_DEVICES leaves visible; one if there is none, with --cpu, or with the
        /// distributed_type NO. At most 4096 on one machine, and 1048576 in all.
        num_processes: usize => setting().launcher().flag("num_processes").at_least(1).at_most(MAX_WORLD_SIZE as u64)
            .reference_default("-1").silent(&["-1"]);
        /// Number of machines. Run the same command on each, with its own --machine_rank, or once with --hosts.
        num_machines: usize = 1 => setting().launcher().flag("num_machines").at_least(1).at_most(MAX_WORLD_SIZE as u64);
        /// The machines to start on by ssh, each with its number of processes: node1:4,node2:2.
        ///
        /// One command here starts all of them. Without a number, a machine gets an equal share of --num_processes, or one process
        /// for each GPU of this machine. An IPv6 address stands in square brackets, with the number behind them: [fd78::1]:4.
        hosts: String => setting().own_key().launcher().flag("hosts");
        /// A file of such machines, with lines such as `node1 slots=4` or `node1:4`.
        hostfile: PathBuf => setting().own_key().launcher().flag("hostfile");
        /// With how many machines of --hosts, of a host file or of a Slurm job a run may begin, and go on after a restart, where others
        /// cannot take part.
        ///
        /// A machine that is left out takes its processes with it: those of the others keep their numbers on each machine, and are
        /// ranked anew. Each restart tries all machines again. Default: all of them.
        min_machines: usize => setting().own_key().launcher().flag("min_machines").at_least(1)
            .at_most(MAX_WORLD_SIZE as u64);
        /// The command that logs in to a machine of --hosts: the host and a command for a shell there are appended.
        ssh_command: String = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10".to_owned() => setting()
            .own_key().launcher().flag("ssh_command");
        /// Seconds after which a machine of --hosts, of a host file or of a Slurm job that says nothing is given up.
        ///
        /// A machine that hears nothing from the launcher for as long ends its processes. Both say something four times as often, unless
        /// the launcher has been suspended by Ctrl-Z. Logging in, and the look at the machines before the start, may take as long each,
        /// and 10 seconds at least. Default 30 seconds.
        #[serde(serialize_with = "seconds_of_duration", deserialize_with = "duration_of_seconds")]
        connection_timeout: Duration = Duration::from_secs(30) => setting().own_key().launcher().flag("connection_timeout");
        /// Which machine this is, counted from 0.
        machine_rank: usize = 0 => setting().launcher().flag("machine_rank");
        /// Address of machine 0, where rank 0 runs. Needed on several machines.
        main_process_ip: String => setting().launcher().flag("main_process_ip");
        /// TCP port on machine 0 where the processes find each other.
        ///
        /// 0, which is the default on one machine, takes any free port. On several machines the default is 29500.
        main_process_port: u16 => setting().launcher().flag("main_process_port");
        /// The GPUs of this machine that are used: all, or numbers separated by commas.
        ///
        /// Handed on as CUDA_VISIBLE_DEVICES. Default: those that are visible already.
        gpu_ids: String => setting().launcher().flag("gpu_ids").harmless(&["all"]);
        /// Threads of each process (OMP_NUM_THREADS).
        ///
        /// Without it, several processes share the cores evenly unless OMP_NUM_THREADS is set to a possible number.
        num_cpu_threads_per_process: usize => setting().own_key().launcher().flag("num_cpu_threads_per_process").at_least(1);
        /// Keep each process on cores of its own: an equal share of those near its GPU, or without one of those of its machine.
        enable_cpu_affinity: bool = false => setting()
            .variable("ACCELERATE_CPU_AFFINITY").flag("enable_cpu_affinity").switch();
        /// How the machines find each other: static.
        rdzv_backend: String = "static".to_owned() => setting().launcher().flag("rdzv_backend").harmless(&["c10d"])
            .refused("machines meet at --main_process_ip and --main_process_port; choose static");
        /// How long the processes may take to meet, in seconds: join_timeout=900.
        ///
        /// Or timeout=900, as torchrun's static backend calls it. It is torchrun's text for options of its agents; these two have
        /// their meaning here. Default: as long as any collective may take.
        rdzv_conf: RendezvousOptions = RendezvousOptions::default() => setting().own_key().flag("rdzv_conf");
        /// Are all machines in one network?
        same_network: bool = true => setting().launcher().flag("same_network").switch().reference_default("false").harmless(&["false"])
            .without_effect("each machine must reach --main_process_ip, in one network or not");
        /// The function of a Python script that a launcher in a notebook or on a TPU calls.
        main_training_function: String = "main".to_owned() => setting().launcher().flag("main_training_function")
            .without_effect("a program has one main function");
        /// Shard models over the processes.
        use_fsdp: bool = false => setting().own_key().flag("use_fsdp").switch();
        /// Shard models as a DeepSpeed configuration says.
        use_deepspeed: bool = false => setting().own_key().flag("use_deepspeed").switch();
        /// Lay processes out along several axes.
        use_parallelism_config: bool = false => setting().own_key().flag("use_parallelism_config").switch();
        /// One process for each GPU, or one where there is none: what happens without it, too.
        multi_gpu: bool = false => setting().own_key().launcher().flag("multi_gpu").switch()
            .without_effect("without --num_processes there is one process for each GPU in any case");
        /// The device that the program computes on, such as cuda:1, whatever the automatic choice is.
        torch_device: String => setting().own_key();
        /// The least level of messages that are written to standard error: debug, info, warning (the default), error or critical.
        ///
        /// A program that has set a subscriber of the crate tracing decides by that.
        log_level: LogLevel => setting().own_key();
        /// Streams that are written to files, too: 0 none, 1 standard output, 2 standard error, 3 both.
        ///
        /// By local rank: 0:1,1:3. The files are stdout.log and stderr.log in FOLDER/none_RANDOM/attempt_0/LOCAL_RANK, as torchrun
        /// names them, where FOLDER is that of --log_dir, or else a new one for temporary files. The terminal shows the same as
        /// without.
        tee: Tee = Tee::default() => setting().own_key().launcher().flag("tee");
        /// When the run has to be over: a time such as 2030-01-31T18:00:00+01:00, or seconds since 1970.
        ///
        /// A program that asks `should_stop` is told to save and to end the stop_margin before, on all ranks at the same step.
        #[serde(serialize_with = "text_of_time", deserialize_with = "time_of_text")]
        stop_at: SystemTime => setting().own_key().flag("stop_at");
        /// When the allocation of the job ends, as Slurm says it. The earlier of this and stop_at counts.
        #[serde(serialize_with = "text_of_time", deserialize_with = "time_of_text")]
        allocation_end: SystemTime => setting().own_key().variable("SLURM_JOB_END_TIME").silent(&["0"]);
        /// How long before the end `should_stop` says so.
        ///
        /// It has to be long enough for one step and one save. Default 120 seconds.
        #[serde(serialize_with = "seconds_of_duration", deserialize_with = "duration_of_seconds")]
        stop_margin: Duration = Duration::from_secs(120) => setting().own_key().flag("stop_margin");
        /// Seconds between asking processes to end and making them (SIGKILL), after the launcher was interrupted or told to end.
        ///
        /// Raise it for programs that save then, as those do that ask `should_stop`. A second Ctrl-C does not wait.
        #[serde(serialize_with = "seconds_of_duration", deserialize_with = "duration_of_seconds")]
        shutdown_grace_period: Duration = Duration::from_secs(10) => setting().own_key().launcher()
            .flag("shutdown_grace_period");
        /// The folder under which --tee writes its files.
        ///
        /// Without --tee, as under torchrun, it holds only what programs write into TORCHELASTIC_ERROR_FILE.
        log_dir: PathBuf => setting().own_key().launcher().flag("log_dir");
        /// What the processes are called in ROLE_NAME.
        role: String = "default".to_owned() => setting().own_key().launcher().flag("role");
        /// How often all processes are started again after one has failed, or a machine of --hosts was lost.
        ///
        /// The first restart comes at once. Where attempts die within a minute, pauses of 1, 2, 4 and up to 30 seconds lie between
        /// them. A program that exits with 2, 126 or 127 is not restarted, nor one that somebody has stopped.
        /// TORCHELASTIC_RESTART_COUNT tells processes how often it has happened.
        max_restarts: usize = 0 => setting().own_key().launcher().flag("max_restarts");
        /// Seconds between two looks at the processes.
        monitor_interval: f64 => setting().own_key().launcher().flag("monitor_interval").harmless(&["0.1", "5"])
            .without_effect("the launcher is told at once when a process ends");
        /// Compute in bfloat16 on a TPU, and in float32 what asks for float64.
        downcast_bf16: bool = false => setting().variable("ACCELERATE_DOWNCAST_BF16").flag("downcast_bf16").switch()
            .without_effect("it is about TPUs, and there is none; mixed_precision bf16 computes in bfloat16 elsewhere");
        /// Train on a TPU.
        tpu: bool = false => setting().own_key().launcher().flag("tpu").switch().refused(NO_TPU);
        /// The name of a TPU.
        tpu_name: String => setting().launcher().refused(NO_TPU);
        /// The zone of a TPU.
        tpu_zone: String => setting().launcher().refused(NO_TPU);
        /// Start on all machines of a TPU.
        tpu_use_cluster: bool = false => setting().launcher().flag("tpu_cluster").switch().refused(NO_TPU);
        /// Start as administrator on a TPU.
        tpu_use_sudo: bool = false => setting().launcher().flag("tpu_use_sudo").switch().refused(NO_TPU);
        /// Machines of a TPU.
        tpu_vm: Vec<String> => setting().launcher().flag("vm").refused(NO_TPU);
        /// Variables on a TPU.
        tpu_env: Vec<String> => setting().launcher().secret().flag("env").refused(NO_TPU);
        /// A file of commands for the machines of a TPU.
        command_file: PathBuf => setting().launcher().refused(NO_TPU);
        /// Commands for the machines of a TPU.
        commands: Vec<String> => setting().launcher().secret().refused(NO_TPU);
    }
}

record! {
    /// How mpirun starts processes (`mpirun_config` of the reference's files).
    MpirunConfig => MpirunSettings, section "mpirun_config", keys "mpirun_", variables "ACCELERATE_MPIRUN_" {
        /// The hosts that mpirun starts processes on.
        mpirun_hostfile: PathBuf => setting().flag("mpirun_hostfile").refused(NO_MPIRUN);
        /// Arguments of mpirun about cores.
        mpirun_ccl: String => setting().refused(NO_MPIRUN);
    }
}

impl ClusterSettings {
    /// From when on a program is told to save and to end: [`stop_margin`](Self::stop_margin) before
    /// [`stop_at`](Self::stop_at) or the end of the allocation, whichever is earlier. `None` without either.
    ///
    /// ```
    /// use accelerate_core::config::ClusterSettings;
    /// use std::time::{Duration, SystemTime};
    /// let after = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    /// let cluster = ClusterSettings {
    ///     stop_at: Some(after(9_000)),
    ///     allocation_end: Some(after(5_000)),
    ///     stop_margin: Duration::from_secs(60),
    ///     ..Default::default()
    /// };
    /// assert_eq!(cluster.stops_from(), Some(after(4_940)));
    /// ```
    pub fn stops_from(&self) -> Option<SystemTime> {
        let end = self.run_end()?;
        Some(end.checked_sub(self.stop_margin).unwrap_or(SystemTime::UNIX_EPOCH))
    }

    pub(super) fn check(&self) -> Result<()> {
        match &self.gpu_ids {
            Some(found) if !names_gpus(found) => Err(Kind::GpuIds { found: found.clone(), wanted: GPU_IDS }.into()),
            _ => Ok(()),
        }
    }

    /// When the run has to be over.
    pub fn run_end(&self) -> Option<SystemTime> {
        [self.stop_at, self.allocation_end].into_iter().flatten().min()
    }
}

/// What `gpu_ids` may be.
pub(super) const GPU_IDS: &str = "all, or different numbers separated by commas, such as 0,1, or the names that nvidia-smi -L gives, such as GPU-8f6d";

/// Is this what CUDA finds GPUs by? It uses none of them where one is there twice. Of nothing, it uses no GPU.
pub(super) fn names_gpus(text: &str) -> bool {
    let words: Vec<_> = text.split(',').map(str::trim).collect();
    let is_name = |word: &str| ["GPU-", "MIG-"].iter().any(|kind| word.len() > kind.len() && word.starts_with(kind));
    let are_known = words.iter().all(|word| word.parse::<u32>().is_ok() || is_name(word));
    let are_different = (1..words.len()).all(|index| !words[..index].contains(&words[index]));
    text.is_empty() || text.eq_ignore_ascii_case("all") || (are_known && are_different)
}

fn text_of_time<S: Serializer>(time: &Option<SystemTime>, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    match time {
        None => serializer.serialize_none(),
        Some(time) => serializer.serialize_str(&time.write()),
    }
}

fn time_of_text<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Option<SystemTime>, D::Error> {
    let text = match Option::<serde_json::Value>::deserialize(deserializer)? {
        None | Some(serde_json::Value::Null) => return Ok(None),
        Some(serde_json::Value::String(text)) => text,
        Some(other) => other.to_string(),
    };
    let wanted = || serde::de::Error::custom(format!("{text:?} is not {}", SystemTime::KIND.wanted()));
    SystemTime::read(&text).map(Some).ok_or_else(wanted)
}
