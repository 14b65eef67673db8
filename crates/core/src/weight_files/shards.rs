//! Which tensor goes into which file.

use super::{Header, Index, IndexMetadata, extension_of};
use std::collections::BTreeMap;

/// Deals tensors to shards of at most `max_shard_bytes`, in the order given
/// (`split_state_dict_into_shards_factory` of `huggingface_hub`).
///
/// A tensor that does not fit any more closes the current shard and opens the next, and so does one after as many tensors as a
/// file may have, [`Header::MAX_TENSORS`](super::Header::MAX_TENSORS). A tensor larger than a
/// shard gets one of its own, without closing the current one. Sharing of storage is not looked at: list
/// each shared tensor once.
///
/// ```
/// use accelerate_core::weight_files::plan_shards;
/// let tensors = [("a", 4), ("b", 4), ("huge", 30), ("c", 4)];
/// let shards = plan_shards(&tensors.map(|(name, bytes)| (name.to_owned(), bytes)), 10);
/// assert_eq!(shards, [vec!["huge"], vec!["a", "b"], vec!["c"]]);
/// ```
pub fn plan_shards(tensors: &[(String, u64)], max_shard_bytes: u64) -> Vec<Vec<String>> {
    let mut shards = Vec::new();
    let mut current = Vec::new();
    let mut current_bytes = 0_u64;
    for (name, bytes) in tensors {
        if *bytes > max_shard_bytes {
            shards.push(vec![name.clone()]);
            continue;
        }
        let is_full = current_bytes.saturating_add(*bytes) > max_shard_bytes || current.len() == Header::MAX_TENSORS;
        if is_full && !current.is_empty() {
            shards.push(std::mem::take(&mut current));
            current_bytes = 0;
        }
        current.push(name.clone());
        current_bytes = current_bytes.saturating_add(*bytes);
    }
    if !current.is_empty() {
        shards.push(current);
    }
    shards
}

/// The names of `num_shards` weight files: `<stem>.safetensors` for one, numbered from 1 for more; `.bin` for those called
/// [`TORCH_STEM`](super::TORCH_STEM).
///
/// ```
/// use accelerate_core::weight_files::shard_file_names;
/// assert_eq!(shard_file_names("model", 1), ["model.safetensors"]);
/// assert_eq!(
///     shard_file_names("model", 2),
///     ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
/// );
/// ```
pub fn shard_file_names(stem: &str, num_shards: usize) -> Vec<String> {
    let extension = extension_of(stem);
    match num_shards {
        0 => Vec::new(),
        1 => vec![format!("{stem}.{extension}")],
        _ => (1..=num_shards).map(|number| format!("{stem}-{number:05}-of-{num_shards:05}.{extension}")).collect(),
    }
}

/// The files that hold a model's weights.
///
/// ```
/// use accelerate_core::weight_files::WeightFiles;
/// let tensors = [("weight".to_owned(), 8), ("bias".to_owned(), 4)];
/// let files = WeightFiles::plan(&tensors, 8, "model");
/// assert_eq!(files.files[1].0, "model-00002-of-00002.safetensors");
/// assert_eq!(files.index.unwrap().metadata.total_size, 12);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct WeightFiles {
    /// File name and the tensors in it, in writing order.
    pub files: Vec<(String, Vec<String>)>,
    /// Contents of the index file; `None` when one file holds everything.
    pub index: Option<Index>,
}

impl WeightFiles {
    /// Lays out tensors of the given sizes in files of at most `max_shard_bytes`. A model without tensors
    /// gets one empty file.
    pub fn plan(tensors: &[(String, u64)], max_shard_bytes: u64, stem: &str) -> Self {
        let total_size = tensors.iter().fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes));
        Self::of_shards(plan_shards(tensors, max_shard_bytes), total_size, stem)
    }

    /// One file for each shard; one empty file if there are none.
    pub(super) fn of_shards(mut shards: Vec<Vec<String>>, total_size: u64, stem: &str) -> Self {
        if shards.is_empty() {
            shards.push(Vec::new());
        }
        let names = shard_file_names(stem, shards.len());
        let files: Vec<(String, Vec<String>)> = names.into_iter().zip(shards).collect();
        let index = (files.len() > 1).then(|| {
            let weight_map =
                files.iter().flat_map(|(file, names)| names.iter().map(|name| (name.clone(), file.clone()))).collect();
            Index { metadata: IndexMetadata { total_size, other: BTreeMap::new() }, weight_map }
        });
        Self { files, index }
    }

    /// Whether `file_name` is left over from an earlier save under the same stem, and would be taken for
    /// part of this one or shadow it: a shard of another count, the single file beside shards, or an index
    /// beside a single file. (The reference removes old shards only; a single file left beside new shards
    /// would then be loaded in their place.)
    ///
    /// ```
    /// # use accelerate_core::weight_files::WeightFiles;
    /// let files = WeightFiles::plan(&[("weight".to_owned(), 8)], 100, "model");
    /// assert!(files.is_stale("model-00001-of-00002.safetensors", "model"));
    /// assert!(files.is_stale("model.safetensors.index.json", "model"));
    /// assert!(!files.is_stale("model.safetensors", "model"));
    /// assert!(!files.is_stale("optimizer.safetensors", "model"));
    /// ```
    pub fn is_stale(&self, file_name: &str, stem: &str) -> bool {
        let written = self.files.iter().any(|(name, _)| name == file_name)
            || (self.index.is_some() && file_name == Index::file_name(stem));
        !written && is_weight_file_of(file_name, stem)
    }
}

/// Whether `file_name` is what a save under `stem` may have written: the single file, a shard of any
/// number and count, or the index.
///
/// ```
/// use accelerate_core::weight_files::is_weight_file_of;
/// assert!(is_weight_file_of("model-00002-of-00010.safetensors", "model"));
/// assert!(!is_weight_file_of("model_1.safetensors", "model"));
/// assert!(!is_weight_file_of("model.bin", "model"));
/// assert!(is_weight_file_of("pytorch_model-00001-of-00002.bin", "pytorch_model"));
/// assert!(!is_weight_file_of("model-final.safetensors", "model"));
/// ```
pub fn is_weight_file_of(file_name: &str, stem: &str) -> bool {
    if file_name == Index::file_name(stem) {
        return true;
    }
    let Some(middle) = file_name
        .strip_prefix(stem)
        .and_then(|rest| rest.strip_suffix(extension_of(stem)))
        .and_then(|rest| rest.strip_suffix('.'))
    else {
        return false;
    };
    middle.is_empty() || is_shard_suffix(middle)
}

/// `-00001-of-00003`, with at least five digits each.
fn is_shard_suffix(text: &str) -> bool {
    let is_number = |text: &str| text.len() >= 5 && text.chars().all(|digit| digit.is_ascii_digit());
    text.strip_prefix('-')
        .and_then(|rest| rest.split_once("-of-"))
        .is_some_and(|(number, count)| is_number(number) && is_number(count))
}
