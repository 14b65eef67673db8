//! What the objects of a checkpoint have of tensors, whoever wrote which part of them.

use std::error::Error;
use std::path::Path;

use accelerate_core::checkpoint::SavedObject;
use accelerate_core::layout::Layout;

use super::error::{CheckpointError, Fault};
use super::folder::OpenCheckpoint;
use super::tensors::Reader;
use crate::weights::{Data, Files, Part, Tensor, Weights};

/// The model of a checkpoint, of which the content was verified. Of several, the first.
pub(crate) fn model_weights(folder: &Path) -> Result<Weights, Box<dyn Error>> {
    let checkpoint = OpenCheckpoint::open(folder)?;
    let objects = &checkpoint.description.objects;
    let Some(model) = objects.get("model") else {
        let names = objects.keys().cloned().collect();
        return Err(CheckpointError::NoModel { folder: folder.to_owned(), names }.into());
    };
    let unusable = |source| CheckpointError::Unusable { folder: folder.to_owned(), source };
    let mut reader = Reader::new(&checkpoint);
    let tensors = tensors_of(&mut reader, "model", model).map_err(unusable)?;
    let notes = reader.notes_of(model).map_err(unusable)?;
    let other_models = objects.keys().filter(|name| name.starts_with("model_")).cloned().collect();
    Ok(Weights { files: files_of(&checkpoint), tensors, other_models, notes, ..Weights::default() })
}

/// The weight files of a checkpoint, by the numbers that its description gives them.
pub(super) fn files_of(checkpoint: &OpenCheckpoint) -> Files {
    let mut files = Files::default();
    for name in &checkpoint.description.files {
        let listed = checkpoint.save.file(name);
        files.add(listed.map_or_else(|| checkpoint.save.folder.join(name), |file| checkpoint.save.path_of(file)));
    }
    files
}

/// The tensors of an object. Each element of them is in one part.
pub(super) fn tensors_of(reader: &mut Reader<'_>, object: &str, saved: &SavedObject) -> Result<Vec<Tensor>, Fault> {
    let mut tensors = Vec::with_capacity(saved.tensors.len());
    for (name, saved) in &saved.tensors {
        let mut parts = Vec::with_capacity(saved.pieces.len());
        for (piece, (file, at)) in saved.pieces.iter().zip(reader.places_of(object, name, saved)?) {
            let layout = piece.layout.clone().unwrap_or_else(|| Layout::full(saved.shape.clone()));
            parts.push(Part { file, at, layout });
        }
        let shape = saved.shape.iter().map(|&size| size as u64).collect();
        tensors.push(Tensor { name: name.clone(), dtype: saved.dtype, shape, data: Data::Parts(parts) });
    }
    Ok(tensors)
}
