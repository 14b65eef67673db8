//! A checkpoint, written by all ranks.

use super::super::atomic::{NewFile, PendingFile};
use super::super::block_file::IoMode;
use super::super::dtype::to_dtype;
use super::super::elsewhere;
use super::super::folder::{commit_instead, prepare_folder, refuse_foreign_files, refuse_other_saves};
use super::super::host_copy::places_for;
use super::super::progress::{NumWritten, SaveProgress};
use super::super::writer::write_pending;
use crate::error::{CheckpointError, Error, Result, WeightsError};
use crate::group::Group;
use crate::offload::is_outline;
use crate::session::{ObjectState, StateReader, StateReaders};
use accelerate_core::accumulation::WindowState;
use accelerate_core::checkpoint::{
    Assignment, Checkpoint, DESCRIPTION, HeldTensor, MOST_RUNS, STEM, SavedObject, SavedTensor, assign,
};
use accelerate_core::layout::Layout;
use accelerate_core::weight_files::{Index, IndexMetadata, SavedFile, is_weight_file_of};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tch::{Device, Tensor};
use torch_ext::device::copy_to_host;

const OP: &str = "save_state";
/// Longer descriptions are an attack or a damaged file.
pub(super) const MAX_DESCRIPTION_BYTES: u64 = 1 << 30;

/// Which ranks write into the folder that this rank sees: a range of neighbours, of which the first commits.
#[derive(Clone, Debug)]
pub(crate) struct FolderWriters(pub(crate) Range<usize>);

/// What a run is to go on from.
#[derive(Debug, Default)]
pub(crate) struct RunState {
    /// By name.
    pub(crate) objects: BTreeMap<String, ObjectState>,
    /// Those of which tensors may be without memory, until they are written.
    pub(crate) readers: StateReaders,
    /// Object and name of tensors of which ranks may hold other numbers.
    pub(crate) may_differ: BTreeSet<(String, String)>,
    /// Object and name of tensors that nobody else has: they stay as they are when the objects change.
    pub(crate) unshared: BTreeSet<(String, String)>,
    pub(crate) accumulation: WindowState,
    /// How many ranks divide a model.
    pub(crate) shard_size: usize,
    /// The number of an automatically named checkpoint.
    pub(crate) iteration: Option<usize>,
    /// How good the run is. Larger is better.
    pub(crate) metric: Option<f64>,
}

impl RunState {
    /// Reads what is without memory.
    pub(super) fn bring_into_memory(&mut self) -> Result<()> {
        for (object, state) in &mut self.objects {
            let Some(reader) = self.readers.get(object) else { continue };
            let outlines = state.tensors.iter().filter(|(_, tensor)| is_outline(tensor));
            let outlines: Vec<(&str, &Tensor)> = outlines.map(|(name, tensor)| (name.as_str(), tensor)).collect();
            if outlines.is_empty() {
                continue;
            }
            let names: Vec<String> = outlines.iter().map(|(name, _)| (*name).to_owned()).collect();
            let read = elsewhere::read(&**reader, &outlines)?;
            state.tensors.extend(names.into_iter().zip(read));
        }
        Ok(())
    }
}

/// What a rank tells the others before anything is written.
#[derive(Serialize, Deserialize)]
struct Held {
    tensors: Vec<HeldTensor>,
    /// By object.
    values: BTreeMap<String, Value>,
    /// That of the main process counts.
    metric: Option<f64>,
}

/// A tensor in a file.
#[derive(Debug)]
pub(super) struct WrittenTensor {
    name: String,
    pub(super) tensor: Tensor,
    /// Nobody else has it.
    is_unshared: bool,
}

impl WrittenTensor {
    /// In the host's memory, whatever the objects do.
    fn stays_as_it_is(&self) -> bool {
        self.is_unshared && self.tensor.device() == Device::Cpu
    }
}

/// A file that this rank writes: part of the state of one object.
pub(super) struct OwnFile {
    name: String,
    pub(super) tensors: Vec<WrittenTensor>,
    /// Has those tensors that are without memory.
    reader: Option<Arc<dyn StateReader>>,
}

impl fmt::Debug for OwnFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnFile").field("name", &self.name).field("tensors", &self.tensors).finish_non_exhaustive()
    }
}

/// A save of which all ranks know who writes what. Nothing is on the disk yet.
#[derive(Debug)]
pub(crate) struct PlannedSave {
    folder: PathBuf,
    writers: FolderWriters,
    /// Those that this rank writes.
    pub(super) files: Vec<OwnFile>,
    /// What is in the folder, all ranks' files.
    description: Checkpoint,
    indexes: BTreeMap<String, Index>,
    progress: SaveProgress,
}

impl PlannedSave {
    /// Divides what all ranks hold, so that each number is written once. Collective.
    pub(crate) fn new(run: RunState, group: &Group, folder: &Path, writers: FolderWriters) -> Result<Self> {
        let all = exchange(group, held(&run, folder))?;
        let assignment = group.agree_on_success(OP, plan(&all, &writers))?;
        let (description, indexes) = (describe(&run, &assignment, &all), indexes(&assignment));
        let files = own_files(run, &assignment, group.rank());
        let progress = progress(folder, &files, group);
        Ok(Self { folder: folder.to_owned(), writers, files, description, indexes, progress })
    }

    /// How much of it this process has written.
    pub(crate) fn progress(&self) -> &SaveProgress {
        &self.progress
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Copies what this rank writes into the host's memory: from then on the objects may change. Not collective.
    pub(crate) fn copy_to_host(&mut self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let copied = self.files.iter().flat_map(|file| &file.tensors).filter(|it| !it.stays_as_it_is());
        let mut places = places_for(&copied.map(|it| &it.tensor).collect::<Vec<_>>())?.into_iter();
        let mut sources = Vec::new();
        for OwnFile { tensors, reader, .. } in &mut self.files {
            let mut read: Vec<(&str, &Tensor)> = Vec::new();
            let copied = tensors.iter_mut().filter(|it| !it.stays_as_it_is());
            for (WrittenTensor { name, tensor, .. }, place) in copied.zip(&mut places) {
                let source = std::mem::replace(tensor, place);
                match is_outline(&source) {
                    true => read.push((name, tensor)),
                    false => sources.push((tensor.shallow_clone(), source)),
                }
            }
            // The object is not needed any more, nor kept alive.
            if let Some(reader) = reader.take().filter(|_| !read.is_empty()) {
                reader.read_state(&read)?;
            }
        }
        let (places, sources): (Vec<&Tensor>, Vec<&Tensor>) =
            sources.iter().map(|(place, source)| (place, source)).unzip();
        Ok(copy_to_host(&places, &sources)?)
    }

    /// Writes the files and commits them. `mode` is that of files with tensors; the small ones that describe them are always
    /// buffered. Collective.
    ///
    /// Nothing that was committed in the folder before is touched until every rank has its new files on the disk.
    pub(crate) fn write(mut self, group: &Group, mode: IoMode) -> Result<()> {
        self.description.id = self.make_folder(group)?;
        let written = self.write_files(group, mode);
        let mut files = group.agree_on_success(OP, written)?;
        // From here on another rank may commit, whatever becomes of this one; what nobody commits, the next save removes.
        files.iter_mut().for_each(PendingFile::leave);
        let list = self.list_files(group, &files)?;
        let committed = if self.is_first(group) { commit_instead(&self.folder, STEM, list) } else { Ok(()) };
        // Until here the files are open, which shows that they are not abandoned.
        group.agree_on_success(OP, committed)
    }
}

/// What this rank holds, without the numbers.
fn held(run: &RunState, folder: &Path) -> Result<Held> {
    let values = run.objects.iter().map(|(object, state)| (object.clone(), state.values.clone()));
    Ok(Held { tensors: held_tensors(run, folder)?, values: values.collect(), metric: run.metric })
}

/// The tensors that this rank holds.
pub(super) fn held_tensors(run: &RunState, folder: &Path) -> Result<Vec<HeldTensor>> {
    let mut tensors = Vec::new();
    for (object, state) in &run.objects {
        for (name, tensor) in &state.tensors {
            let (object, name) = (object.clone(), name.clone());
            let kind = tensor.f_kind()?;
            let Some(dtype) = to_dtype(kind) else {
                return Err(WeightsError::KindNotWritable { path: folder.to_owned(), name, kind }.into());
            };
            let shape = tensor.size().iter().map(|&size| size.max(0) as usize).collect();
            let layout = layout_of(&object, &state.layouts, &name).filter(|_| tensor.dim() != 0).cloned();
            let may_differ = run.may_differ.contains(&(object.clone(), name.clone()));
            tensors.push(HeldTensor { object, name, dtype, shape, layout, may_differ });
        }
    }
    Ok(tensors)
}

/// Which elements a tensor of an object's state is of: its own, or those of the parameter whose state it is.
pub(super) fn layout_of<'a>(object: &str, layouts: &'a BTreeMap<String, Layout>, name: &str) -> Option<&'a Layout> {
    let of_parameter = || layouts.get(name.split_once('.').filter(|_| !is_model(object))?.1);
    layouts.get(name).or_else(of_parameter)
}

pub(super) fn is_model(object: &str) -> bool {
    object == "model" || object.starts_with("model_")
}

/// What every rank holds, by rank. Collective.
fn exchange(group: &Group, own: Result<Held>) -> Result<Vec<Held>> {
    let own = group.agree_on_success(OP, own)?;
    let all = group.all_gather_bytes(&serde_json::to_vec(&own).map_err(Error::other)?)?;
    all.iter().map(|bytes| serde_json::from_slice(bytes).map_err(Error::other)).collect()
}

/// What goes into the folder of `writers`, and that nothing is missing there.
fn plan(all: &[Held], writers: &FolderWriters) -> Result<Assignment> {
    let held: Vec<Vec<HeldTensor>> = all
        .iter()
        .enumerate()
        .map(|(rank, held)| if writers.0.contains(&rank) { held.tensors.clone() } else { Vec::new() })
        .collect();
    let assignment = assign(&held)?;
    for (object, tensors) in &assignment.tensors {
        for (name, tensor) in tensors {
            check_complete(object, name, tensor)?;
        }
    }
    Ok(assignment)
}

/// The files of a rank with their tensors; what it does not write is dropped.
fn own_files(mut run: RunState, assignment: &Assignment, rank: usize) -> Vec<OwnFile> {
    let mut files = Vec::new();
    for file in assignment.of_writer(rank) {
        let Some(object) = run.objects.get_mut(&file.object) else { continue };
        let own = file.tensors.iter().filter_map(|name| {
            let (name, tensor) = object.tensors.remove_entry(name)?;
            let is_unshared = run.unshared.contains(&(file.object.clone(), name.clone()));
            Some(WrittenTensor { name, tensor, is_unshared })
        });
        let reader = run.readers.get(&file.object).cloned();
        files.push(OwnFile { name: file.name.clone(), tensors: own.collect(), reader });
    }
    files
}

fn progress(folder: &Path, files: &[OwnFile], group: &Group) -> SaveProgress {
    let tensors = files.iter().flat_map(|file| &file.tensors);
    let num_bytes = |tensor: &Tensor| (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64;
    SaveProgress {
        name: folder.file_name().unwrap_or(folder.as_os_str()).to_string_lossy().into_owned(),
        total_bytes: tensors.map(|it| num_bytes(&it.tensor)).sum(),
        written: NumWritten::default(),
        is_main_process: group.rank() == 0,
    }
}

impl PlannedSave {
    fn is_first(&self, group: &Group) -> bool {
        group.rank() == self.writers.0.start
    }

    /// Makes the folder, and makes sure that all ranks who write into it see the same one. Returns what this save is called.
    /// Collective.
    fn make_folder(&self, group: &Group) -> Result<String> {
        let mut probe = None;
        let made = match self.is_first(group) {
            true => prepare_folder(&self.folder, STEM).and_then(|()| {
                // Also those of as many ranks as there may have been before.
                let is_one = |name: &str| {
                    let mut objects = self.description.objects.keys();
                    let is_listed = || self.description.files.iter().any(|file| file == name);
                    name == DESCRIPTION || objects.any(|object| is_weight_file_of(name, object)) || is_listed()
                };
                refuse_other_saves(&self.folder, STEM, &is_one)?;
                refuse_foreign_files(&self.folder, STEM, &is_one)?;
                probe = Some(PendingFile::write(&self.folder.join(DESCRIPTION), STEM, &[])?);
                Ok(())
            }),
            false => Ok(()),
        };
        group.agree_on_success(OP, made)?;
        // A path that no rank has asked for before: file systems of a network remember what was not there.
        let name = probe.as_ref().map(PendingFile::temporary_name).unwrap_or_default();
        let names = group.all_gather_bytes(name.as_bytes())?;
        let name = names.get(self.writers.0.start).map(|name| String::from_utf8_lossy(name)).unwrap_or_default();
        let path = self.folder.join(name.as_ref());
        let seen = if path.exists() { Ok(()) } else { Err(WeightsError::NotShared { path }.into()) };
        group.agree_on_success(OP, seen)?;
        Ok(names.first().map(|name| String::from_utf8_lossy(name).into_owned()).unwrap_or_default())
    }

    /// Writes this rank's files under temporary names; the first writer also what describes all of them.
    fn write_files(&self, group: &Group, mode: IoMode) -> Result<Vec<PendingFile>> {
        let mut pending = Vec::new();
        for OwnFile { name, tensors, reader } in &self.files {
            let tensors: Vec<(&str, &Tensor)> = tensors.iter().map(|it| (it.name.as_str(), &it.tensor)).collect();
            let with = (&self.progress.written, reader.as_deref());
            let new = NewFile { path: &self.folder.join(name), stem: STEM, mode };
            pending.push(write_pending(&tensors, None, new, with)?);
        }
        if self.is_first(group) {
            for (name, index) in &self.indexes {
                let path = self.folder.join(name);
                let json = index.to_json().map_err(|source| WeightsError::Index { path: path.clone(), source })?;
                pending.push(PendingFile::write(&path, STEM, json.as_bytes())?);
            }
            let json = self.description.to_json()?;
            let path = self.folder.join(DESCRIPTION);
            if json.len() as u64 > MAX_DESCRIPTION_BYTES {
                return Err(CheckpointError::LongDescription { path, num_bytes: json.len() }.into());
            }
            pending.push(PendingFile::write(&path, STEM, json.as_bytes())?);
        }
        Ok(pending)
    }

    /// The files of all ranks that write into this folder, in the order in which they get their names: weights, what lists
    /// weights, and the description. Collective.
    fn list_files(&self, group: &Group, files: &[PendingFile]) -> Result<Vec<SavedFile>> {
        let own: Vec<SavedFile> = files.iter().map(PendingFile::saved_file).collect();
        let text = serde_json::to_vec(&own).map_err(Error::other)?;
        let mut all = Vec::new();
        for text in group.all_gather_bytes(&text)?.get(self.writers.0.clone()).unwrap_or_default() {
            all.extend(serde_json::from_slice::<Vec<SavedFile>>(text).map_err(Error::other)?);
        }
        all.sort_by_key(|file| (file.name == DESCRIPTION, file.name.ends_with(".json")));
        Ok(all)
    }
}

fn check_complete(object: &str, name: &str, tensor: &SavedTensor) -> Result<()> {
    let num_runs = tensor.num_runs();
    if num_runs > MOST_RUNS {
        let (object, name) = (object.to_owned(), name.to_owned());
        return Err(CheckpointError::TooDivided { object, name, num_runs }.into());
    }
    let layouts: Option<Vec<&Layout>> = tensor.pieces.iter().map(|piece| piece.layout.as_ref()).collect();
    let Some(layouts) = layouts.filter(|_| tensor.is_elementwise) else { return Ok(()) };
    match Layout::full(tensor.shape.clone()).copies_from(layouts) {
        Ok(_) => Ok(()),
        Err(missing) => {
            let (object, name) = (object.to_owned(), name.to_owned());
            Err(CheckpointError::NotHeld { object, name, missing }.into())
        }
    }
}

/// The index of each model that is whole and in several files, as Hugging Face's readers look for it.
fn indexes(assignment: &Assignment) -> BTreeMap<String, Index> {
    let mut indexes = BTreeMap::new();
    for (object, tensors) in &assignment.tensors {
        let files: Vec<_> = assignment.files.iter().filter(|file| file.object == *object).collect();
        let is_whole = tensors.values().flat_map(|tensor| &tensor.pieces).all(|piece| piece.layout.is_none());
        if files.len() < 2 || !is_whole || !is_model(object) {
            continue;
        }
        let in_file = |file: &&_| {
            let file: &accelerate_core::checkpoint::PlannedFile = file;
            file.tensors.iter().map(|name| (name.clone(), file.name.clone())).collect::<Vec<_>>()
        };
        let total_size = tensors.values().map(SavedTensor::num_bytes).sum();
        let metadata = IndexMetadata { total_size, ..Default::default() };
        let index = Index { metadata, weight_map: files.iter().flat_map(in_file).collect() };
        indexes.insert(Index::file_name(object), index);
    }
    indexes
}

fn describe(state: &RunState, assignment: &Assignment, all: &[Held]) -> Checkpoint {
    let mut checkpoint = Checkpoint::new(all.len());
    checkpoint.shard_size = state.shard_size.max(1);
    checkpoint.iteration = state.iteration;
    checkpoint.metric = all.first().and_then(|main| main.metric);
    checkpoint.accumulation = state.accumulation;
    checkpoint.files = assignment.files.iter().map(|file| file.name.clone()).collect();
    let mut objects: HashMap<&String, SavedObject> = HashMap::new();
    for (rank, held) in all.iter().enumerate() {
        for (name, values) in &held.values {
            let object =
                objects.entry(name).or_insert_with(|| SavedObject { values: values.clone(), ..Default::default() });
            if object.values != *values {
                object.values_of_ranks.insert(rank, values.clone());
            }
        }
    }
    for (name, mut object) in objects {
        object.tensors = assignment.tensors.get(name).cloned().unwrap_or_default();
        checkpoint.objects.insert(name.clone(), object);
    }
    checkpoint
}
