//! `accelerate checkpoint convert`: a checkpoint of Python Accelerate as one of this library, and the other way around.
//!
//! [`from_python`] and [`to_python`] find out what the source has and say what becomes of it, [`staged`] writes a folder that
//! appears when all of it is complete.

mod error;
mod from_python;
mod objects;
mod registered;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod sample;
mod staged;
mod state;
mod to_python;

use std::error::Error;
use std::path::PathBuf;

use accelerate_core::checkpoint::python::PythonFile;
use accelerate_core::checkpoint::{DESCRIPTION, STEM};
use accelerate_core::files::in_one_line;
use accelerate_core::names::counted;
use accelerate_core::weight_files::{DistributedCheckpoint, Notes, SaveManifest, format_size, listed, shown};
use anstyle::Style;
use clap::Args;
use serde::Serialize;

use super::folder::{list, newest_in};
use super::report::{Align, Table};
use super::unchanged::Seen;
use error::ConvertError;
use staged::Staged;

/// What a list in the report may take.
const MOST_LISTED_BYTES: usize = 300;

/// Convert checkpoints between Python Accelerate and this library.
///
/// SRC is a folder that `save_state` wrote, of Python Accelerate or of this library. DST becomes what `load_state` of the
/// other one goes on from: parameters, states of optimizers, schedules, the loss scale, the random numbers of PyTorch and
/// registered values, to the bit. What the other side has no place for is listed, and nothing is dropped without a word.
///
/// Nothing in SRC is executed: pickles are read as plain data. DST must not be there, or be empty. It appears when all of it
/// is on the disk. Of a checkpoint of this library, every byte is first compared with what was saved.
///
/// PyTorch numbers an optimizer's parameters, and model.safetensors does not keep their order. Where shapes do not tell them apart
/// either, --parameter_names says their names.
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    From Python, with the names of the optimizer's parameters and one loader, which begins its epoch anew:\n    \
      accelerate checkpoint convert checkpoints/checkpoint_3 converted/checkpoint_3 --parameter_names names.txt --dataloaders 1\n  \
    To Python:\n    \
      accelerate checkpoint convert converted/checkpoint_3 for_python\n\n\
    How Python writes names.txt:\n    \
      names = {parameter: name for name, parameter in model.named_parameters()}\n    \
      ordered = [names[p] for group in optimizer.param_groups for p in group[\"params\"]]\n    \
      open(\"names.txt\", \"w\").write(\"\\n\".join(ordered))\n\n\
    Exit code: 0; 1 if SRC cannot be read or DST not be written; 2 for wrong flags.")]
pub(crate) struct Arguments {
    /// The folder of a checkpoint.
    #[arg(value_name = "SRC")]
    source: PathBuf,

    /// The folder for the converted one.
    #[arg(value_name = "DST")]
    destination: PathBuf,

    /// A text file with the names of an optimizer's parameters in its order, one in a line. Of several optimizers, one file
    /// for each, in their order.
    #[arg(long = "parameter_names", alias = "parameter-names", value_name = "FILE")]
    parameter_names: Vec<PathBuf>,

    /// From Python: how many loaders the program prepares. Python's checkpoint does not say where they stood, so that they
    /// begin with epoch 0.
    #[arg(long, value_name = "COUNT", default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=1000))]
    dataloaders: u16,

    /// Print JSON: what was carried over, and what was not.
    #[arg(long)]
    json: bool,
}

/// What became of a checkpoint.
#[derive(Debug, Serialize)]
struct Report {
    source: String,
    destination: String,
    /// Of which side the destination is: `python` or `accelerate`.
    to: &'static str,
    num_processes: usize,
    carried: Vec<Carried>,
    left_out: Vec<LeftOut>,
}

/// An object that is in both checkpoints.
#[derive(Debug, Serialize)]
struct Carried {
    object: String,
    num_tensors: usize,
    num_bytes: u64,
    note: String,
}

/// What is in the source and not in the destination.
#[derive(Debug, Serialize)]
struct LeftOut {
    what: String,
    reason: String,
}

impl Report {
    fn carry(&mut self, object: &str, (num_tensors, num_bytes): (usize, u64), note: impl Into<String>) {
        self.carried.push(Carried { object: object.to_owned(), num_tensors, num_bytes, note: note.into() });
    }

    fn leave(&mut self, what: impl Into<String>, reason: impl Into<String>) {
        self.left_out.push(LeftOut { what: what.into(), reason: reason.into() });
    }

    /// Says which of the registered objects are not there, of which the source has these numbers. Loading counts them from 0.
    fn leave_gaps(&mut self, found: impl Iterator<Item = usize>) {
        let Some(last) = found.max() else { return };
        let mut carried: Vec<usize> = self.carried.iter().filter_map(|it| registered::number(&it.object)).collect();
        carried.sort_unstable();
        // The number may be that of a file that somebody has named so.
        let (mut missing, mut next) = (Vec::new(), 0_usize);
        for number in carried.into_iter().chain([last.saturating_add(1)]) {
            match number.saturating_sub(next) {
                0 => {}
                1 => missing.push(registered::name(next)),
                _ => missing.push(format!("{} to {}", registered::name(next), number - 1)),
            }
            next = number.saturating_add(1);
        }
        if !missing.is_empty() {
            let (side, then) = if self.to == "python" { ("DST", "") } else { ("SRC", " and convert again") };
            let reason = format!(
                "nothing is there under these names, and load_state wants each object that is registered, counted from 0: register \
                 them after it, and where others come behind them, give the files of those in {side} the free numbers{then}"
            );
            self.leave(listed(&missing, MOST_LISTED_BYTES), reason);
        }
    }

    /// Of several files that become one, what they say differently about themselves.
    fn leave_differing(&mut self, object: &str, notes: &Notes) {
        let differing = notes.differing();
        if !differing.is_empty() {
            let what = format!("{object}: notes {}", listed(&differing, MOST_LISTED_BYTES));
            self.leave(what, "its files differ in these");
        }
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let report = Converted::write(arguments)?.commit()?;
    let text = match arguments.json {
        true => serde_json::to_string_pretty(&report)? + "\n",
        false => described(&report, report.to == "accelerate" && arguments.dataloaders == 0),
    };
    Ok(crate::print_coloured(&text)?)
}

/// A checkpoint of which all is written, and nothing is there under its own name.
struct Converted {
    /// What was in the source before any of it was read.
    seen: Seen,
    staged: Staged,
    report: Report,
}

impl Converted {
    fn write(arguments: &Arguments) -> Result<Self, Box<dyn Error>> {
        let seen = Seen::of(&arguments.source);
        let (staged, report) = write(arguments)?;
        Ok(Self { seen, staged, report })
    }

    /// Gives the folder its name, if all that is in it is of one save.
    fn commit(self) -> Result<Report, Box<dyn Error>> {
        self.seen.check()?;
        self.staged.commit()?;
        Ok(self.report)
    }
}

/// Writes the other checkpoint beside where it will be, and says what became of it.
fn write(arguments: &Arguments) -> Result<(Staged, Report), Box<dyn Error>> {
    let Arguments { source, destination, .. } = arguments;
    let names = list(source)?;
    let is_own = names.iter().any(|name| *name == SaveManifest::file_name(STEM) || name == DESCRIPTION);
    let is_python = names.iter().any(|name| PythonFile::named(name).is_some());
    if !is_own && !is_python {
        let is_distributed = names.iter().any(|name| name == DistributedCheckpoint::FILE_NAME);
        let newest = newest_in(source);
        return Err(ConvertError::NoCheckpoint { folder: source.clone(), is_distributed, newest }.into());
    }
    if is_own {
        check_flags(arguments)?;
    }
    let mut report = Report {
        source: source.display().to_string(),
        destination: destination.display().to_string(),
        to: if is_own { "python" } else { "accelerate" },
        num_processes: 1,
        carried: Vec::new(),
        left_out: Vec::new(),
    };
    let mut staged = Staged::create(source, destination)?;
    match is_own {
        true => to_python::convert(source, &mut staged, &mut report)?,
        false => {
            from_python::convert(arguments, &names, &mut staged, &mut report)?;
            // Names from outside, such as those with control characters, may be more than readers take.
            if !super::is_as_saved(staged.path())? {
                return Err(ConvertError::NotReadable { folder: source.clone() }.into());
            }
        }
    }
    Ok((staged, report))
}

/// Flags that only say something of a checkpoint of Python's.
fn check_flags(arguments: &Arguments) -> Result<(), ConvertError> {
    let flag = match arguments {
        Arguments { parameter_names, .. } if !parameter_names.is_empty() => "parameter_names",
        Arguments { dataloaders: 1.., .. } => "dataloaders",
        _ => return Ok(()),
    };
    Err(ConvertError::ForPython { flag, folder: arguments.source.clone() })
}

/// What became of a checkpoint; `has_no_loaders` of a program that may prepare some.
fn described(report: &Report, has_no_loaders: bool) -> String {
    let side = if report.to == "python" { "Python Accelerate" } else { "this library" };
    let mut text = format!(
        "{} is now a checkpoint of {side} in {}, of {}\n\n",
        in_one_line(&report.source),
        in_one_line(&report.destination),
        counted(report.num_processes, "process")
    );
    let mut table = Table::new(&[
        ("object", Align::Left),
        ("tensors", Align::Right),
        ("size", Align::Right),
        ("note", Align::Left),
    ]);
    for Carried { object, num_tensors, num_bytes, note } in &report.carried {
        let row = [shown(object), num_tensors.to_string(), format_size(*num_bytes), note.clone()];
        table.push(Style::new(), row.into());
    }
    text += &table.text("");
    if !report.left_out.is_empty() {
        text += &format!("\nNot carried over, {}:\n", counted(report.left_out.len(), "thing"));
        for LeftOut { what, reason } in &report.left_out {
            text += &format!("  {}: {}\n", in_one_line(what), in_one_line(reason));
        }
    }
    if has_no_loaders {
        text += "\nA program that prepares data loaders asks for their state, too: convert with --dataloaders and their number.\n";
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_save_meanwhile_is_an_error_and_nothing_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let [source, destination] = ["src", "dst"].map(|name| folder.path().join(name));
        sample::write_sample(&source, 1.0);
        let (parameter_names, dataloaders, json) = (Vec::new(), 0, false);
        let arguments = Arguments { source: source.clone(), destination, parameter_names, dataloaders, json };
        let converted = Converted::write(&arguments).unwrap();
        sample::save_over(&source, 2.0);
        let error = converted.commit().unwrap_err();
        assert!(error.is::<super::super::Changed>(), "{error}");
        assert!(!arguments.destination.exists());
        Converted::write(&arguments).unwrap().commit().unwrap();
    }
}
