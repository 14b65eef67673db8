//! The three numbers about batches, of which each follows from the others.

use super::Filling;
use crate::Result;
use crate::config::Auto;
use crate::error::deep_speed::DeepSpeedErrorKind;

pub(super) struct Batch {
    pub(super) train: usize,
    pub(super) micro: usize,
    pub(super) accumulation: usize,
}

const ACCUMULATION: &str = "gradient_accumulation_steps";
const MICRO: &str = "train_micro_batch_size_per_gpu";

impl Filling<'_> {
    /// The sizes; an error of arithmetic is returned, everything else noted.
    pub(super) fn batch(&mut self, is_train_batch_min: bool) -> Result<Batch> {
        let world_size = self.facts.world_size;
        let train = self.config.train_batch_size.and_then(Auto::value);
        let written_micro = self.config.train_micro_batch_size_per_gpu;
        let loaders = self.loaders_batch_size(is_train_batch_min);
        let known_micro = match written_micro {
            Some(Auto::Value(micro)) => Some(micro),
            // Without the key DeepSpeed divides train_batch_size, whatever the loaders do.
            None if train.is_some() => None,
            Some(Auto::Auto) | None => loaders.ok(),
        };
        let accumulation = match (self.accumulation(), train, known_micro) {
            (Some(steps), ..) => steps,
            (None, Some(train), Some(micro)) if self.config.gradient_accumulation_steps.is_none() => {
                quotient(train, (MICRO, micro), world_size, ACCUMULATION)?
            }
            _ => 1,
        };
        let micro = match (known_micro, train) {
            (Some(micro), _) => micro,
            (None, Some(train)) => quotient(train, (ACCUMULATION, accumulation), world_size, MICRO)?,
            (None, None) => {
                if let Err(why) = loaders {
                    self.remains(MICRO, why);
                }
                1
            }
        };
        let product = micro.saturating_mul(accumulation).saturating_mul(world_size);
        if loaders.is_ok_and(|size| size != micro) {
            let key = if written_micro.is_some() { MICRO } else { "train_batch_size" };
            self.has_no_effect(key, "batches are those of the loaders, which have another size");
        }
        match train {
            Some(train) if train != product => {
                Err(DeepSpeedErrorKind::BatchSize { train, micro, accumulation, world_size, product }.into())
            }
            _ => Ok(Batch { train: product, micro, accumulation }),
        }
    }

    /// Rows that a process gets from a loader in one batch, or why that is not known.
    fn loaders_batch_size(&self, is_train_batch_min: bool) -> Result<usize, &'static str> {
        let Some(sizes) = self.facts.batch_sizes.iter().copied().collect::<Option<Vec<usize>>>() else {
            return Err("a loader that was passed to prepare has no batch size");
        };
        let parts = if self.facts.split_batches { self.facts.world_size } else { 1 };
        let sizes = sizes.into_iter().map(|size| size / parts);
        match if is_train_batch_min { sizes.min() } else { sizes.max() } {
            None => Err("no loader was passed to prepare whose batch size would tell it"),
            Some(0) => Err("a batch of a loader has fewer rows than there are processes to split it among"),
            Some(size) => Ok(size),
        }
    }

    /// The steps that are said somewhere; `None` if nowhere.
    fn accumulation(&mut self) -> Option<usize> {
        let given = self.facts.gradient_accumulation_steps;
        match self.config.gradient_accumulation_steps {
            Some(Auto::Value(steps)) => {
                if let Some(given) = given {
                    self.merge.compare(ACCUMULATION, &steps, "gradient_accumulation_steps of the accelerator", &given);
                }
                Some(steps)
            }
            Some(Auto::Auto) => Some(given.unwrap_or(1)),
            None => given,
        }
    }
}

/// What `wanted` has to be for the product to be `train`.
fn quotient(
    train: usize,
    (known, known_value): (&'static str, usize),
    world_size: usize,
    wanted: &'static str,
) -> Result<usize> {
    let divisor = known_value.saturating_mul(world_size).max(1);
    if train.is_multiple_of(divisor) {
        return Ok(train / divisor);
    }
    Err(DeepSpeedErrorKind::BatchDoesNotDivide { train, known, known_value, world_size, wanted }.into())
}
