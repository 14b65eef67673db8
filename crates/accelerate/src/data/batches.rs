//! One pass over a loader's batches.

use super::dataset::Dataset;
use super::loader::Parts;
use super::recipe::{Errand, Workers};
use super::schedule::{Schedule, Sharding};
use crate::error::Result;
use crate::gradient_state::{LoaderGuard, LoaderPosition};
use std::fmt;
use std::iter::FusedIterator;

/// The batches of one pass, from [`DataLoader::iter`](crate::data::DataLoader::iter) or
/// [`DataLoaderShard::iter`](crate::data::DataLoaderShard::iter).
///
/// After an error the pass goes on with the next batch if it is asked for it. The pass counts as completed,
/// and the loader's epoch moves on, when the iterator returns `None`; a pass that is broken off does not
/// count, and the next one starts with the same epoch (as in the reference, `data_loader.py`,
/// `DataLoaderShard.__iter__`).
///
/// ```
/// use accelerate::data::{DataLoader, VecDataset};
///
/// let loader = DataLoader::builder(VecDataset::new(vec![1i64, 2, 3])).batch_size(2).build()?;
/// let mut batches = loader.iter()?;
/// assert_eq!(batches.len(), 2);
/// assert_eq!(batches.next().unwrap()?.size(), [2]);
/// assert_eq!(batches.len(), 1);
/// # Ok::<(), accelerate::Error>(())
/// ```
pub struct Batches<D: Dataset, B> {
    parts: Parts<D, B>,
    sharding: Sharding,
    schedule: Schedule,
    epoch: usize,
    next_round: usize,
    num_rounds: usize,
    workers: Option<Workers<B>>,
    prepared: Option<Prepared<B>>,
    completed: bool,
}

/// What a prepared loader does to each batch on its way out.
pub(crate) struct Prepared<B> {
    pub(crate) place: Box<dyn Fn(B) -> Result<B> + Send>,
    pub(crate) guard: LoaderGuard,
}

impl<D: Dataset + 'static, B: Send + 'static> Batches<D, B> {
    pub(crate) fn start(
        parts: Parts<D, B>,
        sharding: Sharding,
        schedule: Schedule,
        epoch: usize,
        prepared: Option<Prepared<B>>,
    ) -> Result<Self> {
        let num_rounds = schedule.num_rounds(sharding.rank);
        let next_round = parts.skip_batches.min(num_rounds);
        let mut workers = None;
        if 0 < parts.num_workers && next_round < num_rounds {
            let errand = Errand {
                schedule: schedule.clone(),
                rank: sharding.rank,
                first_round: next_round,
                num_workers: parts.num_workers,
                prefetch_factor: parts.prefetch_factor,
            };
            workers = Some(Workers::start(&parts.recipe, &errand)?);
        }
        Ok(Self { parts, sharding, schedule, epoch, next_round, num_rounds, workers, prepared, completed: false })
    }

    fn make(&self, round: usize) -> Result<B> {
        let batch = match &self.workers {
            Some(workers) => workers.receive(round)?,
            None => {
                let rows = self.schedule.batch(round, self.sharding.rank).unwrap_or_default();
                self.parts.recipe.make(&rows)?
            }
        };
        let Some(prepared) = &self.prepared else {
            return Ok(batch);
        };
        let batch = (prepared.place)(batch)?;
        prepared.guard.publish(self.position(round));
        Ok(batch)
    }

    fn position(&self, round: usize) -> LoaderPosition {
        let mut position = self.schedule.position(round);
        if self.sharding.own_sampler {
            position.counted_rows.clear();
        }
        position
    }

    /// Ends the pass: the loop is no longer active, and the epoch is over.
    fn complete(&mut self) -> Result<()> {
        self.completed = true;
        self.workers = None;
        self.prepared = None;
        self.parts.finish_epoch(self.epoch);
        self.parts.order.pass_completed()
    }
}

impl<D: Dataset + 'static, B: Send + 'static> Iterator for Batches<D, B> {
    type Item = Result<B>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.completed {
            return None;
        }
        if self.next_round == self.num_rounds {
            return self.complete().err().map(Err);
        }
        let round = self.next_round;
        self.next_round += 1;
        Some(self.make(round))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let remaining = self.num_rounds - self.next_round;
        (remaining, Some(remaining))
    }
}

impl<D: Dataset + 'static, B: Send + 'static> ExactSizeIterator for Batches<D, B> {}
impl<D: Dataset + 'static, B: Send + 'static> FusedIterator for Batches<D, B> {}

impl<D: Dataset, B> fmt::Debug for Batches<D, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batches")
            .field("epoch", &self.epoch)
            .field("next_round", &self.next_round)
            .field("num_rounds", &self.num_rounds)
            .finish_non_exhaustive()
    }
}
