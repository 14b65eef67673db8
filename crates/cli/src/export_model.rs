//! `accelerate export-model`: a model of PyTorch as a package that is trained without Python.

use std::error::Error;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use accelerate_core::files::ShownPath;
use clap::{Args, ValueEnum};

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
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    accelerate export-model models:build --inputs 'float32[batch,64]' 'int64[batch]' --output model.pt2\n  \
    accelerate export-model bert:tiny --inputs 'int64[batch,128]' 'int64[batch]' --python .venv/bin/python --output bert.pt2")]
pub(crate) struct Arguments {
    /// What makes the model: a Python module that can be imported from this folder, and a function in it without arguments.
    #[arg(value_name = "MODULE:FUNCTION", value_parser = function)]
    function: String,

    /// What the model takes: for each input a type and a shape, with names for sizes that may vary. Equal names are equal sizes.
    #[arg(long, value_name = "TYPE[SIZES]", num_args = 1.., required = true)]
    inputs: Vec<String>,

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
    #[error("{} could not be written", path.shown())]
    Write { path: PathBuf, source: io::Error },
    #[error("{} could not be started; name another with --python", python.shown())]
    Start { python: PathBuf, source: io::Error },
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Box<dyn Error>> {
    let (package, values) = (&arguments.output, arguments.output.with_extension(VALUES));
    // Before minutes of compiling.
    if !arguments.overwrite
        && let Some(there) = [package, &values].into_iter().find(|path| path.symlink_metadata().is_ok())
    {
        return Err(ExportError::Exists(there.clone()).into());
    }
    let python = match &arguments.python {
        Some(python) => python.clone(),
        None => accelerate_setup::python()?,
    };
    let folder = package.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    let write = |path: &Path, source| ExportError::Write { path: path.to_owned(), source };
    // Both files are made in a folder of their own and moved when they are whole.
    let fresh = tempfile::Builder::new().prefix(".export-model-").tempdir_in(folder);
    let fresh = fresh.map_err(|source| write(folder, source))?;
    let new_package = fresh.path().join("model.pt2");
    let mut command = Command::new(&python);
    command.args(["-c", PROGRAM, &arguments.function, "--inputs"]).args(&arguments.inputs);
    command.arg("--output").arg(&new_package).args(["--device", arguments.device.name()]);
    command.args(["--torch_version", accelerate_setup::VERSION]);
    let status = command.status().map_err(|source| ExportError::Start { python, source })?;
    if !status.success() {
        // Python has said why.
        return Ok(ExitCode::FAILURE);
    }
    for (from, to) in [(new_package.with_extension(VALUES), &values), (new_package, package)] {
        fs::rename(from, to).map_err(|source| write(to, source))?;
    }
    let shown = (package.shown(), values.shown());
    crate::print_message(&format!("accelerate export-model: {} and {} are written", shown.0, shown.1));
    Ok(ExitCode::SUCCESS)
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
