//! What a run says to its DeepSpeed configuration.

use super::RunConfig;
use crate::Result;
use crate::config::{Auto, DeepSpeedConfig, DeepSpeedFacts};
use crate::settings::Origin;
use std::path::Path;

impl RunConfig {
    /// What is known of a run of `world_size` processes before any object is prepared.
    ///
    /// ```
    /// use accelerate_core::config::{RunConfig, Sources};
    /// let facts = RunConfig::resolve(Sources::default())?.deepspeed_facts(4);
    /// assert_eq!((facts.world_size, facts.gradient_accumulation_steps), (4, None));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn deepspeed_facts(&self, world_size: usize) -> DeepSpeedFacts {
        let is_said = *self.origin("gradient_accumulation_config.num_steps") != Origin::Default;
        DeepSpeedFacts {
            world_size,
            gradient_accumulation_steps: is_said.then_some(self.gradient_accumulation.num_steps),
            mixed_precision: self.cluster.mixed_precision,
            split_batches: self.dataloader.split_batches,
            ..Default::default()
        }
    }

    /// Refuses a DeepSpeed configuration by which no program can train in `world_size` processes, with the words that each of
    /// them would use. `read` gives the text of the file that the plugin names. A run without DeepSpeed passes.
    ///
    /// What the program may still say is left open: of `train_batch_size` and `train_micro_batch_size_per_gpu` beside an
    /// "auto" for the accumulation steps, only numbers that do not divide are an error.
    ///
    /// # Errors
    ///
    /// What [`DeepSpeedSettings::config`](crate::config::DeepSpeedSettings::config) and
    /// [`DeepSpeedSettings::resolve`](crate::config::DeepSpeedSettings::resolve) refuse, with the places of the settings.
    ///
    /// ```
    /// use accelerate_core::config::{ConfigFile, RunConfig, Sources};
    /// let text = "use_deepspeed: true\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n";
    /// let file = Some(ConfigFile::read(text, "run.yaml".as_ref())?);
    /// let run = RunConfig::resolve(Sources { file, ..Default::default() })?;
    /// let json = r#"{"zero_optimization": {}, "fp16": {"enabled": true}, "bf16": {"enabled": true}}"#;
    /// let error = run.check_deepspeed(2, &|_| Ok(json.to_owned())).unwrap_err();
    /// assert!(error.to_string().starts_with("ds.json: fp16.enabled and bf16.enabled contradict each other"), "{error}");
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn check_deepspeed(&self, world_size: usize, read: &dyn Fn(&Path) -> std::io::Result<String>) -> Result<()> {
        if !self.cluster.use_deepspeed {
            return Ok(());
        }
        let facts = self.deepspeed_facts(world_size);
        let checked = self.deepspeed.config(read).and_then(|config| {
            let is_open =
                facts.gradient_accumulation_steps.is_none() && config.gradient_accumulation_steps == Some(Auto::Auto);
            let config = match is_open {
                true => DeepSpeedConfig { gradient_accumulation_steps: None, ..config },
                false => config,
            };
            self.deepspeed.resolve(&config, &facts)
        });
        checked.map(drop).map_err(|error| self.with_places("deepspeed_config", error))
    }
}
