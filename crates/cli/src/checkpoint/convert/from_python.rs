//! A checkpoint of Python Accelerate as one of this library.

use std::collections::{BTreeMap, HashSet};
use std::error::Error;
use std::path::{Path, PathBuf};

use accelerate_core::checkpoint::python::{
    Left, Origin, Parameters, PythonFile, PythonOptimizer, model_files, name_parameters, object_name, to_json,
    without_lambdas,
};
use accelerate_core::checkpoint::{Checkpoint, checkpoint_number};
use accelerate_core::weight_files::{Plain, StoredTensor, check_tensor_name, listed, shown};
use safetensors::Dtype;
use serde_json::{Value, json};

use super::super::files::read_small;
use super::error::ConvertError;
use super::objects::{Object, write_checkpoint};
use super::registered::{self, Registered};
use super::staged::Staged;
use super::state::State;
use super::{Arguments, MOST_LISTED_BYTES, Report};
use crate::progress::Progress;
use crate::weights::{self, Data, Files, Tensor, Weights, WeightsError};

/// A file of names is read as a whole.
const MAX_NAMES_BYTES: u64 = 64 << 20;
/// Why a value stays behind.
const NOT_CARRIED: &str = "values are JSON here: finite numbers of 64 bits, texts of at most 4096 bytes, truth values, None, lists, and \
                           dictionaries with texts as keys, in which there may be tensors";
/// What schedules of this library go on from.
const SCHEDULE: [&str; 4] = ["last_epoch", "_step_count", "base_lrs", "_last_lr"];
/// The same of a loss scale.
const SCALE: [&str; 5] = ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"];
/// The generators of random numbers whose states are those of this library, and what else is beside them.
const STEP: &str = "step";
const CPU: &str = "torch_manual_seed";
const CUDA: &str = "torch_cuda_manual_seed";

pub(super) fn convert(
    arguments: &Arguments,
    names: &[String],
    staged: &mut Staged,
    report: &mut Report,
) -> Result<(), Box<dyn Error>> {
    let mut reader = Reader::new(&arguments.source, names, report)?;
    let mut objects = reader.models()?;
    let optimizers = reader.optimizers(&objects, &arguments.parameter_names)?;
    objects.extend(optimizers);
    objects.extend(reader.schedulers()?);
    objects.extend(reader.scaler()?);
    objects.extend(reader.custom()?);
    objects.extend(reader.loaders(arguments.dataloaders.into()));
    let (random, step) = reader.random_states()?;
    objects.extend(random);
    let world_size = reader.num_processes();
    report.num_processes = world_size;
    let mut checkpoint = Checkpoint::new(world_size);
    checkpoint.accumulation.step = step;
    checkpoint.iteration = staged.name().and_then(checkpoint_number);
    let bar = Progress::new("converting", objects.iter().map(|object| object.size().1).fold(0, u64::saturating_add));
    let written = write_checkpoint(checkpoint, objects, staged, &bar);
    bar.finish();
    written
}

/// A value in a file of `torch.save`.
type Stored = Plain<StoredTensor>;

struct Reader<'a> {
    folder: &'a Path,
    /// Names by what they are. The first of two that hold the same.
    files: BTreeMap<PythonFile, String>,
    report: &'a mut Report,
}

impl<'a> Reader<'a> {
    fn new(folder: &'a Path, names: &[String], report: &'a mut Report) -> Result<Self, ConvertError> {
        let mut files: BTreeMap<PythonFile, String> = BTreeMap::new();
        for name in names {
            match PythonFile::named(name) {
                None => report.leave(name, "no file that save_state of Python Accelerate writes by itself"),
                Some(kind) => match files.get(&kind) {
                    Some(first) => report.leave(name, format!("{first} is there, and is what load_state takes")),
                    None => drop(files.insert(kind, name.clone())),
                },
            }
        }
        Ok(Self { folder, files, report })
    }

    /// The files of one kind, which are counted from 0 without a gap.
    fn all(&self, kind: fn(usize) -> PythonFile) -> Result<Vec<String>, ConvertError> {
        let mut found = Vec::new();
        while let Some(name) = self.files.get(&kind(found.len())) {
            found.push(name.clone());
        }
        let is_alike = |file: &PythonFile| std::mem::discriminant(file) == std::mem::discriminant(&kind(0));
        // Files of a kind are in the order of their numbers.
        match self.files.iter().filter(|(file, _)| is_alike(file)).nth(found.len()) {
            None => Ok(found),
            Some((_, name)) => {
                let missing = format!("the one with number {} before it", found.len());
                Err(ConvertError::Gap { folder: self.folder.to_owned(), found: name.clone(), missing })
            }
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn num_processes(&self) -> usize {
        let is_of_process = |file: &&PythonFile| matches!(file, PythonFile::RandomStates(_));
        self.files.keys().filter(is_of_process).count().max(1)
    }

    fn models(&mut self) -> Result<Vec<Object>, Box<dyn Error>> {
        let mut objects = Vec::new();
        while let Some(weights) = self.model(objects.len())? {
            objects.push(Object { name: object_name("model", objects.len()), weights, ..Default::default() });
        }
        let is_beyond = |file: &&PythonFile| match file {
            PythonFile::Model(number) | PythonFile::TorchModel(number) | PythonFile::ShardedModel(number) => {
                *number >= objects.len()
            }
            _ => false,
        };
        if let Some(beyond) = self.files.keys().find(is_beyond) {
            let (folder, found) = (self.folder.to_owned(), self.files[beyond].clone());
            let missing = format!("the model with number {} before it", objects.len());
            return Err(ConvertError::Gap { folder, found, missing }.into());
        }
        objects.iter().for_each(|object| self.report_model(object));
        Ok(objects)
    }

    /// The model with this number, if there is one.
    fn model(&mut self, number: usize) -> Result<Option<Weights>, Box<dyn Error>> {
        let names: Vec<&str> = self.files.values().map(String::as_str).collect();
        let found = model_files(&names, number)
            .map_err(|source| ConvertError::Ambiguous { folder: self.folder.to_owned(), source })?;
        let [taken, others @ ..] = &found[..] else { return Ok(None) };
        for other in others {
            self.report.leave(*other, format!("{taken} is there, and is what load_state takes"));
        }
        let path = self.path(taken);
        if matches!(PythonFile::named(taken), Some(PythonFile::ShardedModel(_))) {
            let weights = weights::open_distributed(&path)?;
            weights.check_tensors(&path)?;
            return Ok(Some(weights));
        }
        let weights = weights::open_named(&path)?;
        weights.check_tensors(&path)?;
        // Shards belong to the index that names them.
        let read: HashSet<String> = weights.files.names().collect();
        self.report.left_out.retain(|left| !read.contains(&left.what));
        Ok(Some(weights))
    }

    fn report_model(&mut self, object: &Object) {
        let weights = &object.weights;
        for (what, names) in [("no tensors", &weights.others), ("named by no index", &weights.unlisted)] {
            if !names.is_empty() {
                let what_they_are = format!("{}: {}", object.name, listed(names, MOST_LISTED_BYTES));
                self.report.leave(what_they_are, what);
            }
        }
        self.report.leave_differing(&object.name, &weights.notes);
        let tied = listed(&weights.tied, MOST_LISTED_BYTES);
        let note = if tied.is_empty() { tied } else { format!("tied to tensors that are there: {tied}") };
        self.report.carry(&object.name, object.size(), note);
    }

    fn optimizers(&mut self, models: &[Object], name_files: &[PathBuf]) -> Result<Vec<Object>, Box<dyn Error>> {
        let (sharded, whole) = (self.all(PythonFile::ShardedOptimizer)?, self.all(PythonFile::Optimizer)?);
        if let Some(first) = sharded.first() {
            for name in &whole {
                self.report.leave(name, format!("{first} is there, and is what load_state of a sharded run takes"));
            }
        }
        let files = if sharded.is_empty() { whole } else { sharded };
        if !name_files.is_empty() && name_files.len() != files.len() {
            return Err(ConvertError::NameFiles { found: name_files.len(), wanted: files.len() }.into());
        }
        let mut objects = Vec::new();
        for (number, file) in files.iter().enumerate() {
            let given = name_files.get(number).map(|path| names_in(path)).transpose()?;
            // As many optimizers as models are one for each.
            let own = if models.len() == files.len() { &models[number..=number] } else { models };
            objects.push(self.optimizer((number, file), own, given.as_deref())?);
        }
        Ok(objects)
    }

    fn optimizer(
        &mut self,
        (number, file): (usize, &str),
        models: &[Object],
        given: Option<&[String]>,
    ) -> Result<Object, Box<dyn Error>> {
        let path = self.path(file);
        let failed = |source| ConvertError::State { path: path.clone(), source };
        let mut state = State::of_optimizer(&path)?;
        let mut optimizer = PythonOptimizer::read(&state.value).map_err(failed)?;
        let mut left = Left::default();
        settings_as_numbers(&mut optimizer, &mut state, &mut left)?;
        let class = optimizer.class().map_err(failed)?;
        let State { files, tensors, beside, .. } = state;
        if !beside.is_empty() {
            let reason = "save_state of Python Accelerate writes an optimizer into this folder, and nothing beside it";
            self.report.leave(format!("{file}: {}", listed(&beside, MOST_LISTED_BYTES)), reason);
        }
        let shape_of = |number: &usize| tensors[*number].shape.clone();
        let (names, origin) = name_parameters(&optimizer, shape_of, &parameters(models), given).map_err(failed)?;
        let values = optimizer.to_groups(&names, &mut left).map_err(failed)?;
        let mut stored: Vec<Option<Tensor>> = tensors.into_iter().map(Some).collect();
        let mut tensors = Vec::new();
        let mut rounded = Vec::new();
        for (name, value) in optimizer.named_state(&names).map_err(failed)? {
            check_tensor_name(&name).map_err(failed)?;
            if let Plain::Tensor(number) = value {
                tensors.extend(stored[*number].take().map(|tensor| Tensor { name, ..tensor }));
                continue;
            }
            let tensor = scalar(name, value).map_err(|reason| ConvertError::Values { path: path.clone(), reason })?;
            if tensor.dtype != Dtype::F32 {
                rounded.push(tensor.name.clone());
            }
            tensors.push(tensor);
        }
        if !rounded.is_empty() {
            let what = format!("{file}: the last digits of {}", listed(&rounded, MOST_LISTED_BYTES));
            let reason =
                "the checkpoint has them as 64-bit floats; load_state makes 32-bit floats of such state, and rounds";
            self.report.leave(what, reason);
        }
        let object = Object { name: object_name("optimizer", number), weights: in_files(files, tensors), values };
        self.leave(file, left);
        if !optimizer.others.is_empty() {
            let reason =
                "the state of an optimizer of PyTorch is `state` and `param_groups`, and nothing else is loaded here";
            self.report.leave(format!("{file}: {}", listed(&optimizer.others, MOST_LISTED_BYTES)), reason);
        }
        let origin = match origin {
            Origin::Given => "parameters are named by --parameter_names",
            Origin::Saved => "parameters have the names that the optimizer saved",
            Origin::Order => "parameters are named in the order of the model's file",
            Origin::Shapes => "parameters are named by their shapes, which all differ",
        };
        let class = class.map(|class| format!("; load it into {class}")).unwrap_or_default();
        self.report.carry(&object.name, object.size(), format!("{origin}{class}"));
        Ok(object)
    }

    fn schedulers(&mut self) -> Result<Vec<Object>, Box<dyn Error>> {
        let mut objects = Vec::new();
        for (number, file) in self.all(PythonFile::Scheduler)?.iter().enumerate() {
            let values = without_lambdas(self.json(file, "the state of a schedule")?);
            if let Some(missing) = SCHEDULE.iter().find(|name| values.get(**name).is_none()) {
                let note = format!("`{missing}` is not in it, without which schedules of this library do not load it");
                self.report.leave(format!("{file}: {missing}"), note);
            }
            objects.push(self.value_object(object_name("scheduler", number), values));
        }
        Ok(objects)
    }

    fn scaler(&mut self) -> Result<Option<Object>, Box<dyn Error>> {
        let Some(file) = self.files.get(&PythonFile::Scaler).cloned() else { return Ok(None) };
        let values = match self.json(&file, "a loss scale")? {
            // One that is switched off saves nothing.
            Value::Object(object) if object.is_empty() => Value::Null,
            values => values,
        };
        let is_number = |name: &&&str| values.get(**name).is_some_and(Value::is_number);
        if let Some(name) = SCALE.iter().find(|name| !values.is_null() && !is_number(name)) {
            let reason = format!("its `{name}` is missing or no number");
            return Err(ConvertError::Values { path: self.path(&file), reason }.into());
        }
        Ok(Some(self.value_object("scaler".to_owned(), values)))
    }

    /// Registered objects. Pickles of other things than plain data are left where they are.
    fn custom(&mut self) -> Result<Vec<Object>, Box<dyn Error>> {
        let mut objects = Vec::new();
        // What was left behind before leaves gaps.
        let numbered = self.files.iter().filter_map(|(kind, name)| match kind {
            PythonFile::Custom(number) => Some((*number, name.clone())),
            _ => None,
        });
        let numbered: Vec<(usize, String)> = numbered.collect();
        for (number, file) in numbered.clone() {
            let mut files = Files::default();
            let value = match read_into(&mut files, &self.path(&file))? {
                Ok(value) => value,
                Err(error) if error.is_foreign_pickle() => {
                    self.report.leave(file, error.to_string());
                    continue;
                }
                Err(source) => return Err(ConvertError::State { path: self.path(&file), source }.into()),
            };
            let (mut left, mut problems) = (Left::default(), Vec::new());
            let registered = registered::from_python(value, &mut left, &mut problems);
            problems.into_iter().for_each(|problem| self.report.leave(&file, problem));
            self.leave(&file, left);
            let Some(Registered { tensors, values }) = registered else { continue };
            let object = Object { name: registered::name(number), weights: in_files(files, tensors), values };
            self.report.carry(&object.name, object.size(), "");
            objects.push(object);
        }
        self.report.leave_gaps(numbered.iter().map(|(number, _)| *number));
        Ok(objects)
    }

    /// Loaders of the program that goes on, at the beginning of an epoch.
    fn loaders(&mut self, number: usize) -> Vec<Object> {
        for (file, name) in &self.files {
            let reason = match file {
                PythonFile::Sampler(_) => "a pickled object of Python's own; --dataloaders lets loaders begin anew",
                PythonFile::Loader(_) => "the place of a loader of torchdata; --dataloaders lets loaders begin anew",
                _ => continue,
            };
            self.report.left_out.push(super::LeftOut { what: name.clone(), reason: reason.to_owned() });
        }
        let values = || json!({ "epoch": 0, "rows_delivered": 0 });
        let mut objects = Vec::new();
        for number in 0..number {
            let object = Object { name: object_name("dataloader", number), values: values(), ..Default::default() };
            self.report.carry(
                &object.name,
                (0, 0),
                "begins with epoch 0: Python's checkpoint does not say where it stood",
            );
            objects.push(object);
        }
        objects
    }

    /// Of each process, and where the accumulation of gradients stood.
    fn random_states(&mut self) -> Result<(Option<Object>, usize), Box<dyn Error>> {
        let found = self.all(PythonFile::RandomStates)?;
        let (mut files, mut tensors, mut step, mut others) = (Files::default(), Vec::new(), 0, Vec::new());
        for (rank, file) in found.iter().enumerate() {
            let path = self.path(file);
            let value = read_into(&mut files, &path)?;
            let value = value.map_err(|source| ConvertError::State { path: path.clone(), source })?;
            let Plain::Dict(pairs) = &value else {
                let reason = format!("it holds {}, and a dictionary of random states is wanted", value.kind());
                return Err(ConvertError::Values { path, reason }.into());
            };
            match value.get(STEP) {
                Some(Plain::Int(found)) if rank == 0 => {
                    let reason = format!("its step is {found}, which is none of a run");
                    step = usize::try_from(*found).map_err(|_| ConvertError::Values { path, reason })?;
                }
                _ => {}
            }
            for (key, state) in pairs {
                match generator(rank, key, state) {
                    Some(tensor) => tensors.push(tensor),
                    None if *key == Plain::text(STEP) => {}
                    None => others.push(if let Plain::Text(key) = key { key.clone() } else { key.kind() }),
                }
            }
        }
        others.sort_unstable();
        others.dedup();
        if !others.is_empty() {
            let reason = "no generators of this library; a program that draws from such ones has to seed them itself";
            self.report.leave(format!("random_states: {}", listed(&others, MOST_LISTED_BYTES)), reason);
        }
        if tensors.is_empty() {
            return Ok((None, step));
        }
        let weights = Weights { files, tensors, ..Weights::default() };
        let object = Object { name: "random_states".to_owned(), weights, ..Default::default() };
        self.report.carry(&object.name, object.size(), "the generators of PyTorch");
        Ok((Some(object), step))
    }

    /// A state that is a dictionary of plain values.
    fn json(&mut self, file: &str, wanted: &str) -> Result<Value, Box<dyn Error>> {
        let mut state = State::read(&self.path(file))?;
        let value = state.with_numbers(state.value.clone())?;
        let mut left = Left::default();
        note_numbers(&state.value, &value, "", &mut left);
        let values = to_json(&value, "", &mut left).filter(Value::is_object).ok_or_else(|| ConvertError::Values {
            path: self.path(file),
            reason: format!("it holds {}, and {wanted} is wanted: a dictionary of plain values", value.kind()),
        })?;
        self.leave(file, left);
        Ok(values)
    }

    fn value_object(&mut self, name: String, values: Value) -> Object {
        self.report.carry(&name, (0, 0), "");
        Object { name, values, ..Default::default() }
    }

    fn leave(&mut self, file: &str, Left(paths): Left) {
        if !paths.is_empty() {
            self.report.leave(format!("{file}: {}", listed(&paths, MOST_LISTED_BYTES)), NOT_CARRIED);
        }
    }
}

/// Puts numbers in place of settings that are tensors of one element, and notes which.
fn settings_as_numbers(
    optimizer: &mut PythonOptimizer<usize>,
    state: &mut State,
    left: &mut Left,
) -> Result<(), WeightsError> {
    for (place, group) in optimizer.groups.iter_mut().enumerate() {
        for (name, setting) in &mut group.settings {
            let numbers = state.with_numbers(setting.clone())?;
            note_numbers(setting, &numbers, &format!("param_groups[{place}].{}", shown(name)), left);
            *setting = numbers;
        }
    }
    Ok(())
}

/// Notes which tensors of a value are numbers now: PyTorch computes with 32 bits where they were tensors of 32 bits.
fn note_numbers(before: &Plain<usize>, after: &Plain<usize>, path: &str, left: &mut Left) {
    match (before, after) {
        (Plain::Tensor(_), Plain::Tensor(_)) => {}
        (Plain::Tensor(_), _) => left.0.push(format!("{path} (a tensor of one element, which is a number now)")),
        (Plain::List(before), Plain::List(after)) | (Plain::Tuple(before), Plain::Tuple(after)) => {
            for (place, (before, after)) in before.iter().zip(after).enumerate() {
                note_numbers(before, after, &format!("{path}[{place}]"), left);
            }
        }
        (Plain::Dict(before), Plain::Dict(after)) => {
            for ((key, before), (_, after)) in before.iter().zip(after) {
                let key = if let Plain::Text(key) = key { shown(key) } else { key.kind() };
                let within = if path.is_empty() { key } else { format!("{path}.{key}") };
                note_numbers(before, after, &within, left);
            }
        }
        _ => {}
    }
}

/// The state of a generator that this library has, too: of the CPU's, or of the GPU's of a process.
fn generator(rank: usize, key: &Stored, state: &Stored) -> Option<Tensor> {
    let Plain::Text(key) = key else { return None };
    let (name, state) = match (key.as_str(), state) {
        (CPU, state) => ("cpu", state),
        // Of all devices that the process sees, of which it has one.
        (CUDA, Plain::List(devices)) => ("cuda", devices.get(rank % devices.len().max(1))?),
        _ => return None,
    };
    match state {
        Plain::Tensor(stored) if stored.dtype() == Dtype::U8 && stored.shape().len() == 1 => {
            Some(Tensor::stored(format!("rank_{rank}.{name}"), rank, stored.clone()))
        }
        _ => None,
    }
}

/// A file of `torch.save`. The inner error says why what is in it cannot be understood.
fn read_into(files: &mut Files, path: &Path) -> Result<accelerate_core::Result<Stored>, WeightsError> {
    let number = files.add(path.to_owned());
    let (file, _) = files.get(number)?;
    Ok(Plain::read(file))
}

fn in_files(files: Files, tensors: Vec<Tensor>) -> Weights {
    Weights { files, tensors, ..Weights::default() }
}

/// A number as the tensor that PyTorch has in its place today: of 32-bit floats, and where these do not have the number, of
/// 64-bit ones. The error says that neither has it.
fn scalar<T>(name: String, value: &Plain<T>) -> Result<Tensor, String> {
    let of_whole = |number: i128| Some(number as f64).filter(|float| *float as i128 == number);
    let (number, found) = match value {
        Plain::Int(number) => (of_whole((*number).into()), number.to_string()),
        Plain::LargeInt(number) => (of_whole((*number).into()), number.to_string()),
        Plain::Float(number) => (Some(*number), number.to_string()),
        other => (None, other.kind()),
    };
    let number = number.ok_or_else(|| {
        format!("its state `{}` is {found}, which is not a number that a 64-bit float has", shown(&name))
    })?;
    let short = number as f32;
    let (dtype, bytes) = match number.is_nan() || f64::from(short) == number {
        true => (Dtype::F32, short.to_le_bytes().to_vec()),
        false => (Dtype::F64, number.to_le_bytes().to_vec()),
    };
    Ok(Tensor { name, dtype, shape: Vec::new(), data: Data::Bytes(bytes) })
}

/// What an optimizer of these models may train.
fn parameters(models: &[Object]) -> Parameters {
    let of_model = |model: &Object| -> Vec<_> {
        model.weights.tensors.iter().map(|it| (it.name.clone(), it.dtype, it.shape.clone())).collect()
    };
    let is_ordered = |model: &Object| model.weights.is_ordered;
    Parameters { tensors: models.iter().flat_map(of_model).collect(), is_ordered: models.iter().all(is_ordered) }
}

/// One name in each line.
fn names_in(path: &Path) -> Result<Vec<String>, ConvertError> {
    let failed = |reason: String| ConvertError::Names { path: path.to_owned(), reason };
    let bytes = read_small(path, MAX_NAMES_BYTES).map_err(|problem| failed(problem.to_string()))?;
    let text = String::from_utf8(bytes).map_err(|_| failed("it is no text in UTF-8".to_owned()))?;
    Ok(text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect())
}
