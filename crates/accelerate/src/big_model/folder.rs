//! A folder of offloaded weights: one file for each tensor, and an index.
//!
//! The format is the reference's (`utils/offload.py`), so either reads what the other has written. A file appears under its name
//! when it is whole, and files that are replaced stay as they are for who has them in use.

use super::dtype::{kind_in_file, kind_of, name_of};
use crate::error::{BigModelError, Result};
use accelerate_core::files::other_than_file;
use accelerate_core::weight_files::{Header, OffloadIndex, OffloadedWeight, shown};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use tch::{Device, Kind, Tensor};
use torch_ext::file::{read_at, write_at};

/// A folder that weights are written to, or read from.
#[derive(Debug)]
pub(super) struct OffloadFolder {
    path: PathBuf,
    index: OffloadIndex,
}

/// A tensor in a file of its own.
#[derive(Debug)]
pub(super) struct DatFile {
    pub(super) path: PathBuf,
    pub(super) kind: Kind,
    pub(super) shape: Vec<i64>,
    stamp: Stamp,
}

/// What is known of a file that nobody may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    inode: (u64, u64),
    num_bytes: u64,
    modified: (i64, i64),
}

/// An offloaded tensor, found.
#[derive(Debug)]
pub(super) enum Found {
    /// To be read where it lies.
    Dat(DatFile),
    /// Read out of a safetensors file, where nothing is aligned.
    Read(Tensor),
}

impl OffloadFolder {
    /// An existing folder with its index.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let index_path = path.join(OffloadIndex::FILE_NAME);
        let (file, found_bytes) = open_file(&index_path)?;
        if found_bytes > OffloadIndex::MAX_BYTES {
            let most_bytes = OffloadIndex::MAX_BYTES;
            return Err(BigModelError::LongIndex { path: index_path, found_bytes, most_bytes }.into());
        }
        let mut text = String::new();
        file.take(OffloadIndex::MAX_BYTES).read_to_string(&mut text).map_err(io_error("read", &index_path))?;
        let index =
            OffloadIndex::from_json(&text).map_err(|source| BigModelError::Index { path: index_path, source })?;
        Ok(Self { path: path.to_owned(), index })
    }

    /// A folder to write to, made if it is not there. What its index has already stays there.
    pub(super) fn create(path: &Path) -> Result<Self> {
        // Weights are looked for there as long as the model lives, also after the program has changed its working folder.
        let path = std::path::absolute(path).map_err(io_error("find", path))?;
        fs::create_dir_all(&path).map_err(io_error("make the folder", &path))?;
        match path.join(OffloadIndex::FILE_NAME).exists() {
            true => Self::open(&path),
            false => Ok(Self { path, index: OffloadIndex::default() }),
        }
    }

    /// Writes a tensor. It counts once [`finish`](Self::finish) has written the index.
    pub(super) fn write(&mut self, name: &str, tensor: &Tensor) -> Result<DatFile> {
        let kind = tensor.f_kind()?;
        let dtype = name_of(kind).ok_or_else(|| BigModelError::KindNotWritable { name: name.to_owned(), kind })?;
        let path = self.path.join(OffloadIndex::dat_file_name(name)?);
        let tensor = tensor.f_detach()?.f_to(Device::Cpu)?.f_contiguous()?;
        replace(&path, |file| write_at(file, &tensor, 0))?;
        let shape: Vec<usize> = tensor.size().iter().map(|&size| size.max(0) as usize).collect();
        self.index.weights.insert(name.to_owned(), OffloadedWeight::Dat { dtype: dtype.to_owned(), shape });
        DatFile::open(path, kind, tensor.size())
    }

    /// Writes the index.
    pub(super) fn finish(&self) -> Result<()> {
        let path = self.path.join(OffloadIndex::FILE_NAME);
        let text = self.index.to_json().map_err(|source| BigModelError::Index { path: path.clone(), source })?;
        replace(&path, |file| file.write_all(text.as_bytes()))
    }

    /// A tensor that the index names.
    pub(super) fn find(&self, name: &str, wanted: &[i64]) -> Result<Found> {
        let folder = || self.path.clone();
        let entry = self.index.weights.get(name);
        let entry = entry.ok_or_else(|| BigModelError::NotInIndex { folder: folder(), name: name.to_owned() })?;
        let kind_named = |dtype: &str| {
            let unknown =
                || BigModelError::UnknownDtype { folder: folder(), name: name.to_owned(), dtype: shown(dtype) };
            kind_of(dtype).ok_or_else(unknown)
        };
        let check_shape = |found: Vec<i64>| match found == wanted {
            true => Ok(found),
            false => {
                Err(BigModelError::Shape { folder: folder(), name: name.to_owned(), found, wanted: wanted.to_vec() })
            }
        };
        match entry {
            OffloadedWeight::Dat { dtype, shape } => {
                let kind = kind_named(dtype)?;
                let shape = check_shape(shape.iter().map(|&size| i64::try_from(size).unwrap_or(i64::MAX)).collect())?;
                Ok(Found::Dat(DatFile::open(self.path.join(OffloadIndex::dat_file_name(name)?), kind, shape)?))
            }
            OffloadedWeight::Safetensors { safetensors_file, weight_name, dtype } => {
                let tensor =
                    read_safetensors(&self.path.join(safetensors_file), weight_name.as_deref().unwrap_or(name))?;
                check_shape(tensor.size())?;
                Ok(Found::Read(match dtype {
                    Some(dtype) => tensor.f_to_kind(kind_named(dtype.trim_start_matches("torch."))?)?,
                    None => tensor,
                }))
            }
        }
    }
}

impl DatFile {
    fn open(path: PathBuf, kind: Kind, shape: Vec<i64>) -> Result<Self> {
        let stamp = Stamp::of(&path)?;
        let num_elements = shape.iter().try_fold(1u64, |product, &size| product.checked_mul(u64::try_from(size).ok()?));
        let wanted = num_elements.and_then(|number| number.checked_mul(kind.elt_size_in_bytes() as u64));
        let wanted_bytes = wanted.unwrap_or(u64::MAX);
        if stamp.num_bytes != wanted_bytes {
            return Err(BigModelError::Length { path, found_bytes: stamp.num_bytes, wanted_bytes }.into());
        }
        Ok(Self { path, kind, shape, stamp })
    }

    pub(super) fn num_bytes(&self) -> u64 {
        self.stamp.num_bytes
    }

    /// libtorch maps only files whose path is UTF-8.
    pub(super) fn can_be_mapped(&self) -> bool {
        self.path.to_str().is_some()
    }

    /// The file as a tensor: a private mapping, of which nothing takes memory before it is used, and what is used can be let go.
    ///
    /// A path that is not UTF-8 cannot be mapped and is read.
    pub(super) fn map(&self) -> Result<Tensor> {
        self.check()?;
        let num_elements: i64 = self.shape.iter().product();
        let options = (self.kind, Device::Cpu);
        let flat = match self.path.to_str() {
            _ if num_elements == 0 => Tensor::f_empty([0], options)?,
            Some(path) => Tensor::f_from_file(path, false, num_elements, options)
                .map_err(|source| BigModelError::Map { path: self.path.clone(), source })?,
            None => {
                let tensor = Tensor::f_empty([num_elements], options)?;
                let (file, _) = open_file(&self.path)?;
                read_at(&file, &tensor, 0).map_err(io_error("read", &self.path))?;
                tensor
            }
        };
        self.check()?;
        Ok(flat.f_view(&self.shape[..])?)
    }

    /// Is it still the file that was opened? Who uses the mapping of a file that has become shorter is killed.
    pub(super) fn check(&self) -> Result<()> {
        match Stamp::of(&self.path)? == self.stamp {
            true => Ok(()),
            false => Err(BigModelError::Changed { path: self.path.clone() }.into()),
        }
    }
}

impl Stamp {
    fn of(path: &Path) -> Result<Self> {
        let metadata = fs::metadata(path).map_err(io_error("open", path))?;
        if let Some(found) = other_than_file(metadata.file_type()) {
            return Err(BigModelError::NotAFile { path: path.to_owned(), found }.into());
        }
        let modified = (metadata.mtime(), metadata.mtime_nsec());
        Ok(Self { inode: (metadata.dev(), metadata.ino()), num_bytes: metadata.len(), modified })
    }
}

fn read_safetensors(path: &Path, name: &str) -> Result<Tensor> {
    let wrong = |reason: String| BigModelError::Safetensors { path: path.to_owned(), name: shown(name), reason };
    let (mut file, found_bytes) = open_file(path)?;
    let header = Header::read(&mut file, found_bytes).map_err(|error| wrong(error.to_string()))?;
    let entry = header.get(name).ok_or_else(|| wrong("it is not in the file".to_owned()))?;
    let kind = kind_in_file(entry.dtype).ok_or_else(|| wrong(format!("its elements are {}", entry.dtype)))?;
    let shape: Vec<i64> = entry.shape.iter().map(|&size| size as i64).collect();
    let tensor = Tensor::f_empty(&shape[..], (kind, Device::Cpu))?;
    read_at(&file, &tensor, header.data_at() + entry.start).map_err(io_error("read", path))?;
    Ok(tensor)
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> BigModelError {
    let path = path.to_owned();
    move |source| BigModelError::Io { action, path, source }
}

/// Opens a file that somebody names. Devices and pipes have no end, and are refused.
fn open_file(path: &Path) -> Result<(File, u64)> {
    let num_bytes = Stamp::of(path)?.num_bytes;
    Ok((File::open(path).map_err(io_error("open", path))?, num_bytes))
}

/// Writes a file under a temporary name and gives it its own, or leaves nothing.
fn replace(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new(""));
    let mut file = tempfile::NamedTempFile::new_in(folder).map_err(io_error("make a file beside", path))?;
    write(file.as_file_mut()).map_err(io_error("write", path))?;
    file.persist(path).map_err(|error| io_error("write", path)(error.error))?;
    Ok(())
}
