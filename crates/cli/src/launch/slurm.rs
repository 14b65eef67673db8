//! `accelerate launch --slurm` and `--emit`: a launch as a job of a cluster, submitted and followed from a login node, or printed.

pub(super) mod allocated;
mod follow;
mod kubernetes;
mod tools;
mod words;

use std::error::Error;
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use accelerate_core::config::{RunConfig, Sources, settings};
use accelerate_core::files::in_one_line;
use accelerate_core::kubernetes::Manifest;
use accelerate_core::settings::{Origin, Setting};
use accelerate_core::slurm::{BatchJob, job_name};
use accelerate_launch::MAX_LOCAL_PROCESSES;
use clap::{Args, ValueEnum};

use crate::env::is_secret;
use crate::resolve::Resolved;

/// What a cluster is asked for.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = super::help::CLUSTERS)]
pub(super) struct ClusterFlags {
    /// Submit a batch job to Slurm that launches the program on its nodes, and follow it: its output is printed as it comes.
    ///
    /// For a login node. The exit code is that of the job. Ctrl-C cancels the job; when the terminal goes away, the job goes on. Within
    /// an allocation (`salloc`, a batch script) no flag is needed: a launch starts processes on all of its nodes.
    #[arg(long, conflicts_with_all = ["dry_run", "emit"])]
    slurm: bool,

    /// How many machines the job gets. Default: --num_machines.
    #[arg(long, value_name = "N", value_parser = count)]
    nodes: Option<u32>,

    /// What the job is called. Default: as the program.
    #[arg(long = "job_name", alias = "job-name", value_name = "NAME")]
    job_name: Option<String>,

    /// How many GPUs each machine of the job has to have; each gets a process.
    #[arg(long = "gpus_per_node", alias = "gpus-per-node", value_name = "N", value_parser = count)]
    gpus_per_node: Option<u32>,

    /// The longest time that the job may take, as sbatch reads it: 30 (minutes), 1:00:00, 2-12.
    #[arg(long, value_name = "TIME")]
    time: Option<String>,

    /// The partition of Slurm that the job is queued in.
    #[arg(long, value_name = "NAME")]
    partition: Option<String>,

    /// Queue the job again when a node fails, when it is preempted, and when its time is over before the program is done.
    ///
    /// Before the end of its time the ranks get SIGUSR1, by which `should_stop` becomes true, the --stop_margin and half a minute before
    /// the end. A program that loads its newest checkpoint when it starts goes on from there.
    #[arg(long)]
    requeue: bool,

    /// One more option of sbatch, such as --sbatch=--account=lab. May be given several times.
    #[arg(long, value_name = "OPTION", allow_hyphen_values = true)]
    sbatch: Vec<String>,

    /// Print what a cluster would be given, and submit nothing: slurm (a batch script), kubernetes (a JobSet) or trainjob (of Kubeflow).
    ///
    /// The two for Kubernetes are written by their schemas and need --image. JobSet or Kubeflow Trainer has to be there.
    #[arg(long, value_name = "FORMAT", conflicts_with = "dry_run", hide_possible_values = true)]
    emit: Option<Emit>,

    /// With --emit kubernetes or trainjob: the image of the containers, in which accelerate and the program are.
    #[arg(long, value_name = "NAME")]
    image: Option<String>,
}

/// A number of things that a job gets.
fn count(text: &str) -> Result<u32, String> {
    let number = text.parse().ok().filter(|number| *number >= 1);
    number.ok_or_else(|| format!("it must be a whole number from 1 to {}", u32::MAX))
}

/// A text for a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Emit {
    Slurm,
    Kubernetes,
    Trainjob,
}

impl ClusterFlags {
    /// Is a cluster to be given something, in place of starting processes here?
    pub(super) fn is_asked(&self) -> bool {
        self.slurm || self.emit.is_some()
    }

    /// What was said that only a job can have, although there is to be none.
    pub(super) fn check(&self) -> Result<(), WithoutJob> {
        let said = [
            ("--nodes", self.nodes.is_some()),
            ("--job_name", self.job_name.is_some()),
            ("--gpus_per_node", self.gpus_per_node.is_some()),
            ("--time", self.time.is_some()),
            ("--partition", self.partition.is_some()),
            ("--requeue", self.requeue),
            ("--sbatch", !self.sbatch.is_empty()),
            ("--image", self.image.is_some()),
        ];
        match said.iter().find(|(_, is_said)| *is_said && !self.is_asked()) {
            Some((flag, _)) => Err(WithoutJob { flag }),
            None => Ok(()),
        }
    }

    fn num_nodes(&self, run: &RunConfig) -> usize {
        self.nodes.and_then(|count| usize::try_from(count).ok()).unwrap_or(run.cluster.num_machines)
    }

    fn num_gpus(&self) -> Option<usize> {
        self.gpus_per_node.and_then(|count| usize::try_from(count).ok())
    }

    /// What the job is called, of which `usable` makes a name that the cluster takes.
    fn name(&self, program: &[OsString], usable: fn(&str) -> String) -> Result<String, NoName> {
        match &self.job_name {
            None => Ok(program_name(program)),
            Some(name) if usable(name) == *name => Ok(name.clone()),
            Some(name) => Err(NoName { found: name.clone(), usable: usable(name) }),
        }
    }

    fn script(&self, run: &RunConfig, words: &[OsString], program: &[OsString]) -> Result<String, Box<dyn Error>> {
        if self.image.is_some() {
            return Err(ForOther { flag: "--image", it: "Kubernetes" }.into());
        }
        let job = BatchJob {
            name: self.name(program, job_name)?,
            num_nodes: self.num_nodes(run),
            num_processes: run.cluster.num_processes,
            gpus_per_node: self.num_gpus(),
            time: self.time.clone(),
            partition: self.partition.clone(),
            requeue: self.requeue,
            stop_margin: run.cluster.stop_margin,
            options: self.sbatch.clone(),
            launch: words::launch_line(words, program.len()),
        };
        Ok(job.script()?)
    }
}

/// A name that was said, and that the cluster does not take.
#[derive(Debug, thiserror::Error)]
#[error("--job_name {found:?} is no name that the cluster takes; {usable} is one")]
struct NoName {
    found: String,
    usable: String,
}

/// Numbers that the launch within the job would refuse, after the job has waited for its turn.
#[derive(Debug, thiserror::Error)]
enum Contradiction {
    #[error("--nodes is {nodes} and num_machines is {num_machines}; leave one of them out")]
    Machines { nodes: usize, num_machines: usize },
    #[error("num_processes is {num_processes}, and the job has {nodes} nodes; use at least one process for each")]
    TooFew { num_processes: usize, nodes: usize },
    #[error(
        "num_processes is {num_processes} on {nodes} nodes, and a machine may run at most {MAX_LOCAL_PROCESSES} processes; use fewer, or \
         more nodes"
    )]
    TooMany { num_processes: usize, nodes: usize },
    #[error("num_processes is {num_processes}, and pods have equal numbers; use a multiple of the {nodes} nodes")]
    Unequal { num_processes: usize, nodes: usize },
    #[error(
        "--gpus_per_node {gpus} asks for GPUs, and {setting} ({origin}) keeps all processes on the CPU; leave one of the two out"
    )]
    IdleGpus { gpus: u32, setting: &'static str, origin: String },
    #[error(
        "--gpus_per_node {gpus} gives each node so many GPUs, and gpu_ids {gpu_ids} ({origin}) names another number of them; leave gpu_ids out, \
         or make the two agree"
    )]
    OtherGpus { gpus: u32, gpu_ids: String, origin: String },
}

/// What keeps processes away from GPUs, and who has said so.
fn kept_on_cpu(run: &RunConfig) -> Option<(&'static str, String)> {
    let is_cpu = run.cluster.torch_device.as_deref().is_some_and(|device| device.eq_ignore_ascii_case("cpu"));
    let said = [("use_cpu", "use_cpu: true", run.cluster.use_cpu), ("torch_device", "torch_device: cpu", is_cpu)];
    let (path, setting, _) = said.into_iter().find(|(.., is_said)| *is_said)?;
    Some((setting, run.origin(path).to_string()))
}

/// What a job gets although no flag of this command says it: values of a file or of variables. What is secret is not told.
fn said_elsewhere(run: &RunConfig) -> Option<String> {
    let plain = RunConfig::resolve(Sources::default()).ok()?;
    let is_secret = |setting: &Setting| setting.is_secret() || setting.variable().is_some_and(|name| is_secret(&name));
    let values = settings().filter(|setting| !is_secret(setting)).filter_map(|setting| {
        let origin = run.origin(setting.path);
        let is_elsewhere = matches!(origin, Origin::Environment(_) | Origin::File { .. });
        let value = run.text(setting).filter(|value| is_elsewhere && plain.text(setting).as_ref() != Some(value))?;
        Some(format!("{} {} ({origin})", setting.path, in_one_line(&value)))
    });
    let values: Vec<_> = values.collect();
    (!values.is_empty()).then(|| format!("beside what flags say, the job has {}", values.join(", ")))
}

fn check_numbers(flags: &ClusterFlags, run: &RunConfig) -> Result<(), Contradiction> {
    let (nodes, num_machines) = (flags.num_nodes(run), run.cluster.num_machines);
    let are_pods = matches!(flags.emit, Some(Emit::Kubernetes | Emit::Trainjob));
    if let (Some(gpus), Some((setting, origin))) = (flags.gpus_per_node, kept_on_cpu(run)) {
        return Err(Contradiction::IdleGpus { gpus, setting, origin });
    }
    let gpu_ids = run.cluster.gpu_ids.as_deref().filter(|found| !found.eq_ignore_ascii_case("all"));
    if let (Some(gpus), Some(gpu_ids)) = (flags.gpus_per_node, gpu_ids)
        && gpu_ids.split(',').count() != gpus as usize
    {
        let (gpu_ids, origin) = (gpu_ids.to_owned(), run.origin("gpu_ids").to_string());
        return Err(Contradiction::OtherGpus { gpus, gpu_ids, origin });
    }
    match run.cluster.num_processes {
        _ if num_machines > 1 && num_machines != nodes => Err(Contradiction::Machines { nodes, num_machines }),
        Some(num_processes) if num_processes < nodes => Err(Contradiction::TooFew { num_processes, nodes }),
        Some(num_processes) if num_processes.div_ceil(nodes.max(1)) > MAX_LOCAL_PROCESSES => {
            Err(Contradiction::TooMany { num_processes, nodes })
        }
        Some(num_processes) if are_pods && num_processes % nodes.max(1) != 0 => {
            Err(Contradiction::Unequal { num_processes, nodes })
        }
        _ => Ok(()),
    }
}

/// What the program is called, without its folder.
fn program_name(program: &[OsString]) -> String {
    let name = program.first().map(OsString::as_os_str).unwrap_or_default();
    Path::new(name).file_name().unwrap_or(name).to_string_lossy().into_owned()
}

/// A flag that only another kind of cluster knows.
#[derive(Debug, thiserror::Error)]
#[error("{flag} is for {it}, and is not what is asked for; leave it out")]
struct ForOther {
    flag: &'static str,
    it: &'static str,
}

/// A flag about a job, and no job.
#[derive(Debug, thiserror::Error)]
#[error(
    "{flag} is about a job of a cluster; say --slurm to submit one, or --emit to see what one would be given, or leave it out"
)]
pub(super) struct WithoutJob {
    flag: &'static str,
}

/// Submits and follows, or prints. The last `words` of the command line are the `program`'s.
///
/// # Errors
///
/// Slurm that is not there or that refuses; a result that cannot be printed. Values that no job can have are told here.
pub(super) fn run(
    flags: &ClusterFlags,
    Resolved { run, file }: &Resolved,
    words: &[OsString],
    program: &[OsString],
    is_quiet: bool,
) -> Result<ExitCode, Box<dyn Error>> {
    for notice in super::default_file(file).into_iter().chain(said_elsewhere(run)).filter(|_| !is_quiet) {
        crate::print_message(&format!("{}: {notice}", super::SPEAKER));
    }
    let text = || match flags.emit {
        None | Some(Emit::Slurm) => flags.script(run, words, program),
        Some(Emit::Kubernetes) => kubernetes::manifest(flags, run, words, program, Manifest::JobSet),
        Some(Emit::Trainjob) => kubernetes::manifest(flags, run, words, program, Manifest::TrainJob),
    };
    match (check_numbers(flags, run).map_err(Box::from).and_then(|()| text()), flags.emit) {
        (Ok(text), Some(_)) => Ok(crate::print_result(&text).map(|()| ExitCode::SUCCESS)?),
        (Ok(script), None) => Ok(follow::submit_and_follow(&script, is_quiet).unwrap_or_else(|error| {
            let code = error.downcast_ref().map_or(1, tools::SlurmError::exit_code);
            failed(error.as_ref(), code)
        })),
        (Err(error), _) => {
            let text = super::with_origins(run, &error.to_string());
            crate::print_error(super::SPEAKER, error.as_ref(), &text);
            Ok(ExitCode::from(2))
        }
    }
}

fn failed(error: &dyn Error, code: u8) -> ExitCode {
    crate::print_error(super::SPEAKER, error, &error.to_string());
    ExitCode::from(code)
}
