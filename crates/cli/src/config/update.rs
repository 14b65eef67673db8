//! `accelerate config update`: a file of an old version in today's words.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use accelerate_core::config::{ConfigFile, FileFormat, RunConfig, Sources, changed_lines};
use accelerate_core::files::ShownPath;
use accelerate_launch::num_visible_gpus;
use clap::Args;

use crate::config_file::{self, Existing};

/// Write a configuration file again with the keys that are used today, and say what changed.
///
/// What the file means stays the same. One that says no type of machines, which Python Accelerate would not read, gets that of
/// this machine: without NVIDIA GPUs, the processes are on the CPU. Comments are not kept. A file that cannot be read is left as it
/// is; `accelerate config validate` says what else is wrong with it.
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    accelerate config update\n  \
    accelerate config update --config_file run.yaml")]
pub(crate) struct Arguments {
    /// The file. Without it, the default one.
    #[arg(long = "config_file", alias = "config-file", value_name = "FILE")]
    config_file: Option<PathBuf>,
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, Box<dyn Error>> {
    let path = config_file::find_existing(arguments.config_file.as_deref(), &config_file::variable)?.path;
    let old = config_file::read(&path)?;
    let visible = config_file::variable("CUDA_VISIBLE_DEVICES");
    let num_gpus = num_visible_gpus(Path::new("/dev"), visible.as_deref());
    let said = ConfigFile::read(&old, &path)?.into_partial().on_machine(num_gpus);
    let new = ConfigFile::write(&said, FileFormat::of_path(&path));
    let changes = changed_lines(&old, &new, &path)?;
    if changes.is_empty() {
        crate::print_message(&format!("accelerate config: {} is up to date, and stays as it is", path.shown()));
    } else {
        config_file::write(&path, &new, Existing::Replace)?;
        crate::print_message(&format!("accelerate config: {} is up to date now:", path.shown()));
    }
    for change in changes {
        crate::print_message(&format!("  {change}"));
    }
    let file = Some(ConfigFile::read(&new, &path)?);
    let (errors, _) = RunConfig::problems(Sources { file, ..Sources::default() });
    if !errors.is_empty() {
        let advice = "no program of this library is launched with it as it is; accelerate config validate says why";
        crate::print_message(&format!("accelerate config: {}: {advice}", path.shown()));
    }
    Ok(ExitCode::SUCCESS)
}
