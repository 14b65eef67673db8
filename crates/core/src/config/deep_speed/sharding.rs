//! How a resolved configuration is carried out: by the project's own sharding.

use super::{ResolvedDeepSpeedConfig, ZeroStage};
use crate::Result;
use crate::config::{AutoWrapPolicy, FullyShardedDataParallelPlugin, ShardingStrategy};
use crate::error::deep_speed::{DeepSpeedErrorKind, Unavailable};

impl ZeroStage {
    /// The strategy that keeps in parts what the stage does.
    ///
    /// ```
    /// use accelerate_core::config::{ShardingStrategy, ZeroStage};
    /// assert_eq!(ZeroStage::Parameters.sharding_strategy(), ShardingStrategy::FullShard);
    /// ```
    pub const fn sharding_strategy(self) -> ShardingStrategy {
        match self {
            Self::Disabled => ShardingStrategy::NoShard,
            Self::OptimizerStates => ShardingStrategy::OptimizerState,
            Self::Gradients => ShardingStrategy::OptimizerStateAndGradients,
            Self::Parameters => ShardingStrategy::FullShard,
        }
    }

    /// The plugin that shards as the stage does. What is gathered together is a block of the model
    /// (`TRANSFORMER_BASED_WRAP` with every numbered module), where DeepSpeed goes by modules and sizes.
    ///
    /// ```
    /// use accelerate_core::config::{AutoWrapPolicy, ZeroStage};
    /// let plugin = ZeroStage::Gradients.fully_sharded_plugin();
    /// assert_eq!(plugin.auto_wrap_policy, AutoWrapPolicy::TransformerBasedWrap);
    /// ```
    pub fn fully_sharded_plugin(self) -> FullyShardedDataParallelPlugin {
        let sharding_strategy = self.sharding_strategy();
        let auto_wrap_policy = match sharding_strategy {
            ShardingStrategy::NoShard => AutoWrapPolicy::NoWrap,
            _ => AutoWrapPolicy::TransformerBasedWrap,
        };
        FullyShardedDataParallelPlugin { sharding_strategy, auto_wrap_policy, ..Default::default() }
    }
}

impl ResolvedDeepSpeedConfig {
    /// The plugin that trains as the configuration asks: stage 3 is `FULL_SHARD`, stage 2 `OPTIMIZER_STATE_AND_GRADIENTS`,
    /// stage 1 `OPTIMIZER_STATE`, stage 0 `NO_SHARD` ([`ZeroStage::fully_sharded_plugin`]).
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config), one for all: offload.
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
        for (key, target) in [
            ("zero_optimization.offload_optimizer.device", &self.offload_optimizer),
            ("zero_optimization.offload_param.device", &self.offload_param),
        ] {
            if let Some(target) = target {
                let instead = "write \"none\"; what is in parts stays on the device";
                items.push(Unavailable { key, found: target.to_string(), instead });
            }
        }
        if !items.is_empty() {
            return Err(DeepSpeedErrorKind::Unavailable { items }.into());
        }
        Ok(self.zero_stage.fully_sharded_plugin())
    }
}
