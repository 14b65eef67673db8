//! What help shows of the many flags of `accelerate launch`: those that matter, and those of what is chosen beside it
//! (`accelerate launch --use_fsdp -h`), as the reference's help does.

use std::ffi::OsString;

use accelerate_core::config::settings;
use accelerate_core::settings::Standing;
use clap::{Arg, Command};

use crate::settings::heading as heading_of_section;

const HARDWARE: &str = "Hardware";
const RESOURCES: &str = "Processes and precision";
const PARADIGM: &str = "Ways to train";
pub(super) const MACHINES: &str = "Several machines";
const MEETING: &str = "How machines meet";
pub(super) const WATCHING: &str = "Output and restarts";
pub(super) const CLUSTERS: &str = "Slurm and Kubernetes";
const TPU: &str = "TPU";

/// Groups that are shown in any case. So is what has no group.
const ALWAYS: [&str; 5] = [HARDWARE, RESOURCES, MACHINES, PARADIGM, WATCHING];

/// Flags that choose something, each with the sections of files and the groups that it is about.
const CHOICES: [(&str, &[&str], &[&str]); 14] = [
    ("cpu", &[], &[MEETING]),
    ("use_cpu", &[], &[MEETING]),
    ("multi_gpu", &[], &[MEETING]),
    ("num_machines", &[], &[MEETING]),
    ("hosts", &[], &[MEETING]),
    ("hostfile", &[], &[MEETING]),
    ("slurm", &[], &[CLUSTERS]),
    ("emit", &[], &[CLUSTERS]),
    ("use_fsdp", &["fsdp_config"], &[]),
    ("use_deepspeed", &["deepspeed_config"], &[]),
    ("dynamo_backend", &["dynamo_config"], &[]),
    ("use_parallelism_config", &["parallelism_config"], &[]),
    ("fp8_backend", &["fp8_config"], &[]),
    ("tpu", &[], &[TPU]),
];

/// How to see the rest.
macro_rules! more {
    () => {
        "More flags are shown beside what they are about:\n  \
           accelerate launch --num_machines 2 -h           how machines meet\n  \
           accelerate launch --slurm -h                    jobs on Slurm and Kubernetes\n  \
           accelerate launch --use_fsdp -h                 sharding (FSDP)\n  \
           accelerate launch --use_deepspeed -h            sharding (DeepSpeed)\n  \
           accelerate launch --dynamo_backend no -h        compiled models\n  \
           accelerate launch --use_parallelism_config -h   several axes of processes\n  \
           accelerate launch --fp8_backend ao -h           computing in FP8\n  \
           accelerate launch --tpu -h                      TPU\n\
         With --help in place of -h, each is explained. Every flag may also be spelled with - instead of _ (--num-processes)."
    };
}
pub(crate) use more;

pub(crate) const MORE: &str = more!();

/// The group of a flag that is in no section of files.
pub(super) fn heading(flag: &str) -> Option<&'static str> {
    match flag {
        "cpu" | "multi_gpu" | "gpu_ids" | "enable_cpu_affinity" | "num_cpu_threads_per_process" => Some(HARDWARE),
        "num_processes" | "mixed_precision" | "gradient_accumulation_steps" | "debug" => Some(RESOURCES),
        "use_fsdp" | "use_deepspeed" | "use_parallelism_config" => Some(PARADIGM),
        "num_machines" | "min_machines" | "machine_rank" | "main_process_ip" | "main_process_port" | "hosts"
        | "hostfile" => Some(MACHINES),
        "ssh_command" | "connection_timeout" | "same_network" | "rdzv_backend" | "rdzv_conf" | "mpirun_hostfile" => {
            Some(MEETING)
        }
        "tee" | "log_dir" | "role" | "max_restarts" | "monitor_interval" => Some(WATCHING),
        "tpu" | "tpu_cluster" | "tpu_use_sudo" | "vm" | "env" | "main_training_function" | "downcast_bf16" => Some(TPU),
        _ => None,
    }
}

/// The command as its help is to be shown for these words. Where nobody asks for the help of `launch`, it is left as it is.
pub(crate) fn for_words(command: Command, words: &[OsString]) -> Command {
    match flags_before_help(words) {
        None => command,
        Some(flags) => {
            command.mut_subcommand("launch", |launch| launch.mut_args(|argument| narrowed(argument, &flags)))
        }
    }
}

/// The names of the flags of `launch` before the one that asks for help; `None` if none does.
fn flags_before_help(words: &[OsString]) -> Option<Vec<String>> {
    let words: Vec<_> = words.iter().skip(1).map(|word| word.to_string_lossy()).collect();
    match words.iter().map(AsRef::as_ref).collect::<Vec<&str>>().as_slice() {
        ["help", "launch", ..] => Some(Vec::new()),
        ["launch", rest @ ..] => {
            let end = rest.iter().position(|word| matches!(*word, "-h" | "--help"))?;
            let flags = rest[..end].iter().filter_map(|word| word.strip_prefix("--"));
            Some(flags.map(|flag| flag.split('=').next().unwrap_or_default().replace('-', "_")).collect())
        }
        _ => None,
    }
}

fn narrowed(argument: Arg, flags: &[String]) -> Arg {
    let chosen = || CHOICES.iter().filter(|(flag, ..)| flags.iter().any(|said| said == flag));
    let group = argument.get_help_heading();
    let is_chosen = chosen().any(|(_, sections, groups)| {
        let mut headings =
            sections.iter().filter_map(|section| heading_of_section(section)).chain(groups.iter().copied());
        headings.any(|heading| group == Some(heading))
    });
    let is_shown = group.is_none_or(|group| ALWAYS.contains(&group)) || is_chosen;
    match refusal(&argument) {
        // Whoever asks about what there is not shall read why.
        Some(why) if is_chosen => {
            let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
            let refused = refused(&argument, why);
            argument.hide(false).help(format!("{help} {refused}"))
        }
        Some(_) => argument,
        None => argument.hide(!is_shown),
    }
}

/// The command with every flag of `launch`, for a page that is read as a whole.
pub(crate) fn with_all(command: Command) -> Command {
    command.mut_subcommand("launch", |launch| {
        launch.mut_args(|argument| match refusal(&argument) {
            Some(why) => {
                let text = refused(&argument, why);
                argument.hide(false).help(text.clone()).long_help(text)
            }
            None => argument.hide(false),
        })
    })
}

/// A sentence on a flag that programs of this library cannot have.
fn refused(argument: &Arg, why: &str) -> String {
    let is_for_python = settings()
        .find(|setting| setting.flag() == Some(argument.get_id().as_str()))
        .is_some_and(|setting| setting.is_for_python());
    match is_for_python {
        true => format!("For programs in Python only; refused for others: {why}."),
        false => format!("Refused: {why}."),
    }
}

fn refusal(argument: &Arg) -> Option<&'static str> {
    let setting = settings().find(|setting| setting.flag() == Some(argument.get_id().as_str()))?;
    match setting.standing() {
        Standing::Refused(why) => Some(why),
        _ => None,
    }
}
