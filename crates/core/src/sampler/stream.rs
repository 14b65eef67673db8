//! Sharing a stream of unknown length: a buffer of one round is filled, then cut into one slice per rank.

use super::{check_sizes, rank_batch_size};
use crate::Result;

/// Where the row of a slot comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SlotSource {
    /// Position in the chunk that has just been read.
    Current(usize),
    /// Position in the first chunk of the stream, which is kept to complete the last one.
    First(usize),
}

/// One position of a per-rank batch of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    /// Where the row comes from.
    pub source: SlotSource,
    /// This row repeats data only to keep ranks even; metrics must drop it.
    pub filler: bool,
}

impl Slot {
    const fn real(position: usize) -> Self {
        Self { source: SlotSource::Current(position), filler: false }
    }

    const fn filler(position: usize) -> Self {
        Self { source: SlotSource::First(position), filler: true }
    }
}

/// How every rank reads the whole stream and keeps its own slice of each round
/// (`IterableDatasetShard` of the reference, `data_loader.py`).
///
/// Read chunks of [`IterableDatasetShard::chunk_rows`] rows; only the last one may be shorter. The
/// reference hands out the fillers of the last round as if they were data; here they are marked.
///
/// ```
/// use accelerate_core::sampler::{IterableDatasetShard, SlotSource};
///
/// let shard = IterableDatasetShard {
///     num_processes: 2,
///     batch_size: 4,
///     drop_last: false,
///     split_batches: false,
/// };
/// assert_eq!(shard.chunk_rows(), 8);
/// // The stream had 10 rows: the second chunk has two, and the first one completes it.
/// let slots = shard.slots(2, 8, 0).unwrap();
/// let sources: Vec<SlotSource> = slots.iter().map(|slot| slot.source).collect();
/// use SlotSource::{Current, First};
/// assert_eq!(sources, [Current(0), Current(1), First(0), First(1)]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IterableDatasetShard {
    /// Number of ranks that share the stream, at least 1.
    pub num_processes: usize,
    /// Rows per batch as the user gave it, at least 1: of one rank, or with `split_batches` of all ranks.
    pub batch_size: usize,
    /// Leave out the rows that do not fill a whole chunk.
    pub drop_last: bool,
    /// `batch_size` counts all ranks together; it must then be a multiple of `num_processes`.
    pub split_batches: bool,
}

impl IterableDatasetShard {
    /// Checks that the sizes can be dealt.
    ///
    /// # Errors
    ///
    /// [`Error::is_data`](crate::Error::is_data): a size of 0, or `split_batches` with a batch size that is
    /// not a multiple of the number of processes.
    ///
    /// ```
    /// # use accelerate_core::sampler::IterableDatasetShard;
    /// let shard = IterableDatasetShard { num_processes: 2, batch_size: 0, drop_last: false, split_batches: false };
    /// assert!(shard.check().unwrap_err().is_data());
    /// ```
    pub fn check(&self) -> Result<()> {
        check_sizes(self.num_processes, self.batch_size, self.split_batches)
    }

    /// Rows to read from the stream for one round of all ranks.
    ///
    /// ```
    /// # use accelerate_core::sampler::IterableDatasetShard;
    /// let shard = IterableDatasetShard { num_processes: 2, batch_size: 4, drop_last: false, split_batches: true };
    /// assert_eq!(shard.chunk_rows(), 4);
    /// ```
    pub fn chunk_rows(&self) -> usize {
        rank_batch_size(self.num_processes, self.batch_size, self.split_batches).saturating_mul(self.num_processes)
    }

    /// The batch of `rank` in a round whose chunk has `chunk_rows` rows, in a stream whose first chunk had
    /// `first_chunk_rows`. `None`: this round is dropped, for every rank alike.
    ///
    /// ```
    /// # use accelerate_core::sampler::IterableDatasetShard;
    /// let shard = IterableDatasetShard { num_processes: 2, batch_size: 4, drop_last: true, split_batches: false };
    /// assert!(shard.slots(8, 8, 1).is_some());
    /// assert!(shard.slots(7, 8, 1).is_none());
    /// ```
    pub fn slots(&self, chunk_rows: usize, first_chunk_rows: usize, rank: usize) -> Option<Vec<Slot>> {
        let wanted = self.chunk_rows();
        let dropped = self.drop_last && chunk_rows < wanted;
        if chunk_rows == 0 || first_chunk_rows == 0 || rank >= self.num_processes || dropped {
            return None;
        }
        let rank_rows = wanted / self.num_processes;
        Some(slots(rank * rank_rows..(rank + 1) * rank_rows, chunk_rows, first_chunk_rows))
    }
}

/// How rank 0, reading alone, cuts a chunk of `chunk_rows` rows for all ranks
/// (`DataLoaderDispatcher` of the reference, `data_loader.py`).
///
/// All ranks get the same number of rows. A chunk that cannot be cut so (only the last one of a stream
/// can be such) is completed from the first chunk, which had `first_chunk_rows` rows. Empty when nothing is
/// there to hand out. The reference can hand an empty batch to the last ranks when the first chunk has fewer
/// rows than there are processes; here fillers go round.
///
/// ```
/// use accelerate_core::sampler::dispatch_slots;
/// let ranks = dispatch_slots(3, 3, 2);
/// assert_eq!(ranks.len(), 2);
/// assert!(ranks[1][1].filler && !ranks[1][0].filler);
/// ```
pub fn dispatch_slots(chunk_rows: usize, first_chunk_rows: usize, num_processes: usize) -> Vec<Vec<Slot>> {
    if chunk_rows == 0 || first_chunk_rows == 0 || num_processes == 0 {
        return Vec::new();
    }
    let rank_rows = chunk_rows.div_ceil(num_processes);
    (0..num_processes)
        .map(|rank| slots(rank * rank_rows..(rank + 1) * rank_rows, chunk_rows, first_chunk_rows))
        .collect()
}

fn slots(positions: std::ops::Range<usize>, chunk_rows: usize, first_chunk_rows: usize) -> Vec<Slot> {
    positions
        .map(|position| match position.checked_sub(chunk_rows) {
            None => Slot::real(position),
            Some(missing) => Slot::filler(missing % first_chunk_rows),
        })
        .collect()
}
