//! `accelerate config validate`: everything that is wrong with a file.

use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use accelerate_core::config::{ConfigFile, FileFormat, RunConfig, Sources};
use accelerate_core::files::{ShownPath, printable};
use clap::Args;
use serde::de::IgnoredAny;

use crate::config_file;
use crate::resolve::warnings;

/// Check configuration files: every mistake with its line, column and cure, and what has no effect on this machine.
///
/// Exit code: 0 if a launch would take each of the files, 1 otherwise. Warnings do not count.
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    accelerate config validate\n  \
    accelerate config validate run.yaml\n  \
    accelerate config validate configs/*.yaml")]
pub(crate) struct Arguments {
    /// The files. Without any, the default one.
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, Box<dyn Error>> {
    let named = arguments.files.iter().map(|file| Some(file.as_path()));
    let default_one = arguments.files.is_empty().then_some(None);
    let mut code = ExitCode::SUCCESS;
    for file in named.chain(default_one) {
        let report = match found(file) {
            Ok(report) => report,
            // The others are looked at all the same.
            Err(error) if arguments.files.len() > 1 => {
                crate::print_error("accelerate config", error.as_ref(), &error.to_string());
                code = ExitCode::FAILURE;
                continue;
            }
            Err(error) => return Err(error),
        };
        crate::print_result(&report.text)?;
        if !report.is_valid {
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}

fn found(file: Option<&Path>) -> Result<Report, Box<dyn Error>> {
    let path = config_file::find_existing(file, &config_file::variable)?.path;
    Ok(check(&config_file::read(&path)?, &path))
}

/// A comma after the last value, a comment: YAML has them, so that they are read here.
fn not_for_python(text: &str, path: &Path) -> Option<String> {
    let is_json = FileFormat::of_path(path) == FileFormat::Json;
    let error = serde_json::from_str::<IgnoredAny>(text).err().filter(|_| is_json)?;
    Some(format!("Python Accelerate does not read this file, which is no JSON to the letter: {error}"))
}

struct Report {
    text: String,
    is_valid: bool,
}

fn check(text: &str, path: &Path) -> Report {
    let (file, mut errors) = ConfigFile::read_all(text, path);
    let sources = || Sources { file: Some(file.clone()), ..Default::default() };
    let (only_for_rust, messages) = RunConfig::problems(sources());
    // Where a launch would fail, only what does not depend on the rest is known.
    let mut warnings = match RunConfig::resolve(sources()) {
        Ok(run) => warnings(&run),
        Err(_) => messages.iter().map(ToString::to_string).collect(),
    };
    warnings.extend(not_for_python(text, path));
    let is_for_python = Sources { is_for_python: true, ..sources() };
    let is_fine_for_python =
        errors.is_empty() && not_for_python(text, path).is_none() && RunConfig::problems(is_for_python).0.is_empty();
    errors.extend(only_for_rust);
    let mut report = Report { text: String::new(), is_valid: errors.is_empty() };
    // Writing to a string cannot fail.
    for error in &errors {
        let _ = writeln!(report.text, "error: {}", printable(&error.to_string()));
        let mut cause = Error::source(error);
        while let Some(error) = cause {
            let _ = writeln!(report.text, "  caused by: {}", printable(&error.to_string()));
            cause = error.source();
        }
    }
    for warning in &warnings {
        let _ = writeln!(report.text, "warning: {}", printable(warning));
    }
    if is_fine_for_python && !errors.is_empty() {
        let _ = writeln!(report.text, "note: a program in Python may be launched with this file");
    }
    let counted = |number: usize, what: &str| format!("{number} {what}{}", if number == 1 { "" } else { "s" });
    let (errors, warnings) = (counted(errors.len(), "error"), counted(warnings.len(), "warning"));
    let _ = writeln!(report.text, "{}: {errors}, {warnings}", path.shown());
    report
}
