//! Which files a checkpoint consists of, and which of them holds which tensor.

use super::atomic::{folder_of, io_error, names_in};
use super::folder::{MOST_TRIES, check_saved_with, finish_interrupted_saves, saves_in};
use super::reader::{WeightFile, WeightReader, open_file};
use super::torch_files::{TorchWeights, is_torch_file};
use crate::error::{Result, WeightsError};
use crate::nn::{Param, StateDict};
use accelerate_core::layout::Layout;
use accelerate_core::weight_files::{DistributedCheckpoint, Index, choose_torch_file, choose_weight_file, shown};
use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use tch::Tensor;

/// Reads all tensors of one file to the CPU: `safetensors.torch.load_file`. A file that is called `.bin`, `.pt`, `.pth` or `.ckpt` is
/// read as one of `torch.save`; nothing in it is executed.
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
    let mut file = open_weights(path.as_ref())?;
    let shapes: Vec<(String, Vec<i64>)> =
        file.shapes().into_iter().map(|(name, shape)| (name.to_owned(), shape)).collect();
    let read = |(name, shape): (String, Vec<i64>)| {
        let full = Layout::full(shape.iter().map(|&size| size as usize).collect::<Vec<_>>());
        let tensor = file.read_elements(&name, &full)?.f_reshape(shape)?;
        Ok((name, tensor))
    };
    shapes.into_iter().map(read).collect()
}

/// All tensors of a checkpoint, not yet read.
#[derive(Debug)]
pub(super) struct Source {
    /// The single file, the index, or the metadata of a folder.
    pub(super) path: PathBuf,
    pub(super) files: Vec<Box<dyn WeightReader>>,
    /// Name, shape and position in `files`, in reading order.
    pub(super) tensors: Vec<(String, Vec<i64>, usize)>,
}

impl Source {
    /// Opens a single file, an index and its shards, or what a folder holds: files of one save, also while others save.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let folder = if path.is_dir() { path } else { folder_of(path) };
        if !folder.is_dir() {
            return Self::open_saved(path);
        }
        let mut num_tries = 0;
        loop {
            let before = saves_in(folder)?;
            let opened = finish_interrupted_saves(folder).and_then(|()| Self::open_saved(path));
            num_tries += 1;
            // What is open stays as it is, whatever is put in its place.
            if saves_in(folder)? == before || num_tries == MOST_TRIES {
                return opened;
            }
        }
    }

    fn open_saved(path: &Path) -> Result<Self> {
        let path = if path.is_dir() { choose_in_folder(path)? } else { path.to_owned() };
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_file() {
            check_saved_with(folder_of(&path), &name)?;
        }
        if name.ends_with(".json") {
            return Self::open_index(&path);
        }
        let file = open_weights(&path)?;
        Self::with_files(path, vec![file], &HashMap::new())
    }

    /// The elements that this process keeps of a parameter, out of the tensor at `position`: flat, on the CPU.
    pub(super) fn read(&mut self, position: usize, param: &Param) -> Result<Tensor> {
        let (name, _, file) = &self.tensors[position];
        self.files[*file].read_elements(name, &param.layout())
    }

    /// Bytes of tensors read so far.
    pub(super) fn num_bytes_read(&self) -> u64 {
        self.files.iter().map(|file| file.num_bytes_read()).sum()
    }

    fn open_index(path: &Path) -> Result<Self> {
        let index = read_index(path)?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let mut files = Vec::new();
        let mut positions = HashMap::new();
        for file in index.files() {
            if !folder.join(file).exists() {
                let num_tensors = index.weight_map.values().filter(|it| *it == file).count();
                let (index, file) = (path.to_owned(), shown(file));
                return Err(WeightsError::MissingShard { index, file, num_tensors }.into());
            }
            positions.insert(file, files.len());
            files.push(open_weights(&folder.join(file))?);
        }
        let wanted: HashMap<&str, usize> =
            index.weight_map.iter().map(|(name, file)| (name.as_str(), positions[file.as_str()])).collect();
        let absent: Vec<String> = index
            .weight_map
            .iter()
            .filter(|(name, file)| files[positions[file.as_str()]].shape(name).is_none())
            .map(|(name, file)| format!("{} (not in {file})", shown(name)))
            .collect();
        if !absent.is_empty() {
            return Err(WeightsError::WrongIndex { index: path.to_owned(), absent }.into());
        }
        Self::with_files(path.to_owned(), files, &wanted)
    }

    /// Lists the tensors. Where the index names a file for one, a tensor of the same name in another file
    /// does not count.
    fn with_files(path: PathBuf, files: Vec<Box<dyn WeightReader>>, wanted: &HashMap<&str, usize>) -> Result<Self> {
        let mut tensors = Vec::new();
        let mut seen: HashMap<&str, usize> = HashMap::new();
        for (position, file) in files.iter().enumerate() {
            for (name, shape) in file.shapes() {
                if wanted.get(name).is_some_and(|it| *it != position) {
                    continue;
                }
                if let Some(first) = seen.insert(name, position) {
                    let paths = [files[first].path().to_owned(), file.path().to_owned()];
                    return Err(WeightsError::InTwoFiles { name: shown(name), paths }.into());
                }
                tensors.push((name.to_owned(), shape, position));
            }
        }
        Ok(Self { path, files, tensors })
    }
}

/// What a single file holds, or a folder by its metadata, in whichever format.
fn open_weights(path: &Path) -> Result<Box<dyn WeightReader>> {
    let name = path.file_name().unwrap_or_default();
    if name == DistributedCheckpoint::FILE_NAME {
        return Ok(Box::new(TorchWeights::open_distributed(folder_of(path))?));
    }
    Ok(if is_torch_file(path) { Box::new(TorchWeights::open(path)?) } else { Box::new(WeightFile::open(path)?) })
}

fn read_index(path: &Path) -> Result<Index> {
    let (file, found_bytes) = open_file(path)?;
    if found_bytes > Index::MAX_BYTES {
        let (path, most_bytes) = (path.to_owned(), Index::MAX_BYTES);
        return Err(WeightsError::LongIndex { path, found_bytes, most_bytes }.into());
    }
    let mut text = String::new();
    // The file may have grown since.
    file.take(Index::MAX_BYTES).read_to_string(&mut text).map_err(io_error("read", path))?;
    Ok(Index::from_json(&text).map_err(|source| WeightsError::Index { path: path.to_owned(), source })?)
}

fn choose_in_folder(folder: &Path) -> Result<PathBuf> {
    let names = names_in(folder)?;
    let known: Vec<&str> = names.iter().map(String::as_str).collect();
    if let Some(name) = choose_weight_file(&known) {
        return Ok(folder.join(name));
    }
    let distributed = known.iter().find(|name| **name == DistributedCheckpoint::FILE_NAME).copied();
    if let Some(name) = distributed.or_else(|| choose_torch_file(&known)) {
        return Ok(folder.join(name));
    }
    Err(WeightsError::NoWeights { folder: folder.to_owned(), names }.into())
}
