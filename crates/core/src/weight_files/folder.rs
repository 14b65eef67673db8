//! Which file of a folder to begin with.

use super::{DEFAULT_STEM, EXTENSION, Index, TORCH_STEM, shard_file_names};

/// Of the names in a folder without safetensors, PyTorch's file of a model's weights, or the index of several, as the reference looks
/// for them: `pytorch_model.bin`, then its index, then the only other index.
///
/// ```
/// use accelerate_core::weight_files::choose_torch_file;
/// assert_eq!(choose_torch_file(&["optimizer.bin", "pytorch_model.bin"]), Some("pytorch_model.bin"));
/// assert_eq!(choose_torch_file(&["a-00001-of-00001.bin", "a.bin.index.json"]), Some("a.bin.index.json"));
/// assert_eq!(choose_torch_file(&["training_args.bin"]), None);
/// ```
pub fn choose_torch_file<'a>(names: &[&'a str]) -> Option<&'a str> {
    let usual = [shard_file_names(TORCH_STEM, 1).concat(), Index::file_name(TORCH_STEM)];
    let found = usual.iter().find_map(|usual| names.iter().find(|name| *name == usual));
    let mut indexes = names.iter().filter(|name| !name.starts_with('.') && name.ends_with(".bin.index.json"));
    let the_only = (indexes.next(), indexes.next().is_none());
    found.or(the_only.0.filter(|_| the_only.1)).copied()
}

/// Of the names in a folder, the file that holds a model's weights, or the index of several
/// (`load_checkpoint_in_model` of the reference, `utils/modeling.py`): `model.safetensors`, then its index, then whatever is
/// the only index or the only weight file. `None` where there is none, or more than one to choose from.
///
/// ```
/// use accelerate_core::weight_files::choose_weight_file;
/// let names = ["a-00001-of-00002.safetensors", "a-00002-of-00002.safetensors", "a.safetensors.index.json", "config.json"];
/// assert_eq!(choose_weight_file(&names), Some("a.safetensors.index.json"));
/// assert_eq!(choose_weight_file(&["a.safetensors", "b.safetensors"]), None);
/// ```
pub fn choose_weight_file<'a>(names: &[&'a str]) -> Option<&'a str> {
    let usual = [shard_file_names(DEFAULT_STEM, 1).concat(), Index::file_name(DEFAULT_STEM)];
    if let Some(name) = usual.iter().find_map(|usual| names.iter().find(|name| *name == usual)) {
        return Some(name);
    }
    let the_only = |suffix: &str| {
        let mut fitting = names.iter().filter(|name| !name.starts_with('.') && name.ends_with(suffix));
        (fitting.next().copied(), fitting.next().is_some())
    };
    match (the_only(&Index::file_name("")), the_only(&format!(".{EXTENSION}"))) {
        ((Some(index), false), _) => Some(index),
        ((None, _), (Some(file), false)) => Some(file),
        _ => None,
    }
}
