//! Two processes on one device, connected by Gloo: NCCL refuses two ranks on one GPU.

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

pub(super) const OPTIONS: NotebookLauncherOptions = NotebookLauncherOptions {
    num_processes: Some(2),
    mixed_precision: None,
    use_port: None,
    master_addr: None,
    node_rank: 0,
    num_nodes: 1,
    rdzv_backend: None,
    rdzv_endpoint: None,
    rdzv_conf: None,
    rdzv_id: None,
    max_restarts: 0,
    monitor_interval: None,
    log_line_prefix_template: None,
};

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
    let (rank, device) = (accelerator.process_index() as i64, accelerator.device());
    let numbers = |tensor: &Tensor| Ok::<_, anyhow::Error>(Vec::<i64>::try_from(tensor.f_to_device(Device::Cpu)?)?);
    let mut gathered = Vec::new();
    for kind in DTYPES {
        let own = Tensor::f_from_slice(&[rank + 1, 10 * (rank + 1)])?.f_to_device(device)?.f_to_kind(kind)?;
        let whole = |tensor: Tensor| numbers(&tensor.f_to_kind(Kind::Int64)?);
        gathered.extend(whole(accelerator.gather(&own)?)?);
        ensure!(whole(accelerator.broadcast(&own, 1)?)? == [2, 20], "broadcast of {kind:?}");
        ensure!(whole(accelerator.reduce(&own, ReduceOp::Sum)?)? == [3, 30], "reduce of {kind:?}");
        let one = Tensor::f_full([1 + rank], rank + 5, (Kind::Int64, device))?.f_to_kind(kind)?;
        let padded = accelerator.pad_across_processes(&one, PadOptions::default())?;
        ensure!(padded.size() == [2] && padded.device() == device, "padding of {kind:?}: {padded:?}");
        let scattered = accelerator.group().reduce_scatter_tensor(&own, ReduceOp::Sum)?;
        ensure!(whole(scattered)? == [[3], [30]][rank as usize], "reduce_scatter_tensor of {kind:?}");
    }
    ensure!(accelerator.gather_object(&[rank])? == [0, 1], "gather_object");
    accelerator.wait_for_everyone()?;
    Ok((format!("{device:?}"), gathered))
}

const DTYPES: [Kind; 5] = [Kind::Int64, Kind::Float, Kind::Double, Kind::Int, Kind::Uint8];

/// Compares what both ranks have gathered; returns where they were.
fn compare_gathered(context: &Context<'_>, ranks: Vec<(String, Vec<i64>)>) -> Result<Vec<String>> {
    let doubles = |numbers: &[i64]| numbers.iter().map(|number| *number as f64).collect::<Vec<_>>();
    let wanted = doubles(&[1, 10, 2, 20]).repeat(DTYPES.len());
    ensure!(ranks.len() == 2, "{} ranks and not two", ranks.len());
    for (rank, (_, gathered)) in ranks.iter().enumerate() {
        context.all_close(&format!("rank {rank}: gathered number"), &doubles(gathered), &wanted, 0.0)?;
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
    let ranks = notebook_launcher(context.workers, collectives_rank, Place::of(context), &OPTIONS)?;
    let devices = compare_gathered(context, ranks)?;
    let said = notebook_launcher(context.workers, absent_in_the_middle, Place::of(context), &OPTIONS)?.swap_remove(0);
    for words in ["all_reduce", "[3] Float", "rank 1"] {
        ensure!(said.contains(words), "rank 0 does not say {words:?}: {said}");
    }
    Found::figure(format!("on {}, 5 dtypes", devices.join(" and ")))
}

/// How two processes are to train.
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

/// Losses are the means of both ranks' halves of the rows; of what ranks hold it is the larger one.
fn trained_by_two(context: &Context<'_>, training: &Training) -> Result<Trained> {
    let [first, second]: [Sent; 2] = notebook_launcher(context.workers, trained_rank, training.clone(), &OPTIONS)?
        .try_into()
        .map_err(|_| anyhow::anyhow!("not two results"))?;
    ensure!(first.norms == second.norms, "{training:?}: the norms of the ranks differ");
    ensure!(first.parameters == second.parameters, "{training:?}: the parameters of the ranks differ");
    let losses = first.losses.iter().zip(&second.losses).map(|(a, b)| f64::midpoint(*a, *b)).collect();
    let tensor = |(name, shape, values): (String, Vec<i64>, Vec<f32>)| {
        Ok((name, Tensor::f_from_slice(&values)?.f_reshape(shape.as_slice())?))
    };
    Ok(Trained {
        losses,
        norms: first.norms,
        parameters: first.parameters.into_iter().map(tensor).collect::<Result<_>>()?,
        num_units: 0,
        share: first.share.max(second.share),
    })
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
    let averaged = trained_by_two(context, &training)?;
    let on_cpu = Place { is_cuda: false, ..training.place };
    let run = |hook, place| trained_by_two(context, &Training { hook: Some(hook), place, ..training.clone() });
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

/// The first two GPUs over NCCL, where there are so many.
pub(crate) fn two_gpus(context: &Context<'_>) -> Result<Found> {
    let num_devices = if context.is_cuda() { probe_of(&std::env::current_exe()?, &[])?.num_devices } else { 0 };
    if num_devices < 2 {
        return Found::not_here(format!("two GPUs are needed, and there are {num_devices}"));
    }
    let place = Place { is_cuda: true, over_nccl: true };
    let devices = compare_gathered(context, notebook_launcher(context.workers, collectives_rank, place, &OPTIONS)?)?;
    ensure!(devices == ["Cuda(0)", "Cuda(1)"], "the ranks were on {devices:?}");
    let said = notebook_launcher(context.workers, absent_in_the_middle, place, &OPTIONS)?.swap_remove(0);
    ensure!(said.contains("all_reduce") && said.contains("rank 1"), "rank 0 does not say who is missing: {said}");
    let training = Training { place, hook: None, strategy: None, max_norm: Some(MAX_NORM), aside: false };
    let replicated = trained_by_two(context, &training)?;
    let sharded = trained_by_two(context, &Training { strategy: Some(ShardingStrategy::FullShard), ..training })?;
    let plain = train(&context.accelerator()?, NUM_STEPS, Some(MAX_NORM))?;
    let replicated = compare(context, "DDP", &replicated, &plain)?;
    let sharded = compare(context, "FSDP", &sharded, &plain)?;
    Found::figure(format!("DDP within {replicated:.1e}, FSDP within {sharded:.1e}"))
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
        Ok::<_, anyhow::Error>((strategy, trained_by_two(context, &training)?))
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
