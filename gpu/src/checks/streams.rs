//! Everything on other streams than the default one. Memory that is used again is protected by the order of one stream; where work
//! goes from one stream to another, the second waits for the first, and nothing else has to be done.

use accelerate::data::{DataLoader, TensorDataset};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{
    Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin, OffloadTarget, ShardingStrategy,
};
use anyhow::{Result, ensure};
use torch_ext::stream::Stream;

use super::sharding::{MAX_NORM, NUM_STEPS, compare, plugin};
use crate::check::{Context, Found};
use crate::models::{Trained, train, train_around};

/// Work that keeps the current stream behind the host, so that who does not wait for it is too early.
fn keep_busy(context: &Context<'_>) -> Result<()> {
    if context.is_cuda() {
        let busy = Tensor::f_ones([2048, 2048], (Kind::Float, context.device))?;
        for _ in 0..20 {
            let _ = busy.f_matmul(&busy)?;
        }
    }
    Ok(())
}

/// Every step on another of two streams, which waits for the one before.
fn alternating(context: &Context<'_>, accelerator: &Accelerator) -> Result<Trained> {
    let start = Stream::current(context.device)?;
    let streams = [Stream::from_pool(context.device)?, Stream::from_pool(context.device)?];
    let trained = train_around(accelerator, NUM_STEPS, Some(MAX_NORM), |step, body| {
        let before = if step == 0 { start } else { streams[(step + 1) % 2] };
        let own = streams[step % 2];
        own.wait_for(&before)?;
        own.run(|| {
            keep_busy(context).map_err(|error| accelerate::Error::other(error.to_string()))?;
            body()
        })?
    });
    start.wait_for(&streams[(NUM_STEPS + 1) % 2])?;
    Ok(trained?)
}

/// How parameters and state are kept, and by what that is asked for.
pub(super) fn engines(context: &Context<'_>) -> Vec<(&'static str, Option<FullyShardedDataParallelPlugin>)> {
    let sharded = plugin(ShardingStrategy::FullShard);
    let offloaded = |target: OffloadTarget| FullyShardedDataParallelPlugin {
        offload_optimizer: Some(target.clone()),
        offload_params: Some(target),
        ..sharded.clone()
    };
    vec![
        ("plain", None),
        ("offloaded to memory", Some(offloaded(OffloadTarget::Cpu))),
        ("offloaded to files", Some(offloaded(OffloadTarget::Nvme(context.folder.to_owned())))),
        ("sharded", Some(sharded)),
    ]
}

pub(crate) fn other_than_the_default(context: &Context<'_>) -> Result<Found> {
    let wanted = train(&context.accelerator()?, NUM_STEPS, Some(MAX_NORM))?;
    let mut largest = 0f64;
    for (name, plugin) in engines(context) {
        let new = || match plugin.clone() {
            Some(plugin) => context.builder().fsdp_plugin(plugin).build(),
            None => context.builder().build(),
        };
        let side = Stream::from_pool(context.device)?;
        let current = Stream::current(context.device)?;
        side.wait_for(&current)?;
        let aside = side.run(|| train(&new()?, NUM_STEPS, Some(MAX_NORM)))??;
        current.wait_for(&side)?;
        largest = largest.max(compare(context, &format!("{name}, one stream aside"), &aside, &wanted)?);
        let accelerator = new()?;
        let turns = alternating(context, &accelerator)?;
        largest = largest.max(compare(context, &format!("{name}, two streams in turns"), &turns, &wanted)?);
        ensure!(Stream::current(context.device)? == current, "{name}: another stream is the current one afterwards");
    }
    let num_batches = batches(context)?;
    Found::figure(format!("4 engines within {largest:.1e}, {num_batches} batches"))
}

/// Batches from pinned memory, copied by a stream that is behind and read by it.
fn batches(context: &Context<'_>) -> Result<usize> {
    const NUM_ROWS: i64 = 64;
    let numbers = Tensor::f_arange(NUM_ROWS, (Kind::Float, Device::Cpu))?;
    let rows = numbers.f_view([NUM_ROWS, 1])?.f_expand([NUM_ROWS, 1 << 14], false)?.f_contiguous()?;
    let side = Stream::from_pool(context.device)?;
    let mut found = Vec::new();
    for num_workers in [0, 2] {
        let configuration = DataLoaderConfiguration { non_blocking: Some(true), ..Default::default() };
        let accelerator = context.builder().dataloader_config(configuration).build()?;
        let dataset = TensorDataset::new(rows.shallow_clone())?;
        let loader = DataLoader::builder(dataset).batch_size(4).num_workers(num_workers).build()?;
        let loader = accelerator.prepare(loader)?;
        side.run(|| {
            for batch in loader.iter()? {
                keep_busy(context)?;
                // Gone at once, so that its memory is the next one's while the stream has not come to it.
                found.push(batch?.f_amax([1], false)?);
            }
            Ok::<_, anyhow::Error>(())
        })??;
    }
    side.synchronize()?;
    let all = Tensor::f_cat(&found, 0)?;
    context.same(
        "the numbers of all batches",
        &all,
        &Tensor::f_cat(&[&numbers, &numbers], 0)?.f_to_device(all.device())?,
    )?;
    Ok(found.len())
}
