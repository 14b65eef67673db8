//! Weights on disk.

use super::models::single_store;
use super::{Accelerator, HasParameters, PreparedModel};
use crate::checkpoint::{
    LoadOptions, SaveModelOptions, Writers, check_save_directory, load_checkpoint_in_model, save_model_weights,
    save_sharded_model_weights,
};
use crate::error::Result;
use crate::nn::LoadReport;
use std::path::Path;

impl Accelerator {
    /// Writes a model's weights as Hugging Face does: `model.safetensors`, or several files and an index; with
    /// `safe_serialization: false` as `torch.save` does, `pytorch_model.bin`.
    ///
    /// The main process writes (with `save_on_each_node` the first of each machine); the others return at once,
    /// so call [`Accelerator::wait_for_everyone`] before reading the files elsewhere. A crash leaves the old
    /// files or the new ones: all of them, those of [`SaveModelOptions::files`] included. See
    /// [the format law](crate::checkpoint).
    ///
    /// A model sharded over several ranks is gathered unit by unit, and each rank writes files of its own: at least one for
    /// each rank that gets a tensor, of equal sizes as far as tensors allow. No rank ever holds more than one unit whole.
    /// With `save_on_each_node` the first process of each machine writes all of them, into a folder that others need not
    /// see. Then the call is collective, and returns when all files are in place.
    ///
    /// # Errors
    /// [`is_weights`](crate::Error::is_weights): a file that cannot be written, by path; of a sharded model on every rank,
    /// with the rank that failed; options that differ between ranks then. A size that cannot be read. An earlier save is then as
    /// it was, unless something was in the way of the final renames: then the next load or save finishes them.
    ///
    /// ```
    /// use accelerate::{Accelerator, nn::{Linear, ParamStore}};
    ///
    /// let folder = std::env::temp_dir().join(format!("accelerate-save-{}", std::process::id()));
    /// let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let store = ParamStore::new(accelerator.device());
    /// Linear::new(store.root(), 2, 2, Default::default())?;
    /// accelerator.save_model(&store, &folder, &Default::default())?;
    /// accelerator.load_checkpoint_in_model(&store, &folder)?;
    /// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// ```
    /// use accelerate::{Accelerator, FloatType, SaveModelOptions, nn::{Linear, ParamStore}};
    ///
    /// let folder = std::env::temp_dir().join(format!("accelerate-save-with-{}", std::process::id()));
    /// let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let store = ParamStore::new(accelerator.device());
    /// Linear::new(store.root(), 8, 4, Default::default())?;
    /// let dtype = Some(FloatType::BFloat16);
    /// let options = SaveModelOptions { max_shard_size: "64B".into(), dtype, ..Default::default() };
    /// accelerator.save_model(&store, &folder, &options)?;
    /// assert!(folder.join("model-00002-of-00002.safetensors").exists());
    /// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    #[track_caller]
    pub fn save_model<M: HasParameters + ?Sized>(
        &self,
        model: &M,
        save_directory: impl AsRef<Path>,
        options: &SaveModelOptions,
    ) -> Result<()> {
        let _called = crate::status::here();
        let store = single_store(model, "save_model")?;
        let saved_dtype = self.deep_speed().and_then(|deep_speed| deep_speed.saved_dtype());
        let options =
            SaveModelOptions { dtype: options.dtype.or(saved_dtype), ..options.clone() }.with_stem_of_format();
        let on_each_node = self.project_configuration().save_on_each_node;
        if self.num_processes() > 1 && store.shard_group().is_some() {
            let writers = match on_each_node {
                true => Writers::FirstOfEachNode { is_first: self.is_local_main_process() },
                false => Writers::AllRanks,
            };
            return save_sharded_model_weights(&store, self.group(), save_directory.as_ref(), &options, writers);
        }
        match if on_each_node { self.is_local_main_process() } else { self.is_main_process() } {
            true => save_model_weights(&store, save_directory, &options).map(drop),
            // Options that cannot be used are an error on all ranks.
            false => options.check().map(drop),
        }
    }

    /// Makes sure before training that [`save_model`](Self::save_model) can write into `save_directory` after it: the main
    /// process (with `save_on_each_node` the first of each machine) makes the folder if it is absent, writes a file there
    /// and removes it. Collective.
    ///
    /// # Errors
    /// [`is_weights`](crate::Error::is_weights): the folder cannot be made or written; an error on every rank.
    ///
    /// ```
    /// use accelerate::Accelerator;
    ///
    /// let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let error = accelerator.check_save_directory("/dev/null/output").unwrap_err();
    /// assert!(error.is_weights() && error.to_string().contains("/dev/null/output"));
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    #[track_caller]
    pub fn check_save_directory(&self, save_directory: impl AsRef<Path>) -> Result<()> {
        let _called = crate::status::here();
        let on_each_node = self.project_configuration().save_on_each_node;
        let writes = if on_each_node { self.is_local_main_process() } else { self.is_main_process() };
        let checked = if writes { check_save_directory(save_directory) } else { Ok(()) };
        self.group().agree_on_success("check_save_directory", checked)
    }

    /// Reads weights by name into a model: one safetensors file or `pytorch_model.bin`, an index, a folder with one of these, or
    /// one of `torch.distributed.checkpoint` (see [`load_checkpoint_in_model`](crate::checkpoint::load_checkpoint_in_model)). Every process
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
    /// accelerator.save_model(&store, &folder, &Default::default())?;
    /// assert!(accelerator.load_checkpoint_in_model(&store, &folder)?.missing_keys.is_empty());
    /// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn load_checkpoint_in_model<M: HasParameters + ?Sized>(
        &self,
        model: &M,
        checkpoint: impl AsRef<Path>,
    ) -> Result<LoadReport> {
        load_checkpoint_in_model(&single_store(model, "load_checkpoint_in_model")?, checkpoint, &LoadOptions::default())
    }

    /// The user's own model inside a prepared one.
    pub fn unwrap_model<'a, M>(&self, model: &'a PreparedModel<M>) -> &'a M {
        model
    }
}
