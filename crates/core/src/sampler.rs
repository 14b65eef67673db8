//! Which rank gets which rows: pure index arithmetic.
//!
//! One rule covers both ways of dealing a map-style dataset, with `p` the rows that one rank gets per
//! round and `t = p * num_processes` the rows of a whole round. Without `split_batches`, `p` is the batch
//! size; with it, `p` is the batch size divided by the number of processes. Slot `s` of round `k` holds row
//! `k * t + s` of the epoch's order, and rank `r` gets slots `r * p .. (r + 1) * p`. A last, incomplete
//! round is dropped (`drop_last`), handed out as far as it goes (neither), or completed from the start of
//! the order, over and over (`even_batches`). This gives the batches of the reference's
//! `BatchSamplerShard`, `IterableDatasetShard` and `DataLoaderDispatcher` (`data_loader.py`), which reach
//! them with buffers; closed form makes any round reachable in constant time.

mod order;
mod ragged;
mod seed;
mod stream;

pub use order::RowOrder;
pub use ragged::RaggedBatchShard;
pub use seed::SeedableRandomSampler;
pub use stream::{IterableDatasetShard, Slot, SlotSource, dispatch_slots};

use crate::Result;
use crate::error::data::DataErrorKind;

/// One position of a per-rank batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Row {
    /// Index into the dataset.
    pub index: usize,
    /// This row repeats data only to keep ranks even; metrics must drop it.
    pub filler: bool,
}

/// How the batches of an epoch are dealt to ranks (`BatchSamplerShard` of the reference, `data_loader.py`).
///
/// ```
/// use accelerate_core::sampler::BatchSamplerShard;
///
/// let shard = BatchSamplerShard {
///     num_processes: 2,
///     batch_size: 3,
///     drop_last: false,
///     split_batches: false,
///     even_batches: true,
/// };
/// let order: Vec<usize> = (0..7).collect();
/// let of_rank_1 = shard.rounds(&order).map(|round| round[1].clone().unwrap());
/// let rows: Vec<Vec<(usize, bool)>> =
///     of_rank_1.map(|batch| batch.iter().map(|row| (row.index, row.filler)).collect()).collect();
/// // Row 6 went to rank 0, with rows 0 and 1 as filler; rank 1 is kept even with fillers only.
/// assert_eq!(rows[0], [(3, false), (4, false), (5, false)]);
/// assert_eq!(rows[1], [(2, true), (3, true), (4, true)]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSamplerShard {
    /// Number of ranks that share the data, at least 1.
    pub num_processes: usize,
    /// Rows per batch as the user gave it, at least 1: of one rank, or with `split_batches` of all ranks.
    pub batch_size: usize,
    /// Leave out the rows that do not fill a whole round.
    pub drop_last: bool,
    /// `batch_size` counts all ranks together; it must then be a multiple of `num_processes`.
    pub split_batches: bool,
    /// Give every rank the same number of batches of the same size, with filler rows at the end.
    /// No effect together with `drop_last`.
    pub even_batches: bool,
}

impl BatchSamplerShard {
    /// Checks that the sizes can be dealt.
    ///
    /// The other methods do not fail without it: with a size of 0 there are no rounds, and an indivisible
    /// batch is split into parts rounded up.
    ///
    /// # Errors
    ///
    /// [`Error::is_data`](crate::Error::is_data): a size of 0, or `split_batches` with a batch size that is
    /// not a multiple of the number of processes.
    ///
    /// ```
    /// # use accelerate_core::sampler::BatchSamplerShard;
    /// let shard = BatchSamplerShard {
    ///     num_processes: 3,
    ///     batch_size: 8,
    ///     drop_last: false,
    ///     split_batches: true,
    ///     even_batches: true,
    /// };
    /// assert!(shard.check().unwrap_err().to_string().contains("use a batch size of 9"));
    /// ```
    pub fn check(&self) -> Result<()> {
        check_sizes(self.num_processes, self.batch_size, self.split_batches)
    }

    /// Rows that one rank gets in a full round: the size of the batches it sees.
    ///
    /// ```
    /// # use accelerate_core::sampler::BatchSamplerShard;
    /// # let shard = BatchSamplerShard { num_processes: 2, batch_size: 8, drop_last: false, split_batches: true, even_batches: true };
    /// assert_eq!(shard.rank_batch_size(), 4); // batch_size 8, two processes, split_batches
    /// ```
    pub fn rank_batch_size(&self) -> usize {
        rank_batch_size(self.num_processes, self.batch_size, self.split_batches)
    }

    /// Rows that all ranks together get in a full round (`total_batch_size` of the reference).
    ///
    /// ```
    /// # use accelerate_core::sampler::BatchSamplerShard;
    /// # let shard = BatchSamplerShard { num_processes: 2, batch_size: 8, drop_last: false, split_batches: false, even_batches: true };
    /// assert_eq!(shard.total_batch_size(), 16); // batch_size 8, two processes
    /// ```
    pub fn total_batch_size(&self) -> usize {
        self.rank_batch_size().saturating_mul(self.num_processes)
    }

    /// Rounds in which at least one rank gets rows, for an epoch of `num_rows` rows.
    ///
    /// ```
    /// # use accelerate_core::sampler::BatchSamplerShard;
    /// # let shard = BatchSamplerShard { num_processes: 2, batch_size: 4, drop_last: false, split_batches: false, even_batches: true };
    /// assert_eq!(shard.total_rounds(22), 3); // 8 rows a round
    /// ```
    pub fn total_rounds(&self, num_rows: usize) -> usize {
        match self.total_batch_size() {
            0 => 0,
            total if self.drop_last => num_rows / total,
            total => num_rows.div_ceil(total),
        }
    }

    /// Batches that `rank` gets in an epoch of `num_rows` rows; all ranks agree unless both `even_batches` and
    /// `drop_last` are off.
    ///
    /// ```
    /// # use accelerate_core::sampler::BatchSamplerShard;
    /// # let shard = BatchSamplerShard { num_processes: 2, batch_size: 2, drop_last: false, split_batches: false, even_batches: false };
    /// assert_eq!((shard.num_rounds(6, 0), shard.num_rounds(6, 1)), (2, 1)); // uneven
    /// ```
    pub fn num_rounds(&self, num_rows: usize, rank: usize) -> usize {
        let rounds = self.total_rounds(num_rows);
        if rank >= self.num_processes || rounds == 0 {
            return 0;
        }
        let last_round_start = (rounds - 1) * self.total_batch_size();
        let rows_of_last_round = num_rows - last_round_start;
        let has_rows = self.even_batches || rank.saturating_mul(self.rank_batch_size()) < rows_of_last_round;
        if has_rows { rounds } else { rounds - 1 }
    }

    /// The batch of `rank` in round `round`, in time proportional to the batch. `None`: this rank gets
    /// nothing in this round.
    ///
    /// `order` lists the dataset indices of the epoch, shuffled or not.
    ///
    /// ```
    /// # use accelerate_core::sampler::BatchSamplerShard;
    /// # let shard = BatchSamplerShard { num_processes: 2, batch_size: 2, drop_last: false, split_batches: false, even_batches: false };
    /// let order = [5, 3, 1, 4, 2];
    /// let batch = shard.batch(&order, 0, 1).unwrap();
    /// assert_eq!((batch[0].index, batch[1].index), (1, 4));
    /// assert_eq!(shard.batch(&order, 1, 1), None);
    /// ```
    pub fn batch(&self, order: &[usize], round: usize, rank: usize) -> Option<Vec<Row>> {
        self.batch_from(order, round.checked_mul(self.total_batch_size())?, rank)
    }

    /// The batch of `rank` in the round whose first slot is row `first_row` of the order, wherever the rounds
    /// before it ended. `None`: this rank gets nothing in this round.
    ///
    /// ```
    /// # use accelerate_core::sampler::BatchSamplerShard;
    /// # let shard = BatchSamplerShard { num_processes: 2, batch_size: 2, drop_last: false, split_batches: false, even_batches: true };
    /// let batch = shard.batch_from(&[5, 3, 1, 4, 2], 3, 1).unwrap();
    /// assert_eq!((batch[0].index, batch[0].filler), (5, true)); // rank 0 has rows 4 and 2
    /// ```
    pub fn batch_from(&self, order: &[usize], first_row: usize, rank: usize) -> Option<Vec<Row>> {
        let positions = self.positions_from(order.len(), first_row, rank)?;
        Some(positions.into_iter().map(|at| Row { index: order[at.index], ..at }).collect())
    }

    /// [`BatchSamplerShard::batch_from`] for an order of `num_rows` rows that is not at hand: `index` of each row is
    /// its position in the order, less than `num_rows`.
    ///
    /// ```
    /// # use accelerate_core::sampler::BatchSamplerShard;
    /// # let shard = BatchSamplerShard { num_processes: 2, batch_size: 2, drop_last: false, split_batches: false, even_batches: true };
    /// let positions = shard.positions_from(5, 3, 0).unwrap();
    /// assert_eq!((positions[0].index, positions[1].index), (3, 4));
    /// ```
    pub fn positions_from(&self, num_rows: usize, first_row: usize, rank: usize) -> Option<Vec<Row>> {
        let (rank_batch_size, total) = (self.rank_batch_size(), self.total_batch_size());
        if rank >= self.num_processes || first_row >= num_rows || total == 0 {
            return None;
        }
        let incomplete = num_rows - first_row < total;
        if incomplete && self.drop_last {
            return None;
        }
        let start = first_row.saturating_add(rank.saturating_mul(rank_batch_size));
        let end = start.saturating_add(rank_batch_size);
        let real = (start..end.min(num_rows)).map(|index| Row { index, filler: false });
        let mut batch: Vec<Row> = real.collect();
        if incomplete && self.even_batches {
            let repeated = num_rows.min(total);
            let filler = |slot| Row { index: (slot - num_rows) % repeated, filler: true };
            batch.extend((start.max(num_rows)..end).map(filler));
        }
        (!batch.is_empty()).then_some(batch)
    }

    /// All rounds of an epoch, made one at a time: nothing but the current round is held in memory.
    ///
    /// `order` lists the dataset indices of the epoch, shuffled or not. Each item has one entry per rank;
    /// `None` there means that this rank yields nothing this round.
    ///
    /// ```
    /// # use accelerate_core::sampler::BatchSamplerShard;
    /// # let shard = BatchSamplerShard { num_processes: 2, batch_size: 4, drop_last: false, split_batches: true, even_batches: true };
    /// assert_eq!(shard.rounds(&[0, 1, 2, 3, 4]).len(), 2);
    /// ```
    pub fn rounds<'a>(&self, order: &'a [usize]) -> Rounds<'a> {
        self.rounds_from(order, 0)
    }

    /// [`BatchSamplerShard::rounds`] without the first `start_round` rounds, which cost nothing
    /// (`skip_first_batches` of the reference, without its loss of the filler count).
    ///
    /// ```
    /// # use accelerate_core::sampler::BatchSamplerShard;
    /// # let shard = BatchSamplerShard { num_processes: 2, batch_size: 2, drop_last: false, split_batches: false, even_batches: true };
    /// let order: Vec<usize> = (0..12).collect();
    /// assert_eq!(shard.rounds_from(&order, 2).next(), shard.rounds(&order).nth(2));
    /// ```
    pub fn rounds_from<'a>(&self, order: &'a [usize], start_round: usize) -> Rounds<'a> {
        self.rounds_after_rows(order, start_round.saturating_mul(self.total_batch_size()))
    }

    /// The rounds that remain once the first `rows_delivered` rows of the order have been handed out,
    /// under whatever number of processes and batch size that happened. Fillers still come from the start
    /// of the whole order.
    ///
    /// ```
    /// # use accelerate_core::sampler::BatchSamplerShard;
    /// # let shard = BatchSamplerShard { num_processes: 1, batch_size: 4, drop_last: false, split_batches: false, even_batches: true };
    /// let order: Vec<usize> = (0..10).collect();
    /// // Three processes with two rows each delivered rows 0 to 5; one process with four goes on with row 6.
    /// let batch = shard.rounds_after_rows(&order, 6).next().unwrap()[0].clone().unwrap();
    /// assert_eq!(batch[0].index, 6);
    /// ```
    pub fn rounds_after_rows<'a>(&self, order: &'a [usize], rows_delivered: usize) -> Rounds<'a> {
        Rounds { shard: *self, order, next_row: rows_delivered }
    }
}

/// The rounds of an epoch, from [`BatchSamplerShard::rounds`]; each item has one entry per rank.
///
/// ```
/// # use accelerate_core::sampler::BatchSamplerShard;
/// # let shard = BatchSamplerShard { num_processes: 2, batch_size: 1, drop_last: false, split_batches: false, even_batches: true };
/// let mut rounds = shard.rounds(&[10, 11, 12]);
/// assert_eq!(rounds.next().unwrap().len(), 2);
/// assert_eq!(rounds.rows_delivered(), 2);
/// ```
#[derive(Clone, Debug)]
pub struct Rounds<'a> {
    shard: BatchSamplerShard,
    order: &'a [usize],
    next_row: usize,
}

impl Rounds<'_> {
    /// Rows of the order that the rounds so far handed out, over all ranks and without fillers: the number to
    /// save for [`BatchSamplerShard::rounds_after_rows`].
    pub fn rows_delivered(&self) -> usize {
        self.next_row.min(self.order.len())
    }

    fn remaining(&self) -> usize {
        self.shard.total_rounds(self.order.len().saturating_sub(self.next_row))
    }

    fn advance(&mut self, num_rounds: usize) {
        let rows = num_rounds.saturating_mul(self.shard.total_batch_size());
        self.next_row = self.next_row.saturating_add(rows);
    }
}

impl Iterator for Rounds<'_> {
    type Item = Vec<Option<Vec<Row>>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.remaining() == 0 {
            return None;
        }
        let ranks = 0..self.shard.num_processes;
        let round = ranks.map(|rank| self.shard.batch_from(self.order, self.next_row, rank)).collect();
        self.advance(1);
        Some(round)
    }

    fn nth(&mut self, n: usize) -> Option<Self::Item> {
        self.advance(n);
        self.next()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.remaining(), Some(self.remaining()))
    }
}

impl ExactSizeIterator for Rounds<'_> {}
impl std::iter::FusedIterator for Rounds<'_> {}

fn check_sizes(num_processes: usize, batch_size: usize, split_batches: bool) -> Result<()> {
    if batch_size == 0 {
        return Err(DataErrorKind::ZeroBatchSize.into());
    }
    if num_processes == 0 {
        return Err(DataErrorKind::ZeroProcesses.into());
    }
    if split_batches && !batch_size.is_multiple_of(num_processes) {
        let suggestion = batch_size.next_multiple_of(num_processes);
        return Err(DataErrorKind::IndivisibleBatch { batch_size, num_processes, suggestion }.into());
    }
    Ok(())
}

fn rank_batch_size(num_processes: usize, batch_size: usize, split_batches: bool) -> usize {
    if split_batches && num_processes > 0 { batch_size.div_ceil(num_processes) } else { batch_size }
}
