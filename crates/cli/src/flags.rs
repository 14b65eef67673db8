//! Flags of the reference's launcher that do not exist here, refused by name. A flag that merely looks like one of them would
//! be a wrong tip.

use std::error::Error;
use std::ffi::OsString;

use accelerate_core::files::in_one_line;
use accelerate_core::weight_files::parse_size;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command};

const NO_MEGATRON: &str = "Megatron-LM is not available; choose --use_fsdp or --use_deepspeed";
const DEVICES: &str = "CPUs and NVIDIA GPUs are available; leave it out, or use --cpu";
const NO_SAGEMAKER: &str = "Amazon SageMaker is not available; leave it out, and start the program where it is to run";

/// How such flags begin, and why they are refused.
const OF_THE_REFERENCE: [(&str, &str); 16] = [
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
    ("nproc_per_node", "it is torchrun's; use --num_processes, which counts over all machines"),
    ("node_rank", "it is torchrun's; use --machine_rank"),
    ("master_addr", "it is torchrun's; use --main_process_ip"),
    ("master_port", "it is torchrun's; use --main_process_port"),
    ("no_tpu_cluster", "there is no TPU; leave it out"),
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

/// The name of a flag that nobody knows, and why it is refused if it is one of the reference's.
fn unknown(error: &clap::Error) -> Option<(String, Option<&'static str>)> {
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else { return None };
    if error.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let name = flag.trim_start_matches('-').replace('-', "_");
    let name = name.split('=').next().unwrap_or_default().to_owned();
    let is_meant = |known: &str| name == known || (known.ends_with('_') && name.starts_with(known));
    let why = OF_THE_REFERENCE.iter().find(|(known, _)| is_meant(known)).map(|(_, why)| *why);
    Some((name, why))
}

/// Is it about a flag of the reference's that is refused?
pub(crate) fn is_of_the_reference(error: &clap::Error) -> bool {
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

/// The error, in better words where the flag is one of the reference's.
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
