//! The training loop. What it trains is in `model.rs`, and what it learns from in `data.rs`.

mod data;
mod model;

use accelerate::prelude::*;
use accelerate::{PreparedModel, ReduceOp, set_seed};

pub use model::Model;

/// Trains a new model, and returns it with the mean loss of each epoch.
pub fn train(accelerator: &Accelerator, num_epochs: usize) -> accelerate::Result<(PreparedModel<Model>, Vec<f64>)> {
    set_seed(42);
    let model = Model::new(accelerator.device())?;
    let optimizer = AdamW::new(model.params(), 3e-3)?;
    let loader = DataLoader::builder(data::examples(768)?).batch_size(16).shuffle(true).build()?;
    // Counted as for one process: a prepared scheduler moves once for each process.
    let num_steps = loader.len() * num_epochs;
    let scheduler = LinearWithWarmup::new(&optimizer, num_steps / 10, num_steps);
    let (model, mut optimizer, loader, mut scheduler) = accelerator.prepare((model, optimizer, loader, scheduler))?;

    let mut epoch_losses = Vec::new();
    for epoch in 1..=num_epochs {
        let mut losses = Vec::new();
        for batch in loader.iter()? {
            let (inputs, labels) = batch?;
            accelerator.accumulate(&model, || {
                // Scores of classes are the last dim, for whole examples and for each of their tokens.
                let scores = model.forward(&inputs)?.flatten(0, -2);
                let loss = scores.cross_entropy_for_logits(&labels.flatten(0, -1));
                accelerator.backward(&loss)?;
                optimizer.step()?;
                scheduler.step()?;
                optimizer.zero_grad()?;
                losses.push(loss.detach());
                Ok(())
            })?;
        }
        let mean = Tensor::stack(&losses, 0).mean(Kind::Float);
        let loss = accelerator.reduce(&mean, ReduceOp::Mean)?.double_value(&[]);
        main_println!(accelerator, "epoch {epoch}: loss {loss:.4}");
        epoch_losses.push(loss);
    }
    Ok((model, epoch_losses))
}
