//! The three numbers about batches, of which each follows from the others.

use super::Filling;
use crate::Result;
use crate::config::Auto;
use crate::config::deep_speed::merge::Source;
use crate::error::deep_speed::DeepSpeedErrorKind;

/// What is `None` is left to loaders that have not been prepared yet.
pub(super) struct Batch {
    pub(super) train: Option<usize>,
    pub(super) micro: Option<usize>,
    pub(super) accumulation: Option<usize>,
}

/// What the loaders tell of the rows that a process gets in one batch.
#[derive(Clone, Copy)]
enum Loaders {
    /// None was prepared yet.
    NotYet,
    Rows(usize),
    /// For this reason it cannot be known.
    Unknown(&'static str),
}

const ACCUMULATION: &str = "gradient_accumulation_steps";
const MICRO: &str = "train_micro_batch_size_per_gpu";

impl Filling<'_> {
    /// The sizes; an error of arithmetic is returned, everything else noted.
    pub(super) fn batch(&mut self, is_train_batch_min: bool) -> Result<Batch> {
        let world_size = self.facts.world_size;
        let train = self.config.train_batch_size.and_then(Auto::value);
        let written_micro = self.config.train_micro_batch_size_per_gpu;
        let loaders = self.loaders(is_train_batch_min);
        let of_loaders = match loaders {
            Loaders::Rows(rows) => Some(rows),
            Loaders::NotYet | Loaders::Unknown(_) => None,
        };
        let known_micro = match written_micro {
            Some(Auto::Value(micro)) => Some(micro),
            // Without the key DeepSpeed divides train_batch_size, whatever the loaders do.
            None if train.is_some() => None,
            Some(Auto::Auto) | None => of_loaders,
        };
        let accumulation = match (self.accumulation(), train, known_micro) {
            (Some(steps), ..) => Some(steps),
            (None, Some(train), Some(micro)) => Some(quotient(train, (MICRO, micro), world_size, ACCUMULATION)?),
            (None, Some(_), None) => written_micro.is_none().then_some(1),
            (None, None, _) => Some(1),
        };
        let micro = match (known_micro, train, accumulation) {
            (Some(micro), ..) => Some(micro),
            (None, Some(train), Some(accumulation)) => {
                Some(quotient(train, (ACCUMULATION, accumulation), world_size, MICRO)?)
            }
            (None, ..) => {
                if let Loaders::Unknown(why) = loaders {
                    self.remains(MICRO, why);
                }
                None
            }
        };
        if of_loaders.is_some() && of_loaders != micro {
            let key = if written_micro.is_some() { MICRO } else { "train_batch_size" };
            self.has_no_effect(key, "batches are those of the loaders, which have another size");
        }
        let (Some(micro), Some(accumulation)) = (micro, accumulation) else {
            return Ok(Batch { train, micro, accumulation });
        };
        let product = micro.saturating_mul(accumulation).saturating_mul(world_size);
        match train {
            Some(train) if train != product => {
                let is_of_loaders = !matches!(written_micro, Some(Auto::Value(_))) && of_loaders.is_some();
                let whose = if is_of_loaders { " (that of the loaders)" } else { "" };
                Err(DeepSpeedErrorKind::BatchSize { train, micro, whose, accumulation, world_size, product }.into())
            }
            _ => Ok(Batch { train: Some(product), micro: Some(micro), accumulation: Some(accumulation) }),
        }
    }

    fn loaders(&self, is_train_batch_min: bool) -> Loaders {
        let sizes = &self.facts.objects.batch_sizes;
        let Some(sizes) = sizes.iter().copied().collect::<Option<Vec<usize>>>() else {
            return Loaders::Unknown("a loader that was passed to prepare has no batch size");
        };
        let parts = if self.facts.split_batches { self.facts.world_size } else { 1 };
        let sizes = sizes.into_iter().map(|size| size / parts);
        match if is_train_batch_min { sizes.min() } else { sizes.max() } {
            None => Loaders::NotYet,
            Some(0) => {
                Loaders::Unknown("a batch of a loader has fewer rows than there are processes to split it among")
            }
            Some(rows) => Loaders::Rows(rows),
        }
    }

    /// The steps that are said somewhere; `None` if nowhere.
    fn accumulation(&mut self) -> Option<usize> {
        let given = self.facts.gradient_accumulation_steps;
        match self.config.gradient_accumulation_steps {
            Some(Auto::Value(steps)) => {
                if let Some(given) = given {
                    let words = "gradient_accumulation_steps of the accelerator";
                    let source = Source::setting(words, "gradient_accumulation_config.num_steps");
                    self.merge.compare(ACCUMULATION, &steps, source, &given);
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
