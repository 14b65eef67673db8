//! What a recording holds.

use accelerate::ProfileKwargs;
use accelerate::optim::AdamW;
use anyhow::{Context as _, Result, ensure};

use accelerate::nn::Module as _;

use crate::check::{Context, Found};
use crate::models::{Classifier, ROWS, loss_of, tokens};

pub(crate) fn trace(context: &Context<'_>) -> Result<Found> {
    let accelerator = context.accelerator()?;
    let model = Classifier::new(accelerator.device())?;
    let optimizer = AdamW::new(model.params(), 1e-3)?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let kwargs = ProfileKwargs {
        profile_memory: Some(true),
        output_trace_dir: Some(context.folder.to_owned()),
        ..Default::default()
    };
    let (_, trace) = accelerator.profile(kwargs, |profiler| {
        for step in 0..3 {
            let (tokens, labels) = tokens(step, 0, ROWS, accelerator.device())?;
            let loss = profiler.record_function("forward", || loss_of(&model.forward(&tokens)?, &labels))?;
            accelerator.backward(&loss)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
            profiler.step()?;
        }
        Ok(())
    })?;
    let trace = trace.context("nothing was recorded")?;
    let averages = trace.key_averages(Default::default())?;
    let count = averages.get("forward").map_or(0, |row| row.count);
    context.close("named ranges", count as f64, 3.0, 0.0)?;
    ensure!(averages.get("aten::addmm").is_some(), "no operator in the recording: {averages}");
    let events = trace.events()?;
    let kernels: Vec<_> = events.iter().filter(|event| event.is_on_device && event.num_bytes == 0).collect();
    let text = std::fs::read_to_string(context.folder.join("profile_0.json"))?;
    ensure!(text.contains("aten::addmm"), "the file has no operator");
    if !context.is_cuda() {
        ensure!(kernels.is_empty(), "a kernel of a device where there is none");
        return Found::figure(format!("{} events; kernels only on a GPU", events.len()));
    }
    let linked = kernels.iter().filter(|kernel| kernel.linked_correlation_id != 0).count();
    ensure!(kernels.len() >= 30, "{} kernels in three steps", kernels.len());
    ensure!(linked * 2 >= kernels.len(), "{linked} of {} kernels name the operator that launched them", kernels.len());
    ensure!(text.contains("\"cat\": \"kernel\""), "the file has no kernels");
    Found::figure(format!("{} events, {} kernels, {linked} linked", events.len(), kernels.len()))
}
