//! How a resolved configuration is carried out: by the project's own sharding.

use super::{ResolvedDeepSpeedConfig, ZeroStage};
use crate::config::{AutoWrapPolicy, FullyShardedDataParallelPlugin, ShardingStrategy};

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
    /// stage 1 `OPTIMIZER_STATE`, stage 0 `NO_SHARD` ([`ZeroStage::fully_sharded_plugin`]). With `mics_shard_size` stage 3 is
    /// `HYBRID_SHARD` in groups of so many ranks. Offload is carried over.
    ///
    /// ```
    /// use accelerate_core::config::{
    ///     DeepSpeedFacts, DeepSpeedPlugin, OffloadDevice, OffloadTarget, ShardingStrategy, ZeroStage,
    /// };
    /// let plugin = DeepSpeedPlugin {
    ///     zero_stage: Some(ZeroStage::Parameters),
    ///     offload_optimizer_device: Some(OffloadDevice::Cpu),
    ///     ..Default::default()
    /// };
    /// let facts = DeepSpeedFacts { batch_sizes: vec![Some(8)], ..Default::default() };
    /// let resolved = plugin.resolve(&plugin.config(&|_| Ok(String::new()))?, &facts)?;
    /// let sharded = resolved.fully_sharded_plugin();
    /// assert_eq!(sharded.sharding_strategy, ShardingStrategy::FullShard);
    /// assert_eq!(sharded.optimizer_offload(), Some(&OffloadTarget::Cpu));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn fully_sharded_plugin(&self) -> FullyShardedDataParallelPlugin {
        let of_stage = self.zero_stage.fully_sharded_plugin();
        FullyShardedDataParallelPlugin {
            sharding_strategy: match self.mics_shard_size {
                Some(_) => ShardingStrategy::HybridShard,
                None => of_stage.sharding_strategy,
            },
            dp_shard_size: self.mics_shard_size,
            offload_optimizer: self.offload_optimizer.clone(),
            offload_params: self.offload_param.clone(),
            ..of_stage
        }
    }
}
