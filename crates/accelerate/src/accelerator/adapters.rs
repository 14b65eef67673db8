//! Adapters of models that several processes train.

use super::Accelerator;
use crate::error::Result;
use crate::lora::{PeftModel, SavePretrainedOptions};
use std::path::Path;

impl Accelerator {
    /// Writes the adapters of a model as PEFT does ([`PeftModel::save_pretrained`]): the main process writes (with
    /// `save_on_each_node` the first of each machine), of a sharded model after all have given their shards.
    /// [`SavePretrainedOptions::is_main_process`] has no effect here. Collective.
    ///
    /// # Errors
    /// There is no such adapter. [`is_weights`](crate::Error::is_weights): a file that cannot be written. An error on every rank.
    ///
    /// ```
    /// use accelerate::Accelerator;
    /// use accelerate::lora::{LoraConfig, get_peft_model};
    /// use accelerate::nn::{Linear, ModuleFn, ParamStore};
    /// use accelerate::tch::Tensor;
    ///
    /// let folder = std::env::temp_dir().join(format!("accelerate-save-adapter-{}", std::process::id()));
    /// let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let store = ParamStore::new(accelerator.device());
    /// let linear = Linear::new(store.root() / "proj", 4, 4, Default::default())?;
    /// let config = LoraConfig { target_modules: Some(["proj"].into()), ..Default::default() };
    /// let adapters = get_peft_model(&store, config)?;
    /// let model = accelerator.prepare(ModuleFn::new(&store, move |input: &Tensor| linear.forward(input)))?;
    /// accelerator.save_adapter(&adapters, &folder, &Default::default())?;
    /// assert!(folder.join("adapter_config.json").exists());
    /// # drop(model);
    /// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    #[track_caller]
    pub fn save_adapter(
        &self,
        model: &PeftModel,
        save_directory: impl AsRef<Path>,
        options: &SavePretrainedOptions,
    ) -> Result<()> {
        let _called = crate::status::here();
        let on_each_node = self.project_configuration().save_on_each_node;
        let is_main_process = if on_each_node { self.is_local_main_process() } else { self.is_main_process() };
        let options = SavePretrainedOptions { is_main_process, ..options.clone() };
        let saved = model.save_pretrained(save_directory, &options).map(drop);
        self.group().agree_on_success("save_adapter", saved)
    }
}
