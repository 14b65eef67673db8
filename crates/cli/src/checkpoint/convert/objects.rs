//! Objects of a run and the files that they are written into.

use accelerate_core::checkpoint::{Checkpoint, DESCRIPTION, STEM, SavedObject, SavedPiece, SavedTensor};
use accelerate_core::weight_files::{EXTENSION, Pickled, Plain, SaveManifest, TorchArchive};
use serde_json::Value;

use super::super::folder::MAX_DESCRIPTION_BYTES;
use super::error::ConvertError;
use super::staged::Staged;
use crate::progress::Progress;
use crate::weights::{Copier, Sink, Tensor, Weights, WeightsError, write_safetensors};

/// The state of an object, whatever wrote it.
#[derive(Debug, Default)]
pub(super) struct Object {
    pub(super) name: String,
    pub(super) weights: Weights,
    pub(super) values: Value,
}

impl Object {
    /// Number of its tensors, and of their bytes.
    pub(super) fn size(&self) -> (usize, u64) {
        (self.weights.tensors.len(), self.weights.num_bytes())
    }
}

/// Writes the files of a checkpoint of this library: weights, description, and the manifest that makes it count.
pub(super) fn write_checkpoint(
    mut checkpoint: Checkpoint,
    objects: Vec<Object>,
    staged: &mut Staged,
    bar: &Progress,
) -> Result<(), Box<dyn std::error::Error>> {
    checkpoint.id = staged.id();
    for Object { name, mut weights, values } in objects {
        let mut saved = SavedObject { values, ..Default::default() };
        if !weights.tensors.is_empty() {
            let file = checkpoint.files.len();
            checkpoint.files.push(format!("{name}.{EXTENSION}"));
            let Weights { files, tensors, notes, .. } = &mut weights;
            let mut copier = Copier::new(files, bar.clone());
            staged.write(&format!("{name}.{EXTENSION}"), |sink| {
                write_safetensors(&mut copier, (tensors.iter().collect(), notes), sink)
            })?;
            saved.tensors = tensors.iter().map(|tensor| (tensor.name.clone(), saved_tensor(tensor, file))).collect();
        }
        checkpoint.objects.insert(name, saved);
    }
    let json = checkpoint.to_json()?;
    if json.len() as u64 > MAX_DESCRIPTION_BYTES {
        let reason = format!("its description would have {} bytes, and {MAX_DESCRIPTION_BYTES} are read", json.len());
        return Err(ConvertError::Values { path: staged.target().to_owned(), reason }.into());
    }
    // What is written here has to be what is read everywhere.
    Checkpoint::from_json(&json)?;
    staged.write(DESCRIPTION, |sink| sink.append(json.as_bytes()))?;
    let manifest = SaveManifest::new(std::mem::take(&mut staged.files)).to_json()?;
    staged.write(&SaveManifest::file_name(STEM), |sink| sink.append(manifest.as_bytes()))?;
    Ok(())
}

fn saved_tensor(tensor: &Tensor, file: usize) -> SavedTensor {
    SavedTensor {
        dtype: tensor.dtype,
        shape: tensor.shape.iter().map(|&size| size as usize).collect(),
        is_elementwise: true,
        pieces: vec![SavedPiece { file, layout: None }],
    }
}

/// Writes a value as `torch.save` does, all of it in this folder of an archive.
pub(super) fn write_torch(
    value: &Plain<&Tensor>,
    copier: &mut Copier<'_>,
    output: &mut Sink<'_>,
    folder: &str,
) -> Result<(), WeightsError> {
    let path = output.path.to_owned();
    let failed = |source| WeightsError::Write { path: path.clone(), source };
    let described = |tensor: &&Tensor| (tensor.dtype, tensor.shape.clone());
    let unwritable =
        |error: accelerate_core::Error| WeightsError::Header { path: path.clone(), reason: error.to_string() };
    let Pickled { bytes, tensors } = Pickled::new(value, described).map_err(unwritable)?;
    let mut archive = TorchArchive::new(&mut *output.output, folder);
    let entry = |archive: &mut TorchArchive<_>, name: &str, bytes: &[u8]| {
        archive.begin(name).and_then(|()| archive.append(bytes)).map_err(failed)
    };
    entry(&mut archive, "data.pkl", &bytes)?;
    entry(&mut archive, "byteorder", b"little")?;
    for (number, tensor) in tensors.into_iter().enumerate() {
        archive.begin(&format!("data/{number}")).map_err(failed)?;
        copier.copy(tensor, &mut Sink { output: &mut Entry(&mut archive), path: &path })?;
    }
    entry(&mut archive, "version", b"3\n")?;
    archive.finish().map(drop).map_err(failed)
}

/// The entry of an archive that was begun last.
struct Entry<'a, W>(&'a mut TorchArchive<W>);

impl<W: std::io::Write> std::io::Write for Entry<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.append(bytes).map(|()| bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
