//! The device's memory: where it ends, and who has it.

use accelerate::nn::{Linear, ModuleFn, ParamStore};
use accelerate::optim::AdamW;
use accelerate::tch::{Kind, Tensor};
use accelerate::{
    Accelerator, FullyShardedDataParallelPlugin, MixedPrecision, OffloadTarget, ShardingStrategy, clear_device_cache,
    find_executable_batch_size,
};
use anyhow::{Result, bail, ensure};
use torch_ext::device::{device_memory, reset_peak_device_memory};
use torch_ext::stream::synchronize;

use super::sharding::{MAX_NORM, plugin};
use super::streams::engines;
use crate::check::{Context, Found};
use crate::models::train_around;

const MIB: i64 = 1 << 20;
/// 0.8 GB of parameters, beside which workspaces of libraries (32 MiB) and activations of four rows are little.
const NUM_LAYERS: usize = 12;
const WIDTH: i64 = 4096;

/// Rows are so long that 100 of them do not fit together and 60 do.
pub(crate) fn batch_size(context: &Context<'_>) -> Result<Found> {
    if !context.is_cuda() {
        return Found::not_here("a machine whose memory is used up ends programs");
    }
    let row = device_memory(context.device)?.free_bytes / 80;
    let mut tried = Vec::new();
    let accelerator = context.accelerator()?;
    let mut executable = find_executable_batch_size().starting_batch_size(100);
    let batch_size = executable.run_on(&accelerator, |accelerator, batch_size| {
        tried.push(batch_size);
        // In pieces, so that what a failed try has taken must be given back for the next one to fit.
        let pieces = (0..batch_size).map(|_| Tensor::f_zeros([row], (Kind::Uint8, accelerator.device())));
        let pieces = pieces.collect::<Result<Vec<Tensor>, _>>()?;
        Ok(pieces.len())
    })?;
    ensure!(tried.len() > 1 && tried.first() == Some(&100), "nothing was too large: {tried:?}");
    // 100, 90, 81, 72: the fourth is the first that is below 80.
    context.close("the batch size that fits", batch_size as f64, 72.0, 8.0)?;
    Found::figure(format!("{batch_size} after {tried:?}, rows of {} MiB", row / MIB))
}

pub(crate) fn figures(context: &Context<'_>) -> Result<Found> {
    if !context.is_cuda() {
        clear_device_cache()?;
        return Found::not_here("libtorch keeps no memory of the CPU for later");
    }
    let before = device_memory(context.device)?;
    reset_peak_device_memory(context.device)?;
    let tensor = Tensor::f_zeros([256 * MIB], (Kind::Uint8, context.device))?;
    let with = device_memory(context.device)?;
    let allocated = (with.allocated_bytes - before.allocated_bytes) as f64 / MIB as f64;
    context.close("MiB of a tensor of 256 MiB", allocated, 256.0, 2.0)?;
    drop(tensor);
    let after = device_memory(context.device)?;
    ensure!(after.allocated_bytes < with.allocated_bytes, "a tensor that is gone still counts");
    ensure!(after.peak_allocated_bytes >= with.allocated_bytes, "the peak is below what there was");
    ensure!(after.reserved_bytes >= with.reserved_bytes, "memory went back before it was asked for");
    clear_device_cache()?;
    let cleared = device_memory(context.device)?;
    let given_back = (after.reserved_bytes - cleared.reserved_bytes) as f64 / MIB as f64;
    context.close("MiB that empty_cache gives back", given_back, 256.0, 16.0)?;
    Found::figure(format!("256 MiB taken and given back, {} GiB in all", cleared.total_bytes / MIB / 1024))
}

/// The peak of three steps, and what the plan of the model had said; both in MiB.
fn peak_and_plan(accelerator: &Accelerator) -> Result<(f64, f64)> {
    let store = ParamStore::new(accelerator.device());
    let layer = |index: usize| Linear::new(store.root() / "layers" / index, WIDTH, WIDTH, Default::default());
    let layers = (0..NUM_LAYERS).map(layer).collect::<accelerate::Result<Vec<_>>>()?;
    let optimizer = AdamW::new(&store, 1e-4)?;
    let model = ModuleFn::new(&store, move |x: &Tensor| {
        layers.iter().try_fold(x.shallow_clone(), |x, layer| Ok(layer.forward(&x)?.f_relu()?))
    });
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let plan = accelerator.plan();
    let planned = plan.first().map_or(0, |plan| plan.bytes_per_rank().peak().1);
    reset_peak_device_memory(accelerator.device())?;
    for _ in 0..3 {
        let loss = model.forward(&Tensor::f_ones([4, WIDTH], (Kind::Float, accelerator.device()))?)?;
        accelerator.backward(&loss.f_mean(Kind::Float)?)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
    }
    let peak = device_memory(accelerator.device())?.peak_allocated_bytes;
    Ok((peak as f64 / MIB as f64, planned as f64 / MIB as f64))
}

/// A plan that is off by a part of its parameters, gradients or state is off by an eighth at least. What it leaves out, activations and
/// the blocks of the allocator, was 2 % on an H100 and an H200.
pub(crate) fn plan(context: &Context<'_>) -> Result<Found> {
    if !context.is_cuda() {
        return Found::not_here("only a device's allocator counts what tensors take");
    }
    let mut figures = Vec::new();
    let mut lowest = f64::INFINITY;
    for (name, builder) in
        [("plain", context.builder()), ("sharded", context.builder().fsdp_plugin(plugin(ShardingStrategy::FullShard)))]
    {
        let (peak, planned) = peak_and_plan(&builder.build()?)?;
        figures.push(format!("{name} {peak:.0} MiB of {planned:.0} planned"));
        context.close(&format!("peak of the {name} model, as a part of its plan"), peak / planned, 1.0, 0.06)?;
        lowest = lowest.min(peak);
        clear_device_cache()?;
    }
    let plugin = FullyShardedDataParallelPlugin {
        offload_optimizer: Some(OffloadTarget::Cpu),
        ..plugin(ShardingStrategy::FullShard)
    };
    let (peak, planned) = peak_and_plan(&context.builder().fsdp_plugin(plugin).build()?)?;
    // A half of the plan is Adam's averages, of which some megabytes are on their way.
    let most = lowest - 0.4 * planned;
    ensure!(
        peak < most,
        "with Adam's state in the host's memory the peak is {peak:.0} MiB, and at most {most:.0} are wanted"
    );
    figures.push(format!("with state in the host's memory {peak:.0} MiB"));
    Found::figure(figures.join(", "))
}

/// Steps that hold on to what they made would end a long run. Of each engine and precision, with saves in between.
pub(crate) fn steady(context: &Context<'_>) -> Result<Found> {
    const NUM_STEPS: usize = 40;
    if !context.is_cuda() {
        return Found::not_here("only a device's allocator counts what tensors take");
    }
    let mut num_trainings = 0;
    for (name, plugin) in engines(context) {
        for precision in [MixedPrecision::No, MixedPrecision::Bf16, MixedPrecision::Fp16] {
            let builder = context.builder().mixed_precision(precision);
            let builder = plugin.iter().fold(builder, |builder, plugin| builder.fsdp_plugin(plugin.clone()));
            let accelerator = builder.build()?;
            let folder = context.folder.join(format!("steady_{num_trainings}"));
            let mut allocated = Vec::new();
            train_around(&accelerator, NUM_STEPS, Some(MAX_NORM), |step, body| {
                body()?;
                if step % 10 == 5 {
                    drop(accelerator.save_state(&*folder)?);
                    synchronize(context.device)?;
                    allocated.push(device_memory(context.device)?.allocated_bytes);
                }
                Ok(())
            })?;
            let what = format!("{name}, {precision}: bytes that are held, after steps 5, 15, 25 and 35: {allocated:?}");
            // Workspaces of libraries come with the first steps.
            let [_, second, .., last] = allocated[..] else { bail!("{what}") };
            context.close(&what, last as f64, second as f64, 0.0)?;
            num_trainings += 1;
        }
    }
    Found::figure(format!("{num_trainings} trainings hold the same after 15 and {} steps", NUM_STEPS - 5))
}
