//! `accelerate to-fsdp2`: a configuration file for version 2 of FSDP, made of one for version 1.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use accelerate_core::config::{ConfigFile, FileFormat, changed_lines};
use accelerate_core::files::ShownPath;
use clap::{ArgGroup, Args};

use crate::config_file::{self, Existing};

/// Convert a configuration file from version 1 of FSDP to version 2.
///
/// fsdp_reshard_after_forward takes the place of fsdp_sharding_strategy, and settings that version 2 does not have are left
/// out. Every key that changes or goes is named. Comments are not kept.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("output").args(["overwrite", "output_file"]).required(true).multiple(true)))]
#[command(after_long_help = "Examples:\n  \
    accelerate to-fsdp2 --config_file run.yaml --output_file run2.yaml\n  \
    accelerate to-fsdp2 --config_file run.yaml --overwrite")]
pub(crate) struct Arguments {
    /// The file to convert.
    #[arg(long = "config_file", alias = "config-file", value_name = "FILE")]
    config_file: PathBuf,

    /// Replace the file that is written, which is the converted one without --output_file.
    #[arg(long)]
    overwrite: bool,

    /// The file to write: JSON if its name ends in .json, and YAML otherwise.
    #[arg(long = "output_file", alias = "output-file", value_name = "FILE")]
    output_file: Option<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Box<dyn Error>> {
    let input = &arguments.config_file;
    let old = config_file::read(input)?;
    let converted = ConfigFile::read(&old, input)?.into_partial().to_fsdp2()?;
    for note in &converted.notes {
        crate::print_message(&format!("accelerate to-fsdp2: {}: {note}", input.shown()));
    }
    // A file that somebody has named is there afterwards, whether there was something to convert or not.
    let output = match (&arguments.output_file, converted.is_converted) {
        (None, false) => return Ok(ExitCode::SUCCESS),
        (Some(output), _) => output,
        (None, true) => input,
    };
    let existing = match arguments.overwrite {
        true => Existing::Replace,
        false => Existing::Keep("--overwrite replaces it, or name another --output_file"),
    };
    let new = ConfigFile::write(&converted.said, FileFormat::of_path(output));
    let changes = changed_lines(&old, &new, input)?;
    config_file::write(output, &new, existing)?;
    let colon = if changes.is_empty() { "" } else { "; beside the order of its keys it differs by:" };
    crate::print_message(&format!("accelerate to-fsdp2: {} is written{colon}", output.shown()));
    for change in changes {
        crate::print_message(&format!("  {change}"));
    }
    Ok(ExitCode::SUCCESS)
}
