//! Checkpoints: a run with delayed scaling goes on to the bit.

use super::{INPUTS, Middle, OUTPUTS, builder, wave};
use accelerate::optim::AdamW;
use accelerate::tch::Kind;
use accelerate::testing::ranks;
use accelerate::{Accelerator, AmaxComputeAlgorithm, FP8RecipeKwargs, Result, TERecipeKwargs};
use rstest::rstest;
use std::path::Path;

const STEPS: usize = 8;

/// Saves in the middle if there is a folder to save to, or begins there.
fn losses(accelerator: &Accelerator, save: Option<&Path>, load: Option<&Path>) -> Result<Vec<f64>> {
    let model = Middle::new();
    let optimizer = AdamW::new(&model.store, 0.01)?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        if let (true, Some(folder)) = (step == STEPS / 2, save) {
            accelerator.save_state(folder)?;
        }
        if let Some(folder) = load {
            match step.cmp(&(STEPS / 2)) {
                std::cmp::Ordering::Less => continue,
                std::cmp::Ordering::Equal => drop(accelerator.load_state(folder)?),
                std::cmp::Ordering::Greater => {}
            }
        }
        let size = 3.0 + (step as f64) * 1.7 + accelerator.process_index() as f64;
        let output = model.forward(&(wave(&[8, INPUTS], step as f64) * size))?;
        let loss = (output - wave(&[8, OUTPUTS], 0.5)).square().mean(Kind::Float);
        accelerator.backward(&loss)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        losses.push(loss.double_value(&[]));
    }
    Ok(losses)
}

fn recipe() -> FP8RecipeKwargs {
    let amax_compute_algo = Some(AmaxComputeAlgorithm::Max);
    TERecipeKwargs { amax_history_len: Some(3), interval: Some(2), amax_compute_algo, ..Default::default() }.into()
}

#[rstest]
fn a_run_goes_on_to_the_bit(#[values(1, 2)] world_size: usize) {
    let folder = tempfile::tempdir().unwrap();
    let whole = ranks(world_size, builder(recipe()), |accelerator| losses(&accelerator, Some(folder.path()), None));
    let resumed = ranks(world_size, builder(recipe()), |accelerator| losses(&accelerator, None, Some(folder.path())));
    for (whole, resumed) in whole.unwrap().iter().zip(resumed.unwrap()) {
        assert_eq!(whole[STEPS / 2..], resumed);
    }
}

/// A checkpoint of a run without FP8 has no scales, and they begin anew.
#[test]
fn a_run_begins_to_compute_in_8_bits_where_another_one_has_ended() {
    let folder = tempfile::tempdir().unwrap();
    ranks(1, Default::default(), |accelerator| losses(&accelerator, Some(folder.path()), None)).unwrap();
    let resumed = ranks(1, builder(recipe()), |accelerator| losses(&accelerator, None, Some(folder.path()))).unwrap();
    assert!(resumed[0].iter().all(|loss| loss.is_finite()), "{resumed:?}");
}

/// Its scales would stay as they were, without a word.
#[test]
fn a_backward_pass_without_the_accelerator_is_an_error_at_the_step() {
    ranks(2, builder(recipe()), |accelerator| {
        let model = Middle::new();
        let optimizer = AdamW::new(&model.store, 0.01)?;
        let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
        let loss = |model: &accelerate::PreparedModel<Middle>| {
            Ok::<_, accelerate::Error>(model.forward(&wave(&[8, INPUTS], 1.0))?.square().mean(Kind::Float))
        };
        loss(&model)?.backward();
        let error = optimizer.step().unwrap_err().to_string();
        assert!(error.contains("call Accelerator::backward"), "{error}");
        optimizer.zero_grad()?;
        accelerator.backward(&loss(&model)?)?;
        optimizer.step()
    })
    .unwrap();
}
