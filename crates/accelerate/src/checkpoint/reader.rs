//! One safetensors file, read: header first, tensors by offset.

use super::atomic::io_error;
use super::dtype::to_kind;
use crate::error::{Result, WeightsError};
use crate::nn::StateDict;
use accelerate_core::layout::Layout;
use safetensors::tensor::{Metadata, TensorInfo};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use tch::{Device, Tensor};
use torch_ext::file::read_at;

const LENGTH_BYTES: u64 = 8;
/// The format's law: a longer header is an attack or a damaged file.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Reads all tensors of one safetensors file to the CPU: `safetensors.torch.load_file`.
///
/// # Errors
/// [`is_weights`](crate::Error::is_weights): the file is absent, unreadable, truncated or damaged, or has an
/// element type that libtorch does not know. The message names the file.
///
/// ```
/// let error = accelerate::checkpoint::load_file("absent.safetensors").unwrap_err();
/// assert!(error.is_weights() && error.to_string().contains("absent.safetensors"));
/// ```
pub fn load_file(path: impl AsRef<Path>) -> Result<StateDict> {
    let mut file = WeightFile::open(path.as_ref())?;
    let names: Vec<String> = file.names().map(str::to_owned).collect();
    names
        .into_iter()
        .map(|name| {
            let tensor = file.read(&name)?;
            Ok((name, tensor))
        })
        .collect()
}

/// An open file whose header fits its length.
#[derive(Debug)]
pub(super) struct WeightFile {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    /// Names in the order of their data.
    names: Vec<String>,
    data_at: u64,
    /// How much has been read, without the header.
    num_bytes_read: u64,
}

impl WeightFile {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let mut file = File::open(path).map_err(io_error("open", path))?;
        let found_bytes = file.metadata().map_err(io_error("read", path))?.len();
        let header = read_header(&mut file, path, found_bytes)?;
        let damaged = |reason: String| WeightsError::Header { path: path.to_owned(), reason };
        let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| damaged(error.to_string()))?;
        let data_at = LENGTH_BYTES + header.len() as u64;
        let wanted_bytes = data_at + metadata.data_len() as u64;
        if found_bytes != wanted_bytes {
            let path = path.to_owned();
            return Err(WeightsError::Length { path, found_bytes, wanted_bytes }.into());
        }
        let names = metadata.offset_keys();
        Ok(Self { path: path.to_owned(), file, metadata, names, data_at, num_bytes_read: 0 })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Names in the order of their data.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }

    pub(super) fn shape(&self, name: &str) -> Option<Vec<i64>> {
        let info = self.metadata.info(name)?;
        Some(info.shape.iter().map(|size| *size as i64).collect())
    }

    fn info(&self, name: &str) -> Result<TensorInfo, WeightsError> {
        self.metadata.info(name).cloned().ok_or_else(|| WeightsError::Header {
            path: self.path.clone(),
            reason: format!("there is no tensor `{name}` in it"),
        })
    }

    /// How much has been read so far, without the header.
    pub(super) fn num_bytes_read(&self) -> u64 {
        self.num_bytes_read
    }

    /// One tensor, on the CPU.
    pub(super) fn read(&mut self, name: &str) -> Result<Tensor> {
        let shape = self.shape(name).unwrap_or_default();
        let sizes: Vec<usize> = shape.iter().map(|&size| size as usize).collect();
        Ok(self.read_elements(name, &Layout::full(sizes))?.f_reshape(shape)?)
    }

    /// The elements of a layout, flat, on the CPU. Nothing else is read.
    pub(super) fn read_elements(&mut self, name: &str, layout: &Layout) -> Result<Tensor> {
        let info = self.info(name)?;
        let Some(kind) = to_kind(info.dtype) else {
            let (path, name) = (self.path.clone(), name.to_owned());
            return Err(WeightsError::UnknownDtype { path, name, dtype: info.dtype.to_string() }.into());
        };
        // The header has been checked: shape, element type and offsets agree, and end with the file.
        let (start, end) = info.data_offsets;
        let element_bytes = kind.elt_size_in_bytes();
        let num_elements = (end - start) / element_bytes;
        if layout.full_numel() != num_elements {
            let reason = format!("`{name}` has {num_elements} elements, and {layout} was asked for");
            return Err(WeightsError::Header { path: self.path.clone(), reason }.into());
        }
        // There is no room for a large tensor twice.
        let tensor = Tensor::f_empty([layout.numel() as i64], (kind, Device::Cpu))?;
        let mut filled = 0;
        for run in layout.runs() {
            let place = tensor.f_narrow(0, filled, run.len() as i64)?;
            let at = self.data_at + (start + run.start * element_bytes) as u64;
            read_at(&self.file, &place, at).map_err(io_error("read", &self.path))?;
            filled += run.len() as i64;
        }
        self.num_bytes_read += (layout.numel() * element_bytes) as u64;
        Ok(tensor)
    }
}

fn read_header(file: &mut File, path: &Path, found_bytes: u64) -> Result<Vec<u8>> {
    let damaged = |reason: String| WeightsError::Header { path: path.to_owned(), reason };
    let mut length = [0; LENGTH_BYTES as usize];
    file.read_exact(&mut length).map_err(|error| match error.kind() {
        ErrorKind::UnexpectedEof => damaged(format!("it has only {found_bytes} bytes")),
        _ => io_error("read", path)(error),
    })?;
    let length = u64::from_le_bytes(length);
    // Before anything is allocated: the number comes from outside.
    if length > MAX_HEADER_BYTES {
        let reason = format!("its header claims {length} bytes, more than the {MAX_HEADER_BYTES} allowed");
        return Err(damaged(reason).into());
    }
    if length > found_bytes - LENGTH_BYTES {
        let reason = format!("its header claims {length} bytes, but the file has only {found_bytes} in all");
        return Err(damaged(reason).into());
    }
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header).map_err(io_error("read", path))?;
    Ok(header)
}
