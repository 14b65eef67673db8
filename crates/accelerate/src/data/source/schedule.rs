//! Which rows make up which batch of which rank, for one pass.

use crate::data::sampler::BatchSampler;
use crate::error::{DataError, Result};
use crate::session::LoaderPosition;
use accelerate_core::sampler::{BatchSamplerShard, RaggedBatchShard, Row, RowOrder, SlotSource, dispatch_slots};
use std::sync::Arc;

/// How the batches of a loader are shared between processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sharding {
    pub(crate) rank: usize,
    pub(crate) num_processes: usize,
    pub(crate) split_batches: bool,
    pub(crate) even_batches: bool,
    /// Rank 0 reads for all and cuts what it has read into equal parts.
    pub(crate) dispatch: bool,
    /// The sampler already picks the rows of its rank, and what other ranks do is not known here.
    pub(crate) own_sampler: bool,
}

impl Sharding {
    /// All rows go to this process.
    pub(crate) fn whole() -> Self {
        let (split_batches, even_batches, dispatch, own_sampler) = (false, false, false, false);
        Self { rank: 0, num_processes: 1, split_batches, even_batches, dispatch, own_sampler }
    }

    /// The arithmetic for batches of `batch_size` rows.
    pub(crate) fn by_rows(&self, batch_size: usize, drop_last: bool) -> BatchSamplerShard {
        BatchSamplerShard {
            num_processes: self.num_processes,
            batch_size,
            drop_last,
            split_batches: self.split_batches,
            // One process has nobody to keep even with: its last batch is as long as it is, as in the
            // reference, which does not wrap the sampler then.
            even_batches: (self.even_batches || self.dispatch) && self.num_processes > 1,
        }
    }

    /// The arithmetic for batches of any size.
    pub(crate) fn by_batches(&self, drop_last: bool) -> RaggedBatchShard {
        RaggedBatchShard { num_processes: self.num_processes, drop_last, even_batches: self.even_batches }
    }

    /// Batches of a whole pass over `num_rows` rows.
    pub(crate) fn num_rounds_of_rows(&self, batch_size: usize, drop_last: bool, num_rows: usize) -> usize {
        self.by_rows(batch_size, drop_last).num_rounds(num_rows, self.rank)
    }

    /// Batches of a whole pass over the batches of a sampler.
    pub(crate) fn num_rounds_of_batches(&self, sampler: &dyn BatchSampler) -> usize {
        if self.split_batches {
            return sampler.len();
        }
        let even_batches = self.even_batches || self.dispatch;
        let shard = RaggedBatchShard { even_batches, ..self.by_batches(sampler.drop_last()) };
        shard.num_rounds(sampler.len(), self.rank)
    }

    /// `split_batches` cuts batches into equal parts: is that possible?
    pub(crate) fn check(&self, batch_size: Option<usize>) -> Result<()> {
        if !self.split_batches {
            return Ok(());
        }
        let batch_size = match batch_size {
            Some(batch_size) => batch_size,
            // Rank 0 cuts what it has read, of whatever size.
            None if self.dispatch => return Ok(()),
            None => return Err(DataError::UnknownBatchSize.into()),
        };
        if batch_size.is_multiple_of(self.num_processes) {
            return Ok(());
        }
        Err(DataError::IndivisibleBatch { batch_size, num_processes: self.num_processes }.into())
    }
}

/// The batches of one pass, of all ranks: any of them can be asked for in constant time.
#[derive(Clone, Debug)]
pub(crate) struct Schedule {
    deal: Deal,
    /// What was handed out before the first round: rows of the order, or batches.
    first: usize,
}

#[derive(Clone, Debug)]
enum Deal {
    Rows {
        shard: BatchSamplerShard,
        order: RowOrder,
        dispatch: bool,
    },
    Batches {
        shard: RaggedBatchShard,
        batches: Arc<[Vec<usize>]>,
    },
    /// Rank 0 joins `per_round` batches and cuts them anew.
    Dispatched {
        num_processes: usize,
        per_round: usize,
        drop_last: bool,
        batches: Arc<[Vec<usize>]>,
    },
}

impl Schedule {
    pub(crate) fn of_rows(sharding: &Sharding, batch_size: usize, drop_last: bool, order: RowOrder) -> Self {
        let (shard, dispatch) = (sharding.by_rows(batch_size, drop_last), sharding.dispatch);
        Self { deal: Deal::Rows { shard, order, dispatch }, first: 0 }
    }

    pub(crate) fn of_batches(sharding: &Sharding, drop_last: bool, batches: Arc<[Vec<usize>]>) -> Self {
        let deal = if sharding.dispatch {
            let num_processes = sharding.num_processes;
            let per_round = if sharding.split_batches { 1 } else { num_processes };
            Deal::Dispatched { num_processes, per_round, drop_last, batches }
        } else {
            Deal::Batches { shard: sharding.by_batches(drop_last), batches }
        };
        Self { deal, first: 0 }
    }

    /// Goes on where an earlier run had handed out `delivered` rows, or batches.
    ///
    /// # Errors
    /// There are not as many.
    pub(crate) fn start_after(&mut self, delivered: u64) -> Result<()> {
        match usize::try_from(delivered) {
            Ok(first) if first <= self.total() => self.first = first,
            _ => return Err(DataError::BehindTheEnd { found: delivered, wanted: self.total() as u64 }.into()),
        }
        Ok(())
    }

    /// Rows of the order, or batches.
    fn total(&self) -> usize {
        match &self.deal {
            Deal::Rows { order, .. } => order.len(),
            Deal::Batches { batches, .. } | Deal::Dispatched { batches, .. } => batches.len(),
        }
    }

    /// Rows, or batches, that a round takes.
    fn per_round(&self) -> usize {
        match &self.deal {
            Deal::Rows { shard, .. } => shard.total_batch_size(),
            Deal::Batches { shard, .. } => shard.num_processes,
            Deal::Dispatched { per_round, .. } => *per_round,
        }
    }

    fn num_processes(&self) -> usize {
        match &self.deal {
            Deal::Rows { shard, .. } => shard.num_processes,
            Deal::Batches { shard, .. } => shard.num_processes,
            Deal::Dispatched { num_processes, .. } => *num_processes,
        }
    }

    /// Batches that `rank` gets.
    pub(crate) fn num_rounds(&self, rank: usize) -> usize {
        let left = self.total() - self.first;
        match &self.deal {
            Deal::Rows { shard, .. } => shard.num_rounds(left, rank),
            Deal::Batches { shard, .. } => shard.num_rounds(left, rank),
            Deal::Dispatched { per_round, drop_last: true, .. } => left / per_round,
            Deal::Dispatched { per_round, .. } => left.div_ceil(*per_round),
        }
    }

    /// What has been handed out once round `round` is.
    pub(crate) fn delivered_after(&self, round: usize) -> u64 {
        let rounds = (round + 1).saturating_mul(self.per_round());
        self.first.saturating_add(rounds).min(self.total()) as u64
    }

    /// The rows of `rank` in round `round`, or `None` when it gets nothing.
    pub(crate) fn batch(&self, round: usize, rank: usize) -> Option<Vec<Row>> {
        let start = self.first.checked_add(round.checked_mul(self.per_round())?)?;
        match &self.deal {
            Deal::Rows { shard, order, dispatch: false } => {
                shard.positions_from(order.len(), start, rank).map(|positions| order.rows_at(positions))
            }
            Deal::Rows { shard, order, dispatch: true } => {
                let per_round = shard.total_batch_size();
                let chunk = order.len().checked_sub(start)?.min(per_round);
                if shard.drop_last && chunk < per_round {
                    return None;
                }
                let position = |source| match source {
                    SlotSource::Current(offset) => start + offset,
                    SlotSource::First(offset) => offset,
                };
                let positions = cut(chunk, per_round.min(order.len()), shard.num_processes, rank, position)?;
                Some(order.rows_at(positions))
            }
            // Batches in front of the first one still fill up the last round.
            Deal::Batches { shard, batches } => shard.batch_from(batches, start, rank),
            Deal::Dispatched { num_processes, per_round, drop_last, batches } => {
                let joined = |start: usize| -> Option<Vec<usize>> {
                    let batches = batches.get(start..batches.len().min(start.saturating_add(*per_round)))?;
                    let dropped = *drop_last && batches.len() < *per_round;
                    (!dropped).then(|| batches.concat())
                };
                let (chunk, first_chunk) = (joined(start)?, joined(0)?);
                cut(chunk.len(), first_chunk.len(), *num_processes, rank, |source| match source {
                    SlotSource::Current(offset) => chunk[offset],
                    SlotSource::First(offset) => first_chunk[offset],
                })
            }
        }
    }

    /// What is known about round `round` once its batches are out.
    pub(crate) fn position(&self, round: usize) -> LoaderPosition {
        let counted = |rank| {
            let rows = self.batch(round, rank).unwrap_or_default();
            rows.iter().map(|row| !row.filler).collect()
        };
        LoaderPosition {
            // Rank 0 is never the first to run out.
            end_of_dataloader: round + 1 == self.num_rounds(0),
            counted_rows: (0..self.num_processes()).map(counted).collect(),
        }
    }
}

/// The part of `rank` of a chunk that rank 0 has read, as the dispatcher of the reference cuts it; `index` says what
/// stands in a slot.
fn cut(
    chunk: usize,
    first_chunk: usize,
    num_processes: usize,
    rank: usize,
    index: impl Fn(SlotSource) -> usize,
) -> Option<Vec<Row>> {
    if num_processes == 1 {
        let row = |offset| Row { index: index(SlotSource::Current(offset)), filler: false };
        return (0 < chunk).then(|| (0..chunk).map(row).collect());
    }
    let mut ranks = dispatch_slots(chunk, first_chunk, num_processes);
    let slots = if rank < ranks.len() { ranks.swap_remove(rank) } else { return None };
    Some(slots.into_iter().map(|slot| Row { index: index(slot.source), filler: slot.filler }).collect())
}

/// The one order behind the batches of a sampler that promises batches of `batch_size` rows.
pub(crate) fn flatten(batches: Vec<Vec<usize>>, batch_size: usize) -> Result<Vec<usize>> {
    let last = batches.len().saturating_sub(1);
    for (position, batch) in batches.iter().enumerate() {
        let is_last = position == last;
        let found = batch.len();
        if batch_size < found || (!is_last && found < batch_size) {
            return Err(DataError::BrokenPromise { position, found, wanted: batch_size, is_last }.into());
        }
    }
    Ok(batches.concat())
}
