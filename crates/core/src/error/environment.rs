//! What can be wrong with the environment variables of a launcher.

#[derive(Debug, thiserror::Error)]
pub(crate) enum EnvironmentErrorKind {
    #[error(
        "WORLD_SIZE is {world_size}, but RANK is not set, so this process does not know which of the \
         {world_size} it is; start it with `accelerate launch` or `torchrun`, set RANK, or unset WORLD_SIZE"
    )]
    WorldSizeWithoutRank { world_size: usize },
    #[error(
        "{present} is {value}, but {missing} is not set; a launcher sets both: set {missing}, or unset \
         {present} to run as a single process"
    )]
    Incomplete { present: &'static str, value: usize, missing: &'static str },
    #[error("{name} is {rank}, but {size_name} is {size}: ranks are counted from 0 to {}", size.saturating_sub(1))]
    RankTooLarge { name: String, rank: usize, size_name: String, size: usize },
    #[error(
        "{local_name} is {local_world_size}, but {name} is {world_size}: one machine cannot hold more ranks \
         than there are in total"
    )]
    LocalSizeTooLarge { local_name: String, local_world_size: usize, name: String, world_size: usize },
    #[error("the environment variable {name} is {value:?}, but must be {wanted}")]
    Value { name: String, value: String, wanted: &'static str },
    #[error(
        "rank {rank} of {world_size} does not know its place on this machine: neither LOCAL_RANK nor \
         LOCAL_WORLD_SIZE is set; set LOCAL_RANK to its number among the ranks of this machine (0 when it is \
         the only one here)"
    )]
    NoLocalRank { rank: usize, world_size: usize },
    #[error(
        "rank {rank} of {world_size} does not know where to meet the others: MASTER_ADDR is not set; set it \
         to the host name or address of the machine of rank 0"
    )]
    NoMasterAddress { rank: usize, world_size: usize },
    #[error(
        "WORLD_SIZE is {world_size}, but {launcher} started {found} processes ({name}); unset WORLD_SIZE or \
         make the two agree"
    )]
    SizesDisagree { world_size: usize, launcher: &'static str, name: String, found: usize },
    #[error("{name} is {value:?}, which is not a Slurm host list such as \"node[03-05,7]\"")]
    HostList { name: String, value: String },
    #[error(
        "--num_processes {num_processes} counts the processes of all machines together, and the Slurm job has {num_nodes} nodes; \
         use at least {num_nodes}, or ask Slurm for fewer nodes"
    )]
    FewerProcessesThanNodes { num_processes: usize, num_nodes: usize },
    #[error(
        "{variable} says that job {job_id} has {num_nodes} nodes, and SLURM_JOB_NODELIST does not say which; start within the job, or \
         unset the variables of Slurm to start processes on this machine alone"
    )]
    NoNodeList { job_id: String, variable: &'static str, num_nodes: usize },
    #[error(
        "the {all} GPUs of the Slurm job (SLURM_GPUS) are not shared evenly by its {num_nodes} nodes{}, so how many processes each \
         node gets is not known; ask Slurm for --gpus-per-node, or say --num_processes or --hosts",
        here.map(|here| format!(", of which this one has {here}")).unwrap_or_default()
    )]
    UnequalGpus { all: usize, num_nodes: usize, here: Option<usize> },
    #[error(
        "the Slurm job {job_id} asks for more than the {most} processes that a run may have; ask for fewer tasks or GPUs"
    )]
    TooManyProcesses { job_id: String, most: usize },
    #[error(
        "--time {time} is too short: with --requeue the job is told to save {lead} s before its end (--stop_margin and 30 s), and Slurm \
         may do so a minute earlier, so it would be queued again before it had trained; ask for more time, or say a smaller --stop_margin"
    )]
    ShortTime { time: String, lead: u64 },
    #[error(
        "a job with --requeue would be told to save {lead} s before its end (--stop_margin and 30 s), and Slurm signals at most {most} s \
         before; say a smaller --stop_margin"
    )]
    LongLead { lead: u64, most: u64 },
    #[error("{flag} {value:?} cannot stand in a batch script; wanted: {wanted}")]
    BatchValue { flag: &'static str, value: String, wanted: &'static str },
    #[error(
        "--image is {found:?}, but must be the name of an image, such as registry.example/team/train:1 or train@sha256:...: without \
         spaces, without https://, and in lower case before the tag"
    )]
    Image { found: String },
    #[error(
        "the job would have {found} {what}, and a TrainJob may have {most}; put them into a file or a script of the image, or use \
         --emit kubernetes"
    )]
    TrainJobLimit { found: usize, most: usize, what: &'static str },
    #[error("{what} is {found}, and Kubernetes allows from {least} to {most}; use another number")]
    ManifestNumber { what: &'static str, found: usize, least: usize, most: usize },
    #[error(
        "another launcher has made this launch {world}, and {what}. The launches of the other ranks would do the same; start the program \
         itself with that launcher, or {cure}"
    )]
    LaunchWithinWorld { world: String, what: String, cure: String },
    #[error(
        "PMIX_RANK is {rank}, but no variable says how many processes there are; set WORLD_SIZE, LOCAL_RANK and MASTER_ADDR beside \
         it, or start the program with mpirun, srun or `accelerate launch`"
    )]
    PmixWithoutSize { rank: usize },
}
