//! Which rows make up which batch of which rank, for one pass.

use crate::error::{DataError, Result};
use crate::gradient_state::LoaderPosition;
use accelerate_core::sampler::{BatchSamplerShard, RaggedBatchShard, Row};
use std::sync::Arc;

/// How the batches of a loader are shared between processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sharding {
    pub(crate) rank: usize,
    pub(crate) num_processes: usize,
    pub(crate) split_batches: bool,
    pub(crate) even_batches: bool,
    /// The sampler already picks the rows of its rank, and what other ranks do is not known here.
    pub(crate) own_sampler: bool,
}

impl Sharding {
    /// All rows go to this process.
    pub(crate) fn whole() -> Self {
        Self { rank: 0, num_processes: 1, split_batches: false, even_batches: false, own_sampler: false }
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
            even_batches: self.even_batches && self.num_processes > 1,
        }
    }

    /// The arithmetic for batches of any size.
    pub(crate) fn by_batches(&self, drop_last: bool) -> RaggedBatchShard {
        RaggedBatchShard { num_processes: self.num_processes, drop_last, even_batches: self.even_batches }
    }

    /// `split_batches` cuts batches into equal parts: is that possible?
    pub(crate) fn check(&self, batch_size: Option<usize>) -> Result<()> {
        if !self.split_batches {
            return Ok(());
        }
        let batch_size = batch_size.ok_or(DataError::UnknownBatchSize)?;
        if batch_size.is_multiple_of(self.num_processes) {
            return Ok(());
        }
        Err(DataError::IndivisibleBatch { batch_size, num_processes: self.num_processes }.into())
    }
}

/// The batches of one pass, of all ranks: any of them can be asked for in constant time.
#[derive(Clone, Debug)]
pub(crate) enum Schedule {
    Rows { shard: BatchSamplerShard, order: Arc<[usize]> },
    Batches { shard: RaggedBatchShard, batches: Arc<[Vec<usize>]> },
}

impl Schedule {
    /// Batches that `rank` gets.
    pub(crate) fn num_rounds(&self, rank: usize) -> usize {
        match self {
            Self::Rows { shard, order } => shard.num_rounds(order.len(), rank),
            Self::Batches { shard, batches } => shard.num_rounds(batches.len(), rank),
        }
    }

    /// The rows of `rank` in round `round`, or `None` when it gets nothing.
    pub(crate) fn batch(&self, round: usize, rank: usize) -> Option<Vec<Row>> {
        match self {
            Self::Rows { shard, order } => shard.batch(order, round, rank),
            Self::Batches { shard, batches } => shard.batch(batches, round, rank),
        }
    }

    fn num_processes(&self) -> usize {
        match self {
            Self::Rows { shard, .. } => shard.num_processes,
            Self::Batches { shard, .. } => shard.num_processes,
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
