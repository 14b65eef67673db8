//! The parameters of a model, from the headers of its files.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use accelerate_core::plan::{Inventory, ParameterEntry};
use accelerate_core::weight_files::{HeaderEntry, Index, choose_weight_file, shown};
use safetensors::Dtype;

use super::error::EstimateError;
use super::local::LocalFiles;
use super::source::ModelFiles;

/// What PyTorch's own format is called.
const PICKLE_EXTENSIONS: [&str; 4] = ["bin", "pt", "pth", "ckpt"];

/// Files and the name of the one to begin with.
pub(super) type Chosen = (Box<dyn ModelFiles>, String);

/// A file, or what a folder has of a file or an index.
pub(super) fn local(model: &Path) -> Result<Chosen, EstimateError> {
    if model.is_dir() {
        let files = LocalFiles::new(model);
        let first = choose(&files, &files.names()?)?;
        return Ok((Box::new(files), first));
    }
    let absent = || EstimateError::NoSuchModel { path: model.to_owned() };
    let name = model.file_name().ok_or_else(absent)?.to_string_lossy().into_owned();
    Ok((Box::new(LocalFiles::new(model.parent().unwrap_or(Path::new("")))), name))
}

/// Of the files of a model, the one that holds its weights, or the index of several.
pub(super) fn choose(files: &dyn ModelFiles, names: &[String]) -> Result<String, EstimateError> {
    let borrowed: Vec<&str> = names.iter().map(String::as_str).collect();
    if let Some(name) = choose_weight_file(&borrowed) {
        return Ok(name.to_owned());
    }
    match borrowed.iter().find(|name| is_pickle(name)) {
        Some(pickle) if !borrowed.iter().any(|name| name.ends_with(".safetensors")) => {
            Err(EstimateError::Pickle { place: files.place(pickle) })
        }
        _ => Err(EstimateError::NoWeights { place: files.place(""), names: names.to_owned() }),
    }
}

fn is_pickle(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|found| PICKLE_EXTENSIONS.iter().any(|pickle| found == *pickle))
}

/// The parameters of a file, or of the files of an index, in the order of their names: files do not know in which order a
/// model registers them.
pub(super) fn inventory(files: &dyn ModelFiles, first: &str) -> Result<Inventory, EstimateError> {
    if is_pickle(first) {
        return Err(EstimateError::Pickle { place: files.place(first) });
    }
    let mut parameters = if Path::new(first).extension().is_some_and(|extension| extension == "json") {
        parameters_of_index(files, first)?
    } else {
        let header = files.header(first)?;
        header.entries().iter().map(|found| entry(files, first, found)).collect::<Result<_, _>>()?
    };
    parameters.sort_by_cached_key(|parameter| name_order(&parameter.name));
    Ok(Inventory { parameters })
}

fn parameters_of_index(files: &dyn ModelFiles, index: &str) -> Result<Vec<ParameterEntry>, EstimateError> {
    let place = || files.place(index);
    let text = files.text(index, Index::MAX_BYTES)?;
    let Index { weight_map, .. } =
        Index::from_json(&text).map_err(|source| EstimateError::Index { place: place(), source })?;
    let mut names_in: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, file) in &weight_map {
        names_in.entry(file).or_default().push(name);
    }
    let absent = names_in.iter().find(|(file, _)| !files.has(file));
    if let Some((file, names)) = absent {
        return Err(EstimateError::MissingFile { index: place(), file: shown(file), num_tensors: names.len() });
    }
    let of_file = |(file, names): &(&str, Vec<&str>)| {
        let header = files.header(file)?;
        let parameter = |&name: &&str| match header.get(name) {
            Some(found) => entry(files, file, found),
            None => Err(EstimateError::WrongIndex { index: place(), name: shown(name), file: shown(file) }),
        };
        names.iter().map(parameter).collect::<Result<Vec<_>, _>>()
    };
    let parts = in_parallel(&names_in.into_iter().collect::<Vec<_>>(), files.num_readers(), of_file)?;
    Ok(parts.concat())
}

/// The results of all items in their order, or the error of one of them. Headers of a large model are in hundreds of files,
/// and each of them is asked for over a network.
fn in_parallel<T: Sync, R: Send, E: Send>(
    items: &[T],
    num_threads: usize,
    work: impl Fn(&T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    let next = AtomicUsize::new(0);
    let share = || {
        let mut done = Vec::new();
        loop {
            let position = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(position) else { return Ok(done) };
            // After an error nobody begins with another item.
            done.push((position, work(item).inspect_err(|_| next.store(items.len(), Ordering::Relaxed))?));
        }
    };
    let shares: Vec<Result<Vec<(usize, R)>, E>> = thread::scope(|scope| {
        let others: Vec<_> = (1..num_threads.min(items.len())).map(|_| scope.spawn(share)).collect();
        let own = share();
        let join = |thread: thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        std::iter::once(own).chain(others.into_iter().map(join)).collect()
    });
    let mut done: Vec<(usize, R)> = shares.into_iter().collect::<Result<Vec<_>, E>>()?.into_iter().flatten().collect();
    done.sort_by_key(|&(position, _)| position);
    Ok(done.into_iter().map(|(_, result)| result).collect())
}

fn entry(files: &dyn ModelFiles, file: &str, found: &HeaderEntry) -> Result<ParameterEntry, EstimateError> {
    let HeaderEntry { name, dtype, shape, .. } = found;
    let Some(torch_dtype) = torch_name(*dtype) else {
        let (place, name, dtype) = (files.place(file), shown(name), dtype.to_string());
        return Err(EstimateError::ElementType { place, name, dtype });
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
