//! Trains a little; then rank 1 keeps the others waiting until it is let go on, so that they can be looked at from outside.

use accelerate::data::{DataLoader, TensorDataset};
use accelerate::nn::{Linear, ModuleFn, ParamStore};
use accelerate::optim::Sgd;
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Accelerator, ReduceOp};
use anyhow::Context;
use std::fs::File;
use std::io::{Read, copy, sink};
use std::path::Path;

/// Steps before the others wait. With two rows for each rank in a step.
const NUM_STEPS: usize = 3;

pub(crate) fn run(folder: Option<&Path>) -> anyhow::Result<()> {
    let folder = folder.context("this script needs --folder")?;
    let accelerator = Accelerator::builder().cpu(true).build()?;
    let store = ParamStore::new(accelerator.device());
    let linear = Linear::new(store.root(), 2, 1, Default::default())?;
    let optimizer = Sgd::new(&store, 0.1)?;
    let model = ModuleFn::new(&store, move |x: &Tensor| linear.forward(x));
    let num_rows = 2 * NUM_STEPS * accelerator.num_processes();
    let rows = Tensor::ones([num_rows as i64, 2], (Kind::Float, Device::Cpu));
    let loader = DataLoader::builder(TensorDataset::new(rows)?).batch_size(2).build()?;
    let (model, mut optimizer, loader) = accelerator.prepare((model, optimizer, loader))?;
    for batch in loader.iter()? {
        accelerator.backward(&model.forward(&batch?)?.sum(Kind::Float))?;
        optimizer.step()?;
        optimizer.zero_grad()?;
    }
    if accelerator.process_index() == 1 {
        // Opened once somebody has opened the other end.
        copy(&mut File::open(folder.join("gate"))?.take(1), &mut sink())?;
    }
    accelerator.group().all_reduce(&Tensor::from_slice(&[1f32]), ReduceOp::Sum)?;
    Ok(())
}
