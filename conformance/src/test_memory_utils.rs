//! `tests/test_memory_utils.py`, on many ranks: one of them runs out of memory in the middle of a step.

use crate::regression::{RegressionModel, mse, regression_data};
use accelerate::optim::Sgd;
use accelerate::{Accelerator, Error, find_executable_batch_size, main_println};
use anyhow::{Context, Result, ensure};

pub(crate) fn run() -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).build()?;
    test_memory_explicit(&accelerator)?;
    test_any_other_error(&accelerator)?;
    main_println!(accelerator, "test_memory_utils: all checks passed");
    Ok(())
}

fn test_memory_explicit(accelerator: &Accelerator) -> Result<()> {
    let mut batch_sizes = Vec::new();
    let mut executable = find_executable_batch_size();
    let weights = executable.run_on(accelerator, |accelerator, batch_size| {
        batch_sizes.push(batch_size);
        let model = RegressionModel::new(accelerator.device(), 0.0, 0.0)?;
        let optimizer = Sgd::new(accelerate::nn::Module::params(&model), 0.1)?;
        let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
        let (x, y) = regression_data(batch_size as i64)?;
        for step in 0..3 {
            let loss = mse(&model.forward(&x)?, &y)?;
            if accelerator.is_last_process() && step == 1 && batch_size > 100 {
                return Err(Error::other("CUDA out of memory. Tried to allocate 20.00 MiB"));
            }
            accelerator.backward(&loss)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
        }
        model.values()
    })?;
    ensure!(batch_sizes == [128, 115, 103, 92] && executable.batch_size() == 92, "{batch_sizes:?}");
    let everywhere = accelerator.gather_object(&[weights])?;
    ensure!(everywhere.iter().all(|other| *other == weights), "{everywhere:?}");
    Ok(())
}

fn test_any_other_error(accelerator: &Accelerator) -> Result<()> {
    let result = find_executable_batch_size().run_on(accelerator, |accelerator, _| -> accelerate::Result<()> {
        if accelerator.is_last_process() {
            return Err(Error::other("Oops, we had an error!"));
        }
        accelerator.wait_for_everyone()
    });
    let error = result.err().context("the last rank failed, so all have to")?.to_string();
    ensure!(error.contains("Oops, we had an error!"), "{error}");
    let named = format!("rank {} failed with batch size 128", accelerator.num_processes() - 1);
    ensure!(accelerator.is_last_process() || error.contains(&named), "{error}");
    Ok(())
}
