//! `test_sync.py`: where gradients differ between ranks, where they agree, and where optimizers step.

use crate::regression::{RegressionModel, ensure_close, mse, rank_batch, regression_data, regression_loader};
use accelerate::nn::Module;
use accelerate::optim::{AdamW, LambdaLr};
use accelerate::{Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin, main_println};
use anyhow::{Result, ensure};

pub(crate) fn run() -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).build()?;
    test_distributed_sync(&accelerator)?;
    test_trigger_sync(&accelerator)?;
    for split_batches in [false, true] {
        for sync_each_batch in [false, true] {
            test_gradient_accumulation(&accelerator, split_batches, sync_each_batch)?;
            test_with_opt_and_scheduler(&accelerator, split_batches)?;
        }
    }
    test_dataloader_break(&accelerator)?;
    main_println!(accelerator, "test_sync: all checks passed");
    Ok(())
}

/// Are this rank's gradients those of every rank?
fn gradients_agree(accelerator: &Accelerator, model: &RegressionModel) -> Result<bool> {
    let everywhere = accelerator.gather_object(&[model.gradients()?])?;
    Ok(everywhere.iter().all(|other| *other == everywhere[0]))
}

fn test_distributed_sync(accelerator: &Accelerator) -> Result<()> {
    let model = accelerator.prepare(RegressionModel::new(accelerator.device(), 0.5, 0.5)?)?;
    let alone = accelerator.num_processes() == 1;
    for step in 0..4 {
        let (x, y) = rank_batch(accelerator, step)?;
        let backward = || accelerator.backward(&mse(&model.forward(&x)?, &y)?);
        if step % 2 == 0 {
            accelerator.no_sync(&model, backward)?;
            ensure!(alone || !gradients_agree(accelerator, &model)?, "gradients were averaged under no_sync");
        } else {
            backward()?;
            ensure!(gradients_agree(accelerator, &model)?, "gradients differ after a synchronising step");
        }
    }
    Ok(())
}

fn test_trigger_sync(accelerator: &Accelerator) -> Result<()> {
    let model = accelerator.prepare(RegressionModel::new(accelerator.device(), 0.5, 0.5)?)?;
    let (x, y) = rank_batch(accelerator, 0)?;
    let loss = accelerator.no_sync(&model, || mse(&model.forward(&x)?, &y))?;
    accelerator.trigger_sync_in_backward(&model)?;
    accelerator.backward(&loss)?;
    ensure!(gradients_agree(accelerator, &model)?, "the triggered backward pass did not average");
    Ok(())
}

/// Windows of two micro-batches: gradients agree at their ends and at the end of the data, and are the mean over
/// the micro-batches that the window had.
fn test_gradient_accumulation(accelerator: &Accelerator, split_batches: bool, sync_each_batch: bool) -> Result<()> {
    let world_size = accelerator.num_processes();
    let plugin =
        GradientAccumulationPlugin { num_steps: Some(2), sync_each_batch: Some(sync_each_batch), ..Default::default() };
    let config = DataLoaderConfiguration { split_batches: Some(split_batches), ..Default::default() };
    let configured = Accelerator::builder()
        .gradient_accumulation_plugin(plugin)
        .dataloader_config(config)
        .build_from(accelerator)?;
    // Five micro-batches of 4 rows on every rank: the last window has one.
    let per_rank = 4;
    let total = (per_rank * world_size) as i64;
    let batch_size = if split_batches { per_rank * world_size } else { per_rank };
    let loader = configured.prepare(regression_loader(5 * total, batch_size, false)?)?;
    let model = configured.prepare(RegressionModel::new(configured.device(), 0.5, 0.5)?)?;
    let (x_all, y_all) = regression_data(5 * total)?;
    for (index, batch) in loader.iter()?.enumerate() {
        let (x, y) = batch?;
        configured.accumulate(&model, || configured.backward(&mse(&model.forward(&x)?, &y)?))?;
        let ends = index % 2 == 1 || index == 4;
        ensure!(configured.sync_gradients() == ends, "micro-batch {index}");
        let agree = gradients_agree(&configured, &model)?;
        ensure!(agree == (ends || sync_each_batch || world_size == 1), "micro-batch {index}: agree {agree}");
        if ends {
            let first = if index == 4 { 4 } else { index as i64 - 1 };
            let window = (index as i64 + 1 - first) * total;
            let reference = RegressionModel::new(configured.device(), 0.5, 0.5)?;
            let rows = |tensor: &accelerate::tch::Tensor| tensor.f_narrow(0, first * total, window);
            mse(&reference.forward(&rows(&x_all)?)?, &rows(&y_all)?)?.backward();
            ensure_close(model.gradients()?, reference.gradients()?, 1e-5, "gradients of a window")?;
            for param in model.params().parameters() {
                let _ = param.grad().map(|mut grad| grad.zero_());
            }
        }
    }
    Ok(())
}

/// The learning rate moves by one tick per process at every optimizer step, by one when batches are split.
fn test_with_opt_and_scheduler(accelerator: &Accelerator, split_batches: bool) -> Result<()> {
    let world_size = accelerator.num_processes();
    let config = DataLoaderConfiguration { split_batches: Some(split_batches), ..Default::default() };
    let configured =
        Accelerator::builder().gradient_accumulation_steps(2).dataloader_config(config).build_from(accelerator)?;
    let model = RegressionModel::new(configured.device(), 0.0, 0.0)?;
    let optimizer = AdamW::new(model.params(), 1e-3)?;
    let scheduler = LambdaLr::new(&optimizer, |step| (step as f64).powf(0.65));
    let batch_size = if split_batches { 4 * world_size } else { 4 };
    let loader = regression_loader(16 * world_size as i64, batch_size, false)?;
    let (model, mut optimizer, loader, mut scheduler) = configured.prepare((model, optimizer, loader, scheduler))?;
    let mut ticks = 0;
    for batch in loader.iter()? {
        let (x, y) = batch?;
        configured.accumulate(&model, || {
            configured.backward(&mse(&model.forward(&x)?, &y)?)?;
            optimizer.step()?;
            scheduler.step()?;
            optimizer.zero_grad()
        })?;
        if configured.sync_gradients() {
            ticks += if split_batches { 1 } else { world_size };
        }
        let expected = 1e-3 * (ticks as f64).powf(0.65);
        ensure!((scheduler.get_last_lr()[0] - expected).abs() < 1e-12, "learning rate after {ticks} ticks");
    }
    ensure!(ticks == 2 * if split_batches { 1 } else { world_size });
    Ok(())
}

/// A loop inside a loop, and one that is left early, do not confuse each other.
fn test_dataloader_break(accelerator: &Accelerator) -> Result<()> {
    let rows = 8 * accelerator.num_processes() as i64;
    let (outer, inner) =
        accelerator.prepare((regression_loader(rows, 4, false)?, regression_loader(rows, 2, false)?))?;
    for (index, batch) in outer.iter()?.enumerate() {
        let _ = batch?;
        ensure!(accelerator.end_of_dataloader() == (index == 1));
        for batch in inner.iter()?.take(2) {
            let _ = batch?;
            ensure!(!accelerator.end_of_dataloader(), "the inner loop has four batches");
        }
        ensure!(accelerator.end_of_dataloader() == (index == 1), "the inner loop was left early and is still active");
    }
    ensure!(!accelerator.end_of_dataloader());
    Ok(())
}
