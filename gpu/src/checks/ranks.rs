//! Several processes: two on one device, connected by Gloo, for NCCL refuses two ranks on one GPU; and one on each GPU, over NCCL.

use std::time::Duration;

use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{
    Accelerator, AcceleratorBuilder, DDPCommunicationHookType as Hook, DistributedDataParallelKwargs,
    InitProcessGroupKwargs, NotebookLauncherOptions, PadOptions, ReduceOp, ShardingStrategy, notebook_launcher,
};
use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::sharding::{MAX_NORM, NUM_STEPS, STRATEGIES, compare, plugin};
use crate::check::{Context, Found};
use crate::machine::probe_of;
use crate::models::{Trained, train};
use torch_ext::stream::Stream;

/// So many processes, on this machine.
pub(super) fn processes(num_processes: usize) -> NotebookLauncherOptions {
    NotebookLauncherOptions { num_processes: Some(num_processes), ..Default::default() }
}

/// Where ranks compute, and by what they are connected.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Place {
    is_cuda: bool,
    /// NCCL needs a GPU for each rank.
    over_nccl: bool,
}

impl Place {
    /// All ranks on the device of the check.
    pub(super) fn of(context: &Context<'_>) -> Self {
        Self { is_cuda: context.is_cuda(), over_nccl: false }
    }

    pub(super) const CPU: Self = Self { is_cuda: false, over_nccl: false };

    pub(super) fn builder(self, timeout: u64) -> AcceleratorBuilder {
        let kwargs = InitProcessGroupKwargs {
            backend: Some(if self.over_nccl { "nccl" } else { "gloo" }.to_owned()),
            timeout: Some(Duration::from_secs(timeout)),
            ..Default::default()
        };
        Accelerator::builder().cpu(!self.is_cuda).kwargs_handler(kwargs)
    }
}

/// The collectives of an accelerator, with tensors of its device; says where that was, and what came of gathering each dtype.
pub(crate) fn collectives_rank(place: Place) -> Result<(String, Vec<i64>)> {
    let accelerator = place.builder(40).build()?;
    let (rank, world_size) = (accelerator.process_index() as i64, accelerator.num_processes() as i64);
    let device = accelerator.device();
    let numbers = |tensor: &Tensor| Ok::<_, anyhow::Error>(Vec::<i64>::try_from(tensor.f_to_device(Device::Cpu)?)?);
    let sums: Vec<i64> = (0..world_size).map(|place| (0..world_size).map(|rank| 1 + rank + place).sum()).collect();
    let mut gathered = Vec::new();
    for kind in DTYPES {
        let own = Tensor::f_from_slice(&numbers_of(rank, world_size))?.f_to_device(device)?.f_to_kind(kind)?;
        let whole = |tensor: Tensor| numbers(&tensor.f_to_kind(Kind::Int64)?);
        gathered.extend(whole(accelerator.gather(&own)?)?);
        ensure!(whole(accelerator.broadcast(&own, 1)?)? == numbers_of(1, world_size), "broadcast of {kind:?}");
        ensure!(whole(accelerator.reduce(&own, ReduceOp::Sum)?)? == sums, "reduce of {kind:?}");
        let one = Tensor::f_full([1 + rank], rank + 5, (Kind::Int64, device))?.f_to_kind(kind)?;
        let padded = accelerator.pad_across_processes(&one, PadOptions::default())?;
        ensure!(padded.size() == [world_size] && padded.device() == device, "padding of {kind:?}: {padded:?}");
        let scattered = accelerator.group().reduce_scatter_tensor(&own, ReduceOp::Sum)?;
        ensure!(whole(scattered)? == [sums[rank as usize]], "reduce_scatter_tensor of {kind:?}");
    }
    ensure!(accelerator.gather_object(&[rank])? == (0..world_size).collect::<Vec<_>>(), "gather_object");
    accelerator.wait_for_everyone()?;
    Ok((format!("{device:?}"), gathered))
}

const DTYPES: [Kind; 5] = [Kind::Int64, Kind::Float, Kind::Double, Kind::Int, Kind::Uint8];

/// What a rank gives: small enough that the sum of eight ranks is a byte.
fn numbers_of(rank: i64, world_size: i64) -> Vec<i64> {
    (0..world_size).map(|place| 1 + rank + place).collect()
}

/// Compares what all ranks have gathered; returns where they were.
fn compare_gathered(context: &Context<'_>, ranks: Vec<(String, Vec<i64>)>, world_size: usize) -> Result<Vec<String>> {
    let of_rank = |rank| numbers_of(rank, world_size as i64);
    let wanted: Vec<f64> = (0..world_size as i64).flat_map(of_rank).map(|number| number as f64).collect();
    let wanted = wanted.repeat(DTYPES.len());
    ensure!(ranks.len() == world_size, "{} ranks and not {world_size}", ranks.len());
    for (rank, (_, gathered)) in ranks.iter().enumerate() {
        let gathered: Vec<f64> = gathered.iter().map(|number| *number as f64).collect();
        context.all_close(&format!("rank {rank}: gathered number"), &gathered, &wanted, 0.0)?;
    }
    Ok(ranks.into_iter().map(|(device, _)| device).collect())
}

/// Rank 1 leaves out a call; what rank 0 says of it.
pub(crate) fn absent_in_the_middle(place: Place) -> Result<String> {
    let accelerator = place.builder(5).build()?;
    let tensor = Tensor::f_ones([3], (Kind::Float, accelerator.device()))?;
    accelerator.group().all_reduce(&tensor, ReduceOp::Sum)?;
    if accelerator.process_index() == 1 {
        return Ok(String::new());
    }
    let error = accelerator.group().all_reduce(&tensor, ReduceOp::Sum).err().context("rank 0 reduced alone")?;
    Ok(error.to_string())
}

pub(crate) fn two_ranks(context: &Context<'_>) -> Result<Found> {
    let place = Place::of(context);
    let ranks = notebook_launcher(context.workers, collectives_rank, place, &processes(2))?;
    let devices = compare_gathered(context, ranks, 2)?;
    let said = notebook_launcher(context.workers, absent_in_the_middle, place, &processes(2))?.swap_remove(0);
    for words in ["all_reduce", "[3] Float", "rank 1"] {
        ensure!(said.contains(words), "rank 0 does not say {words:?}: {said}");
    }
    Found::figure(format!("on {}, 5 dtypes", devices.join(" and ")))
}

/// How several processes are to train.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Training {
    place: Place,
    hook: Option<Hook>,
    strategy: Option<ShardingStrategy>,
    max_norm: Option<f64>,
    /// On another stream than the default one.
    aside: bool,
}

/// What a rank sends back of a [`Trained`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Sent {
    losses: Vec<f64>,
    norms: Vec<f64>,
    parameters: Vec<(String, Vec<i64>, Vec<f32>)>,
    share: f64,
}

pub(crate) fn trained_rank(training: Training) -> Result<Sent> {
    let mut builder = training.place.builder(40);
    if let Some(strategy) = training.strategy {
        builder = builder.fsdp_plugin(plugin(strategy));
    }
    if let Some(hook) = training.hook {
        // The least that PowerSGD may begin with: two steps of plain averages.
        let compresses = matches!(hook, Hook::PowerSgd | Hook::BatchedPowerSgd);
        let options = compresses.then(|| [("start_powerSGD_iter".to_owned(), json!(2))].into());
        builder = builder.kwargs_handler(DistributedDataParallelKwargs {
            comm_hook: Some(hook.into()),
            comm_state_option: options,
            ..Default::default()
        });
    }
    let accelerator = builder.build()?;
    let device = accelerator.device();
    let stream = if training.aside { Stream::from_pool(device)? } else { Stream::current(device)? };
    let Trained { losses, norms, parameters, share, .. } =
        stream.run(|| train(&accelerator, NUM_STEPS, training.max_norm))??;
    let sent = |(name, tensor): (String, Tensor)| {
        let values = Vec::<f32>::try_from(tensor.f_reshape([-1])?)?;
        Ok((name, tensor.size(), values))
    };
    let parameters = parameters.into_iter().map(sent).collect::<Result<_>>()?;
    Ok(Sent { losses, norms, parameters, share })
}

/// Losses are the means of all ranks' parts of the rows; of what ranks hold it is the largest one.
fn trained_by(context: &Context<'_>, world_size: usize, training: &Training) -> Result<Trained> {
    let ranks = notebook_launcher(context.workers, trained_rank, training.clone(), &processes(world_size))?;
    ensure!(ranks.len() == world_size, "{} results and not {world_size}", ranks.len());
    let mean = |step: usize| ranks.iter().map(|rank| rank.losses[step]).sum::<f64>() / world_size as f64;
    let losses = (0..NUM_STEPS).map(mean).collect();
    let share = ranks.iter().map(|rank| rank.share).fold(0.0, f64::max);
    let mut ranks = ranks.into_iter();
    let first = ranks.next().context("no rank")?;
    for (rank, other) in ranks.enumerate() {
        ensure!(first.norms == other.norms, "{training:?}: the norms of ranks 0 and {} differ", rank + 1);
        ensure!(
            first.parameters == other.parameters,
            "{training:?}: the parameters of ranks 0 and {} differ",
            rank + 1
        );
    }
    let tensor = |(name, shape, values): (String, Vec<i64>, Vec<f32>)| {
        Ok((name, Tensor::f_from_slice(&values)?.f_reshape(shape.as_slice())?))
    };
    let parameters = first.parameters.into_iter().map(tensor).collect::<Result<_>>()?;
    Ok(Trained { losses, norms: first.norms, parameters, num_units: 0, share })
}

/// Each hook, and how far a loss of 6 may be from that of the same hook on the CPU. The random matrices of PowerSGD are made there for all
/// devices, so that rounding is all that differs: float16 keeps 11 bits of each gradient and bfloat16 8, and AdamW's step has the length
/// of its rate whatever a gradient's size. Gradients of noise as large as those of `batched_power_sgd` move a loss by 0.6.
const HOOKS: [(Hook, f64); 4] =
    [(Hook::Fp16, 1e-3), (Hook::Bf16, 5e-3), (Hook::PowerSgd, 1e-2), (Hook::BatchedPowerSgd, 5e-2)];

pub(crate) fn ddp_hooks(context: &Context<'_>) -> Result<Found> {
    // Before this process has a device of its own: a launcher refuses then.
    let training =
        Training { place: Place::of(context), hook: None, strategy: None, max_norm: Some(MAX_NORM), aside: false };
    let averaged = trained_by(context, 2, &training)?;
    let on_cpu = Place::CPU;
    let run = |hook, place| trained_by(context, 2, &Training { hook: Some(hook), place, ..training.clone() });
    let runs = HOOKS.map(|(hook, _)| Ok::<_, anyhow::Error>((run(hook, training.place)?, run(hook, on_cpu)?)));
    let plain = train(&context.accelerator()?, NUM_STEPS, Some(MAX_NORM))?;
    let mut figures = vec![format!("none {:.0e}", compare(context, "no hook", &averaged, &plain)?)];
    for ((hook, tolerance), run) in HOOKS.into_iter().zip(runs) {
        let (found, wanted) = run?;
        let far = context.all_close(&format!("{hook}: loss of step"), &found.losses, &wanted.losses, tolerance)?;
        ensure!(found.losses != averaged.losses, "{hook} has the losses without a hook, so it was not in use");
        ensure!(found.losses.last() < found.losses.first(), "{hook}: the loss did not fall");
        figures.push(format!("{hook} {far:.0e}"));
    }
    Found::figure(figures.join(", "))
}

/// One process on each GPU, over NCCL. Of so many GPUs as divide the rows of a step.
pub(crate) fn every_gpu(context: &Context<'_>) -> Result<Found> {
    let num_devices = if context.is_cuda() { probe_of(&std::env::current_exe()?, &[])?.num_devices } else { 0 };
    let Some(world_size) = [8, 4, 2].into_iter().find(|&world_size| world_size as i64 <= num_devices) else {
        return Found::not_here(format!("two GPUs are needed, and there are {num_devices}"));
    };
    by_all(context, Place { is_cuda: true, over_nccl: true }, world_size)
}

/// The collectives, who is missing, and training.
fn by_all(context: &Context<'_>, place: Place, world_size: usize) -> Result<Found> {
    let ranks = notebook_launcher(context.workers, collectives_rank, place, &processes(world_size))?;
    let devices = compare_gathered(context, ranks, world_size)?;
    let wanted: Vec<String> = (0..world_size).map(|rank| format!("Cuda({rank})")).collect();
    ensure!(!place.over_nccl || devices == wanted, "the ranks were on {devices:?}");
    let said = notebook_launcher(context.workers, absent_in_the_middle, place, &processes(world_size))?.swap_remove(0);
    let is_right = said.contains("all_reduce") && said.contains("rank 1 has not made this call");
    ensure!(is_right, "rank 0 does not say who is missing, or says more: {said}");
    let training = Training { place, hook: None, strategy: None, max_norm: Some(MAX_NORM), aside: false };
    let replicated = trained_by(context, world_size, &training)?;
    let sharded = Training { strategy: Some(ShardingStrategy::FullShard), ..training };
    let sharded = trained_by(context, world_size, &sharded)?;
    let plain = train(&context.accelerator()?, NUM_STEPS, Some(MAX_NORM))?;
    let replicated = compare(context, "DDP", &replicated, &plain)?;
    let sharded = compare(context, "FSDP", &sharded, &plain)?;
    Found::figure(format!("{world_size} ranks: DDP within {replicated:.1e}, FSDP within {sharded:.1e}"))
}

/// Two processes that NCCL is to connect on one GPU are told what to do.
pub(crate) fn shared_gpu(context: &Context<'_>) -> Result<Found> {
    let num_devices = if context.is_cuda() { probe_of(&std::env::current_exe()?, &[])?.num_devices } else { 0 };
    if num_devices != 1 {
        return Found::not_here(format!("one GPU is needed, and there are {num_devices}"));
    }
    let place = Place { is_cuda: true, over_nccl: true };
    let ended = notebook_launcher(context.workers, collectives_rank, place, &processes(2));
    let said = ended.err().context("two ranks of NCCL were connected on one GPU")?.to_string();
    for words in ["two processes use the same GPU", "--num_processes"] {
        ensure!(said.contains(words), "the ranks do not say {words:?}: {said}");
    }
    Found::figure("it is refused, with its cure")
}

/// What `every_gpu` does, by four processes over Gloo, so that this is seen where there are no GPUs.
pub(crate) fn four_ranks(context: &Context<'_>) -> Result<Found> {
    by_all(context, Place::of(context), 4)
}

pub(crate) fn fsdp_two(context: &Context<'_>) -> Result<Found> {
    let [first, second] = STRATEGIES;
    let runs = [(first, false), (second, false), (first, true)].map(|(strategy, aside)| {
        let training = Training {
            place: Place::of(context),
            hook: None,
            strategy: Some(strategy),
            max_norm: Some(MAX_NORM),
            aside,
        };
        Ok::<_, anyhow::Error>((strategy, trained_by(context, 2, &training)?))
    });
    let plain = train(&context.accelerator()?, NUM_STEPS, Some(MAX_NORM))?;
    let mut largest = 0f64;
    for run in runs {
        let (strategy, found) = run?;
        // Units are padded to a multiple of two elements.
        ensure!(found.share < 0.51, "{strategy}: a rank has {} of all elements between steps", found.share);
        largest = largest.max(compare(context, &strategy.to_string(), &found, &plain)?);
    }
    Found::figure(format!("2 strategies, one of them on another stream too, within {largest:.1e}"))
}
