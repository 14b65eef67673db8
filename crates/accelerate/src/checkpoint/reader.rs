//! One safetensors file, read: header first, tensors by offset.

use super::atomic::io_error;
use super::dtype::to_kind;
use crate::error::{Result, WeightsError};
use accelerate_core::files::other_than_file;
use accelerate_core::layout::Layout;
use accelerate_core::weight_files::{Header, HeaderEntry, shown};
use std::fmt;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use tch::{Device, Kind, Tensor};
use torch_ext::file::read_at;
use torch_ext::mapped_file::MappedFile;

/// Tensors by name whose elements are read when they are asked for.
pub(super) trait WeightReader: fmt::Debug {
    /// Of the file, or of what lists several.
    fn path(&self) -> &Path;

    fn shape(&self, name: &str) -> Option<Vec<i64>>;

    /// Names and shapes in the order in which they are read fastest.
    fn shapes(&self) -> Vec<(&str, Vec<i64>)>;

    /// How much of tensors has been read so far.
    fn num_bytes_read(&self) -> u64;

    /// The elements of a layout, flat, on the CPU.
    fn read_elements(&mut self, name: &str, layout: &Layout) -> Result<Tensor>;
}

impl WeightReader for WeightFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn shape(&self, name: &str) -> Option<Vec<i64>> {
        Some(sizes(self.header.get(name)?))
    }

    fn shapes(&self) -> Vec<(&str, Vec<i64>)> {
        self.header.entries().iter().map(|entry| (entry.name.as_str(), sizes(entry))).collect()
    }

    fn num_bytes_read(&self) -> u64 {
        self.num_bytes_read
    }

    fn read_elements(&mut self, name: &str, layout: &Layout) -> Result<Tensor> {
        self.elements(name, layout)
    }
}

/// Where the bytes of an open file come from.
#[derive(Debug)]
enum Content {
    /// Of which tensors are read once, so that pages of it need not stay.
    File(File),
    Mapped(MappedFile),
}

impl Content {
    fn read_at(&self, place: &Tensor, offset: u64) -> io::Result<()> {
        match self {
            Self::File(file) => read_at(file, place, offset),
            Self::Mapped(file) => file.read_tensor_at(place, offset),
        }
    }
}

/// An open file whose header fits its length.
#[derive(Debug)]
pub(super) struct WeightFile {
    path: PathBuf,
    content: Content,
    header: Header,
    /// How much has been read, without the header.
    num_bytes_read: u64,
}

impl WeightFile {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let (file, found_bytes) = open_file(path)?;
        let header = read_header(&file, found_bytes, path)?;
        Ok(Self { path: path.to_owned(), content: Content::File(file), header, num_bytes_read: 0 })
    }

    /// The file at `path`, which is open already.
    pub(super) fn of_mapped(mapped: MappedFile, path: &Path) -> Result<Self> {
        let header = read_header(mapped.file(), mapped.num_bytes(), path)?;
        Ok(Self { path: path.to_owned(), content: Content::Mapped(mapped), header, num_bytes_read: 0 })
    }

    fn entry(&self, name: &str) -> Result<&HeaderEntry, WeightsError> {
        self.header.get(name).ok_or_else(|| WeightsError::Header {
            path: self.path.clone(),
            reason: format!("there is no tensor `{}` in it", shown(name)),
        })
    }

    /// What the header says of a tensor, if it is in the file.
    pub(super) fn get(&self, name: &str) -> Option<&HeaderEntry> {
        self.header.get(name)
    }

    /// Fills `place` with as many elements of a tensor, flat, from the element `first` on. Both have been compared with
    /// the header.
    pub(super) fn read_into(&mut self, name: &str, first: usize, place: &Tensor) -> Result<()> {
        let start = self.entry(name)?.start;
        let element_bytes = place.f_kind()?.elt_size_in_bytes();
        let at = self.header.data_at() + start + (first * element_bytes) as u64;
        self.content.read_at(place, at).map_err(io_error("read", &self.path))?;
        self.num_bytes_read += (place.numel() * element_bytes) as u64;
        Ok(())
    }

    /// An empty tensor of so many elements, on the CPU.
    pub(super) fn new_tensor(&self, name: &str, num_elements: usize, kind: Kind) -> Result<Tensor> {
        // There is no room for a large tensor twice.
        Ok(Tensor::f_empty([num_elements as i64], (kind, Device::Cpu)).map_err(|_| {
            let num_bytes = num_elements as u64 * kind.elt_size_in_bytes() as u64;
            WeightsError::NoMemory { path: self.path.clone(), name: shown(name), num_bytes }
        })?)
    }

    /// The elements of a layout, flat, on the CPU. Nothing else is read.
    fn elements(&mut self, name: &str, layout: &Layout) -> Result<Tensor> {
        let &HeaderEntry { dtype, start, end, .. } = self.entry(name)?;
        let Some(kind) = to_kind(dtype) else {
            let (path, name) = (self.path.clone(), shown(name));
            return Err(WeightsError::UnknownDtype { path, name, dtype: dtype.to_string() }.into());
        };
        // The header has been checked: shape, element type and offsets agree, and end with the file.
        let element_bytes = kind.elt_size_in_bytes();
        let num_elements = (end - start) / element_bytes as u64;
        if layout.full_numel() as u64 != num_elements {
            let reason = format!("`{}` has {num_elements} elements, and {layout} was asked for", shown(name));
            return Err(WeightsError::Header { path: self.path.clone(), reason }.into());
        }
        let tensor = self.new_tensor(name, layout.numel(), kind)?;
        let mut filled = 0;
        for run in layout.runs() {
            let place = tensor.f_narrow(0, filled, run.len() as i64)?;
            self.read_into(name, run.start, &place)?;
            filled += run.len() as i64;
        }
        Ok(tensor)
    }
}

/// Of a file from which nothing has been read by its own position.
fn read_header(mut file: &File, num_bytes: u64, path: &Path) -> Result<Header> {
    let damaged =
        |source: accelerate_core::Error| WeightsError::Header { path: path.to_owned(), reason: source.to_string() };
    Ok(Header::read(&mut file, num_bytes).map_err(damaged)?)
}

/// The header has been checked: each size is one that an `i64` holds.
fn sizes(entry: &HeaderEntry) -> Vec<i64> {
    entry.shape.iter().map(|&size| size as i64).collect()
}

/// Opens a file that somebody names, and says how long it is. Devices and pipes have no end, and are refused.
pub(super) fn open_file(path: &Path) -> Result<(File, u64)> {
    // Asked before opening: to open a pipe is to wait for its writer.
    let kind = std::fs::metadata(path).map_err(io_error("open", path))?.file_type();
    if let Some(found) = other_than_file(kind) {
        return Err(WeightsError::NotAFile { path: path.to_owned(), found }.into());
    }
    let file = File::open(path).map_err(io_error("open", path))?;
    let found_bytes = file.metadata().map_err(io_error("read", path))?.len();
    Ok((file, found_bytes))
}
