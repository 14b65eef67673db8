//! `accelerate checkpoint ls`: which checkpoints there are, and what is in one.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use accelerate_core::checkpoint::{Checkpoint, SavedObject, SavedTensor};
use accelerate_core::files::in_one_line;
use accelerate_core::names::counted;
use accelerate_core::weight_files::{format_size, listed, shown};
use anstyle::{AnsiColor, Style};
use clap::Args;
use serde::Serialize;
use serde_json::Value;

use super::conversions::{self, conversions_in};
use super::folder::{
    OpenCheckpoint, State, is_checkpoint, is_of_python, list, no_checkpoint, num_bytes, numbered_in, saved_at,
};
use super::report::{Align, Table, age, short};

/// List checkpoints, or what is in one.
///
/// FOLDER is a checkpoint, a project, or the folder `checkpoints` of a project. Of several checkpoints it shows which are
/// completed, and marks the newest of these, from which `load_state` without a folder goes on. Of one it shows each object
/// of the run with its tensors, and the values of schedulers and loaders.
///
/// Only names, sizes and the description are looked at, which takes milliseconds. `accelerate checkpoint verify` reads all.
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    accelerate checkpoint ls\n  \
    accelerate checkpoint ls runs/bert\n  \
    accelerate checkpoint ls runs/bert/checkpoints/checkpoint_3 --tensors\n  \
    accelerate checkpoint ls runs/bert --json | jq '.checkpoints[] | select(.newest) | .folder'")]
pub(crate) struct Arguments {
    /// A checkpoint, or a folder with checkpoints.
    #[arg(value_name = "FOLDER", default_value = ".", hide_default_value = true)]
    folder: PathBuf,

    /// List each tensor of a checkpoint with its element type, shape and files.
    #[arg(long)]
    tensors: bool,

    /// Print JSON, with sizes in bytes and values in full.
    #[arg(long)]
    json: bool,
}

/// A checkpoint in a list.
#[derive(Debug, Serialize)]
struct Entry {
    folder: String,
    /// `completed`, `interrupted`, `not completed`, `damaged`, `not readable` or `of a newer version`.
    state: &'static str,
    /// Why it is not completed.
    reason: Option<String>,
    newest: bool,
    number: Option<usize>,
    num_processes: Option<usize>,
    num_bytes: u64,
    /// Seconds since 1970.
    saved_at: Option<u64>,
    /// Micro-batches since the count of accumulation last restarted.
    accumulation_step: Option<usize>,
}

/// An object of a run.
#[derive(Debug, Serialize)]
struct Object<'a> {
    num_tensors: usize,
    num_elements: u64,
    num_bytes: u64,
    dtypes: Vec<String>,
    num_pieces: usize,
    values: &'a Value,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    values_of_ranks: &'a BTreeMap<usize, Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tensors: Option<BTreeMap<&'a str, Tensor<'a>>>,
}

#[derive(Debug, Serialize)]
struct Tensor<'a> {
    dtype: String,
    shape: &'a [usize],
    num_bytes: u64,
    /// One for each piece.
    files: Vec<&'a str>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let folder = &arguments.folder;
    let names = list(folder)?;
    let text = if is_checkpoint(folder, &names) { one(arguments)? } else { several(arguments, &names)? };
    Ok(crate::print_coloured(&text)?)
}

fn several(arguments: &Arguments, names: &[String]) -> Result<String, Box<dyn Error>> {
    let mut entries: Vec<Entry> = numbered_in(&arguments.folder)
        .into_iter()
        .map(|(number, folder)| Entry { number: Some(number), ..Entry::new(&folder, &State::of(&folder)) })
        .collect();
    if entries.is_empty() {
        return Err(no_checkpoint(&arguments.folder, names).into());
    }
    if let Some(newest) = entries.iter_mut().rev().find(|entry| entry.counts()) {
        newest.newest = true;
    }
    let conversions = conversions_in(&arguments.folder);
    if arguments.json {
        let report = serde_json::json!({ "checkpoints": entries, "conversions": conversions });
        return Ok(serde_json::to_string_pretty(&report)? + "\n");
    }
    let mut table = Table::new(&[
        ("checkpoint", Align::Left),
        ("processes", Align::Right),
        ("size", Align::Right),
        ("age", Align::Right),
        ("accumulation step", Align::Right),
        ("state", Align::Left),
    ]);
    for entry in &entries {
        table.push(entry.style(), entry.cells());
    }
    Ok(table.text("") + &conversions::described(&conversions))
}

impl Entry {
    fn new(folder: &Path, state: &State) -> Self {
        let description = state.open().map(|open| &open.description);
        let (word, reason) = match state {
            State::Completed(_) => ("completed", None),
            State::Interrupted(_) => {
                ("interrupted", Some("all is there, and the next load or save gives files their names".to_owned()))
            }
            State::NotCompleted if list(folder).is_ok_and(|names| is_of_python(&names)) => (
                "not completed",
                Some("it is of Python Accelerate; `accelerate checkpoint convert` reads it".to_owned()),
            ),
            State::NotCompleted => ("not completed", Some("there is no checkpoint.manifest.json in it".to_owned())),
            State::Unusable(fault) => (fault.problem.verdict().word(), Some(fault.to_string())),
        };
        Self {
            folder: folder.display().to_string(),
            state: word,
            reason,
            newest: false,
            number: description.and_then(|description| description.iteration),
            num_processes: description.map(|description| description.world_size),
            num_bytes: num_bytes(folder),
            saved_at: saved_at(folder).and_then(|at| Some(at.duration_since(UNIX_EPOCH).ok()?.as_secs())),
            accumulation_step: description.map(|description| description.accumulation.step),
        }
    }

    /// May a run go on from it?
    fn counts(&self) -> bool {
        self.state == "completed" || self.state == "interrupted"
    }

    fn style(&self) -> Style {
        match (self.newest, self.counts()) {
            (true, _) => AnsiColor::Green.on_default().bold(),
            (_, true) => Style::new(),
            (_, false) => AnsiColor::Red.on_default(),
        }
    }

    fn cells(&self) -> Vec<String> {
        let or_none = |number: Option<usize>| number.map_or_else(|| "-".to_owned(), |number| number.to_string());
        vec![
            or_none(self.number),
            or_none(self.num_processes),
            format_size(self.num_bytes),
            self.age(),
            or_none(self.accumulation_step),
            self.words(),
        ]
    }

    fn age(&self) -> String {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let seconds = self.saved_at.map(|at| now.saturating_sub(at));
        seconds.map_or_else(|| "-".to_owned(), |seconds| age(std::time::Duration::from_secs(seconds)))
    }

    /// Its state, and why.
    fn words(&self) -> String {
        let reason = self.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
        format!("{}{}{reason}", self.state, if self.newest { ", newest" } else { "" })
    }
}

fn one(arguments: &Arguments) -> Result<String, Box<dyn Error>> {
    let state = State::of_open(OpenCheckpoint::open(&arguments.folder)?);
    let mut objects = BTreeMap::new();
    if let Some(OpenCheckpoint { description, .. }) = state.open() {
        for (name, object) in &description.objects {
            objects.insert(name.as_str(), Object::new(description, object, arguments.tensors));
        }
    }
    let entry = Entry::new(&arguments.folder, &state);
    if arguments.json {
        return Ok(
            serde_json::to_string_pretty(&serde_json::json!({ "checkpoint": entry, "objects": objects }))? + "\n"
        );
    }
    Ok(show(&entry, &objects))
}

impl<'a> Object<'a> {
    fn new(checkpoint: &'a Checkpoint, object: &'a SavedObject, with_tensors: bool) -> Self {
        let tensors = || object.tensors.values();
        let dtypes: BTreeSet<String> = tensors().map(|tensor| tensor.dtype.to_string()).collect();
        let each = || object.tensors.iter().map(|(name, tensor)| (name.as_str(), Tensor::new(checkpoint, tensor)));
        Self {
            num_tensors: object.tensors.len(),
            num_elements: tensors().map(num_elements).fold(0, u64::saturating_add),
            num_bytes: tensors().map(SavedTensor::num_bytes).fold(0, u64::saturating_add),
            dtypes: dtypes.into_iter().collect(),
            num_pieces: tensors().map(|tensor| tensor.pieces.len()).sum(),
            values: &object.values,
            values_of_ranks: &object.values_of_ranks,
            tensors: with_tensors.then(|| each().collect()),
        }
    }
}

impl<'a> Tensor<'a> {
    fn new(checkpoint: &'a Checkpoint, tensor: &'a SavedTensor) -> Self {
        let file = |number: usize| checkpoint.files.get(number).map(String::as_str);
        Self {
            dtype: tensor.dtype.to_string(),
            shape: &tensor.shape,
            num_bytes: tensor.num_bytes(),
            files: tensor.pieces.iter().filter_map(|piece| file(piece.file)).collect(),
        }
    }
}

fn num_elements(tensor: &SavedTensor) -> u64 {
    tensor.shape.iter().fold(1, |product: u64, &size| product.saturating_mul(size as u64))
}

fn show(entry: &Entry, objects: &BTreeMap<&str, Object>) -> String {
    let mut text = format!("{}\n  {}", in_one_line(&entry.folder), entry.words());
    if let (Some(number), Some(step)) = (entry.num_processes, entry.accumulation_step) {
        let _ = write!(text, "; {}", counted(number, "process"));
        let _ = write!(text, "; {}; {} old; accumulation step {step}", format_size(entry.num_bytes), entry.age());
    }
    text.push_str("\n\n");
    let mut table = Table::new(&[
        ("object", Align::Left),
        ("tensors", Align::Right),
        ("elements", Align::Right),
        ("size", Align::Right),
        ("pieces", Align::Right),
        ("dtypes", Align::Left),
    ]);
    for (name, object) in objects {
        let counts = [object.num_tensors.to_string(), object.num_elements.to_string(), format_size(object.num_bytes)];
        let rest = [object.num_pieces.to_string(), object.dtypes.join(", ")];
        table.push(Style::new(), [shown(name)].into_iter().chain(counts).chain(rest).collect());
    }
    text.push_str(&table.text(""));
    for (name, object) in objects {
        text.push_str(&tensors_of(name, object));
    }
    text.push_str(&values(objects));
    text
}

fn tensors_of(name: &str, object: &Object) -> String {
    let mut table = Table::new(&[
        ("tensor", Align::Left),
        ("dtype", Align::Left),
        ("shape", Align::Right),
        ("size", Align::Right),
        ("files", Align::Left),
    ]);
    for (name, tensor) in object.tensors.iter().flatten() {
        let files = listed(&tensor.files, 200);
        let shape = format!("{:?}", tensor.shape);
        table.push(Style::new(), vec![shown(name), tensor.dtype.clone(), shape, format_size(tensor.num_bytes), files]);
    }
    if table.is_empty() { String::new() } else { format!("\n{}\n{}", shown(name), table.text("  ")) }
}

/// What objects have besides tensors, each in a short line.
fn values(objects: &BTreeMap<&str, Object>) -> String {
    let mut table = Table::new(&[("object", Align::Left), ("values", Align::Left)]);
    for (name, object) in objects.iter().filter(|(_, object)| !object.values.is_null()) {
        let others = match object.values_of_ranks.len() {
            0 => String::new(),
            others => format!(" (other ones on {})", counted(others, "rank")),
        };
        table.push(Style::new(), vec![shown(name), short(object.values) + &others]);
    }
    if table.is_empty() { String::new() } else { format!("\n{}", table.text("")) }
}
