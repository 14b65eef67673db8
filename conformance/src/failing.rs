//! Ranks that fail in the three ways that make Python programs hang.

use accelerate::nn::{Linear, ModuleFn, ParamStore};
use accelerate::optim::AdamW;
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{
    Accelerator, AutoWrapPolicy, FullyShardedDataParallelPlugin, InitProcessGroupKwargs, OffloadTarget, ReduceOp,
};
use anyhow::{Context, bail, ensure};
use rustix::process::{Resource, Rlimit, Signal, getpid, kill_process, setrlimit};
use std::path::Path;
use std::time::Duration;

fn accelerator(timeout: Duration) -> accelerate::Result<Accelerator> {
    let kwargs = InitProcessGroupKwargs { timeout: Some(timeout), ..Default::default() };
    Accelerator::builder().cpu(true).kwargs_handler(kwargs).build()
}

/// Rank 1 ends abruptly, with its sockets open, while the others wait for it.
pub(crate) fn dying_rank() -> anyhow::Result<()> {
    let accelerator = accelerator(Duration::from_secs(60))?;
    // Who dies while others still connect is missed by those in another way.
    accelerator.wait_for_everyone()?;
    if accelerator.process_index() == 1 {
        std::process::abort();
    }
    accelerator.group().all_reduce(&Tensor::from_slice(&[1f32]), ReduceOp::Sum)?;
    Ok(())
}

/// Rank 1 ends abruptly, or is stopped, while ranks are adding up large tensors, each of which goes in many blocks.
pub(crate) fn struck_in_sum(signal: Signal) -> anyhow::Result<()> {
    let accelerator = accelerator(Duration::from_secs(6))?;
    let tensor = Tensor::f_ones([10 << 20], (Kind::Float, Device::Cpu))?;
    accelerator.group().all_reduce(&tensor, ReduceOp::Mean)?;
    if accelerator.process_index() == 1 {
        let (begins, begun) = std::sync::mpsc::channel();
        std::thread::spawn(move || begun.recv().map(|()| kill_process(getpid(), signal)));
        begins.send(())?;
    }
    // The signal comes during one of them.
    (0..10_000).try_for_each(|_| accelerator.group().all_reduce(&tensor, ReduceOp::Mean))?;
    bail!("the signal has not come")
}

/// A rank fails by itself while the others wait for it, and takes its time to end after its connections have closed.
pub(crate) fn failing_rank(failing: usize) -> anyhow::Result<()> {
    let accelerator = accelerator(Duration::from_secs(60))?;
    accelerator.wait_for_everyone()?;
    if accelerator.process_index() == failing {
        drop(accelerator);
        std::thread::park_timeout(Duration::from_millis(400));
        bail!("this rank has failed by itself");
    }
    accelerator.group().all_reduce(&Tensor::from_slice(&[1f32]), ReduceOp::Sum)?;
    Ok(())
}

/// Only the main process sees that nothing can be saved, and all fail; the main process takes its time to end.
pub(crate) fn unwritable_folder() -> anyhow::Result<()> {
    let accelerator = accelerator(Duration::from_secs(60))?;
    let checked = accelerator.check_save_directory("/dev/null/folder");
    if accelerator.is_main_process() {
        std::thread::park_timeout(Duration::from_millis(400));
    }
    Ok(checked?)
}

/// Ranks end as soon as they have met, the store of the run among them.
pub(crate) fn leaving_at_once() -> anyhow::Result<()> {
    Accelerator::builder().cpu(true).build()?;
    Ok(())
}

/// A rank ends well before it makes its accelerator, by which the others wait to meet it.
pub(crate) fn leaving_before(leaving: usize) -> anyhow::Result<()> {
    if std::env::var("RANK")? == leaving.to_string() {
        return Ok(());
    }
    leaving_at_once()
}

/// Processes meet once: a second meeting is refused on each rank with the cure, and the cure works.
pub(crate) fn second_meeting() -> anyhow::Result<()> {
    let first = Accelerator::builder().cpu(true).build()?;
    let refused = Accelerator::builder().cpu(true).build().err().context("ranks have met twice")?.to_string();
    ensure!(refused.contains("build_from(&first)"), "{refused}");
    let second = Accelerator::builder().gradient_accumulation_steps(2).build_from(&first)?;
    ensure!(second.num_processes() == first.num_processes());
    Ok(second.wait_for_everyone()?)
}

/// Rank 1 lives, but waits elsewhere: for the end of its standard input.
pub(crate) fn absent_rank() -> anyhow::Result<()> {
    let accelerator = accelerator(Duration::from_secs(6))?;
    if accelerator.process_index() == 1 {
        std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
        return Ok(());
    }
    accelerator.group().all_reduce(&Tensor::from_slice(&[1f32]), ReduceOp::Sum)?;
    Ok(())
}

/// Rank 1 waits for all others, which live, but wait elsewhere: for the end of their standard input. Rank 0 makes the call
/// after that, with a deadline that is later than that of rank 1.
pub(crate) fn late_rank() -> anyhow::Result<()> {
    let accelerator = accelerator(Duration::from_secs(8))?;
    accelerator.wait_for_everyone()?;
    let rank = accelerator.process_index();
    if rank != 1 {
        std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    }
    if rank < 2 {
        accelerator.group().all_reduce(&Tensor::from_slice(&[1f32]), ReduceOp::Sum)?;
    }
    Ok(())
}

/// Rank 0, which keeps the store through which ranks find out about each other, is stopped: it has neither ended nor does it
/// answer.
pub(crate) fn stopped_rank_zero() -> anyhow::Result<()> {
    let accelerator = accelerator(Duration::from_secs(6))?;
    accelerator.wait_for_everyone()?;
    if accelerator.is_main_process() {
        kill_process(getpid(), Signal::STOP)?;
    }
    accelerator.group().all_reduce(&Tensor::from_slice(&[1f32]), ReduceOp::Sum)?;
    Ok(())
}

/// The classic mistake: a collective that only the main process reaches.
pub(crate) fn straying_rank() -> anyhow::Result<()> {
    let accelerator = accelerator(Duration::from_secs(6))?;
    if accelerator.is_main_process() {
        accelerator.group().all_gather(&Tensor::from_slice(&[1f32, 2.0, 3.0]))?;
    }
    accelerator.wait_for_everyone()?;
    Ok(())
}

/// Rank 1 ends abruptly in the middle of the forward pass of a sharded model; the others want its parts, which it sends or
/// which they read.
pub(crate) fn dying_rank_in_gather(direct_all_gather: bool) -> anyhow::Result<()> {
    let plugin = FullyShardedDataParallelPlugin {
        auto_wrap_policy: Some(AutoWrapPolicy::TransformerBasedWrap),
        direct_all_gather: Some(direct_all_gather),
        ..Default::default()
    };
    let accelerator = Accelerator::builder().cpu(true).fsdp_plugin(plugin).build()?;
    let store = ParamStore::new(accelerator.device());
    let layers = (0..3)
        .map(|layer| Linear::new(store.root() / "layers" / layer, 4, 4, Default::default()))
        .collect::<accelerate::Result<Vec<_>>>()?;
    let dies = accelerator.process_index() == 1;
    let model = accelerator.prepare(ModuleFn::new(&store, move |input: &Tensor| {
        let mut x = input.shallow_clone();
        for (index, layer) in layers.iter().enumerate() {
            if dies && index == 1 {
                std::process::abort();
            }
            x = layer.forward(&x)?;
        }
        Ok(x)
    }))?;
    // Parts may have been read before the rank was gone; its gradients cannot be there.
    let output = model.forward(&Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0]))?;
    accelerator.backward(&output.f_sum(None)?)?;
    Ok(())
}

/// Saves a model of ones, or of twos where there is one already. Each rank writes files of more than 1 KiB.
pub(crate) fn saved_sharded(folder: Option<&Path>) -> anyhow::Result<()> {
    let folder = folder.context("the folder to save to has to be given")?;
    let value = if folder.exists() { 2.0 } else { 1.0 };
    let plugin = FullyShardedDataParallelPlugin {
        auto_wrap_policy: Some(AutoWrapPolicy::TransformerBasedWrap),
        ..Default::default()
    };
    let accelerator = Accelerator::builder().cpu(true).fsdp_plugin(plugin).build()?;
    let store = ParamStore::new(accelerator.device());
    let layers = (0..3)
        .map(|layer| Linear::new(store.root() / "layers" / layer, 32, 32, Default::default()))
        .collect::<accelerate::Result<Vec<_>>>()?;
    for param in store.parameters() {
        param.copy_(&Tensor::from(value))?;
    }
    let model = accelerator.prepare(ModuleFn::new(&store, move |input: &Tensor| layers[0].forward(input)))?;
    accelerator.save_model(&model, folder, &Default::default())?;
    Ok(())
}

/// Saves a model of ones to `folder`, and trains it with state and parameters on the disk of that folder; between the first step
/// and the second, rank 1 loses the right to write to files. The signal that it would get has to be ignored.
pub(crate) fn full_disk(folder: Option<&Path>) -> anyhow::Result<()> {
    let folder = folder.context("the folder to save to has to be given")?;
    let scratch = Some(OffloadTarget::Nvme(folder.parent().context("it has to be in another folder")?.to_owned()));
    let plugin = FullyShardedDataParallelPlugin {
        auto_wrap_policy: Some(AutoWrapPolicy::TransformerBasedWrap),
        offload_optimizer: scratch.clone(),
        offload_params: scratch,
        ..Default::default()
    };
    let accelerator = Accelerator::builder().cpu(true).fsdp_plugin(plugin).build()?;
    let store = ParamStore::new(accelerator.device());
    let linear = Linear::new(store.root() / "layers" / 0, 32, 32, Default::default())?;
    for param in store.parameters() {
        param.copy_(&Tensor::from(1f32))?;
    }
    let model = ModuleFn::new(&store, move |input: &Tensor| linear.forward(input));
    let (model, mut optimizer) = accelerator.prepare((model, AdamW::new(&store, 0.1)?))?;
    accelerator.save_model(&model, folder, &Default::default())?;
    for step in 0..2 {
        if step == 1 && accelerator.process_index() == 1 {
            setrlimit(Resource::Fsize, Rlimit { current: Some(0), maximum: None })?;
        }
        let output = model.forward(&Tensor::ones([32], (Kind::Float, Device::Cpu)))?;
        accelerator.backward(&output.sum(None))?;
        if let Err(error) = optimizer.step() {
            // Nobody may go on with parameters and state of two steps.
            let next = optimizer.step().err().context("a step after one that failed was taken")?;
            return Err(error.context(format!("then {next}")).into());
        }
        optimizer.zero_grad()?;
    }
    bail!("the disk was full, and nobody has said so")
}
