//! How gradients accumulate over micro-batches.

use crate::Result;
use crate::error::config::ConfigErrorKind;
use serde::{Deserialize, Deserializer, Serialize};

/// How gradients accumulate over micro-batches before the optimizer steps
/// (`GradientAccumulationPlugin` of the reference, `utils/dataclasses.py`).
///
/// ```
/// use accelerate_core::config::GradientAccumulationPlugin;
/// let plugin: GradientAccumulationPlugin = serde_json::from_str(r#"{"num_steps": 4}"#).unwrap();
/// assert_eq!(plugin.num_steps, 4);
/// assert!(plugin.sync_with_dataloader);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GradientAccumulationPlugin {
    /// Micro-batches per optimizer step, at least 1. Default 1; Python Accelerate requires it, and `null`
    /// gives 1 here.
    #[serde(deserialize_with = "null_is_one")]
    pub num_steps: usize,
    /// Keep the schedule in step with the optimizer while gradients accumulate. Default true, as Python
    /// Accelerate documents; there it has no effect on the learning rate.
    pub adjust_scheduler: bool,
    /// The end of the data loader ends the window. Default true.
    pub sync_with_dataloader: bool,
    /// Average gradients over ranks after every micro-batch, not only at the end of the window: more
    /// traffic, less memory under sharding. Default false.
    pub sync_each_batch: bool,
}

impl Default for GradientAccumulationPlugin {
    fn default() -> Self {
        Self { num_steps: 1, adjust_scheduler: true, sync_with_dataloader: true, sync_each_batch: false }
    }
}

impl GradientAccumulationPlugin {
    /// Checks the number of steps.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): `num_steps` is 0.
    ///
    /// ```
    /// # use accelerate_core::config::GradientAccumulationPlugin;
    /// let plugin = GradientAccumulationPlugin { num_steps: 0, ..Default::default() };
    /// assert_eq!(plugin.check().unwrap_err().to_string(), "num_steps is 0, but must be at least 1");
    /// ```
    pub fn check(&self) -> Result<()> {
        if self.num_steps == 0 {
            return Err(ConfigErrorKind::MustBePositive { name: "num_steps" }.into());
        }
        Ok(())
    }
}

fn null_is_one<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(1))
}
