//! `accelerate export-model`: a model of PyTorch as a package that is trained without Python.

mod failure;
mod inputs;

use std::error::Error;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use accelerate_core::files::ShownPath;
use clap::{Args, ValueEnum};
use serde::Serialize;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use failure::{Failure, Reported};
use inputs::{Described, Example, Examples, Input};

/// What Python runs.
const PROGRAM: &str = include_str!("export_model/export_model.py");
/// The file of the values has the name of the package with this ending.
const VALUES: &str = "safetensors";

/// Compile a model of PyTorch into a package that Accelerate trains without Python.
///
/// Python runs once, here: it needs torch of the version that programs are built with, safetensors, and a C++ compiler, and takes a
/// minute or more. The package holds forward and backward passes as machine code for this kind of processor or GPU; a program loads it
/// as an nn::ExportedModule, with the compiler backend "aot_inductor". The values of parameters and buffers are written
/// beside it, in a file that ends in .safetensors.
///
/// The model's forward takes the inputs by position. It returns the loss, a scalar, or several tensors with the loss first, or a
/// dictionary with "loss" in it.
///
/// Before anything is written, the model, what was exported and the compiled code are run on examples, and losses, other outputs,
/// gradients and buffers are compared. Compiled code that draws random numbers, as for dropout, draws others and is not compared.
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    accelerate export-model models:build --inputs 'float32[batch,64]' 'int64[batch]' --output model.pt2\n  \
    accelerate export-model bert:tiny --inputs 'int64[batch,128]' 'int64[batch]' --python .venv/bin/python --output bert.pt2")]
pub(crate) struct Arguments {
    /// What makes the model: a Python module that can be imported from this folder, and a function in it without arguments.
    #[arg(value_name = "MODULE:FUNCTION", value_parser = function)]
    function: String,

    /// What the model takes: for each input a type and a shape, with names for sizes that may vary. Equal names are equal sizes. A
    /// name may have the size that it has in examples, on which the model is run once: float32[batch=8,length=32].
    #[arg(long, value_name = "TYPE[SIZES]", num_args = 1.., required = true)]
    inputs: Vec<Input>,

    /// The package to write; its name ends in .pt2.
    #[arg(long, value_name = "FILE", value_parser = package)]
    output: PathBuf,

    /// What the package computes on. For cuda, Python needs a GPU here.
    #[arg(long, value_name = "KIND", value_enum, default_value_t = Device::Cpu)]
    device: Device,

    /// Replace the package and its values if they are there.
    #[arg(long)]
    overwrite: bool,

    /// The Python to run. Without it, the first of python3 and python that is found.
    #[arg(long, value_name = "FILE")]
    python: Option<PathBuf>,
}

/// The kinds of devices that packages are made for.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Device {
    Cpu,
    Cuda,
}

impl Device {
    fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }
}

fn function(text: &str) -> Result<String, String> {
    match text.split_once(':') {
        Some((module, function)) if !module.is_empty() && !function.is_empty() => Ok(text.to_owned()),
        _ => Err("say a module and a function in it, as in models:build".to_owned()),
    }
}

fn package(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match path.extension() {
        Some(extension) if extension == "pt2" => Ok(path),
        _ => Err("the name of a package ends in .pt2".to_owned()),
    }
}

#[derive(Debug, thiserror::Error)]
enum ExportError {
    #[error("{} is there already; --overwrite replaces it, or name another --output", .0.shown())]
    Exists(PathBuf),
    #[error("{} is there without its package, left by something that was stopped; --overwrite replaces it, or name another --output", .0.shown())]
    Left(PathBuf),
    #[error("--inputs cannot be used: {0}")]
    Inputs(String),
    #[error("{} could not be written", path.shown())]
    Write { path: PathBuf, source: io::Error },
    #[error("{} could not be started; name another with --python", python.shown())]
    Start { python: PathBuf, source: io::Error },
    #[error("{} ended without a package, though it reported no failure; name another with --python", .0.shown())]
    Nothing(PathBuf),
}

fn write_error(path: &Path, source: io::Error) -> ExportError {
    ExportError::Write { path: path.to_owned(), source }
}

/// What Python takes, as JSON.
#[derive(Debug, Serialize)]
struct Order<'a> {
    module: &'a str,
    function: &'a str,
    inputs: &'a [Example],
    /// Whole numbers of examples are below this.
    integers: u32,
    output: &'a Path,
    device: &'a str,
    torch_version: &'a str,
    /// Where Python writes what failed.
    failure: &'a Path,
    signature: Signature<'a>,
}

/// What is known of a package's signature before Python runs.
#[derive(Clone, Copy, Debug, Serialize)]
struct Signature<'a> {
    version: u32,
    inputs: &'a [Described],
}

/// How Python ended.
#[derive(Debug)]
enum Ended {
    Success,
    /// It has said why on its own.
    Failure,
    Reported(Reported),
    /// This command was told to end, and has told Python.
    Stopped(i32),
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Box<dyn Error>> {
    let (package, values) = (&arguments.output, arguments.output.with_extension(VALUES));
    // Before minutes of compiling.
    if !arguments.overwrite {
        if package.symlink_metadata().is_ok() {
            return Err(ExportError::Exists(package.clone()).into());
        }
        if values.symlink_metadata().is_ok() {
            return Err(ExportError::Left(values).into());
        }
    }
    let examples = Examples::of(&arguments.inputs).map_err(ExportError::Inputs)?;
    let python = match &arguments.python {
        Some(python) => python.clone(),
        None => accelerate_setup::python()?,
    };
    let folder = package.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    // From here on, whatever ends this command cleans up first.
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGCHLD]).map_err(|source| write_error(folder, source))?;
    // Both files are made in a folder of their own and moved when they are whole.
    let fresh = tempfile::Builder::new().prefix(".export-model-").tempdir_in(folder);
    let fresh = fresh.map_err(|source| write_error(folder, source))?;
    let new_package = fresh.path().join("model.pt2");
    let ended = match export(arguments, &examples, &python, &new_package, 2, &mut signals)? {
        // A table of one row has no row 1.
        Ended::Reported(reported) if reported.is_about_an_index() => {
            match export(arguments, &examples, &python, &new_package, 1, &mut signals)? {
                Ended::Reported(_) => Ended::Reported(reported),
                ended => ended,
            }
        }
        ended => ended,
    };
    match ended {
        Ended::Success => replace(&new_package, package, &python)?,
        Ended::Failure => return Ok(ExitCode::FAILURE),
        Ended::Reported(reported) => {
            return Err(Failure { reported, function: arguments.function.clone(), sizes: examples.shown() }.into());
        }
        Ended::Stopped(signal) => {
            fresh.close().map_err(|source| write_error(folder, source))?;
            emulate_default_handler(signal)?;
            return Ok(ExitCode::FAILURE);
        }
    }
    let shown = (package.shown(), values.shown());
    crate::print_message(&format!("accelerate export-model: {} and {} are written", shown.0, shown.1));
    Ok(ExitCode::SUCCESS)
}

/// Runs Python, with whole numbers below `integers` in its examples.
fn export(
    arguments: &Arguments,
    examples: &Examples,
    python: &Path,
    output: &Path,
    integers: u32,
    signals: &mut Signals,
) -> Result<Ended, Box<dyn Error>> {
    let inputs: Vec<_> = arguments.inputs.iter().map(|input| examples.example(input)).collect();
    let described: Vec<_> = arguments.inputs.iter().map(Input::described).collect();
    let (module, function) = arguments.function.split_once(':').unwrap_or((&arguments.function, ""));
    let failure = output.with_file_name("failure.json");
    let order = Order {
        module,
        function,
        inputs: &inputs,
        integers,
        output,
        device: arguments.device.name(),
        torch_version: accelerate_setup::VERSION,
        failure: &failure,
        signature: Signature { version: 1, inputs: &described },
    };
    let mut command = Command::new(python);
    command.args(["-c", PROGRAM, &serde_json::to_string(&order)?]);
    // The module is in this folder. PyTorch warns of what PyTorch does.
    command.env_remove("PYTHONSAFEPATH").env("PYTHONWARNINGS", "ignore::FutureWarning");
    let start = |source| ExportError::Start { python: python.to_owned(), source };
    let mut child = command.spawn().map_err(start)?;
    let mut stopped = None;
    let status = loop {
        if let Some(status) = child.try_wait().map_err(start)? {
            break status;
        }
        // A child that ends from here on is told by a signal, too.
        for signal in signals.wait().filter(|signal| *signal != SIGCHLD) {
            stopped = Some(signal);
            child.kill().map_err(start)?;
        }
    };
    Ok(match stopped {
        Some(signal) => Ended::Stopped(signal),
        None if status.success() => Ended::Success,
        None => match fs::read(&failure) {
            Ok(text) => Ended::Reported(serde_json::from_slice(&text)?),
            Err(_) => Ended::Failure,
        },
    })
}

/// Moves a package and its values to where they belong.
fn replace(new_package: &Path, package: &Path, python: &Path) -> Result<(), ExportError> {
    let (new_values, values) = (new_package.with_extension(VALUES), package.with_extension(VALUES));
    if !new_package.is_file() || !new_values.is_file() {
        return Err(ExportError::Nothing(python.to_owned()));
    }
    // A package is never there with values that are not its own: they could fit in shape.
    match fs::remove_file(package) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(write_error(package, error)),
        _ => {}
    }
    for (from, to) in [(&*new_values, &*values), (new_package, package)] {
        fs::rename(from, to).map_err(|source| write_error(to, source))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{PROGRAM, function, package};

    #[test]
    fn a_function_has_a_module_and_a_package_ends_in_pt2() {
        assert!(function("models:build").is_ok());
        for text in ["models", "models:", ":build", ""] {
            assert!(function(text).is_err(), "{text}");
        }
        assert!(package("a/model.pt2").is_ok());
        for text in ["model.pt", "pt2", "model", ""] {
            assert!(package(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_program_is_short_enough_to_be_read() {
        assert!(PROGRAM.lines().count() <= 150);
    }
}
