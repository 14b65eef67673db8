//! A model that Python has saved as TorchScript.

use accelerate::DynamoBackend;
use accelerate::nn::{Module as _, ScriptModule};
use accelerate::optim::Sgd;
use accelerate::tch::Kind;
use anyhow::{Context as _, Result};
use serde::Deserialize;

use crate::check::{Context, Found, NO_PYTHON};
use crate::models::wave;

#[derive(Deserialize)]
struct Answer {
    losses: Vec<f64>,
}

/// Python trains the same file. The kernels are the same, so float32 sums may differ by their order alone.
pub(crate) fn trains(context: &Context<'_>) -> Result<Found> {
    let path = context.folder.join("model.pt");
    let file = path.to_str().context("the folder is no text")?;
    let Some(wanted) = context.python::<Answer>("script_module.py", &["--output", file])? else {
        return Found::not_here(NO_PYTHON);
    };
    let accelerator = context.builder().dynamo_backend(DynamoBackend::Ts).build()?;
    let model: ScriptModule = ScriptModule::load(&path, accelerator.device())?;
    let optimizer = Sgd::new(model.params(), 0.1)?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let mut losses = Vec::new();
    for step in 0..wanted.losses.len() {
        let rows = wave(&[8, 12], step as f64)?.f_to_device(accelerator.device())?;
        let loss = model.forward(&rows)?.f_square()?.f_mean(Kind::Float)?;
        accelerator.backward(&loss)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        losses.push(loss.f_double_value(&[])?);
    }
    let difference = context.all_close("loss of step", &losses, &wanted.losses, 1e-5)?;
    Found::figure(format!("{} steps within {difference:.1e} of Python", losses.len()))
}
