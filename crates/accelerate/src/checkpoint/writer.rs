//! One safetensors file, written.

use super::atomic::{PendingFile, WriteError, sync_folder};
use super::dtype::to_dtype;
use crate::error::{Result, WeightsError};
use crate::nn::StateDict;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use std::collections::HashMap;
use std::io::Write;
use std::path::Path;
use tch::Tensor;

/// Readers refuse longer headers.
const MAX_HEADER_BYTES: usize = 100_000_000;

/// Writes named tensors to one safetensors file, whole or not at all: `safetensors.torch.save_file`.
///
/// The tensors may live on any device, be views, and share memory; each is written in full. An existing
/// file is replaced.
///
/// # Errors
/// [`is_weights`](crate::Error::is_weights): the disk is full, the folder missing or not writable, or an element type that the
/// format does not know.
///
/// ```
/// use accelerate::checkpoint::{load_file, save_file};
/// use accelerate::{nn::StateDict, tch::Tensor};
///
/// let path = std::env::temp_dir().join(format!("accelerate-save-file-{}.safetensors", std::process::id()));
/// let state: StateDict = [("x".to_string(), Tensor::from_slice(&[1.5f32, 2.0]))].into_iter().collect();
/// save_file(&state, &path)?;
/// assert_eq!(load_file(&path)?.get("x"), state.get("x"));
/// # std::fs::remove_file(&path).map_err(accelerate::Error::other)?;
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn save_file(state: &StateDict, path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    write_pending(&state.iter().collect::<Vec<_>>(), path)?.commit()?;
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => sync_folder(folder),
        _ => sync_folder(Path::new(".")),
    }
}

/// Number of bytes a tensor takes in a file.
pub(super) fn num_bytes(tensor: &Tensor) -> Result<usize> {
    Ok(tensor.numel() * tensor.f_kind()?.elt_size_in_bytes())
}

/// Writes the tensors beside `path`, in the order that every writer of the format uses.
pub(super) fn write_pending(tensors: &[(&str, &Tensor)], path: &Path) -> Result<PendingFile> {
    let mut entries = Vec::with_capacity(tensors.len());
    for (name, tensor) in tensors {
        let kind = tensor.f_kind()?;
        let Some(dtype) = to_dtype(kind) else {
            let (path, name) = (path.to_owned(), (*name).to_owned());
            return Err(WeightsError::KindNotWritable { path, name, kind }.into());
        };
        entries.push((dtype, *name, *tensor));
    }
    // Largest alignment first keeps every tensor aligned without holes.
    entries.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(b.1)));
    let header = header(&entries, path)?;
    PendingFile::write(path, |file| {
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(&header)?;
        let mut bytes = Vec::new();
        for (_, _, tensor) in entries {
            write_tensor(tensor, &mut bytes, file)?;
        }
        Ok(())
    })
}

fn header(entries: &[(Dtype, &str, &Tensor)], path: &Path) -> Result<Vec<u8>> {
    let mut infos = Vec::with_capacity(entries.len());
    let mut offset = 0;
    for (dtype, name, tensor) in entries {
        let end = offset + num_bytes(tensor)?;
        let shape = tensor.size().into_iter().map(|size| size as usize).collect();
        let info = TensorInfo { dtype: *dtype, shape, data_offsets: (offset, end) };
        infos.push(((*name).to_owned(), info));
        offset = end;
    }
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let damaged = |reason: String| WeightsError::Header { path: path.to_owned(), reason };
    let metadata = Metadata::new(Some(format), infos).map_err(|error| damaged(error.to_string()))?;
    let mut header = serde_json::to_vec(&metadata).map_err(|error| damaged(error.to_string()))?;
    header.resize(header.len().next_multiple_of(8), b' ');
    if header.len() > MAX_HEADER_BYTES {
        return Err(damaged(format!("its header would have {} bytes", header.len())).into());
    }
    Ok(header)
}

/// Copies one tensor at a time through `bytes`, so that the file costs no more memory than its largest tensor.
fn write_tensor(tensor: &Tensor, bytes: &mut Vec<u8>, file: &mut dyn Write) -> Result<(), WriteError> {
    let size = num_bytes(tensor).map_err(WriteError::Other)?;
    bytes.resize(size, 0);
    let copied = tensor.f_copy_data_u8(bytes, tensor.numel());
    copied.map_err(|error| WriteError::Other(error.into()))?;
    Ok(file.write_all(bytes)?)
}
