//! How gradients accumulate over micro-batches.

use crate::Result;
use crate::error::config::ConfigErrorKind;
use crate::settings::object_value;
use crate::settings::record::record;

record! {
    /// How gradients accumulate over micro-batches before the optimizer steps
    /// (`GradientAccumulationPlugin` of the reference, `utils/dataclasses.py`).
    ///
    /// ```
    /// use accelerate_core::config::{GradientAccumulationPlugin, GradientAccumulationSettings};
    /// let plugin: GradientAccumulationPlugin = serde_json::from_str(r#"{"num_steps": 4}"#).unwrap();
    /// let settings = GradientAccumulationSettings::from(plugin);
    /// assert!(settings.num_steps == 4 && settings.sync_with_dataloader);
    /// ```
    GradientAccumulationPlugin => GradientAccumulationSettings,
    section "gradient_accumulation_config", keys "", variables "ACCELERATE_GRADIENT_ACCUMULATION_" {
        /// Number of batches whose gradients are added up before each optimizer step, at least 1.
        ///
        /// Default 1. Python Accelerate requires it in the plugin.
        num_steps: usize = 1 => setting()
            .variable("ACCELERATE_GRADIENT_ACCUMULATION_STEPS").flag("gradient_accumulation_steps")
            .keys(&["num_steps", "gradient_accumulation_steps"]).at_least(1).silent(&["auto"]);
        /// A schedule that is written for micro-batches keeps step with the optimizer: each optimizer step moves it by the
        /// number of micro-batches in the window.
        ///
        /// Default `None`: one tick for each optimizer step, which is what Python Accelerate does whatever is said, although
        /// it documents `true`.
        adjust_scheduler: bool => setting().reference_default("true").seed_default("true");
        /// The end of the data loader ends the window. Default true.
        sync_with_dataloader: bool = true => setting();
        /// Average gradients over ranks after every micro-batch, not only at the end of the window: more
        /// traffic, less memory under sharding. Default false.
        sync_each_batch: bool = false => setting();
    }
}

object_value!(GradientAccumulationPlugin);

impl GradientAccumulationSettings {
    /// Checks the number of steps.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): `num_steps` is 0.
    ///
    /// ```
    /// # use accelerate_core::config::GradientAccumulationSettings;
    /// let plugin = GradientAccumulationSettings { num_steps: 0, ..Default::default() };
    /// assert_eq!(plugin.check().unwrap_err().to_string(), "num_steps is 0, but must be at least 1");
    /// ```
    pub fn check(&self) -> Result<()> {
        if self.num_steps == 0 {
            return Err(ConfigErrorKind::MustBePositive { name: "num_steps" }.into());
        }
        Ok(())
    }
}
