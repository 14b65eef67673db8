//! The parameters of a model on disk, from the headers of its files.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use accelerate_core::files::other_than_file;
use accelerate_core::plan::{Inventory, ParameterEntry};
use accelerate_core::weight_files::{Header, HeaderEntry, Index, choose_weight_file, shown};
use safetensors::Dtype;

use super::error::EstimateError;

/// What PyTorch's own format is called.
const PICKLE_EXTENSIONS: [&str; 4] = ["bin", "pt", "pth", "ckpt"];

/// The parameters of a file, of the files of an index, or of what a folder has of either, in the order of their names:
/// files do not know in which order a model registers them.
pub(super) fn read_inventory(model: &Path) -> Result<Inventory, EstimateError> {
    let path = if model.is_dir() { choose_in_folder(model)? } else { model.to_owned() };
    if !path.exists() {
        return Err(EstimateError::NoSuchModel { path });
    }
    let extension = path.extension().unwrap_or_default();
    if PICKLE_EXTENSIONS.iter().any(|pickle| extension == *pickle) {
        return Err(EstimateError::Pickle { path });
    }
    let mut parameters = if extension == "json" {
        parameters_of_index(&path)?
    } else {
        read_header(&path)?.entries().iter().map(|found| entry(&path, found)).collect::<Result<_, _>>()?
    };
    parameters.sort_by_cached_key(|parameter| name_order(&parameter.name));
    Ok(Inventory { parameters })
}

fn choose_in_folder(folder: &Path) -> Result<PathBuf, EstimateError> {
    let unreadable = |source| EstimateError::Unreadable { path: folder.to_owned(), source };
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        names.push(entry.map_err(unreadable)?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    let borrowed: Vec<&str> = names.iter().map(String::as_str).collect();
    if let Some(name) = choose_weight_file(&borrowed) {
        return Ok(folder.join(name));
    }
    let is_pickle =
        |name: &str| PICKLE_EXTENSIONS.iter().any(|it| Path::new(name).extension().is_some_and(|e| e == *it));
    match borrowed.iter().find(|name| is_pickle(name)) {
        Some(pickle) if !borrowed.iter().any(|name| name.ends_with(".safetensors")) => {
            Err(EstimateError::Pickle { path: folder.join(pickle) })
        }
        _ => Err(EstimateError::NoWeights { folder: folder.to_owned(), names }),
    }
}

fn parameters_of_index(path: &Path) -> Result<Vec<ParameterEntry>, EstimateError> {
    let index = read_index(path)?;
    let mut names_in: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, file) in &index.weight_map {
        names_in.entry(file).or_default().push(name);
    }
    let mut parameters = Vec::with_capacity(index.weight_map.len());
    for (file, names) in names_in {
        let file_path = path.with_file_name(file);
        if !file_path.exists() {
            let (index, file, num_tensors) = (path.to_owned(), shown(file), names.len());
            return Err(EstimateError::MissingFile { index, file, num_tensors });
        }
        let header = read_header(&file_path)?;
        for name in names {
            let absent = || {
                let (index, name, file) = (path.to_owned(), shown(name), file.to_owned());
                EstimateError::WrongIndex { index, name, file }
            };
            parameters.push(entry(&file_path, header.get(name).ok_or_else(absent)?)?);
        }
    }
    Ok(parameters)
}

fn read_index(path: &Path) -> Result<Index, EstimateError> {
    let (file, found_bytes) = open_file(path)?;
    if found_bytes > Index::MAX_BYTES {
        let (path, most_bytes) = (path.to_owned(), Index::MAX_BYTES);
        return Err(EstimateError::LargeIndex { path, found_bytes, most_bytes });
    }
    let mut text = String::new();
    // The file may have grown since.
    file.take(Index::MAX_BYTES)
        .read_to_string(&mut text)
        .map_err(|source| EstimateError::Unreadable { path: path.to_owned(), source })?;
    Index::from_json(&text).map_err(|source| EstimateError::Index { path: path.to_owned(), source })
}

fn read_header(path: &Path) -> Result<Header, EstimateError> {
    let (mut file, found_bytes) = open_file(path)?;
    Header::read(&mut file, found_bytes)
        .map_err(|error| EstimateError::Header { path: path.to_owned(), reason: error.to_string() })
}

/// The file and its length. Devices and pipes have no end, and are refused.
fn open_file(path: &Path) -> Result<(File, u64), EstimateError> {
    let unreadable = |source| EstimateError::Unreadable { path: path.to_owned(), source };
    // Asked before opening: to open a pipe is to wait for its writer.
    let kind = fs::metadata(path).map_err(unreadable)?.file_type();
    if let Some(found) = other_than_file(kind) {
        return Err(EstimateError::NotAFile { path: path.to_owned(), found });
    }
    let file = File::open(path).map_err(unreadable)?;
    let found_bytes = file.metadata().map_err(unreadable)?.len();
    Ok((file, found_bytes))
}

fn entry(path: &Path, found: &HeaderEntry) -> Result<ParameterEntry, EstimateError> {
    let HeaderEntry { name, dtype, shape, .. } = found;
    let Some(torch_dtype) = torch_name(*dtype) else {
        let (path, name, dtype) = (path.to_owned(), shown(name), dtype.to_string());
        return Err(EstimateError::ElementType { path, name, dtype });
    };
    let mut entry = ParameterEntry::new(name, shape, torch_dtype, dtype.bitsize() / 8);
    // Files do not tell buffers from parameters: integers never get gradients, nor do what norms of batches count.
    let is_running = ["running_mean", "running_var"].iter().any(|buffer| name.ends_with(buffer));
    entry.requires_grad = (entry.is_floating_point() || torch_dtype.starts_with("complex")) && !is_running;
    Ok(entry)
}

/// As PyTorch writes it; `None` for types it does not have, among them all with less than a byte.
fn torch_name(dtype: Dtype) -> Option<&'static str> {
    Some(match dtype {
        Dtype::BOOL => "bool",
        Dtype::U8 => "uint8",
        Dtype::I8 => "int8",
        Dtype::F8_E5M2 => "float8_e5m2",
        Dtype::F8_E4M3 => "float8_e4m3fn",
        Dtype::F8_E8M0 => "float8_e8m0fnu",
        Dtype::F8_E4M3FNUZ => "float8_e4m3fnuz",
        Dtype::F8_E5M2FNUZ => "float8_e5m2fnuz",
        Dtype::I16 => "int16",
        Dtype::U16 => "uint16",
        Dtype::F16 => "float16",
        Dtype::BF16 => "bfloat16",
        Dtype::I32 => "int32",
        Dtype::U32 => "uint32",
        Dtype::F32 => "float32",
        Dtype::C64 => "complex64",
        Dtype::F64 => "float64",
        Dtype::I64 => "int64",
        Dtype::U64 => "uint64",
        _ => return None,
    })
}

/// Numbered modules by their numbers: block 2 before block 10.
fn name_order(name: &str) -> Vec<(Option<u64>, String)> {
    name.split('.').map(|part| (part.parse().ok(), part.to_owned())).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;
