//! Process groups themselves: NCCL on a GPU, Gloo on the CPU.

use std::time::{Duration, Instant};

use accelerate::tch::{Kind, Tensor};
use anyhow::{Context as _, Result, ensure};
use torch_ext::{GlooInterface, GlooOptions, NcclOptions, ProcessGroup, ReduceOp, Store};

use crate::check::{Context, Found};

/// What both backends move and add up.
const KINDS: [Kind; 8] =
    [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16, Kind::Int, Kind::Int64, Kind::Uint8, Kind::Int8];

const DEADLINE: Duration = Duration::from_secs(10);

fn group(
    context: &Context<'_>,
    store: &Store,
    rank: usize,
    world_size: usize,
    timeout: Duration,
) -> Result<ProcessGroup> {
    let address = GlooInterface::Address("127.0.0.1".to_owned());
    let gloo = GlooOptions { timeout, interface: address, ..GlooOptions::default() };
    if !context.is_cuda() {
        return Ok(ProcessGroup::gloo(store, rank, world_size, &gloo)?);
    }
    // As an accelerator does it: CPU tensors travel by Gloo in the same group. Not where nobody else is, for Gloo meets at once.
    let cpu =
        (world_size == 1).then(|| ProcessGroup::gloo(&store.prefix("gloo")?, rank, world_size, &gloo)).transpose()?;
    let options = NcclOptions { timeout, device_index: 0, cpu: cpu.as_ref() };
    Ok(ProcessGroup::nccl(&store.prefix("nccl")?, rank, world_size, &options)?)
}

/// What one rank does in place changes nothing: of those calls it is seen that they return, and of all others where their result is.
pub(crate) fn every_one(context: &Context<'_>) -> Result<Found> {
    let group = group(context, &Store::hash()?, 0, 1, DEADLINE)?;
    let mut num_calls = 0;
    for kind in KINDS {
        let ones = || Tensor::f_arange_start(1, 9, (Kind::Int64, context.device)).and_then(|t| t.f_to_kind(kind));
        let (sent, wanted) = (ones()?, ones()?);
        let empty = || ones().and_then(|t| t.f_zeros_like());
        for op in [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max] {
            group.all_reduce(&sent, op, None)?.wait(None)?;
            context.same(&format!("all_reduce {op:?} of {kind:?}"), &sent, &wanted)?;
        }
        group.broadcast(&sent, 0, None)?.wait(None)?;
        context.same(&format!("broadcast of {kind:?}"), &sent, &wanted)?;
        group.reduce(&sent, 0, ReduceOp::Sum, None)?.wait(None)?;
        context.same(&format!("reduce of {kind:?}"), &sent, &wanted)?;
        let outputs = [empty()?];
        group.all_gather(&outputs, &sent, None)?.wait(None)?;
        context.same(&format!("all_gather of {kind:?}"), &outputs[0], &wanted)?;
        let output = empty()?;
        group.all_gather_into_tensor(&output, &sent, None)?.wait(None)?;
        context.same(&format!("all_gather_into_tensor of {kind:?}"), &output, &wanted)?;
        let output = empty()?;
        group.reduce_scatter_tensor(&output, &sent, ReduceOp::Sum, None)?.wait(None)?;
        context.same(&format!("reduce_scatter_tensor of {kind:?}"), &output, &wanted)?;
        let output = empty()?;
        group.reduce_scatter(&output, &[sent.shallow_clone()], ReduceOp::Sum, None)?.wait(None)?;
        context.same(&format!("reduce_scatter of {kind:?}"), &output, &wanted)?;
        let outputs = [empty()?];
        group.gather(&outputs, &sent, 0, None)?.wait(None)?;
        context.same(&format!("gather of {kind:?}"), &outputs[0], &wanted)?;
        let output = empty()?;
        group.scatter(&output, &[sent.shallow_clone()], 0, None)?.wait(None)?;
        context.same(&format!("scatter of {kind:?}"), &output, &wanted)?;
        let output = empty()?;
        group.all_to_all_single(&output, &sent, &[], &[], None)?.wait(None)?;
        context.same(&format!("all_to_all_single of {kind:?}"), &output, &wanted)?;
        group.all_reduce_coalesced(&[sent.shallow_clone(), ones()?], ReduceOp::Sum, None)?.wait(None)?;
        context.same(&format!("all_reduce_coalesced of {kind:?}"), &sent, &wanted)?;
        let several = [sent.shallow_clone(), ones()?];
        group.broadcast_coalesced(&several, 64, 0)?;
        context.same(&format!("broadcast_coalesced of {kind:?}"), &several[1], &wanted)?;
        group.verify_params_across_processes(&several)?;
        num_calls += 16;
    }
    group.barrier(None)?.wait(None)?;
    if context.is_cuda() {
        let average = Tensor::f_ones([4], (Kind::Float, context.device))?;
        group.all_reduce(&average, ReduceOp::Avg, None)?.wait(None)?;
        context.near("all_reduce Avg", &average, &average.f_ones_like()?, 0.0)?;
        let on_cpu = Tensor::f_from_slice(&[3i64])?;
        group.all_reduce(&on_cpu, ReduceOp::Sum, None)?.wait(None)?;
        ensure!(on_cpu.f_int64_value(&[0])? == 3, "a CPU tensor did not travel in the group of a GPU");
    }
    Found::figure(format!("{num_calls} calls, {} dtypes", KINDS.len()))
}

/// This process is rank 1, which NCCL has wait for what rank 0 never says; over Gloo nobody can be connected with.
pub(crate) fn absent_rank(context: &Context<'_>) -> Result<Found> {
    let timeout = Duration::from_secs(2);
    let store = Store::hash()?;
    store.set_timeout(timeout)?;
    let started = Instant::now();
    let tensor = Tensor::f_ones([4], (Kind::Float, context.device))?;
    let outcome = group(context, &store, 1, 2, timeout)
        .and_then(|group| Ok(group.all_reduce(&tensor, ReduceOp::Sum, None)?.wait(None)?));
    let error = outcome.err().context("a collective without its other rank succeeded")?;
    let error = error.downcast::<torch_ext::Error>()?;
    let seconds = started.elapsed().as_secs_f64();
    ensure!(error.is_timeout() || error.is_connection(), "another error than one of time: {error}");
    context.close("seconds to the error", seconds, 0.0, 30.0)?;
    Found::figure(format!("an error after {seconds:.1} s for a deadline of 2 s"))
}

/// Work that nobody waits for any more, of groups that nobody has any more. On a GPU it comes behind products that take longer than
/// it takes to ask for it, so that there is some.
pub(crate) fn abort(context: &Context<'_>) -> Result<Found> {
    let large = Tensor::f_ones([1 << 22], (Kind::Float, context.device))?;
    let mut num_pending = 0;
    for _ in 0..3 {
        let group = group(context, &Store::hash()?, 0, 1, DEADLINE)?;
        // The first collective of a group connects it.
        group.all_reduce(&large, ReduceOp::Sum, None)?.wait(None)?;
        if context.is_cuda() {
            let busy = Tensor::f_ones([4096, 4096], (Kind::Float, context.device))?;
            for _ in 0..50 {
                let _ = busy.f_matmul(&busy)?;
            }
        }
        for _ in 0..8 {
            let work = group.all_reduce(&large, ReduceOp::Sum, None)?;
            num_pending += usize::from(!work.is_completed()?);
        }
    }
    ensure!(num_pending > 0 || !context.is_cuda(), "all work was done before its group was dropped");
    let group = group(context, &Store::hash()?, 0, 1, DEADLINE)?;
    group.all_reduce(&large, ReduceOp::Sum, None)?.wait(None)?;
    context.near("what the last group leaves", &large, &large.f_ones_like()?, 0.0)?;
    Found::figure(format!("3 groups dropped, with {num_pending} calls pending"))
}
