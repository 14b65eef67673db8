//! How a resolved configuration is carried out: by the project's own sharding.

use super::{ResolvedDeepSpeedConfig, ZeroStage};
use crate::config::{AutoWrapPolicy, FloatType, FullyShardedSettings, MixedPrecisionPolicy, ShardingStrategy};

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
    /// let plugin = ZeroStage::Gradients.fully_sharded_settings();
    /// assert_eq!(plugin.auto_wrap_policy, AutoWrapPolicy::TransformerBasedWrap);
    /// ```
    pub fn fully_sharded_settings(self) -> FullyShardedSettings {
        let sharding_strategy = self.sharding_strategy();
        let auto_wrap_policy = match sharding_strategy {
            ShardingStrategy::NoShard => AutoWrapPolicy::NoWrap,
            _ => AutoWrapPolicy::TransformerBasedWrap,
        };
        FullyShardedSettings { sharding_strategy, auto_wrap_policy, ..Default::default() }
    }
}

impl ResolvedDeepSpeedConfig {
    /// The plugin that trains as the configuration asks: stage 3 is `FULL_SHARD`, stage 2 `OPTIMIZER_STATE_AND_GRADIENTS`,
    /// stage 1 `OPTIMIZER_STATE`, stage 0 `NO_SHARD` ([`ZeroStage::fully_sharded_settings`]). With `mics_shard_size` stage 3 is
    /// `HYBRID_SHARD` in groups of so many ranks. Offload and the type of gradients that travel are carried over.
    ///
    /// ```
    /// use accelerate_core::config::{
    ///     DeepSpeedFacts, DeepSpeedSettings, OffloadDevice, OffloadTarget, ShardingStrategy, ZeroStage,
    /// };
    /// let plugin = DeepSpeedSettings {
    ///     zero_stage: Some(ZeroStage::Parameters),
    ///     offload_optimizer_device: Some(OffloadDevice::Cpu),
    ///     ..Default::default()
    /// };
    /// let resolved = plugin.resolve(&plugin.config(&|_| Ok(String::new()))?, &DeepSpeedFacts::default())?;
    /// let sharded = resolved.fully_sharded_settings();
    /// assert_eq!(sharded.sharding_strategy, ShardingStrategy::FullShard);
    /// assert_eq!(sharded.optimizer_offload(), Some(&OffloadTarget::Cpu));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn fully_sharded_settings(&self) -> FullyShardedSettings {
        let of_stage = self.zero_stage.fully_sharded_settings();
        FullyShardedSettings {
            sharding_strategy: match self.mics_shard_size {
                Some(_) => ShardingStrategy::HybridShard,
                None => of_stage.sharding_strategy,
            },
            dp_shard_size: self.mics_shard_size,
            offload_optimizer: self.offload_optimizer.clone(),
            offload_params: self.offload_param.clone(),
            mixed_precision_policy: self
                .reduce_dtype
                .map(|dtype| MixedPrecisionPolicy { reduce_dtype: Some(dtype), ..Default::default() }),
            ..of_stage
        }
    }

    /// The type that `save_model` writes floating-point weights in, if not in what they are trained in.
    ///
    /// ```
    /// use accelerate_core::config::{DeepSpeedFacts, DeepSpeedSettings, FloatType};
    /// let json = r#"{"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": true},
    ///     "bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}"#;
    /// let plugin = DeepSpeedSettings { hf_ds_config: Some(json.parse()?), ..Default::default() };
    /// let resolved = plugin.resolve(&plugin.config(&|_| Ok(String::new()))?, &DeepSpeedFacts::default())?;
    /// assert_eq!(resolved.saved_dtype(), Some(FloatType::BFloat16));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn saved_dtype(&self) -> Option<FloatType> {
        self.mixed_precision.float_type().filter(|_| self.stage3_gather_16bit_weights_on_model_save)
    }
}
