//! `accelerate config default`: a file for this machine without a question.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use accelerate_core::config::{ConfigFile, FileFormat, MixedPrecision, PartialRunConfig};
use accelerate_core::files::ShownPath;
use accelerate_launch::num_visible_gpus;
use clap::Args;

use crate::config_file::{self, Existing};

/// Write a configuration file for what this machine has: a process for each GPU, or one on the CPU.
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    accelerate config default --mixed_precision bf16\n  \
    accelerate config default --config_file run.yaml")]
pub(crate) struct Arguments {
    /// The file to write: JSON if its name ends in .json, and YAML otherwise. Without it, the default one.
    #[arg(long = "config_file", alias = "config-file", value_name = "FILE")]
    config_file: Option<PathBuf>,

    /// Precision of the computation.
    #[arg(long = "mixed_precision", alias = "mixed-precision", value_name = "NAME", default_value = "no", value_parser = ["no", "fp16", "bf16", "fp8"], ignore_case = true)]
    mixed_precision: String,

    /// Replace the file if it exists.
    #[arg(long)]
    overwrite: bool,
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, Box<dyn Error>> {
    let path = match &arguments.config_file {
        Some(path) => path.clone(),
        None => config_file::default_path(&config_file::variable)?,
    };
    let visible = config_file::variable("CUDA_VISIBLE_DEVICES");
    let num_gpus = num_visible_gpus(Path::new("/dev"), visible.as_deref());
    let said = PartialRunConfig::for_machine(num_gpus, arguments.mixed_precision.parse::<MixedPrecision>()?);
    let existing = if arguments.overwrite {
        Existing::Replace
    } else {
        Existing::Keep("--overwrite replaces it, or name another one")
    };
    config_file::write(&path, &ConfigFile::write(&said, FileFormat::of_path(&path)), existing)?;
    let what = match num_gpus {
        0 => "one process on the CPU, because no NVIDIA GPU was found".to_owned(),
        1 => "one process on the GPU".to_owned(),
        _ => format!("a process on each of {num_gpus} GPUs"),
    };
    crate::print_message(&format!("accelerate config: {} says {what}", path.shown()));
    Ok(ExitCode::SUCCESS)
}
