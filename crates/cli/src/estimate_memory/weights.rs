//! The parameters of a model on disk, from the headers of its files.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use accelerate_core::plan::{Inventory, ParameterEntry};
use accelerate_core::weight_files::{Index, choose_weight_file};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::error::EstimateError;

const LENGTH_BYTES: u64 = 8;
/// The format's law for headers. An index says less than headers do.
const MOST_BYTES: u64 = 100_000_000;
/// What PyTorch's own format is called.
const PICKLE_EXTENSIONS: [&str; 4] = ["bin", "pt", "pth", "ckpt"];

/// The parameters of a file, of the files of an index, or of what a folder has of either, in the order of their names:
/// files do not know in which order a model registers them.
pub(super) fn read_inventory(model: &Path) -> Result<Inventory, EstimateError> {
    let path = if model.is_dir() { choose_in_folder(model)? } else { model.to_owned() };
    // A pipe would never end.
    if !path.is_file() {
        return Err(EstimateError::NoSuchModel { path });
    }
    let extension = path.extension().unwrap_or_default();
    if PICKLE_EXTENSIONS.iter().any(|pickle| extension == *pickle) {
        return Err(EstimateError::Pickle { path });
    }
    let mut parameters = if extension == "json" {
        parameters_of_index(&path)?
    } else {
        let metadata = read_metadata(&path)?;
        let entry = |(name, info): (String, &TensorInfo)| entry(&path, &name, info);
        metadata.tensors().into_iter().map(entry).collect::<Result<_, _>>()?
    };
    parameters.sort_by(|one, other| name_order(&one.name).cmp(name_order(&other.name)));
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
    let unreadable = |source| EstimateError::Unreadable { path: path.to_owned(), source };
    let mut text = String::new();
    File::open(path).map_err(unreadable)?.take(MOST_BYTES + 1).read_to_string(&mut text).map_err(unreadable)?;
    if text.len() as u64 > MOST_BYTES {
        return Err(EstimateError::LargeIndex { path: path.to_owned(), most_bytes: MOST_BYTES });
    }
    let index = Index::from_json(&text).map_err(|source| EstimateError::Index { path: path.to_owned(), source })?;
    let mut names_in: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, file) in &index.weight_map {
        names_in.entry(file).or_default().push(name);
    }
    let mut parameters = Vec::with_capacity(index.weight_map.len());
    for (file, names) in names_in {
        let file_path = path.with_file_name(file);
        if !file_path.is_file() {
            let (index, file, num_tensors) = (path.to_owned(), file.to_owned(), names.len());
            return Err(EstimateError::MissingFile { index, file, num_tensors });
        }
        let metadata = read_metadata(&file_path)?;
        for name in names {
            let absent = || {
                let (index, name, file) = (path.to_owned(), name.to_owned(), file.to_owned());
                EstimateError::WrongIndex { index, name, file }
            };
            parameters.push(entry(&file_path, name, metadata.info(name).ok_or_else(absent)?)?);
        }
    }
    Ok(parameters)
}

/// The header of a file, which fits the file's length. Whatever the file claims, no more is read or allocated than the file
/// has.
fn read_metadata(path: &Path) -> Result<Metadata, EstimateError> {
    let unreadable = |source| EstimateError::Unreadable { path: path.to_owned(), source };
    let damaged = |reason| EstimateError::Header { path: path.to_owned(), reason };
    let mut file = File::open(path).map_err(unreadable)?;
    let found_bytes = file.metadata().map_err(unreadable)?.len();
    if found_bytes < LENGTH_BYTES {
        return Err(damaged(format!("it has only {found_bytes} bytes")));
    }
    let mut length = [0; LENGTH_BYTES as usize];
    file.read_exact(&mut length).map_err(unreadable)?;
    let length = u64::from_le_bytes(length);
    if length > MOST_BYTES {
        return Err(damaged(format!("its header claims {length} bytes, more than the {MOST_BYTES} allowed")));
    }
    if length > found_bytes - LENGTH_BYTES {
        return Err(damaged(format!("its header claims {length} bytes, but the file has only {found_bytes} in all")));
    }
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header).map_err(unreadable)?;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| damaged(error.to_string()))?;
    let wanted_bytes = (LENGTH_BYTES + length).saturating_add(metadata.data_len() as u64);
    if found_bytes != wanted_bytes {
        return Err(EstimateError::Length { path: path.to_owned(), found_bytes, wanted_bytes });
    }
    Ok(metadata)
}

fn entry(path: &Path, name: &str, info: &TensorInfo) -> Result<ParameterEntry, EstimateError> {
    let Some(dtype) = torch_name(info.dtype) else {
        let (path, name, dtype) = (path.to_owned(), name.to_owned(), info.dtype.to_string());
        return Err(EstimateError::ElementType { path, name, dtype });
    };
    let mut entry = ParameterEntry::new(name, &info.shape, dtype, info.dtype.bitsize() / 8);
    // Files do not tell buffers from parameters: integers never get gradients, nor do what norms of batches count.
    let is_running = ["running_mean", "running_var"].iter().any(|buffer| name.ends_with(buffer));
    entry.requires_grad = (entry.is_floating_point() || dtype.starts_with("complex")) && !is_running;
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
fn name_order(name: &str) -> impl Iterator<Item = (Option<u64>, &str)> {
    name.split('.').map(|part| (part.parse().ok(), part))
}
