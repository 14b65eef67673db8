//! A model's weights to files.

use super::atomic::{NewFile, PendingFile};
use super::folder::{check_own_names, commit_folder, prepare_folder, refuse_other_saves};
use super::progress::NumWritten;
use super::writer::{write_pending, written_kind};
use crate::error::{Result, WeightsError};
use crate::nn::{ParamStore, StateDict};
use accelerate_core::checkpoint::STEM;
use accelerate_core::config::FloatType;
use accelerate_core::weight_files::{DEFAULT_STEM, Index, TORCH_STEM, WeightFiles, is_weight_file_of, parse_size};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use tch::Tensor;

/// How [`save_model_weights`] and [`Accelerator::save_model`](crate::Accelerator::save_model) write.
///
/// ```
/// let options = accelerate::SaveModelOptions { max_shard_size: "1GB".into(), ..Default::default() };
/// assert_eq!(accelerate::SaveModelOptions::default().max_shard_size, "10GB");
/// assert_eq!(options.stem, "model");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaveModelOptions {
    /// Largest size of the tensors in one file, such as `"1GB"` (decimal), `"1GiB"` or `"64B"`; a single larger tensor gets a
    /// file of its own. Default `"10GB"`.
    pub max_shard_size: String,
    /// Write safetensors (`true`), or files as `torch.save` writes them, `pytorch_model.bin` (`false`)? These hold the same
    /// tensors, and a pickle that names them. Default true.
    pub safe_serialization: bool,
    /// What file names begin with: the `model` of `model.safetensors`. Default `"model"`; that of files in PyTorch's format is
    /// `"pytorch_model"`, and no others have it. `"checkpoint"` is refused: what `save_state` writes is called so.
    pub stem: String,
    /// The type that floating-point weights and buffers are written in. Default: their own; in `Accelerator::save_model`
    /// with DeepSpeed's `zero3_save_16bit_model` that of the mixed precision.
    pub dtype: Option<FloatType>,
    /// Further files that belong to the model, such as its `config.json` and its tokenizer: their names in the folder and
    /// their contents. They and the weights are saved as one, so that a crash never leaves the weights of one save beside
    /// the configuration of another. [`read_saved_file`](super::read_saved_file) reads them back. Default: none.
    ///
    /// Where several processes write, those of the main process are written (with `save_on_each_node`, of the first of each
    /// machine).
    pub files: BTreeMap<String, Vec<u8>>,
}

impl SaveModelOptions {
    /// Largest number of bytes of tensors in one file, if all options can be used.
    pub(crate) fn check(&self) -> Result<u64> {
        if self.safe_serialization == (self.stem == TORCH_STEM) {
            let reason = match self.safe_serialization {
                true => "files in PyTorch's format have it; say safe_serialization: false, or another stem",
                false => "files in PyTorch's format are called pytorch_model; leave stem out",
            };
            return Err(WeightsError::FileName { name: self.stem.clone(), reason }.into());
        }
        if self.stem == STEM {
            // The manifest of a checkpoint in the same folder would have the same name.
            let reason = "the files of save_state have it; say another stem";
            return Err(WeightsError::FileName { name: self.stem.clone(), reason }.into());
        }
        check_own_names(self.files.keys(), &self.stem)?;
        Ok(parse_size(&self.max_shard_size)?)
    }
}

impl SaveModelOptions {
    /// The same, with the stem that files in PyTorch's format have.
    pub(crate) fn with_stem_of_format(mut self) -> Self {
        if !self.safe_serialization && self.stem == DEFAULT_STEM {
            self.stem = TORCH_STEM.to_owned();
        }
        self
    }
}

impl Default for SaveModelOptions {
    fn default() -> Self {
        let (max_shard_size, stem) = ("10GB".to_owned(), DEFAULT_STEM.to_owned());
        Self { max_shard_size, safe_serialization: true, stem, dtype: None, files: BTreeMap::new() }
    }
}

/// Writes parameters and persistent buffers into `folder` (made if absent) in the layout of Hugging Face
/// models; see [the format law](crate::checkpoint). Returns the files written, index last.
///
/// Weights that are tied, or share their memory otherwise, are written once under the first name. Weight
/// files of an earlier save with the same stem are removed, once the new ones are in place.
///
/// Collective if the model is sharded, and each rank that calls it writes everything: there
/// [`Accelerator::save_model`](crate::Accelerator::save_model) has each rank write a part.
///
/// # Errors
/// A size or a name that cannot be used. [`is_weights`](crate::Error::is_weights): the disk is full or the folder not writable.
/// What was there before is then untouched; if something is in the way when the files get their names, the next load or save
/// finishes that.
///
/// ```
/// use accelerate::SaveModelOptions;
/// use accelerate::checkpoint::save_model_weights;
/// use accelerate::nn::{Linear, ParamStore};
/// use accelerate::tch::Device;
///
/// let folder = std::env::temp_dir().join(format!("accelerate-save-model-{}", std::process::id()));
/// let store = ParamStore::new(Device::Cpu);
/// Linear::new(store.root(), 4, 4, Default::default())?;
/// let options = SaveModelOptions { max_shard_size: "64B".into(), ..Default::default() };
/// let files = save_model_weights(&store, &folder, &options)?;
/// let names: Vec<_> = files.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
/// assert_eq!(names, [
///     "model-00001-of-00002.safetensors",
///     "model-00002-of-00002.safetensors",
///     "model.safetensors.index.json",
/// ]);
/// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn save_model_weights(
    store: &ParamStore,
    folder: impl AsRef<Path>,
    options: &SaveModelOptions,
) -> Result<Vec<PathBuf>> {
    // First, because it may be collective, and what fails on this process alone must not keep the others waiting.
    let state = store.state_dict()?;
    save_state_dict(&state, folder.as_ref(), options)
}

/// The same with tensors by name.
pub(super) fn save_state_dict(state: &StateDict, folder: &Path, options: &SaveModelOptions) -> Result<Vec<PathBuf>> {
    let options = &options.clone().with_stem_of_format();
    let max_shard_bytes = options.check()?;
    let stem = options.stem.as_str();
    prepare_model_folder(folder, stem)?;
    let tensors = distinct(state.iter());
    let mut sizes = Vec::with_capacity(tensors.len());
    for (name, tensor) in &tensors {
        let bytes = tensor.numel() * written_kind(tensor.f_kind()?, options.dtype).elt_size_in_bytes();
        sizes.push(((*name).to_owned(), bytes as u64));
    }
    let plan = WeightFiles::plan(&sizes, max_shard_bytes, stem);

    let mut pending = write_own_files(folder, options)?;
    let by_name: HashMap<&str, &Tensor> = tensors.into_iter().collect();
    for (file, names) in &plan.files {
        let content: Vec<(&str, &Tensor)> =
            names.iter().filter_map(|name| by_name.get_key_value(name.as_str())).map(|(n, t)| (*n, *t)).collect();
        pending.push(write_pending(
            &content,
            options.dtype,
            NewFile::buffered(&folder.join(file), stem),
            (&NumWritten::default(), None),
        )?);
    }
    pending.extend(write_index(folder, &plan, stem)?);
    let written = weight_paths(folder, &plan, stem);
    commit_pending(folder, stem, pending)?;
    Ok(written)
}

/// Makes a folder ready for a save of a model by itself, and fails where it would replace files of another kind of save.
pub(super) fn prepare_model_folder(folder: &Path, stem: &str) -> Result<()> {
    prepare_folder(folder, stem)?;
    refuse_other_saves(folder, stem, &|name| is_weight_file_of(name, stem))
}

/// Commits what this process alone has written.
fn commit_pending(folder: &Path, stem: &str, mut pending: Vec<PendingFile>) -> Result<()> {
    let files = pending.iter().map(PendingFile::saved_file).collect();
    // Once the manifest is there they belong to it, whatever becomes of this process.
    pending.iter_mut().for_each(PendingFile::leave);
    commit_folder(folder, stem, files)
}

/// The weight files, index last.
fn weight_paths(folder: &Path, plan: &WeightFiles, stem: &str) -> Vec<PathBuf> {
    let index = plan.index.as_ref().map(|_| Index::file_name(stem));
    let shards = plan.files.iter().map(|(file, _)| file.clone());
    shards.chain(index).map(|name| folder.join(name)).collect()
}

/// Writes the files of the user's own under temporary names.
pub(super) fn write_own_files(folder: &Path, options: &SaveModelOptions) -> Result<Vec<PendingFile>> {
    let own = options.files.iter();
    own.map(|(name, content)| PendingFile::write(&folder.join(name), &options.stem, content)).collect()
}

/// Writes the index, if there is one, under a temporary name.
pub(super) fn write_index(folder: &Path, plan: &WeightFiles, stem: &str) -> Result<Option<PendingFile>> {
    let Some(index) = &plan.index else { return Ok(None) };
    let path = folder.join(Index::file_name(stem));
    let json = index.to_json().map_err(|source| WeightsError::Index { path: path.clone(), source })?;
    PendingFile::write(&path, stem, json.as_bytes()).map(Some)
}

/// Every piece of memory once, under the first of its names.
fn distinct<'a>(tensors: impl Iterator<Item = (&'a str, &'a Tensor)>) -> Vec<(&'a str, &'a Tensor)> {
    let mut seen = HashSet::new();
    tensors.filter(|(_, tensor)| tensor.numel() == 0 || seen.insert(crate::nn::memory_of(tensor))).collect()
}
