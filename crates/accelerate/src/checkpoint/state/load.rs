//! A checkpoint, read by all ranks: each the elements that it keeps.

use super::super::dtype::to_kind;
use super::super::folder::{finish_interrupted_saves, read_committed, verify_part};
use super::super::reader::{WeightFile, WeightReader};
use super::save::{FolderWriters, MAX_DESCRIPTION_BYTES, layout_of};
use crate::error::{CheckpointError, Result, WeightsError};
use crate::group::Group;
use crate::messages;
use crate::session::ObjectState;
use accelerate_core::checkpoint::{Checkpoint, DESCRIPTION, STEM, SavedObject, SavedPiece, SavedTensor};
use accelerate_core::layout::{Copied, Layout};
use accelerate_core::weight_files::shown;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use tch::Tensor;

const OP: &str = "load_state";

/// A committed checkpoint whose content is as it was saved.
#[derive(Debug)]
pub(crate) struct OpenCheckpoint {
    folder: PathBuf,
    pub(crate) description: Checkpoint,
    /// Those that have been opened, by position.
    files: HashMap<usize, WeightFile>,
}

impl OpenCheckpoint {
    /// Finishes a save that was interrupted in the folder, and compares the content of all files with their hashes, each
    /// rank its part of them. Collective.
    pub(crate) fn open(group: &Group, folder: &Path, writers: &FolderWriters) -> Result<Self> {
        let range = &writers.0;
        let finished = if group.rank() == range.start { finish_interrupted_saves(folder) } else { Ok(()) };
        group.agree_on_success(OP, finished)?;
        let opened = Self::read(folder)
            .and_then(|opened| verify_part(folder, STEM, group.rank() - range.start, range.len()).map(|()| opened));
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
        if let Some(file) = description.files.iter().find(|file| manifest.file(file).is_none()) {
            let reason = "it is not in the manifest, so nothing says what it has to be".to_owned();
            return Err(CheckpointError::Damaged { path: folder.join(shown(file)), reason }.into());
        }
        Ok(Self { folder: folder.to_owned(), description, files: HashMap::new() })
    }

    pub(crate) fn description_path(&self) -> PathBuf {
        self.folder.join(DESCRIPTION)
    }

    /// The state of one object: of sharded parameters the elements of `layouts`.
    pub(crate) fn object(
        &mut self,
        name: &str,
        layouts: &BTreeMap<String, Layout>,
        (rank, world_size): (usize, usize),
    ) -> Result<Option<ObjectState>> {
        let Some(SavedObject { tensors, .. }) = self.description.objects.get_mut(name) else { return Ok(None) };
        let tensors = std::mem::take(tensors);
        let mut state = ObjectState { layouts: layouts.clone(), ..Default::default() };
        for (tensor_name, tensor) in &tensors {
            let wanted = layout_of(name, layouts, tensor_name);
            let read = self.tensor(tensor_name, tensor, wanted);
            state.tensors.insert(tensor_name.clone(), read.map_err(|error| error.context(name))?);
        }
        let object = self.description.objects.entry(name.to_owned()).or_default();
        object.tensors = tensors;
        let rank = if world_size == self.description.world_size { rank } else { 0 };
        if world_size != self.description.world_size && !object.values_of_ranks.is_empty() {
            messages::warning_here!(
                "{name} had other values on other ranks of the run; all ranks go on with those of rank 0"
            );
        }
        state.values = object.values_of(rank).clone();
        Ok(Some(state))
    }

    /// Those elements of a tensor that this rank keeps, flat, if its `own` layout says which; all of them in its shape if not.
    fn tensor(&mut self, name: &str, saved: &SavedTensor, own: Option<&Layout>) -> Result<Tensor> {
        let wanted = own.filter(|layout| saved.is_elementwise && *layout.shape() == *saved.shape);
        let whole = saved.pieces.iter().find(|piece| piece.layout.is_none());
        match (whole, wanted) {
            (Some(piece), wanted) => {
                self.check(name, saved, piece)?;
                let file = self.file(piece.file)?;
                match wanted {
                    Some(layout) => file.read_elements(name, layout),
                    None => file.read(name),
                }
            }
            (None, _) if !saved.is_elementwise => self.same_elements(name, saved, own),
            (None, Some(wanted)) => self.assemble(name, saved, wanted),
            (None, None) => {
                let shape: Vec<i64> = saved.shape.iter().map(|&size| size as i64).collect();
                Ok(self.assemble(name, saved, &Layout::full(saved.shape.clone()))?.f_reshape(shape)?)
            }
        }
    }

    /// State that does not go element by element is of use to whoever has the same elements.
    fn same_elements(&mut self, name: &str, saved: &SavedTensor, own: Option<&Layout>) -> Result<Tensor> {
        let Some(piece) = saved.pieces.iter().find(|piece| piece.layout.as_ref() == own) else {
            let wanted = own.map_or_else(|| "all".to_owned(), Layout::to_string);
            let path = self.description_path();
            return Err(CheckpointError::InBlocks { path, name: shown(name), wanted }.into());
        };
        self.check(name, saved, piece)?;
        self.file(piece.file)?.read(name)
    }

    /// Puts the `wanted` elements together from pieces.
    fn assemble(&mut self, name: &str, saved: &SavedTensor, wanted: &Layout) -> Result<Tensor> {
        let pieces: Vec<(&SavedPiece, &Layout)> =
            saved.pieces.iter().filter_map(|piece| Some((piece, piece.layout.as_ref()?))).collect();
        // Files are as long as their headers say, so that after this the sizes of all pieces are true.
        pieces.iter().try_for_each(|(piece, _)| self.check(name, saved, piece))?;
        let copies = match wanted.copies_from(pieces.iter().map(|(_, layout)| *layout)) {
            Ok(copies) => copies,
            Err(missing) => {
                let reason = format!("elements {}..{} of `{}` are in no file", missing.start, missing.end, shown(name));
                return Err(self.damaged(&self.folder.join(DESCRIPTION), reason));
            }
        };
        let Some(kind) = to_kind(saved.dtype) else {
            let (path, dtype) = (self.folder.join(DESCRIPTION), saved.dtype.to_string());
            return Err(WeightsError::UnknownDtype { path, name: shown(name), dtype }.into());
        };
        let tensor = self.file(pieces[0].0.file)?.new_tensor(name, wanted.numel(), kind)?;
        for Copied { source, from, to } in copies {
            let place = tensor.f_narrow(0, to as i64, from.len() as i64)?;
            self.file(pieces[source].0.file)?.read_into(name, from.start, &place)?;
        }
        Ok(tensor)
    }

    /// Makes sure that a piece in its file is what the description says of it.
    fn check(&mut self, name: &str, saved: &SavedTensor, piece: &SavedPiece) -> Result<()> {
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

    fn damaged(&self, path: &Path, reason: String) -> crate::Error {
        CheckpointError::Damaged { path: path.to_owned(), reason }.into()
    }

    fn file(&mut self, number: usize) -> Result<&mut WeightFile> {
        let file = match self.files.entry(number) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(closed) => {
                let name = self.description.files.get(number).map_or(DESCRIPTION, String::as_str);
                closed.insert(WeightFile::open(&self.folder.join(name))?)
            }
        };
        Ok(file)
    }
}
