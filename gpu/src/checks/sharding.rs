//! Sharded models: what one rank does alone, and what a model of two ranks is compared with.

use accelerate::{AutoWrapPolicy, FullyShardedDataParallelPlugin, ShardingStrategy};
use anyhow::{Result, ensure};

use crate::check::{Context, Found};
use crate::models::{Trained, train};

pub(crate) const STRATEGIES: [ShardingStrategy; 2] = [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp];
pub(crate) const NUM_STEPS: usize = 6;
pub(crate) const MAX_NORM: f64 = 0.5;

/// Each block is a unit.
pub(crate) fn plugin(sharding_strategy: ShardingStrategy) -> FullyShardedDataParallelPlugin {
    FullyShardedDataParallelPlugin {
        sharding_strategy: Some(sharding_strategy),
        auto_wrap_policy: Some(AutoWrapPolicy::TransformerBasedWrap),
        ..Default::default()
    }
}

/// Fails unless both trainings are the same but for the order of sums: losses of 5 to 6 in 6 steps of AdamW, whose first
/// steps divide rounding by rounding where a gradient is all but zero. A unit that came late or twice shows at 1e-2.
pub(crate) fn compare(context: &Context<'_>, what: &str, found: &Trained, wanted: &Trained) -> Result<f64> {
    let losses = context.all_close(&format!("{what}: loss of step"), &found.losses, &wanted.losses, 1e-4)?;
    // Norms are 0.7 to 6, and a part of the losses' difference comes into them.
    let norms = context.all_close(&format!("{what}: norm of step"), &found.norms, &wanted.norms, 2e-3)?;
    let mut largest = losses.max(norms);
    for ((name, found), (_, wanted)) in found.parameters.iter().zip(&wanted.parameters) {
        largest = largest.max(context.near(&format!("{what}: {name}"), found, wanted, 5e-4)?);
    }
    Ok(largest)
}

pub(crate) fn one(context: &Context<'_>) -> Result<Found> {
    let plain = train(&context.accelerator()?, NUM_STEPS, Some(MAX_NORM))?;
    let mut largest = 0f64;
    for strategy in STRATEGIES {
        let accelerator = context.builder().fsdp_plugin(plugin(strategy)).build()?;
        let sharded = train(&accelerator, NUM_STEPS, Some(MAX_NORM))?;
        ensure!(sharded.num_units == 4, "{strategy}: {} units, not three blocks and the rest", sharded.num_units);
        largest = largest.max(compare(context, &strategy.to_string(), &sharded, &plain)?);
    }
    Found::figure(format!("2 strategies within {largest:.1e}"))
}
