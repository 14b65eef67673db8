//! `tests/test_optimizer.py`: saved state goes on where it was, steps happen at the ends of windows, and gradients that
//! are not finite change nothing.

use crate::regression::{RegressionModel, mse, rank_batch};
use accelerate::checkpoint::{load_file, save_file};
use accelerate::nn::{Module, StateDict};
use accelerate::optim::{AcceleratedOptimizer, AdamW, GroupState, OptimizerState, Sgd};
use accelerate::{Accelerator, MixedPrecision, PreparedModel, main_println};
use anyhow::{Result, ensure};

pub(crate) fn run() -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).build()?;
    test_accelerated_optimizer_pickling(&accelerator)?;
    test_steps_wait_for_the_end_of_a_window(&accelerator)?;
    test_accelerated_optimizer_step_was_skipped(&accelerator)?;
    main_println!(accelerator, "test_optimizer: all checks passed");
    Ok(())
}

type Prepared = (PreparedModel<RegressionModel>, AcceleratedOptimizer<AdamW>);

fn start(accelerator: &Accelerator, [a, b]: [f64; 2], lr: f64) -> Result<Prepared> {
    let model = RegressionModel::new(accelerator.device(), a as f32, b as f32)?;
    let optimizer = AdamW::new(model.params(), lr)?;
    Ok(accelerator.prepare((model, optimizer))?)
}

fn train(accelerator: &Accelerator, (model, optimizer): &mut Prepared, steps: std::ops::Range<usize>) -> Result<()> {
    for step in steps {
        let (x, y) = rank_batch(accelerator, step)?;
        accelerator.backward(&mse(&model.forward(&x)?, &y)?)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
    }
    Ok(())
}

/// The state by way of bytes: tensors as a weights file has them, groups as text.
fn saved_and_loaded(state: OptimizerState) -> Result<OptimizerState> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("optimizer.safetensors");
    let groups = serde_json::to_string(&state.groups)?;
    save_file(&state.tensors.into_iter().collect::<StateDict>(), &path)?;
    let tensors = load_file(&path)?;
    let tensors = tensors.iter().map(|(name, tensor)| (name.to_owned(), tensor.shallow_clone())).collect();
    let groups = serde_json::from_str::<Vec<GroupState>>(&groups)?;
    Ok(OptimizerState { tensors, groups, ..Default::default() })
}

/// Six steps are three, and three more by another model and optimizer that took over the state: to the bit. Unlike the
/// reference, which only asks that pickling does not fail.
fn test_accelerated_optimizer_pickling(accelerator: &Accelerator) -> Result<()> {
    let mut first = start(accelerator, [0.5, -0.5], 0.05)?;
    train(accelerator, &mut first, 0..3)?;
    let (values, state) = (first.0.values()?, first.1.state_dict()?);
    train(accelerator, &mut first, 3..6)?;
    let mut forgetful = start(accelerator, values, 0.05)?;
    train(accelerator, &mut forgetful, 3..6)?;
    ensure!(forgetful.0.values()? != first.0.values()?, "the moments of AdamW make no difference");
    let mut second = start(accelerator, values, 10.0)?;
    second.1.load_state_dict(&saved_and_loaded(state)?)?;
    train(accelerator, &mut second, 3..6)?;
    let (found, wanted) = (second.0.values()?, first.0.values()?);
    ensure!(found == wanted, "resumed to {found:?}, without interruption {wanted:?}");
    let everywhere = accelerator.gather_object(&[found])?;
    ensure!(everywhere.iter().all(|other| *other == found), "ranks resumed differently: {everywhere:?}");
    Ok(())
}

fn test_steps_wait_for_the_end_of_a_window(accelerator: &Accelerator) -> Result<()> {
    let configured = Accelerator::builder().gradient_accumulation_steps(3).build_from(accelerator)?;
    let (model, mut optimizer) = start(&configured, [0.0, 0.0], 0.1)?;
    for step in 0..6 {
        let before = model.values()?;
        let ends = step % 3 == 2;
        configured.accumulate(&model, || {
            let (x, y) = rank_batch(&configured, step)?;
            configured.backward(&mse(&model.forward(&x)?, &y)?)?;
            let gradients = model.gradients()?;
            optimizer.step()?;
            optimizer.zero_grad()?;
            let dropped = model.a.grad().is_none() && model.b.grad().is_none();
            let kept = model.gradients()? == gradients && gradients != [0.0, 0.0];
            let holds = if ends { dropped } else { kept };
            if holds { Ok(()) } else { Err(accelerate::Error::other(format!("zero_grad in micro-batch {step}"))) }
        })?;
        ensure!((model.values()? != before) == ends, "the parameters in micro-batch {step}");
        ensure!(optimizer.handle().num_steps() == (step + 1) / 3, "the steps in micro-batch {step}");
        ensure!(!optimizer.step_was_skipped(), "a step that waits is not skipped");
    }
    Ok(())
}

/// One rank's loss is not finite: all ranks skip the step, and take the next.
fn test_accelerated_optimizer_step_was_skipped(accelerator: &Accelerator) -> Result<()> {
    let configured = Accelerator::builder().mixed_precision(MixedPrecision::Fp16).build_from(accelerator)?;
    let model = RegressionModel::new(configured.device(), 0.0, 0.0)?;
    let optimizer = Sgd::builder(model.params()).lr(0.1).momentum(0.9).build()?;
    let (model, mut optimizer) = configured.prepare((model, optimizer))?;
    for (index, factor) in [1.0, f64::NAN, 1.0, f64::INFINITY, f64::INFINITY, 1.0].into_iter().enumerate() {
        let before = model.values()?;
        let (x, y) = rank_batch(&configured, index)?;
        let factor = if configured.is_last_process() { factor } else { 1.0 };
        configured.backward(&(mse(&model.forward(&x)?, &y)? * factor))?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        let wanted = matches!(index, 1 | 3 | 4);
        ensure!(optimizer.step_was_skipped() == wanted, "step {index}: skipped {}", !wanted);
        ensure!(configured.optimizer_step_was_skipped() == wanted, "step {index}, as the accelerator sees it");
        let after = model.values()?;
        ensure!((after == before) == wanted && after.iter().all(|value| value.is_finite()), "step {index}: {after:?}");
    }
    Ok(())
}
