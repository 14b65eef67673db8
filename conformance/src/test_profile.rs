//! Profiling on many ranks: one trace file for each, complete when any rank goes on.

use crate::regression::{RegressionModel, mse, regression_data};
use accelerate::optim::Sgd;
use accelerate::{Accelerator, ProfileKwargs, main_println};
use anyhow::{Context, Result, ensure};
use std::path::Path;

pub(crate) fn run(folder: Option<&Path>) -> Result<()> {
    let folder = folder.context("this script needs --folder")?.join("traces");
    let kwargs = ProfileKwargs { output_trace_dir: Some(folder.clone()), ..Default::default() };
    let accelerator = Accelerator::builder().cpu(true).kwargs_handler(kwargs).build()?;
    let model = RegressionModel::new(accelerator.device(), 0.0, 0.0)?;
    let optimizer = Sgd::new(accelerate::nn::Module::params(&model), 0.1)?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let (x, y) = regression_data(8)?;
    let (_, trace) = accelerator.profile(None, |profiler| {
        for _ in 0..3 {
            let loss = profiler.record_function("forward", || mse(&model.forward(&x)?, &y))?;
            accelerator.backward(&loss)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
            profiler.step()?;
        }
        Ok(())
    })?;
    let averages = trace.context("everything was recorded")?.key_averages(Default::default())?;
    ensure!(averages.get("forward").map(|row| row.count) == Some(3), "{averages}");
    // Files of all ranks are there on every rank.
    for rank in 0..accelerator.num_processes() {
        let text = std::fs::read_to_string(folder.join(format!("profile_{rank}.json")))?;
        ensure!(
            text.contains("ProfilerStep#2") && text.contains(&format!("\"rank\": {rank}")),
            "profile of rank {rank}"
        );
    }
    ensure!(std::fs::read_dir(&folder)?.count() == accelerator.num_processes(), "other files beside the traces");
    main_println!(accelerator, "test_profile: all checks passed");
    Ok(())
}
