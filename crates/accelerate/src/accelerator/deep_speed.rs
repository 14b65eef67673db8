//! Training by a DeepSpeed configuration: what it says becomes settings of the accelerator.

use crate::error::Result;
use crate::state::Lookup;
use accelerate_core::config::{
    Auto, DeepSpeedConfig, DeepSpeedFacts, DeepSpeedPlugin, OptimizerInCode, ResolvedDeepSpeedConfig,
    check_deep_speed_prepared,
};
use std::fs;
use std::sync::{Mutex, PoisonError};

/// A configuration while objects are prepared: loaders tell numbers that it leaves open.
#[derive(Debug)]
pub(crate) struct DeepSpeed {
    plugin: DeepSpeedPlugin,
    config: DeepSpeedConfig,
    facts: Mutex<DeepSpeedFacts>,
}

impl DeepSpeed {
    /// Reads the configuration, its file included.
    pub(super) fn read(plugin: DeepSpeedPlugin) -> Result<Self> {
        plugin.check()?;
        let config = plugin.config(&|path| fs::read_to_string(path))?;
        Ok(Self { plugin, config, facts: Mutex::default() })
    }

    /// What holds before any object is prepared. Where the batch size is left to the loaders, its numbers are not checked
    /// yet.
    pub(super) fn settle(&self, facts: DeepSpeedFacts) -> Result<ResolvedDeepSpeedConfig> {
        let mut config = self.config.clone();
        // These are checked against the objects that are prepared for them.
        (config.optimizer, config.scheduler) = (None, None);
        let knows_batch = |number: &Option<Auto<usize>>| matches!(number, Some(Auto::Value(_)));
        if !knows_batch(&config.train_micro_batch_size_per_gpu) {
            config.train_micro_batch_size_per_gpu = Some(Auto::Value(1));
            config.train_batch_size = Some(Auto::Auto);
        }
        let resolved = self.plugin.resolve(&config, &facts)?;
        *self.facts.lock().unwrap_or_else(PoisonError::into_inner) = facts;
        Ok(resolved)
    }

    /// Compares the batch size of one more loader with the configuration. Returns the number of micro-batches per step.
    ///
    /// # Errors
    /// The numbers do not multiply to `train_batch_size`, or "auto" remains.
    pub(crate) fn loader_prepared(&self, batch_size: Option<usize>) -> Result<usize> {
        let mut config = self.config.clone();
        (config.optimizer, config.scheduler) = (None, None);
        let mut facts = self.facts.lock().unwrap_or_else(PoisonError::into_inner);
        facts.batch_sizes.push(batch_size);
        let resolved = self.plugin.resolve(&config, &facts)?;
        // Told here, because loaders for evaluation may well have other sizes.
        for inert in resolved.inert_keys.iter().filter(|inert| inert.key == "train_micro_batch_size_per_gpu") {
            tracing::warn!("DeepSpeed's {} has no effect: {}", inert.key, inert.why);
        }
        Ok(resolved.gradient_accumulation_steps)
    }

    /// Refuses an optimizer of the program's own beside one of the configuration.
    pub(crate) fn optimizer_prepared(&self, lr: Option<f64>) -> Result<()> {
        Ok(check_deep_speed_prepared(&self.config, Some(&OptimizerInCode::Own { lr }), None)?)
    }
}

/// Does the launcher ask for this kind of sharding?
pub(super) fn is_asked_for(lookup: Lookup<'_>, name: &str) -> bool {
    lookup(name)
        .is_some_and(|value| matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on" | "y" | "t"))
}
