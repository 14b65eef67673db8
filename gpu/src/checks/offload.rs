//! What is kept off the device between its uses.

use accelerate::{FullyShardedDataParallelPlugin, OffloadTarget, ShardingStrategy};
use anyhow::{Result, ensure};

use super::sharding::{MAX_NORM, NUM_STEPS, compare, plugin};
use crate::check::{Context, Found};
use crate::models::train;

/// That memory of the device is free then is seen by the check `plan`: here all state has room in the blocks on their way.
///
/// Every place for the optimizer's state, then for the parameters as well: to the bit on the CPU. On a GPU the optimizer's kernel is
/// another one where the state is in the host's memory, so the trainings are the same but for rounding.
pub(crate) fn no_bit(context: &Context<'_>) -> Result<Found> {
    let sharded = plugin(ShardingStrategy::FullShard);
    let kept = train(&context.builder().fsdp_plugin(sharded.clone()).build()?, NUM_STEPS, Some(MAX_NORM))?;
    let mut largest = 0f64;
    let mut num_places = 0;
    for target in [OffloadTarget::Cpu, OffloadTarget::Nvme(context.folder.to_owned())] {
        for with_parameters in [false, true] {
            let accelerator = context.builder().fsdp_plugin(FullyShardedDataParallelPlugin {
                offload_optimizer: Some(target.clone()),
                offload_params: with_parameters.then(|| target.clone()),
                ..sharded.clone()
            });
            let offloaded = train(&accelerator.build()?, NUM_STEPS, Some(MAX_NORM))?;
            let what = format!("to {:?}, parameters as well: {with_parameters}", target.device());
            largest = largest.max(compare(context, &what, &offloaded, &kept)?);
            let is_same = offloaded.losses == kept.losses;
            ensure!(is_same || context.is_cuda(), "{what}: {:?} and not {:?}", offloaded.losses, kept.losses);
            num_places += 1;
        }
    }
    Found::figure(format!("{num_places} places within {largest:.1e}"))
}
