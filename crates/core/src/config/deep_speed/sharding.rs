//! How a resolved configuration is carried out: by the project's own sharding.

use super::{ResolvedDeepSpeedConfig, ZeroStage};
use crate::Result;
use crate::config::{AutoWrapPolicy, FullyShardedDataParallelPlugin, ShardingStrategy};
use crate::error::deep_speed::{DeepSpeedErrorKind, Unavailable};

/// The strategy that keeps in parts what a stage does; `None` where there is none yet.
const fn sharding_strategy(stage: ZeroStage) -> Option<ShardingStrategy> {
    match stage {
        ZeroStage::Disabled => Some(ShardingStrategy::NoShard),
        ZeroStage::OptimizerStates => None,
        ZeroStage::Gradients => Some(ShardingStrategy::ShardGradOp),
        ZeroStage::Parameters => Some(ShardingStrategy::FullShard),
    }
}

impl ResolvedDeepSpeedConfig {
    /// The plugin that trains as the configuration asks: stage 3 is `FULL_SHARD`, stage 2 `SHARD_GRAD_OP`, stage 0
    /// `NO_SHARD`. What is gathered together is a block of the model (`TRANSFORMER_BASED_WRAP` with every numbered
    /// module), where DeepSpeed goes by modules and sizes.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config), one for all: stage 1, and offload.
    ///
    /// ```
    /// use accelerate_core::config::{DeepSpeedFacts, DeepSpeedPlugin, ShardingStrategy, ZeroStage};
    /// let plugin = DeepSpeedPlugin { zero_stage: Some(ZeroStage::Parameters), ..Default::default() };
    /// let facts = DeepSpeedFacts { batch_sizes: vec![Some(8)], ..Default::default() };
    /// let resolved = plugin.resolve(&plugin.config(&|_| Ok(String::new()))?, &facts)?;
    /// assert_eq!(resolved.fully_sharded_plugin()?.sharding_strategy, ShardingStrategy::FullShard);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn fully_sharded_plugin(&self) -> Result<FullyShardedDataParallelPlugin> {
        let mut items = Vec::new();
        let strategy = sharding_strategy(self.zero_stage);
        if strategy.is_none() {
            items.push(Unavailable {
                key: "zero_optimization.stage",
                found: self.zero_stage.to_string(),
                instead: "choose stage 2, which keeps gradients in parts too, or 0",
            });
        }
        for (key, target) in [
            ("zero_optimization.offload_optimizer.device", &self.offload_optimizer),
            ("zero_optimization.offload_param.device", &self.offload_param),
        ] {
            if let Some(target) = target {
                let instead = "write \"none\"; what is in parts stays on the device";
                items.push(Unavailable { key, found: target.to_string(), instead });
            }
        }
        let Some(sharding_strategy) = strategy.filter(|_| items.is_empty()) else {
            return Err(DeepSpeedErrorKind::Unavailable { items }.into());
        };
        let auto_wrap_policy = match sharding_strategy {
            ShardingStrategy::NoShard => AutoWrapPolicy::NoWrap,
            _ => AutoWrapPolicy::TransformerBasedWrap,
        };
        Ok(FullyShardedDataParallelPlugin { sharding_strategy, auto_wrap_policy, ..Default::default() })
    }
}
