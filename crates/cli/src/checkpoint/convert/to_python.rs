//! A checkpoint of this library as one of Python Accelerate.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

use accelerate_core::checkpoint::python::{
    PythonOptimizer, fresh_random_states, from_json, schedule_from_json,
};
use accelerate_core::checkpoint::SavedObject;
use accelerate_core::weight_files::{Plain, format_size, listed};
use indicatif::ProgressBar;
use safetensors::Dtype;
use serde_json::Value;

use super::super::folder::OpenCheckpoint;
use super::super::report::progress_bar;
use super::super::tensors::Reader;
use super::super::verify::is_as_saved;
use super::super::weights::{files_of, tensors_of};
use super::Report;
use super::error::ConvertError;
use super::objects::write_torch;
use super::staged::Staged;
use crate::weights::{Copier, Tensor, WeightsError, write_safetensors};

const RANDOM_STATES: &str = "random_states";

pub(super) fn convert(folder: &Path, staged: &mut Staged, report: &mut Report) -> Result<(), Box<dyn Error>> {
    if !is_as_saved(folder)? {
        return Err(ConvertError::NotAsSaved { folder: folder.to_owned() }.into());
    }
    let checkpoint = OpenCheckpoint::open(folder)?;
    let description = &checkpoint.description;
    report.num_processes = description.world_size;
    let sizes = description.objects.values().flat_map(|object| object.tensors.values());
    let bar = progress_bar(sizes.fold(0, |sum, tensor| sum.saturating_add(tensor.num_bytes())));
    for (name, object) in &description.objects {
        let tensors = tensors_of(&mut Reader::new(&checkpoint), name, object).map_err(|source| {
            let reason = source.to_string();
            ConvertError::Object { folder: folder.to_owned(), object: name.clone(), reason }
        })?;
        let mut writer = Writer { checkpoint: &checkpoint, bar: &bar, staged: &mut *staged, report: &mut *report };
        writer.object(name, object, &tensors)?;
        if !object.values_of_ranks.is_empty() && name != RANDOM_STATES {
            let ranks: Vec<String> = object.values_of_ranks.keys().map(ToString::to_string).collect();
            let what = format!("{name}: values of the processes {}", listed(&ranks, 100));
            report.leave(what, "Python has one value for all processes, and gets that of process 0");
        }
    }
    if !description.objects.contains_key(RANDOM_STATES) {
        let mut writer = Writer { checkpoint: &checkpoint, bar: &bar, staged, report };
        writer.random_states(&[])?;
    }
    bar.finish_and_clear();
    Ok(())
}

struct Writer<'a> {
    checkpoint: &'a OpenCheckpoint,
    bar: &'a ProgressBar,
    staged: &'a mut Staged,
    report: &'a mut Report,
}

impl Writer<'_> {
    fn object(&mut self, name: &str, object: &SavedObject, tensors: &[Tensor]) -> Result<(), Box<dyn Error>> {
        let kind = name.trim_end_matches(|letter: char| letter.is_ascii_digit()).trim_end_matches('_');
        let num_bytes = tensors.iter().map(Tensor::num_bytes).fold(0, u64::saturating_add);
        let size = (tensors.len(), num_bytes);
        match kind {
            "model" => {
                let mut files = files_of(self.checkpoint);
                let mut copier = Copier::new(&mut files, self.bar.clone());
                let file = format!("{name}.safetensors");
                self.staged.write(&file, |sink| write_safetensors(&mut copier, tensors.iter().collect(), sink))?;
                self.report.carry(name, size, file);
                if !object.values.is_null() {
                    let what = format!("{name}: {}", keys_of(&object.values));
                    self.report.leave(what, "how gradients are put into buckets, which each run finds out by itself");
                }
            }
            "optimizer" => {
                if let Some(tensor) = tensors.iter().find(|tensor| tensor.dtype == Dtype::U8) {
                    let reason = format!("`{}` is in 8 bits, as no optimizer of PyTorch keeps its state", tensor.name);
                    return Err(self.wrong(name, reason).into());
                }
                let of_name = tensors.iter().map(|tensor| (tensor.name.clone(), tensor));
                let state = PythonOptimizer::state_dict(&object.values, of_name);
                let state = state.map_err(|source| ConvertError::ObjectState {
                    folder: self.checkpoint.save.folder.clone(),
                    object: name.to_owned(),
                    source,
                })?;
                self.torch(name, "bin", &state)?;
                self.report.carry(name, size, format!("{name}.bin; parameters are counted in the order of the groups"));
            }
            "scheduler" => {
                self.torch(name, "bin", &schedule_from_json(&object.values))?;
                self.report.carry(name, size, format!("{name}.bin"));
            }
            "scaler" => {
                // One that is switched off has nothing to say.
                let value = if object.values.is_null() { Plain::Dict(Vec::new()) } else { from_json(&object.values) };
                self.torch(name, "pt", &value)?;
                self.report.carry(name, size, "scaler.pt");
            }
            "custom_checkpoint" => {
                let value = self.custom(name, &object.values, tensors)?;
                self.torch(name, "pkl", &value)?;
                self.report.carry(name, size, format!("{name}.pkl"));
            }
            "dataloader" => self.report.leave(
                format!("{name} at {}", object.values),
                "Python's load_state has no place for it; skip what the epoch has seen with \
                 accelerator.skip_first_batches",
            ),
            RANDOM_STATES => self.random_states(tensors)?,
            _ => self.report.leave(
                format!("{name}, {} tensors, {}", tensors.len(), format_size(num_bytes)),
                "Python Accelerate has no such object",
            ),
        }
        Ok(())
    }

    fn wrong(&self, object: &str, reason: String) -> ConvertError {
        let (folder, object) = (self.checkpoint.save.folder.clone(), object.to_owned());
        ConvertError::Object { folder, object, reason }
    }

    fn torch(&mut self, stem: &str, extension: &str, value: &Plain<&Tensor>) -> Result<(), WeightsError> {
        let mut files = files_of(self.checkpoint);
        let mut copier = Copier::new(&mut files, self.bar.clone());
        self.staged.write(&format!("{stem}.{extension}"), |sink| write_torch(value, &mut copier, sink, stem))
    }

    /// Tensors and values of a registered object are one dictionary for Python.
    fn custom<'t>(&self, name: &str, values: &Value, tensors: &'t [Tensor]) -> Result<Plain<&'t Tensor>, ConvertError> {
        let mut entries = match from_json(values) {
            value if tensors.is_empty() => return Ok(value),
            Plain::Dict(entries) => entries,
            Plain::None => Vec::new(),
            value => {
                let reason = format!("its values are {} and not a dictionary that its tensors could join", value.kind());
                return Err(self.wrong(name, reason));
            }
        };
        for tensor in tensors {
            if values.get(&tensor.name).is_some() {
                let reason = format!("`{}` is the name of a tensor and of a value of it", tensor.name);
                return Err(self.wrong(name, reason));
            }
            entries.push((Plain::text(&tensor.name), Plain::Tensor(tensor)));
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
                let hash = blake3::hash(format!("{} {rank}", description.id).as_bytes());
                let seed = hash.as_bytes().iter().take(4).fold(0, |seed, &byte| seed << 8 | u32::from(byte));
                let [python, numpy] = fresh_random_states(seed);
                entries.extend([("random_state", python), ("numpy_random_seed", numpy)]);
                entries.push(("torch_manual_seed", Plain::Tensor(*cpu)));
            }
            if !of_device.is_empty() {
                entries.push(("torch_cuda_manual_seed", Plain::List(of_device.clone())));
            }
            self.torch(&format!("{RANDOM_STATES}_{rank}"), "pkl", &Plain::dict(entries))?;
        }
        let num_bytes = tensors.iter().map(Tensor::num_bytes).fold(0, u64::saturating_add);
        let note = "the generators of PyTorch; those of Python and NumPy begin with seeds of their own";
        self.report.carry(RANDOM_STATES, (tensors.len(), num_bytes), note);
        Ok(())
    }
}

fn keys_of(values: &Value) -> String {
    match values {
        Value::Object(object) => listed(object.keys(), 100),
        _ => "values".to_owned(),
    }
}
