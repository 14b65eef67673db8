//! Flags of the reference's launcher and of torchrun that do not exist here, refused by name, with what stands in their place. A flag
//! that merely looks like one of them would be a wrong tip.

use std::error::Error;
use std::ffi::OsString;

use accelerate_core::files::in_one_line;
use accelerate_core::weight_files::parse_size;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command};

const NO_MEGATRON: &str = "Megatron-LM is not available; choose --use_fsdp or --use_deepspeed";
const DEVICES: &str = "CPUs and NVIDIA GPUs are available; leave it out, or use --cpu";
const NO_SAGEMAKER: &str = "Amazon SageMaker is not available; leave it out, and start the program where it is to run";

const TEE: &str =
    "it is torchrun's; use --tee, which writes the same files, and shows the output at the terminal as well";
const FILTERS: &str =
    "it is torchrun's; use --tee, which writes a file for each stream of each process, and filter these";

/// How such flags begin, and why they are refused. A name that ends in `_` is the beginning of several.
const OF_OTHER_LAUNCHERS: &[(&str, &str)] = &[
    ("use_megatron_lm", NO_MEGATRON),
    ("megatron_lm_", NO_MEGATRON),
    ("use_xpu", DEVICES),
    ("xpu", DEVICES),
    ("ipex", DEVICES),
    ("use_ipex", DEVICES),
    ("mps", DEVICES),
    ("use_mps_device", DEVICES),
    ("use_npu", DEVICES),
    ("use_mlu", DEVICES),
    ("aws_", NO_SAGEMAKER),
    ("no_tpu_cluster", "there is no TPU; leave it out"),
    ("nproc_per_node", "it is torchrun's; use --num_processes, which counts over all machines"),
    ("node_rank", "it is torchrun's; use --machine_rank"),
    ("master_addr", "it is torchrun's; use --main_process_ip"),
    ("master_port", "it is torchrun's; use --main_process_port"),
    (
        "rdzv_endpoint",
        "it is torchrun's; use --main_process_ip and --main_process_port, or --hosts, which needs neither",
    ),
    ("rdzv_id", "it is torchrun's; runs are kept apart by their ports, and by ACCELERATE_RUN_SECRET; leave it out"),
    ("standalone", "it is torchrun's; a launch on one machine takes any free port without it; leave it out"),
    (
        "local_addr",
        "it is torchrun's; --main_process_ip says where machines meet, and GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME by which \
         network of its own each machine is reached",
    ),
    ("redirects", TEE),
    ("logs_specs", "it is torchrun's; use --tee and --log_dir"),
    ("local_ranks_filter", FILTERS),
    ("duplicate_stdout_filters", FILTERS),
    ("duplicate_stderr_filters", FILTERS),
    (
        "log_line_prefix_template",
        "it is torchrun's; lines begin with [rank N], or with nothing if --no_prefix is given; a launch from code can have a template",
    ),
    ("numa_binding", "it is torchrun's; use --enable_cpu_affinity"),
    (
        "signals_to_handle",
        "it is torchrun's; SIGINT, SIGTERM, SIGHUP and SIGQUIT end a run, and SIGUSR1 and SIGUSR2 are passed on; leave it out",
    ),
    ("start_method", "it is torchrun's; each process is a program of its own, started anew; leave it out"),
    ("use_env", "it is torchrun's; processes are told their ranks by variables in any case; leave it out"),
    (
        "event_log_handler",
        "it is torchrun's; what happens is told on standard error, and by `accelerate status`; leave it out",
    ),
    ("run_path", "it is torchrun's; name the script in the place of the program"),
    ("virtual_local_rank", "it is torchrun's; a process computes on the GPU of its LOCAL_RANK; leave it out"),
];

/// A size with room for something.
pub(crate) fn size_above_zero(text: &str) -> Result<u64, Box<dyn Error + Send + Sync>> {
    match parse_size(text)? {
        0 => Err("0 bytes have no room for anything; name a size such as 5GB".into()),
        size => Ok(size),
    }
}

/// The command, in which every flag with a value takes a negative number for one: `--flag -1` is `--flag=-1`, and what is wrong
/// with that is said by whoever reads the value.
pub(crate) fn with_negative_numbers(command: Command) -> Command {
    let takes = |argument: Arg| match argument.get_long().is_some() && argument.get_action().takes_values() {
        true => argument.allow_negative_numbers(true),
        false => argument,
    };
    command.mut_args(takes).mut_subcommands(with_negative_numbers)
}

/// The error without control characters in the words of the command line that it repeats.
pub(crate) fn shown(mut error: clap::Error) -> clap::Error {
    let escaped = |value: &ContextValue| match value {
        ContextValue::String(text) => Some(ContextValue::String(in_one_line(text))),
        ContextValue::Strings(texts) => Some(ContextValue::Strings(texts.iter().map(|it| in_one_line(it)).collect())),
        _ => None,
    };
    let all: Vec<_> = error.context().filter_map(|(kind, value)| Some((kind, escaped(value)?))).collect();
    for (kind, value) in all {
        error.insert(kind, value);
    }
    error
}

/// The name of a flag that nobody knows, and why it is refused if it is one of another launcher.
fn unknown(error: &clap::Error) -> Option<(String, Option<&'static str>)> {
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else { return None };
    if error.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let name = flag.trim_start_matches('-').replace('-', "_");
    let name = name.split('=').next().unwrap_or_default().to_owned();
    let is_meant = |known: &str| name == known || (known.ends_with('_') && name.starts_with(known));
    let why = OF_OTHER_LAUNCHERS.iter().find(|(known, _)| is_meant(known)).map(|(_, why)| *why);
    Some((name, why))
}

/// Is it about a flag of another launcher, which is refused?
pub(crate) fn is_of_other_launcher(error: &clap::Error) -> bool {
    matches!(unknown(error), Some((_, Some(_))))
}

/// Where the flag that it is about stands.
pub(crate) fn position_of(error: &clap::Error, words: &[OsString]) -> Option<usize> {
    let (wanted, _) = unknown(error)?;
    let name = |word: &OsString| {
        let word = word.to_string_lossy();
        let name = word.strip_prefix("--")?.split('=').next()?.replace('-', "_");
        Some(name)
    };
    words.iter().position(|word| name(word).as_ref() == Some(&wanted))
}

/// The error, in better words where the flag is one of another launcher.
pub(crate) fn explained(mut error: clap::Error) -> clap::Error {
    match unknown(&error) {
        None => error,
        Some((name, Some(why))) => {
            clap::Error::raw(error.kind(), format!("--{} is refused: {why}\n", in_one_line(&name)))
        }
        Some((_, None)) => {
            // "use '-- --flag'" would make the flag the program.
            error.remove(ContextKind::Suggested);
            error
        }
    }
}
