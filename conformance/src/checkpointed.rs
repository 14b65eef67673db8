//! Training that saves a checkpoint at every step and goes on from the newest one: what `attack --checkpoints` kills.
//!
//! Every step prints its loss to the bit, so that runs can be compared with one that nobody disturbed. A run that is asked to
//! end does so after a save, and says which step was its last.

use accelerate::data::{DataLoader, Generator, TensorDataset};
use accelerate::nn::{Dropout, Linear, Module, ModuleFn, ParamStore};
use accelerate::optim::{AdamW, LinearWithWarmup};
use accelerate::tch::{Kind, Tensor};
use accelerate::{
    Accelerator, FullyShardedDataParallelPlugin, MixedPrecision, ProjectConfiguration, ReduceOp, ShardingStrategy,
    main_println, set_seed,
};
use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::Duration;

/// `ddp`, `async` (saved in the background), `fp16`, `full_shard`, `shard_grad_op`, `hybrid_shard`.
const FORM: &str = "CHECKPOINTED_FORM";
/// A pipe by which a test holds rank 0 in step 3, until it has opened and closed it.
const GATE: &str = "CHECKPOINTED_GATE";
/// A rank that never asks whether to stop, or `all`.
const SILENT: &str = "CHECKPOINTED_SILENT";
/// How many milliseconds each step takes besides.
const SLOWNESS: &str = "CHECKPOINTED_SLOWNESS";
const EPOCHS: usize = 3;
const ROWS: i64 = 52;
const WIDTH: i64 = 24;

/// How far the run is.
#[derive(Debug, Default, Deserialize, Serialize)]
struct Progress {
    epoch: usize,
    step: usize,
}

fn accelerator(folder: &Path) -> anyhow::Result<Accelerator> {
    let builder =
        Accelerator::builder().cpu(true).gradient_accumulation_steps(2).project_config(ProjectConfiguration {
            project_dir: Some(folder.to_owned()),
            automatic_checkpoint_naming: Some(true),
            total_limit: Some(2),
            ..Default::default()
        });
    let strategy = match std::env::var(FORM).unwrap_or_default().as_str() {
        "" | "ddp" | "async" => None,
        "fp16" => return Ok(builder.mixed_precision(MixedPrecision::Fp16).build()?),
        "full_shard" => Some(ShardingStrategy::FullShard),
        "shard_grad_op" => Some(ShardingStrategy::OptimizerStateAndGradients),
        "hybrid_shard" => Some(ShardingStrategy::HybridShard),
        other => bail!("the form {other} is not known"),
    };
    Ok(match strategy {
        None => builder.build()?,
        Some(strategy) => {
            let dp_shard_size = (strategy == ShardingStrategy::HybridShard).then_some(2);
            let plugin = FullyShardedDataParallelPlugin {
                sharding_strategy: Some(strategy),
                dp_shard_size,
                ..Default::default()
            };
            builder.fsdp_plugin(plugin).build()?
        }
    })
}

fn model(store: &ParamStore) -> accelerate::Result<impl Module<Input = Tensor, Output = Tensor> + use<>> {
    let hidden = Linear::new(store.root() / "hidden", WIDTH, WIDTH, Default::default())?;
    let head = Linear::new(store.root() / "head", WIDTH, 1, Default::default())?;
    let dropout = Dropout::new(store.root() / "dropout", 0.25)?;
    Ok(ModuleFn::new(store, move |x: &Tensor| head.forward(&dropout.forward(&hidden.forward(x)?.f_gelu("none")?)?)))
}

/// Rows in an order that a seed decides.
fn loader(accelerator: &Accelerator) -> accelerate::Result<DataLoader<(Tensor, Tensor)>> {
    let generator = Generator::new_cpu()?;
    generator.manual_seed(5)?;
    let inputs = Tensor::f_arange(ROWS * WIDTH, (Kind::Float, accelerator.device()))?.f_view([ROWS, WIDTH])?.f_sin()?;
    let targets = inputs.f_sum_dim_intlist(1, true, None)?;
    let loader = DataLoader::builder(TensorDataset::new((inputs, targets))?);
    loader.batch_size(3).shuffle(true).generator(generator).build()
}

/// Is the run to end? Saves in any case.
fn asked_and_saved(accelerator: &Accelerator, step: usize) -> anyhow::Result<bool> {
    if let Some(milliseconds) = std::env::var(SLOWNESS).ok().and_then(|text| text.parse().ok()) {
        std::thread::sleep(Duration::from_millis(milliseconds));
    }
    if let Some(gate) = std::env::var_os(GATE).filter(|_| step == 3 && accelerator.is_main_process()) {
        // Opening a pipe waits for the other end, and reading it for that end to be closed.
        std::fs::read(gate)?;
    }
    let rank = accelerator.process_index().to_string();
    let asks = std::env::var(SILENT).map_or(true, |silent| silent != "all" && silent != rank);
    let stops = asks && accelerator.should_stop()?;
    match std::env::var(FORM).as_deref() {
        Ok("async") => accelerator.save_state_async(None)?,
        _ => accelerator.save_state(None)?,
    };
    Ok(stops)
}

pub(crate) fn run(folder: Option<&Path>) -> anyhow::Result<()> {
    let folder = folder.context("the folder of the project has to be given")?;
    let accelerator = accelerator(folder)?;
    // Every rank drops other numbers.
    set_seed(3 + accelerator.process_index() as u64);
    let store = ParamStore::new(accelerator.device());
    let model = model(&store)?;
    let loader = loader(&accelerator)?;
    let optimizer = AdamW::new(&store, 1e-2)?;
    let scheduler = LinearWithWarmup::new(&optimizer, 3, accelerator.num_training_steps(&loader, EPOCHS));
    let (model, mut optimizer, loader, mut scheduler) = accelerator.prepare((model, optimizer, loader, scheduler))?;

    let progress = accelerator.register_for_checkpointing(Progress::default());
    if folder.join("checkpoints").exists() {
        match accelerator.load_state(None) {
            Ok(from) => main_println!(accelerator, "goes on from {}", from.display()),
            // Killed before the first one was complete.
            Err(error) if error.is_checkpoint() => main_println!(accelerator, "begins anew: {error}"),
            Err(error) => return Err(error.into()),
        }
    }
    println!("process {} is rank {}", std::process::id(), accelerator.process_index());
    while progress.lock().epoch < EPOCHS {
        for batch in loader.iter()? {
            let (inputs, targets) = batch?;
            let mut losses = Vec::new();
            accelerator.accumulate(&model, || {
                let loss = model.forward(&inputs)?.f_mse_loss(&targets, accelerate::tch::Reduction::Mean)?;
                losses.push(loss.f_detach()?);
                accelerator.backward(&loss)?;
                optimizer.step()?;
                scheduler.step()?;
                optimizer.zero_grad()
            })?;
            if !accelerator.sync_gradients() {
                continue;
            }
            let loss = losses[0].f_to_kind(Kind::Double)?;
            accelerator.group().all_reduce(&loss, ReduceOp::Sum)?;
            let step = {
                let mut progress = progress.lock();
                progress.step += 1;
                progress.step
            };
            let (loss, rate) = (loss.f_double_value(&[])?, scheduler.get_last_lr()[0]);
            main_println!(accelerator, "step {step} loss {:016x} rate {:016x}", loss.to_bits(), rate.to_bits());
            if asked_and_saved(&accelerator, step)? {
                accelerator.end_training()?;
                println!("rank {} stops after step {step}", accelerator.process_index());
                return Ok(());
            }
        }
        progress.lock().epoch += 1;
    }
    accelerator.end_training()?;
    main_println!(accelerator, "trained to the end");
    Ok(())
}
