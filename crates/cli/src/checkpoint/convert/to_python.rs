//! A checkpoint of this library as one of Python Accelerate.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::Path;

use accelerate_core::checkpoint::python::{PythonOptimizer, fresh_random_states, from_json, schedule_from_json};
use accelerate_core::checkpoint::{Checkpoint, SavedObject};
use accelerate_core::names::counted;
use accelerate_core::weight_files::{Checksum, Notes, Plain, format_size, listed, shown};
use safetensors::Dtype;
use serde_json::Value;

use super::super::check::rank_in;
use super::super::folder::OpenCheckpoint;
use super::super::report::short;
use super::super::tensors::Reader;
use super::super::verify::is_as_saved;
use super::super::weights::{files_of, tensors_of};
use super::Report;
use super::error::ConvertError;
use super::objects::write_torch;
use super::registered;
use super::staged::Staged;
use crate::progress::Progress;
use crate::weights::{Copier, Tensor, WeightsError, write_safetensors};

const RANDOM_STATES: &str = "random_states";
/// So many processes are believed without anything that they have saved.
const MOST_UNSEEN_PROCESSES: usize = 64;

pub(super) fn convert(folder: &Path, staged: &mut Staged, report: &mut Report) -> Result<(), Box<dyn Error>> {
    if !is_as_saved(folder)? {
        return Err(ConvertError::NotAsSaved { folder: folder.to_owned() }.into());
    }
    let checkpoint = OpenCheckpoint::open(folder)?;
    let description = &checkpoint.description;
    check_processes(folder, description)?;
    report.num_processes = description.world_size;
    let sizes = description.objects.values().flat_map(|object| object.tensors.values());
    let bar = Progress::new("converting", sizes.fold(0, |sum, tensor| sum.saturating_add(tensor.num_bytes())));
    for (name, object) in &description.objects {
        let mut reader = Reader::new(&checkpoint);
        let found = tensors_of(&mut reader, name, object).and_then(|it| Ok((it, reader.notes_of(object)?)));
        let (tensors, notes) = found.map_err(|source| {
            let reason = source.to_string();
            ConvertError::Object { folder: folder.to_owned(), object: name.clone(), reason }
        })?;
        let mut writer = Writer { checkpoint: &checkpoint, bar: &bar, staged: &mut *staged, report: &mut *report };
        writer.object((name, object), &tensors, &notes)?;
        if !object.values_of_ranks.is_empty() && name != RANDOM_STATES {
            let ranks: Vec<String> = object.values_of_ranks.keys().map(ToString::to_string).collect();
            let what = format!("{name}: values of the processes {}", listed(&ranks, 100));
            report.leave(what, "Python has one value for all processes, and gets that of process 0");
        }
    }
    leave_of_run(description, report);
    report.leave_gaps(description.objects.keys().filter_map(|name| registered::number(name)));
    if !description.objects.contains_key(RANDOM_STATES) {
        let mut writer = Writer { checkpoint: &checkpoint, bar: &bar, staged, report };
        writer.random_states(&[])?;
    }
    bar.finish();
    Ok(())
}

/// What a description says of the run that no file of Python's has.
fn leave_of_run(description: &Checkpoint, report: &mut Report) {
    if let Some(metric) = description.metric {
        report.leave(format!("metric {metric}"), "checkpoints of Python Accelerate do not say how good a run was");
    }
    let seen = description.accumulation.seen;
    if seen > 0 {
        let what = format!("a window of gradient accumulation, {} into it", counted(seen, "micro-batch"));
        report.leave(what, "Python counts on from the step, without the gradients of these");
    }
}

/// Each process becomes a file. More than a few have to be seen in the checkpoint, and not only counted.
fn check_processes(folder: &Path, description: &Checkpoint) -> Result<(), ConvertError> {
    let objects = || description.objects.values();
    let of_values = objects().flat_map(|object| object.values_of_ranks.keys().copied());
    let random = description.objects.get(RANDOM_STATES).into_iter().flat_map(|object| object.tensors.keys());
    let of_random = random.filter_map(|name| name.strip_prefix("rank_")?.split('.').next()?.parse().ok());
    let of_files = description.files.iter().filter_map(|file| rank_in(file)).map(|(rank, _)| rank);
    let seen: BTreeSet<usize> = of_values.chain(of_random).chain(of_files).collect();
    let (found, wanted) = (seen.len(), description.world_size);
    match wanted > MOST_UNSEEN_PROCESSES && found < wanted {
        true => Err(ConvertError::Processes { folder: folder.to_owned(), found, wanted }),
        false => Ok(()),
    }
}

struct Writer<'a> {
    checkpoint: &'a OpenCheckpoint,
    bar: &'a Progress,
    staged: &'a mut Staged,
    report: &'a mut Report,
}

impl Writer<'_> {
    fn object(
        &mut self,
        (name, object): (&str, &SavedObject),
        tensors: &[Tensor],
        notes: &Notes,
    ) -> Result<(), Box<dyn Error>> {
        // A model's file says the same.
        if let Some(tensor) = tensors.iter().find(|tensor| !tensor.has_whole_bytes()) {
            let reason =
                format!("the elements of `{}` are {}, a type of less than a byte", shown(&tensor.name), tensor.dtype);
            return Err(self.wrong(name, reason).into());
        }
        let kind = name.trim_end_matches(|letter: char| letter.is_ascii_digit()).trim_end_matches('_');
        let size = (tensors.len(), tensors.iter().map(Tensor::num_bytes).fold(0, u64::saturating_add));
        let values = &object.values;
        match kind {
            "model" if tensors.is_empty() => {
                let reason = "it has no tensors, so that Python could go on from nothing; take a checkpoint that has its weights";
                return Err(self.wrong(name, reason.to_owned()).into());
            }
            "model" => {}
            _ => self.leave_notes(name, notes),
        }
        match kind {
            "model" => return Ok(self.model((name, values), tensors, notes)?),
            "optimizer" => return self.optimizer(name, values, tensors),
            "scheduler" => {
                if let Some(kind) = values["_scheduler_type"].as_str() {
                    let what = format!("{name}: its kind, {}", shown(kind));
                    self.report.leave(what, "states of PyTorch do not say which schedule they are of");
                }
                self.torch((name, "bin"), size, &schedule_from_json(values))?;
            }
            // One that is switched off has nothing to say.
            "scaler" if values.is_null() => self.torch((name, "pt"), size, &Plain::Dict(Vec::new()))?,
            "scaler" => self.torch((name, "pt"), size, &from_json(values))?,
            "custom_checkpoint" => {
                let value = self.custom(name, values, tensors)?;
                self.torch((name, "pkl"), size, &value)?;
            }
            "dataloader" => self.report.leave(
                format!("{name} at epoch {}, {} rows", short(&values["epoch"]), short(&values["rows_delivered"])),
                "Python's load_state has no place for it; skip what the epoch has seen with \
                 accelerator.skip_first_batches",
            ),
            RANDOM_STATES => self.random_states(tensors)?,
            _ => self.report.leave(
                format!("{name}, {} tensors, {}", size.0, format_size(size.1)),
                "Python Accelerate has no such object",
            ),
        }
        Ok(())
    }

    fn model(&mut self, (name, values): (&str, &Value), tensors: &[Tensor], notes: &Notes) -> Result<(), WeightsError> {
        let size = (tensors.len(), tensors.iter().map(Tensor::num_bytes).fold(0, u64::saturating_add));
        let mut files = files_of(self.checkpoint);
        let mut copier = Copier::new(&mut files, self.bar.clone());
        let file = format!("{name}.safetensors");
        self.staged.write(&file, |sink| write_safetensors(&mut copier, (tensors.iter().collect(), notes), sink))?;
        self.report.carry(name, size, file);
        self.report.leave_differing(name, notes);
        let Value::Object(values) = values else { return Ok(()) };
        if let Some(left_out) = values.get("left_out").and_then(Value::as_object) {
            let what = format!("{name}: {} frozen tensors", left_out.len());
            self.report
                .leave(what, "they are not in the checkpoint (adapter_only); Python has to have them from elsewhere");
        }
        let others: Vec<&String> = values.keys().filter(|key| *key != "left_out").collect();
        if !others.is_empty() {
            let what = format!("{name}: {}", listed(others, 100));
            self.report.leave(what, "how gradients are put into buckets, which each run finds out by itself");
        }
        Ok(())
    }

    /// Of objects that become pickles.
    fn leave_notes(&mut self, name: &str, notes: &Notes) {
        let agreed = notes.agreed().into_keys().filter(|key| key != Notes::FORMAT);
        let keys: Vec<String> = agreed.chain(notes.differing()).collect();
        if !keys.is_empty() {
            let what = format!("{name}: notes {}", listed(&keys, 100));
            self.report.leave(what, "files of torch.save have no notes about themselves");
        }
    }

    fn optimizer(&mut self, name: &str, values: &Value, tensors: &[Tensor]) -> Result<(), Box<dyn Error>> {
        if let Some(tensor) = tensors.iter().find(|tensor| tensor.dtype == Dtype::U8) {
            let reason = format!("`{}` is in 8 bits, as no optimizer of PyTorch keeps its state", shown(&tensor.name));
            return Err(self.wrong(name, reason).into());
        }
        let size = (tensors.len(), tensors.iter().map(Tensor::num_bytes).fold(0, u64::saturating_add));
        let of_name = tensors.iter().map(|tensor| (tensor.name.clone(), tensor));
        let state = PythonOptimizer::state_dict(values, of_name).map_err(|source| {
            let (folder, object) = (self.checkpoint.save.folder.clone(), name.to_owned());
            ConvertError::ObjectState { folder, object, source }
        })?;
        self.torch((name, "bin"), size, &state)?;
        Ok(())
    }

    fn wrong(&self, object: &str, reason: String) -> ConvertError {
        let (folder, object) = (self.checkpoint.save.folder.clone(), object.to_owned());
        ConvertError::Object { folder, object, reason }
    }

    fn torch(
        &mut self,
        (name, extension): (&str, &str),
        size: (usize, u64),
        value: &Plain<&Tensor>,
    ) -> Result<(), WeightsError> {
        let file = format!("{name}.{extension}");
        self.write(&file, value)?;
        self.report.carry(name, size, file);
        Ok(())
    }

    /// The folder in the archive is called as the file, as `torch.save` does.
    fn write(&mut self, file: &str, value: &Plain<&Tensor>) -> Result<(), WeightsError> {
        let mut files = files_of(self.checkpoint);
        let mut copier = Copier::new(&mut files, self.bar.clone());
        let folder = file.split('.').next().unwrap_or(file);
        self.staged.write(file, |sink| write_torch(value, &mut copier, sink, folder))
    }

    /// Tensors and values of a registered object are one dictionary for Python.
    fn custom<'t>(&self, name: &str, values: &Value, tensors: &'t [Tensor]) -> Result<Plain<&'t Tensor>, ConvertError> {
        let mut entries = match from_json(values) {
            value if tensors.is_empty() => return Ok(value),
            Plain::Dict(entries) => entries,
            Plain::None => Vec::new(),
            value => {
                let reason =
                    format!("its values are {} and not a dictionary that its tensors could join", value.kind());
                return Err(self.wrong(name, reason));
            }
        };
        for tensor in tensors {
            registered::insert(&mut entries, values, tensor).map_err(|reason| self.wrong(name, reason))?;
        }
        Ok(Plain::Dict(entries))
    }

    /// One file for each process, with the generators of PyTorch where they were.
    fn random_states(&mut self, tensors: &[Tensor]) -> Result<(), WeightsError> {
        let of_name: BTreeMap<&str, &Tensor> = tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        let description = &self.checkpoint.description;
        let (world_size, step) = (description.world_size, description.accumulation.step as i64);
        let of_device: Vec<Plain<&Tensor>> = (0..world_size)
            .map_while(|rank| of_name.get(format!("rank_{rank}.cuda").as_str()).map(|tensor| Plain::Tensor(*tensor)))
            .collect();
        for rank in 0..world_size {
            let mut entries = vec![("step", Plain::Int(step))];
            if let Some(cpu) = of_name.get(format!("rank_{rank}.cpu").as_str()) {
                // Without states of its own generators, Python goes on to none.
                let seed = Checksum::of(format!("{} {rank}", description.id).as_bytes()).value() as u32;
                let [python, numpy] = fresh_random_states(seed);
                entries.extend([("random_state", python), ("numpy_random_seed", numpy)]);
                entries.push(("torch_manual_seed", Plain::Tensor(*cpu)));
            }
            if !of_device.is_empty() {
                entries.push(("torch_cuda_manual_seed", Plain::List(of_device.clone())));
            }
            self.write(&format!("{RANDOM_STATES}_{rank}.pkl"), &Plain::dict(entries))?;
        }
        let num_bytes = tensors.iter().map(Tensor::num_bytes).fold(0, u64::saturating_add);
        let note = match tensors.is_empty() {
            true => "where the accumulation of gradients stood; no generators were saved",
            false => "the generators of PyTorch; those of Python and NumPy begin with seeds of their own",
        };
        self.report.carry(RANDOM_STATES, (tensors.len(), num_bytes), note);
        Ok(())
    }
}
