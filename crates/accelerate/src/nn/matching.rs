//! Which found tensor goes into which parameter.

use super::{Param, ParamStore};
use crate::error::{Mismatch, Misshaped};
use std::collections::{HashMap, HashSet};
use tch::{Kind, Tensor};
use torch_ext::storage::{storage_id, storage_offset};

/// Pairs found tensors (by name and shape) with parameters: `(position in found, parameter)`.
///
/// A tied parameter may be found under any of its names; its first name wins. Parameters that share memory
/// without being tied need only one of them found, since only one is written. `num_batches_tracked` may be
/// absent, because files written before PyTorch 0.4.1 lack it, and PyTorch accepts that too.
pub(crate) fn match_names(store: &ParamStore, found: &[(String, Vec<i64>)]) -> (Vec<(usize, Param)>, Mismatch) {
    let mut mismatch = Mismatch::default();
    let persistent = store.persistent();
    let by_name: HashMap<&str, &Param> = persistent.iter().map(|param| (param.name(), param)).collect();
    let aliases = store.aliases();
    let mut by_first_name: HashMap<String, (usize, bool)> = HashMap::new();
    for (position, (name, _)) in found.iter().enumerate() {
        match by_name.get(aliases.get(name).unwrap_or(name).as_str()) {
            Some(param) => {
                let is_first_name = param.name() == name;
                let entry = by_first_name.entry(param.name().to_owned());
                let slot = entry.or_insert((position, is_first_name));
                if is_first_name {
                    *slot = (position, true);
                }
            }
            None => mismatch.unexpected.push(name.clone()),
        }
    }
    let mut pairs = Vec::new();
    let mut absent = Vec::new();
    for param in &persistent {
        let Some(&(position, _)) = by_first_name.get(param.name()) else {
            absent.push(param);
            continue;
        };
        let (name, shape) = &found[position];
        let wanted = param.shape();
        if *shape == wanted {
            pairs.push((position, param.clone()));
        } else {
            mismatch.misshaped.push(Misshaped { name: name.clone(), found: shape.clone(), wanted });
        }
    }
    let filled: HashSet<_> = pairs.iter().map(|(_, param)| memory_of(&param.local())).collect();
    let is_missing = |param: &&Param| {
        let is_counter = param.is_buffer() && param.name().ends_with("num_batches_tracked");
        let local = param.local();
        // A rank may own no element of a sharded parameter.
        !is_counter && (local.numel() == 0 || !filled.contains(&memory_of(&local)))
    };
    let missing = absent.into_iter().filter(is_missing);
    mismatch.missing = missing.map(|param| param.name().to_owned()).collect();
    mismatch.unexpected.sort();
    (pairs, mismatch)
}

/// Tensors of a file that go into one parameter under two of its names: the position of the one that is loaded, that of the other, and
/// the parameter.
pub(crate) fn found_twice(store: &ParamStore, found: &[(String, Vec<i64>)]) -> Vec<(usize, usize, Param)> {
    let aliases = store.aliases();
    let (pairs, _) = match_names(store, found);
    let loaded: HashMap<String, (usize, Param)> =
        pairs.into_iter().map(|(position, param)| (param.name().to_owned(), (position, param))).collect();
    let names = found.iter().enumerate();
    names
        .filter_map(|(other, (name, shape))| {
            let (position, param) = loaded.get(aliases.get(name).unwrap_or(name))?;
            let is_other = *position != other && *shape == found[*position].1;
            is_other.then(|| (*position, other, param.clone()))
        })
        .collect()
}

/// The same for two tensors that are one piece of memory seen in the same way. Meaningless for empty ones.
pub(crate) fn memory_of(tensor: &Tensor) -> (usize, i64, Vec<i64>, Vec<i64>, Option<Kind>) {
    (storage_id(tensor), storage_offset(tensor), tensor.size(), tensor.stride(), tensor.f_kind().ok())
}
