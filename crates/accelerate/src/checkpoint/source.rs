//! Which files a checkpoint consists of, and which of them holds which tensor.

use super::atomic::{folder_of, io_error, names_in};
use super::folder::{MOST_TRIES, check_saved_with, finish_interrupted_saves, saves_in};
use super::reader::{WeightFile, open_file};
use crate::error::{Result, WeightsError};
use accelerate_core::weight_files::{EXTENSION, Index, choose_weight_file, shown};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::Read;
use std::path::{Path, PathBuf};

/// What PyTorch's own format is called.
const PICKLE_EXTENSIONS: [&str; 4] = ["bin", "pt", "pth", "ckpt"];

/// All tensors of a checkpoint, not yet read.
#[derive(Debug)]
pub(super) struct Source {
    /// The single file or the index.
    pub(super) path: PathBuf,
    pub(super) files: Vec<WeightFile>,
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
        if path.extension().is_some_and(|it| PICKLE_EXTENSIONS.iter().any(|pickle| it == *pickle)) {
            return Err(WeightsError::Pickle { path }.into());
        }
        let files = vec![WeightFile::open(&path)?];
        Self::with_files(path, files, &HashMap::new())
    }

    /// Bytes of tensors read so far.
    pub(super) fn num_bytes_read(&self) -> u64 {
        self.files.iter().map(WeightFile::num_bytes_read).sum()
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
            files.push(WeightFile::open(&folder.join(file))?);
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
    fn with_files(path: PathBuf, files: Vec<WeightFile>, wanted: &HashMap<&str, usize>) -> Result<Self> {
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
    let extension = |name: &&str| Path::new(name).extension().map(OsStr::to_owned);
    let has_weights = known.iter().filter_map(extension).any(|it| it == EXTENSION);
    let is_pickle =
        |name: &&&str| extension(name).is_some_and(|it| PICKLE_EXTENSIONS.iter().any(|pickle| it == *pickle));
    match known.iter().filter(|name| !name.starts_with('.')).find(is_pickle) {
        Some(pickle) if !has_weights => Err(WeightsError::Pickle { path: folder.join(pickle) }.into()),
        _ => Err(WeightsError::NoWeights { folder: folder.to_owned(), names }.into()),
    }
}
