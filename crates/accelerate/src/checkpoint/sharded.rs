//! A sharded model's weights to files: units pass all ranks one after the other, and each rank writes its tensors of them.
//!
//! Ranks agree on every step before they take the next, so that a disk that is full on one of them is an error on all, and
//! nothing is replaced before everything new is on the disks. Then the first writer puts the files of all in their places.

use super::atomic::{NewFile, PendingFile};
use super::folder::commit_folder;
use super::save::{SaveModelOptions, prepare_model_folder, write_index, write_own_files};
use super::writer::{TensorFile, TensorSpec, written_kind};
use crate::error::{Error, Result, WeightsError};
use crate::group::Group;
use crate::nn::{Param, ParamStore, memory_of};
use accelerate_core::config::FloatType;
use accelerate_core::weight_files::{Index, ParallelFiles, SavedFile, TensorEntry, format_size};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use tch::Tensor;

const OP: &str = "save_model";

/// Which ranks write.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Writers {
    /// Each its own files, into a folder that all of them see; rank 0 also the index.
    AllRanks,
    /// One of each machine everything, into a folder that others need not see.
    FirstOfEachNode { is_first: bool },
}

impl Writers {
    fn count(self, group: &Group) -> usize {
        match self {
            Self::AllRanks => group.world_size(),
            Self::FirstOfEachNode { .. } => 1,
        }
    }

    /// The number of this rank among the writers.
    fn own(self, group: &Group) -> Option<usize> {
        match self {
            Self::AllRanks => Some(group.rank()),
            Self::FirstOfEachNode { is_first } => is_first.then_some(0),
        }
    }

    fn is_first(self, group: &Group) -> bool {
        self.own(group) == Some(0)
    }
}

/// [`save_model_weights`](super::save_model_weights) for parameters of which ranks own shards. Options that this rank
/// cannot read are an error on all of them. Collective.
pub(crate) fn save_sharded_model_weights(
    store: &ParamStore,
    group: &Group,
    folder: &Path,
    options: &SaveModelOptions,
    writers: Writers,
) -> Result<()> {
    let tensors = options.check().and_then(|bytes| Ok((list_tensors(store, options.dtype, folder)?, bytes)));
    let (tensors, max_shard_bytes) = agree_on_success(group, false, tensors)?;
    let save = Save::plan(tensors, group, folder, options, max_shard_bytes, writers);
    save.agree_on_layout()?;
    save.make_folder()?;

    let written = save.write()?;
    let mut files = agree_on_success(group, false, written)?;
    let list = save.list_files(&files)?;
    // Once the manifest is there they belong to it, whatever becomes of any process.
    files.iter_mut().for_each(PendingFile::leave);
    let committed = save.if_first(|| commit_folder(folder, &options.stem, list));
    // Until here the files are open, which shows that they are not abandoned.
    agree_on_success(group, true, committed)
}

/// A parameter or buffer and how it is written.
struct SavedTensor {
    param: Param,
    spec: TensorSpec,
    entry: TensorEntry,
}

/// What is saved, floating-point ones as `dtype` if given: tied weights once, and memory that tensors share once.
fn list_tensors(store: &ParamStore, dtype: Option<FloatType>, folder: &Path) -> Result<Vec<SavedTensor>> {
    let mut seen = HashSet::new();
    let mut tensors = Vec::new();
    for param in store.persistent() {
        let (local, unit) = (param.local(), param.unit().map(|place| place.unit));
        if unit.is_none() && local.numel() > 0 && !seen.insert(memory_of(&local)) {
            continue;
        }
        let (name, kind) = (param.name().to_owned(), written_kind(local.f_kind()?, dtype));
        let spec = TensorSpec::new(&name, kind, &param.shape(), &folder.join(&name))?;
        let bytes = spec.num_bytes() as u64;
        let entry = TensorEntry { name, bytes, element_bytes: kind.elt_size_in_bytes() as u64, unit };
        tensors.push(SavedTensor { param, spec, entry });
    }
    Ok(tensors)
}

struct Save<'a> {
    group: &'a Group,
    folder: &'a Path,
    options: &'a SaveModelOptions,
    /// The size in the options, read.
    max_shard_bytes: u64,
    writers: Writers,
    tensors: Vec<SavedTensor>,
    plan: ParallelFiles,
}

impl<'a> Save<'a> {
    fn plan(
        tensors: Vec<SavedTensor>,
        group: &'a Group,
        folder: &'a Path,
        options: &'a SaveModelOptions,
        max_shard_bytes: u64,
        writers: Writers,
    ) -> Self {
        let entries: Vec<TensorEntry> = tensors.iter().map(|tensor| tensor.entry.clone()).collect();
        let plan = ParallelFiles::plan(&entries, writers.count(group), max_shard_bytes, &options.stem);
        Self { group, folder, options, max_shard_bytes, writers, tensors, plan }
    }

    /// Ranks with different plans would wait for units that others do not gather. Collective.
    fn agree_on_layout(&self) -> Result<()> {
        let mut hasher = DefaultHasher::new();
        for tensor in &self.tensors {
            (&tensor.entry.name, tensor.entry.unit, tensor.entry.bytes).hash(&mut hasher);
        }
        self.plan.files.files.hash(&mut hasher);
        self.writers.count(self.group).hash(&mut hasher);
        self.options.dtype.map(FloatType::as_str).hash(&mut hasher);
        let (num_tensors, num_files) = (self.tensors.len(), self.plan.files.files.len());
        let (most, layout) = (format_size(self.max_shard_bytes), hasher.finish());
        let description =
            format!("{num_tensors} tensors in {num_files} files of at most {most} (layout {layout:016x})");
        self.group.agree(OP, &description, "save the same model with the same max_shard_size and dtype on all ranks")
    }

    /// Makes the folder, and makes sure that all ranks who write together see the same one. Collective.
    fn make_folder(&self) -> Result<()> {
        if let Writers::FirstOfEachNode { .. } = self.writers {
            return agree_on_success(
                self.group,
                false,
                self.if_first(|| prepare_model_folder(self.folder, &self.options.stem)),
            );
        }
        // A path that no rank has asked for before: file systems of a network remember what was not there.
        let path = self.folder.join(Index::file_name(&self.options.stem));
        let mut probe = None;
        let made = self.if_first(|| {
            prepare_model_folder(self.folder, &self.options.stem)?;
            probe = Some(PendingFile::write(&path, &self.options.stem, &[])?);
            Ok(())
        });
        agree_on_success(self.group, false, made)?;
        let name = probe.as_ref().map(PendingFile::temporary_name).unwrap_or_default();
        let name = self.group.broadcast_bytes(name.as_bytes(), 0)?;
        let path = self.folder.join(String::from_utf8_lossy(&name).as_ref());
        let seen = if path.exists() { Ok(()) } else { Err(WeightsError::NotShared { path }.into()) };
        agree_on_success(self.group, false, seen)
    }

    /// Gathers unit after unit and writes this rank's files under temporary names: where it is the first writer with those
    /// of the user's own first, and the index last.
    ///
    /// The outer error is one between ranks, after which nothing can be agreed on; the inner one is this rank's own: it
    /// goes on gathering for the others. Collective.
    fn write(&self) -> Result<Result<Vec<PendingFile>>> {
        let mut own = Ok(OwnFiles::new(self));
        for group in &self.plan.groups {
            let Some(&first) = group.first() else { continue };
            let first = &self.tensors[first].param;
            let unit = first.unit().map_or_else(|| Ok(Vec::new()), |_| first.full_unit())?;
            let mut appended = Ok(());
            for &position in group {
                let param = &self.tensors[position].param;
                // Parts of a weight are gathered one by one, also for the others.
                let part = param.shard_group().filter(|_| param.unit().is_none()).map(|_| param.full_tensor());
                let part = part.transpose()?;
                let (Ok(files), true) = (own.as_mut(), appended.is_ok()) else { continue };
                appended = match (param.unit(), part) {
                    (Some(place), _) => files.append(position, &unit[place.member]),
                    (None, Some(part)) => files.append(position, &part),
                    (None, None) => param.full_tensor().and_then(|full| files.append(position, &full)),
                };
            }
            if let Err(error) = appended {
                own = Err(error);
            }
        }
        Ok(own.and_then(|own| {
            let mut files = own.finished;
            self.if_first(|| {
                let own_files = write_own_files(self.folder, self.options)?;
                files.splice(..0, own_files);
                files.extend(write_index(self.folder, &self.plan.files, &self.options.stem)?);
                Ok(())
            })?;
            Ok(files)
        }))
    }

    /// The files that all ranks have written, in the order in which they get their names, on the first writer that needs
    /// them. Collective where all ranks write.
    fn list_files(&self, files: &[PendingFile]) -> Result<Vec<SavedFile>> {
        let own: Vec<SavedFile> = files.iter().map(PendingFile::saved_file).collect();
        if let Writers::FirstOfEachNode { .. } = self.writers {
            return Ok(own);
        }
        let text = serde_json::to_vec(&own).map_err(Error::other)?;
        let mut all = Vec::new();
        for text in self.group.all_gather_bytes(&text)? {
            all.extend(serde_json::from_slice::<Vec<SavedFile>>(&text).map_err(Error::other)?);
        }
        let index = Index::file_name(&self.options.stem);
        all.sort_by_key(|file| file.name == index);
        Ok(all)
    }

    fn if_first(&self, run: impl FnOnce() -> Result<()>) -> Result<()> {
        if self.writers.is_first(self.group) { run() } else { Ok(()) }
    }
}

/// The files that this rank writes.
struct OwnFiles<'a> {
    save: &'a Save<'a>,
    /// File name and the tensors in it, by position.
    files: Vec<(&'a str, Vec<usize>)>,
    /// The file of each tensor.
    file_of: HashMap<usize, usize>,
    open: BTreeMap<usize, TensorFile>,
    finished: Vec<PendingFile>,
}

impl<'a> OwnFiles<'a> {
    fn new(save: &'a Save<'a>) -> Self {
        let entries = save.tensors.iter().enumerate();
        let positions: HashMap<&str, usize> =
            entries.map(|(position, tensor)| (tensor.entry.name.as_str(), position)).collect();
        let own = save.writers.own(save.group);
        let own_files =
            save.plan.files.files.iter().zip(&save.plan.writers).filter(|(_, writer)| Some(**writer) == own);
        let files: Vec<(&str, Vec<usize>)> = own_files
            .map(|((file, names), _)| {
                let positions = names.iter().filter_map(|name| positions.get(name.as_str()).copied());
                (file.as_str(), positions.collect())
            })
            .collect();
        let of_file = |(file, (_, positions)): (usize, &(&str, Vec<usize>))| {
            positions.iter().map(|&position| (position, file)).collect::<Vec<_>>()
        };
        let file_of = files.iter().enumerate().flat_map(of_file).collect();
        Self { save, files, file_of, open: BTreeMap::new(), finished: Vec::new() }
    }

    /// Writes a tensor, if it is in one of the files: they open with their first tensor and are finished with their last.
    fn append(&mut self, position: usize, tensor: &Tensor) -> Result<()> {
        let Some(&number) = self.file_of.get(&position) else { return Ok(()) };
        let mut file = match self.open.remove(&number) {
            Some(file) => file,
            None => {
                let (name, positions) = &self.files[number];
                let specs = positions.iter().map(|&position| &self.save.tensors[position].spec);
                TensorFile::create(NewFile::buffered(&self.save.folder.join(name), &self.save.options.stem), specs)?
            }
        };
        file.append(tensor, &self.save.tensors[position].spec)?;
        if file.is_complete() {
            self.finished.push(file.finish()?);
        } else {
            self.open.insert(number, file);
        }
        Ok(())
    }
}

/// Passes on what this rank has made if all ranks have succeeded; else fails on all of them, with every rank's failure.
/// Collective.
fn agree_on_success<T>(group: &Group, was_replacing: bool, own: Result<T>) -> Result<T> {
    let text = own.as_ref().err().map(ToString::to_string);
    let failed = group.failures(OP, text.as_deref())?;
    if failed.is_empty() {
        return own;
    }
    let failures: Vec<String> = failed.iter().map(|(rank, text)| format!("rank {rank} failed: {text}")).collect();
    Err(WeightsError::FailedRanks { failures: failures.join("; "), was_replacing }.into())
}
