//! Weights on disk.

use super::{Accelerator, PreparedModel};
use crate::checkpoint::{
    LoadOptions, SaveOptions, Writers, load_checkpoint_in_model, save_model_weights, save_sharded_model_weights,
};
use crate::error::{Error, Result};
use crate::nn::{LoadReport, Module, ParamStore};
use accelerate_core::config::FloatType;
use accelerate_core::weight_files::parse_size;
use std::path::Path;

/// Whatever owns a model's parameters: a model, prepared or not, or the store itself.
pub trait AsParamStore {
    /// The store of all parameters and buffers.
    fn as_param_store(&self) -> &ParamStore;
}

impl AsParamStore for ParamStore {
    fn as_param_store(&self) -> &ParamStore {
        self
    }
}

impl<M: Module> AsParamStore for M {
    fn as_param_store(&self) -> &ParamStore {
        self.params()
    }
}

impl<M: Module> AsParamStore for PreparedModel<M> {
    fn as_param_store(&self) -> &ParamStore {
        self.params()
    }
}

/// How [`Accelerator::save_model_with`] writes.
///
/// ```
/// let options = accelerate::SaveModelOptions { max_shard_size: "1GB".into(), ..Default::default() };
/// assert_eq!(accelerate::SaveModelOptions::default().max_shard_size, "10GB");
/// # let _ = options;
/// ```
#[derive(Clone, Debug)]
pub struct SaveModelOptions {
    /// Largest size of one file, such as `"1GB"` (decimal) or `"1GiB"`; a larger tensor gets a file of its own.
    /// Default `"10GB"`.
    pub max_shard_size: String,
    /// The type that floating-point weights and buffers are written in. Default: their own; with DeepSpeed's
    /// `zero3_save_16bit_model` that of the mixed precision.
    pub dtype: Option<FloatType>,
}

impl Default for SaveModelOptions {
    fn default() -> Self {
        Self { max_shard_size: "10GB".to_owned(), dtype: None }
    }
}

impl Accelerator {
    /// Writes a model's weights as Hugging Face does: `model.safetensors`, or several files and an index.
    ///
    /// The main process writes (with `save_on_each_node` the first of each machine); the others return at once,
    /// so call [`Accelerator::wait_for_everyone`] before reading the files elsewhere. A crash leaves the old
    /// files or the new ones, never half of each file.
    ///
    /// A model sharded over several ranks is gathered unit by unit, and each rank writes files of its own: at least one for
    /// each rank that gets a tensor, of equal sizes as far as tensors allow. No rank ever holds more than one unit whole.
    /// With `save_on_each_node` the first process of each machine writes all of them, into a folder that others need not
    /// see. Then the call is collective, and returns when all files are in place.
    ///
    /// # Errors
    /// [`is_weights`](crate::Error::is_weights): a file that cannot be written, by path; of a sharded model on every rank,
    /// with the rank that failed. An earlier save is then as it was, unless the failure came among the final renames.
    ///
    /// ```
    /// use accelerate::{Accelerator, nn::{Linear, ParamStore}};
    ///
    /// let folder = std::env::temp_dir().join(format!("accelerate-save-{}", std::process::id()));
    /// let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let store = ParamStore::new(accelerator.device());
    /// Linear::new(store.root(), 2, 2, Default::default())?;
    /// accelerator.save_model(&store, &folder)?;
    /// accelerator.load_checkpoint_in_model(&store, &folder)?;
    /// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn save_model<M: AsParamStore + ?Sized>(&self, model: &M, save_directory: impl AsRef<Path>) -> Result<()> {
        self.save_model_with(model, save_directory, &SaveModelOptions::default())
    }

    /// As [`Accelerator::save_model`], with all its settings. Collective if the model is sharded; then all ranks need the
    /// same settings.
    ///
    /// # Errors
    /// Those of [`Accelerator::save_model`]; a size that cannot be read; settings that differ between ranks.
    ///
    /// ```
    /// use accelerate::{Accelerator, FloatType, SaveModelOptions, nn::{Linear, ParamStore}};
    ///
    /// let folder = std::env::temp_dir().join(format!("accelerate-save-with-{}", std::process::id()));
    /// let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let store = ParamStore::new(accelerator.device());
    /// Linear::new(store.root(), 8, 4, Default::default())?;
    /// let options = SaveModelOptions { max_shard_size: "64B".into(), dtype: Some(FloatType::BFloat16) };
    /// accelerator.save_model_with(&store, &folder, &options)?;
    /// assert!(folder.join("model-00002-of-00002.safetensors").exists());
    /// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn save_model_with<M: AsParamStore + ?Sized>(
        &self,
        model: &M,
        save_directory: impl AsRef<Path>,
        options: &SaveModelOptions,
    ) -> Result<()> {
        let store = model.as_param_store();
        let max_shard_bytes = parse_size(&options.max_shard_size).map_err(Error::from);
        let dtype = options.dtype.or(self.settings().saved_dtype);
        let options =
            max_shard_bytes.map(|max_shard_bytes| SaveOptions { max_shard_bytes, dtype, ..Default::default() });
        let on_each_node = self.project_configuration().save_on_each_node;
        if self.num_processes() > 1 && store.shard_group().is_some() {
            let writers = match on_each_node {
                true => Writers::FirstOfEachNode { is_first: self.is_local_main_process() },
                false => Writers::AllRanks,
            };
            return save_sharded_model_weights(store, self.group(), save_directory.as_ref(), options, writers);
        }
        let options = options?;
        match if on_each_node { self.is_local_main_process() } else { self.is_main_process() } {
            true => save_model_weights(store, save_directory, &options).map(drop),
            false => Ok(()),
        }
    }

    /// Reads weights by name into a model: one safetensors file, an index, or a folder with either. Every process
    /// reads for itself, of sharded parameters the shard that it keeps. All names and shapes are compared first, and must
    /// fit. Not collective.
    ///
    /// # Errors
    /// All missing, unexpected and mis-shaped weights in one error; damaged files by path.
    ///
    /// ```
    /// use accelerate::{Accelerator, nn::{Linear, ParamStore}};
    ///
    /// let folder = std::env::temp_dir().join(format!("accelerate-load-model-{}", std::process::id()));
    /// let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let store = ParamStore::new(accelerator.device());
    /// Linear::new(store.root(), 2, 2, Default::default())?;
    /// accelerator.save_model(&store, &folder)?;
    /// assert!(accelerator.load_checkpoint_in_model(&store, &folder)?.missing_keys.is_empty());
    /// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn load_checkpoint_in_model<M: AsParamStore + ?Sized>(
        &self,
        model: &M,
        checkpoint: impl AsRef<Path>,
    ) -> Result<LoadReport> {
        load_checkpoint_in_model(model.as_param_store(), checkpoint, &LoadOptions::default())
    }

    /// The user's own model inside a prepared one.
    pub fn unwrap_model<'a, M>(&self, model: &'a PreparedModel<M>) -> &'a M {
        model
    }
}
