//! A checkpoint, read by all ranks: each the elements that it keeps.

use super::super::atomic::io_error;
use super::super::dtype::to_kind;
use super::super::folder::{finish_interrupted_saves, is_unchanged, read_committed, verify_part};
use super::super::memory::TensorMemory;
use super::super::reader::{WeightFile, WeightReader, open_file};
use super::blocks::{Dequantize, InBlocks};
use super::save::{FolderWriters, MAX_DESCRIPTION_BYTES, layout_of};
use crate::error::{CheckpointError, Result, WeightsError};
use crate::group::Group;
use crate::messages;
use crate::session::ObjectState;
use accelerate_core::checkpoint::{Checkpoint, DESCRIPTION, STEM, SavedObject, SavedPiece, SavedTensor};
use accelerate_core::layout::{Copied, Layout};
use accelerate_core::weight_files::{SaveManifest, shown};
use serde_json::Value;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use tch::{Device, Kind, Tensor};
use torch_ext::mapped_file::MappedFile;

const OP: &str = "load_state";

/// A committed checkpoint whose content is as it was saved.
#[derive(Debug)]
pub(crate) struct OpenCheckpoint {
    folder: PathBuf,
    pub(crate) description: Checkpoint,
    /// Those that have been opened, by position.
    files: HashMap<usize, WeightFile>,
    /// By name, files that this rank has compared and nobody has opened yet.
    compared: HashMap<String, MappedFile>,
    manifest: SaveManifest,
    /// What is still to be read.
    in_place: Vec<InPlace>,
}

/// A tensor that is to be read into the memory of an object.
#[derive(Debug)]
struct InPlace {
    object: String,
    name: String,
    source: Source,
    place: Tensor,
}

/// Where the elements of a tensor are.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) kind: Kind,
    /// What it becomes: flat, if it is a shard.
    pub(super) shape: Vec<i64>,
    pub(super) copies: Vec<CopiedFrom>,
}

/// Elements that lie one behind the other, in a file and in the tensor.
#[derive(Debug)]
pub(super) struct CopiedFrom {
    pub(super) file: usize,
    pub(super) from: Range<usize>,
    pub(super) to: usize,
}

impl Source {
    fn numel(&self) -> usize {
        numel(&self.shape)
    }

    /// Can it be read into this memory? Single numbers are not: counts of steps, which objects look at before they take a
    /// state.
    fn fits(&self, place: &Tensor) -> bool {
        self.numel() > 1
            && place.device() == Device::Cpu
            && place.is_contiguous()
            && (place.numel(), place.f_kind().ok()) == (self.numel(), Some(self.kind))
    }
}

impl OpenCheckpoint {
    /// Finishes a save that was interrupted in the folder, and compares the content of all files with their checksums, each
    /// rank its part of them. Collective.
    pub(crate) fn open(group: &Group, folder: &Path, writers: &FolderWriters) -> Result<Self> {
        let range = &writers.0;
        let finished = match group.rank() == range.start {
            true if !folder.is_dir() => Err(CheckpointError::NoSuchFolder { folder: folder.to_owned() }.into()),
            true => finish_interrupted_saves(folder),
            false => Ok(()),
        };
        group.agree_on_success(OP, finished)?;
        let opened = Self::read(folder).and_then(|opened| {
            let compared = verify_part(folder, STEM, group.rank() - range.start, range.len())?;
            Ok(Self { compared, ..opened })
        });
        let opened = group.agree_on_success(OP, opened)?;
        // Machines that share no folder may have been killed at different saves.
        let (id, cure) = (&opened.description.id, "name a checkpoint that all machines have completed");
        group.agree(OP, &format!("checkpoint {}", shown(id)), cure)?;
        Ok(opened)
    }

    fn read(folder: &Path) -> Result<Self> {
        let Some((manifest, json)) = read_committed(folder, STEM, DESCRIPTION, MAX_DESCRIPTION_BYTES)? else {
            return Err(CheckpointError::NotCommitted { folder: folder.to_owned() }.into());
        };
        let path = folder.join(DESCRIPTION);
        let described = Checkpoint::from_json(&String::from_utf8_lossy(&json));
        let description = described.map_err(|source| CheckpointError::Description { path, source })?;
        // The content of what is not in the manifest has not been compared with anything.
        let listed: HashSet<&str> = manifest.files.iter().map(|file| file.name.as_str()).collect();
        if let Some(file) = description.files.iter().find(|file| !listed.contains(file.as_str())) {
            let reason = "it is not in the manifest, so nothing says what it has to be".to_owned();
            return Err(CheckpointError::Damaged { path: folder.join(shown(file)), reason }.into());
        }
        Ok(Self {
            folder: folder.to_owned(),
            description,
            files: HashMap::new(),
            compared: HashMap::new(),
            manifest,
            in_place: Vec::new(),
        })
    }

    /// Of what was compared on other ranks, this one has opened the files by their names. All that it needs are open by now, and
    /// nothing has changed yet.
    ///
    /// # Errors
    /// Somebody has saved into the folder meanwhile, so that some of them may be of another checkpoint.
    pub(crate) fn check_unchanged(&self) -> Result<()> {
        match is_unchanged(&self.folder, STEM, &self.manifest)? {
            true => Ok(()),
            false => Err(CheckpointError::SavedMeanwhile { folder: self.folder.clone() }.into()),
        }
    }

    pub(crate) fn description_path(&self) -> PathBuf {
        self.folder.join(DESCRIPTION)
    }

    /// The state of one object: of sharded parameters the elements of `layouts`. What fits into `places` is not read yet:
    /// these tensors are in the state, and [`read_in_place`](Self::read_in_place) fills them. `dequantize` makes numbers of
    /// state in blocks where these elements cut through blocks.
    pub(crate) fn object(
        &mut self,
        name: &str,
        layouts: &BTreeMap<String, Layout>,
        places: &BTreeMap<String, Tensor>,
        (rank, world_size): (usize, usize),
        dequantize: &Dequantize<'_>,
    ) -> Result<Option<ObjectState>> {
        let Some(SavedObject { tensors, .. }) = self.description.objects.get_mut(name) else { return Ok(None) };
        let tensors = std::mem::take(tensors);
        let mut state = ObjectState { layouts: layouts.clone(), ..Default::default() };
        let read = self.in_blocks(name, &tensors, layouts, dequantize);
        let read = read.and_then(|in_blocks| self.tensors(name, &tensors, layouts, (places, in_blocks)));
        state.tensors = read.map_err(|error| error.context(name))?;
        let object = self.description.objects.entry(name.to_owned()).or_default();
        object.tensors = tensors;
        let is_same = world_size == self.description.world_size;
        if rank == 0 {
            warn_of_other_values(name, object, is_same);
        }
        state.values = object.values_of(if is_same { rank } else { 0 }).clone();
        Ok(Some(state))
    }

    /// The objects of which some memory is still to be filled.
    pub(crate) fn objects_in_place(&self) -> BTreeSet<String> {
        self.in_place.iter().map(|tensor| tensor.object.clone()).collect()
    }

    /// Fills the memory of objects. Whatever can be wrong with a checkpoint has been found before, so that only a disk fails.
    pub(crate) fn read_in_place(&mut self) -> Result<()> {
        for InPlace { object, name, source, place } in std::mem::take(&mut self.in_place) {
            self.read_into(&name, &source, &place).map_err(|source| CheckpointError::HalfLoaded { object, source })?;
        }
        Ok(())
    }

    /// Of each tensor, the elements that this rank keeps, flat, if its layout says which; all of them in its shape if not.
    fn tensors(
        &mut self,
        object: &str,
        saved: &BTreeMap<String, SavedTensor>,
        layouts: &BTreeMap<String, Layout>,
        (places, mut in_blocks): (&BTreeMap<String, Tensor>, BTreeMap<String, InBlocks>),
    ) -> Result<BTreeMap<String, Tensor>> {
        let mut tensors = BTreeMap::new();
        let mut without_place = Vec::new();
        for (name, saved) in saved {
            let source = match in_blocks.remove(name) {
                None => self.source(name, saved, layout_of(object, layouts, name))?,
                Some(InBlocks::Unchanged(source)) => source,
                Some(InBlocks::Numbers(numbers)) => {
                    tensors.insert(name.clone(), numbers);
                    continue;
                }
                Some(InBlocks::Left) => continue,
            };
            let Some(place) = places.get(name).filter(|place| source.fits(place)) else {
                without_place.push((name, source));
                continue;
            };
            let place = place.f_view(&*source.shape)?;
            tensors.insert(name.clone(), place.shallow_clone());
            self.in_place.push(InPlace { object: object.to_owned(), name: name.clone(), source, place });
        }
        let sizes = without_place.iter().map(|(_, source)| (source.kind, source.numel()));
        let num_bytes = TensorMemory::num_bytes(sizes);
        let mut memory = TensorMemory::new(num_bytes).map_err(|_| {
            let (path, name) = (self.description_path(), object.to_owned());
            WeightsError::NoMemory { path, name, num_bytes: num_bytes as u64 }
        })?;
        for (name, source) in without_place {
            let tensor = memory.tensor(source.kind, source.numel())?.f_view(&*source.shape)?;
            self.read_into(name, &source, &tensor)?;
            tensors.insert(name.clone(), tensor);
        }
        Ok(tensors)
    }

    fn read_into(&mut self, name: &str, source: &Source, tensor: &Tensor) -> Result<()> {
        let flat = tensor.f_view([-1])?;
        for CopiedFrom { file, from, to } in source.copies.iter().filter(|copy| !copy.from.is_empty()) {
            let part = flat.f_narrow(0, *to as i64, from.len() as i64)?;
            self.file(*file)?.read_into(name, from.start, &part)?;
        }
        Ok(())
    }

    fn source(&mut self, name: &str, saved: &SavedTensor, own: Option<&Layout>) -> Result<Source> {
        let Some(kind) = to_kind(saved.dtype) else {
            let (path, dtype) = (self.description_path(), saved.dtype.to_string());
            return Err(WeightsError::UnknownDtype { path, name: shown(name), dtype }.into());
        };
        let wanted = own.filter(|layout| saved.is_elementwise && *layout.shape() == *saved.shape);
        let whole = saved.pieces.iter().find(|piece| piece.layout.is_none());
        let (shape, copies) = match (whole, wanted) {
            (Some(piece), Some(layout)) => {
                self.check(name, saved, piece)?;
                let mut to = 0;
                let run = |from: Range<usize>| {
                    to += from.len();
                    CopiedFrom { file: piece.file, to: to - from.len(), from }
                };
                (flat(layout), layout.runs().map(run).collect())
            }
            (Some(piece), None) => self.all_of(name, saved, piece)?,
            (None, _) if !saved.is_elementwise => {
                let piece = self.same_elements(name, saved, own)?;
                self.all_of(name, saved, piece)?
            }
            (None, Some(layout)) => (flat(layout), self.assemble(name, saved, layout)?),
            (None, None) => {
                let all = Layout::full(saved.shape.clone());
                (signed(&saved.shape), self.assemble(name, saved, &all)?)
            }
        };
        Ok(Source { kind, shape, copies })
    }

    /// A piece, as it is in its file: its shape, and its elements.
    fn all_of(&mut self, name: &str, saved: &SavedTensor, piece: &SavedPiece) -> Result<(Vec<i64>, Vec<CopiedFrom>)> {
        self.check(name, saved, piece)?;
        let shape = self.file(piece.file)?.shape(name).unwrap_or_default();
        let numel = numel(&shape);
        Ok((shape, vec![CopiedFrom { file: piece.file, from: 0..numel, to: 0 }]))
    }

    /// State that does not go element by element is of use to whoever has the same elements.
    fn same_elements<'a>(&self, name: &str, saved: &'a SavedTensor, own: Option<&Layout>) -> Result<&'a SavedPiece> {
        let piece = saved.pieces.iter().find(|piece| piece.layout.as_ref() == own);
        piece.ok_or_else(|| {
            let wanted = own.map_or_else(|| "all".to_owned(), Layout::to_string);
            CheckpointError::InBlocks { path: self.description_path(), name: shown(name), wanted }.into()
        })
    }

    /// The `wanted` elements, from pieces.
    fn assemble(&mut self, name: &str, saved: &SavedTensor, wanted: &Layout) -> Result<Vec<CopiedFrom>> {
        let pieces: Vec<(&SavedPiece, &Layout)> =
            saved.pieces.iter().filter_map(|piece| Some((piece, piece.layout.as_ref()?))).collect();
        // Files are as long as their headers say, so that after this the sizes of all pieces are true.
        pieces.iter().try_for_each(|(piece, _)| self.check(name, saved, piece))?;
        let copies = wanted.copies_from(pieces.iter().map(|(_, layout)| *layout));
        let copies = copies.map_err(|missing| self.missing(name, &missing))?;
        let from = |Copied { source, from, to }| CopiedFrom { file: pieces[source].0.file, from, to };
        Ok(copies.into_iter().map(from).collect())
    }

    /// Makes sure that a piece in its file is what the description says of it.
    pub(super) fn check(&mut self, name: &str, saved: &SavedTensor, piece: &SavedPiece) -> Result<()> {
        let file = self.file(piece.file)?;
        let path = file.path().to_owned();
        let reason = match file.get(name) {
            None => format!("there is no tensor `{}` in it", shown(name)),
            Some(found) if found.dtype != saved.dtype => {
                format!("`{}` has elements of type {}, not {}", shown(name), found.dtype, saved.dtype)
            }
            Some(found) => match &piece.layout {
                None if found.shape != saved.shape => {
                    format!("`{}` has shape {:?}, not {:?}", shown(name), found.shape, saved.shape)
                }
                Some(layout) if saved.is_elementwise && found.shape != [layout.numel()] => {
                    format!("`{}` has shape {:?}, and {layout} was saved", shown(name), found.shape)
                }
                _ => return Ok(()),
            },
        };
        Err(self.damaged(&path, reason))
    }

    pub(super) fn missing(&self, name: &str, Range { start, end }: &Range<usize>) -> crate::Error {
        self.damaged(&self.description_path(), format!("elements {start}..{end} of `{}` are in no file", shown(name)))
    }

    pub(super) fn damaged(&self, path: &Path, reason: String) -> crate::Error {
        CheckpointError::Damaged { path: path.to_owned(), reason }.into()
    }

    pub(super) fn file(&mut self, number: usize) -> Result<&mut WeightFile> {
        let file = match self.files.entry(number) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(closed) => {
                let name = self.description.files.get(number).map_or(DESCRIPTION, String::as_str);
                let path = self.folder.join(name);
                let mapped = match self.compared.remove(name) {
                    Some(mapped) => mapped,
                    None => MappedFile::new(open_file(&path)?.0).map_err(io_error("read", &path))?,
                };
                closed.insert(WeightFile::of_mapped(mapped, &path)?)
            }
        };
        Ok(file)
    }
}

fn numel(shape: &[i64]) -> usize {
    shape.iter().map(|&size| size as usize).product()
}

pub(super) fn flat(layout: &Layout) -> Vec<i64> {
    vec![layout.numel() as i64]
}

/// Sizes that a header has been compared with fit an `i64`.
pub(super) fn signed(shape: &[usize]) -> Vec<i64> {
    shape.iter().map(|&size| size as i64).collect()
}

/// Says what becomes of values that ranks did not have alike.
fn warn_of_other_values(name: &str, object: &SavedObject, is_same: bool) {
    let others = || object.values_of_ranks.iter().filter(|(_, values)| says_other(values, &object.values));
    match others().next() {
        Some((other, _)) if is_same && is_alike_on_all_ranks(name) => messages::warning_here!(
            "{name} had other values on rank {other} of the run than on rank 0, such as another learning rate, and the ranks of a \
             run are meant to have the same; each rank goes on with its own"
        ),
        Some(_) if !is_same => messages::warning_here!(
            "{name} had other values on other ranks of the run; all ranks go on with those of rank 0"
        ),
        _ => {}
    }
}

/// Do all ranks of a run take the same steps with such an object?
fn is_alike_on_all_ranks(name: &str) -> bool {
    ["optimizer", "scheduler", "scaler"].iter().any(|kind| name.starts_with(kind))
}

/// Does a rank say something else than the first one? Ranks to which rank 0 hands rows out say less of a loader.
fn says_other(values: &Value, first: &Value) -> bool {
    match (values, first) {
        (Value::Object(values), Value::Object(first)) => {
            values.iter().any(|(key, value)| first.get(key) != Some(value))
        }
        _ => values != first,
    }
}
