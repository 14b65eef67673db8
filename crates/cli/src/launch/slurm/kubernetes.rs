//! `accelerate launch --emit kubernetes` and `trainjob`.

use std::collections::BTreeSet;
use std::error::Error;
use std::ffi::{OsStr, OsString};

use accelerate_core::config::{RunConfig, settings};
use accelerate_core::files::ShownPath;
use accelerate_core::kubernetes::{ClusterJob, Manifest, job_name};
use accelerate_core::settings::{Origin, Standing};

use super::words::flags_and_program;
use super::{ClusterFlags, ForOther};
use crate::config_file::variable;
use crate::env::is_secret;

/// How often pods are started again with --requeue. A program that fails each time shall not do so for ever.
const MAX_RESTARTS: usize = 10;
/// What the manifest says itself, of machines and of restarts.
const OF_MANIFEST: [&str; 7] =
    ["num_machines", "min_machines", "nnodes", "machine_rank", "main_process_ip", "main_process_port", "max_restarts"];
/// A file is here and not in the pods, which get what it says.
const CONFIG_FILE: &str = "config_file";
/// Settings of a launcher that starts several machines, which none in a pod does.
const OF_SEVERAL_MACHINES: [&str; 2] = ["ssh_command", "connection_timeout"];

#[derive(Debug, thiserror::Error)]
enum ManifestError {
    #[error(
        "a manifest for Kubernetes names the image of its containers; say --image, one in which accelerate and the program are"
    )]
    NoImage,
    #[error("{flag} has no place in a TrainJob, whose runtime says {what}; leave it out, or use --emit kubernetes")]
    OfRuntime { flag: &'static str, what: &'static str },
    #[error(
        "min_machines (or MIN of --nnodes MIN:MAX) is {least}, but the pods of a job are all there or none; leave it out, or say one \
         number for --nnodes"
    )]
    FewerPods { least: usize },
    #[error("{word} is no UTF-8, which a manifest cannot hold; give it another name")]
    NotText { word: String },
}

/// What settings come to for the processes, whether a flag, a file or a variable has said it here: pods have neither the file nor
/// the variables. What is secret has no place in a manifest.
fn environment(run: &RunConfig) -> Vec<(String, String)> {
    let said = run.variables();
    let of_processes = settings().filter(|setting| !setting.is_for_launcher() && !setting.is_secret());
    let names = of_processes.filter_map(|setting| setting.variable()).filter(|name| !is_secret(name));
    // A variable may be that of several settings.
    let names: BTreeSet<String> = names.collect();
    names
        .into_iter()
        .filter_map(|name| Some((name.clone(), said.get(&name).cloned().or_else(|| variable(&name))?)))
        .collect()
}

/// What a file or a variable says here to the launcher itself, as flags for the launchers in the pods. Flags are there already.
fn flags_of_launcher(run: &RunConfig) -> Vec<OsString> {
    let of_launcher = settings().filter(|setting| setting.is_for_launcher() && !setting.is_secret());
    let honoured = of_launcher.filter(|setting| setting.standing() == Standing::Honoured);
    let flags = honoured.filter_map(|setting| {
        let flag = setting.flag().filter(|flag| !OF_MANIFEST.contains(flag) && !OF_SEVERAL_MACHINES.contains(flag))?;
        let is_said_elsewhere = matches!(run.origin(setting.path), Origin::Environment(_) | Origin::File { .. });
        let value = run.text(setting).filter(|_| is_said_elsewhere)?;
        match (setting.is_switch(), value.as_str()) {
            (true, "true") => Some(format!("--{flag}").into()),
            (true, _) => None,
            (false, value) => Some(format!("--{flag}={value}").into()),
        }
    });
    flags.collect()
}

pub(super) fn manifest(
    flags: &ClusterFlags,
    run: &RunConfig,
    words: &[OsString],
    program: &[OsString],
    kind: Manifest,
) -> Result<String, Box<dyn Error>> {
    let of_slurm = [
        ("--time", flags.time.is_some()),
        ("--partition", flags.partition.is_some()),
        ("--sbatch", !flags.sbatch.is_empty()),
    ];
    if let Some((flag, _)) = of_slurm.into_iter().find(|(_, is_said)| *is_said) {
        return Err(ForOther { flag, it: "Slurm" }.into());
    }
    let max_restarts = run.cluster.max_restarts;
    let main_process_port = run.cluster.main_process_port;
    let restarts = "how often pods are started again";
    let of_runtime = [
        ("--requeue", restarts, flags.requeue),
        ("--max_restarts", restarts, max_restarts > 0),
        ("--main_process_port", "at which port ranks meet", main_process_port.is_some()),
    ];
    if let (Some((flag, what, _)), Manifest::TrainJob) = (of_runtime.into_iter().find(|(.., is_said)| *is_said), kind) {
        return Err(ManifestError::OfRuntime { flag, what }.into());
    }
    if let Some(least) = run.cluster.min_machines.filter(|least| *least != flags.num_nodes(run)) {
        return Err(ManifestError::FewerPods { least }.into());
    }
    let image = flags.image.clone().ok_or(ManifestError::NoImage)?;
    let (kept, program_words) = flags_and_program(words, program.len(), &[&OF_MANIFEST[..], &[CONFIG_FILE]].concat());
    let of_launcher = flags_of_launcher(run);
    let text =
        |word: &OsStr| word.to_str().map(str::to_owned).ok_or_else(|| ManifestError::NotText { word: word.shown() });
    // A file within the image may say it, too.
    let no_restarts = (max_restarts > 0).then_some(OsStr::new("--max_restarts=0"));
    let of_launcher = of_launcher.iter().map(OsString::as_os_str);
    let all =
        no_restarts.into_iter().chain(of_launcher).chain(kept).chain(program_words.iter().map(OsString::as_os_str));
    let job = ClusterJob {
        name: flags.name(program, job_name)?,
        image,
        num_nodes: flags.num_nodes(run),
        gpus_per_node: flags.num_gpus(),
        main_process_port,
        environment: environment(run),
        // All pods start again together, so the launches in them leave it to the job.
        max_restarts: if flags.requeue && max_restarts == 0 { MAX_RESTARTS } else { max_restarts },
        words: all.map(text).collect::<Result<_, _>>()?,
    };
    job.check(kind)?;
    Ok(job.manifest(kind))
}
