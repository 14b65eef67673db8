//! A short training: the model has to learn something.

use accelerate::Accelerator;

#[test]
fn the_loss_falls() -> accelerate::Result<()> {
    let (_model, losses) = {{crate}}::train(&Accelerator::new()?, 2)?;
    assert!(losses[1] < losses[0], "mean losses of two epochs: {losses:?}");
    Ok(())
}
