//! Trains the model of this project, on one process or on many: only the launcher differs.

use accelerate::prelude::*;

fn main() -> accelerate::Result<()> {
    let accelerator = Accelerator::new()?;
    let (model, _losses) = {{crate}}::train(&accelerator, 3)?;
    accelerator.save_model(&model, "out", &Default::default())
}
