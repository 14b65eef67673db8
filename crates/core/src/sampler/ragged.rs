//! Sharing the batches of a sampler that decides batch sizes itself.

use super::Row;
use crate::Result;
use crate::error::data::DataErrorKind;

/// How batches of any size, made by the user's own batch sampler, are dealt to ranks: whole, in turn
/// (`BatchSamplerShard` of the reference over a sampler without a `batch_size`, `data_loader.py`).
///
/// Batch `k` goes to rank `k mod num_processes`. Batches are never cut or filled up, so ranks may see
/// different sizes in the same round.
///
/// ```
/// use accelerate_core::sampler::RaggedBatchShard;
/// let shard = RaggedBatchShard { num_processes: 2, drop_last: false, even_batches: true };
/// let batches = [vec![0, 1, 2], vec![3], vec![4, 5]];
/// let batch = shard.batch(&batches, 1, 1).unwrap();
/// assert_eq!(batch.len(), 3); // batch 0 again, to keep rank 1 even with rank 0
/// assert!(batch.iter().all(|row| row.filler));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RaggedBatchShard {
    /// Number of ranks that share the batches, at least 1.
    pub num_processes: usize,
    /// Leave out the batches that do not make a whole round.
    pub drop_last: bool,
    /// Give every rank the same number of batches, by repeating batches from the start.
    /// No effect together with `drop_last`.
    pub even_batches: bool,
}

impl RaggedBatchShard {
    /// Checks that there is a rank to deal to.
    ///
    /// # Errors
    ///
    /// [`Error::is_data`](crate::Error::is_data): no processes.
    ///
    /// ```
    /// # use accelerate_core::sampler::RaggedBatchShard;
    /// assert!(RaggedBatchShard { num_processes: 0, drop_last: false, even_batches: true }.check().is_err());
    /// ```
    pub fn check(&self) -> Result<()> {
        if self.num_processes == 0 {
            return Err(DataErrorKind::ZeroProcesses.into());
        }
        Ok(())
    }

    /// Batches that `rank` gets out of `num_batches`.
    ///
    /// ```
    /// # use accelerate_core::sampler::RaggedBatchShard;
    /// let shard = RaggedBatchShard { num_processes: 2, drop_last: false, even_batches: false };
    /// assert_eq!((shard.num_rounds(5, 0), shard.num_rounds(5, 1)), (3, 2));
    /// ```
    pub fn num_rounds(&self, num_batches: usize, rank: usize) -> usize {
        if rank >= self.num_processes {
            return 0;
        }
        let (whole, left) = (num_batches / self.num_processes, num_batches % self.num_processes);
        let has_rest = !self.drop_last && left > 0 && (self.even_batches || rank < left);
        whole + usize::from(has_rest)
    }

    /// The batch of `rank` in round `round`; `None` when it gets nothing.
    ///
    /// ```
    /// # use accelerate_core::sampler::RaggedBatchShard;
    /// let shard = RaggedBatchShard { num_processes: 2, drop_last: true, even_batches: true };
    /// assert_eq!(shard.batch(&[vec![0], vec![1], vec![2]], 1, 0), None);
    /// ```
    pub fn batch(&self, batches: &[Vec<usize>], round: usize, rank: usize) -> Option<Vec<Row>> {
        self.batch_from(batches, round.checked_mul(self.num_processes)?, rank)
    }

    /// The batch of `rank` in the round that begins with batch number `first`, wherever the rounds before it
    /// ended; `None` when it gets nothing.
    ///
    /// ```
    /// # use accelerate_core::sampler::RaggedBatchShard;
    /// let shard = RaggedBatchShard { num_processes: 2, drop_last: false, even_batches: true };
    /// let batch = shard.batch_from(&[vec![0], vec![1], vec![2, 3]], 2, 1).unwrap();
    /// assert_eq!((batch[0].index, batch[0].filler), (0, true));
    /// ```
    pub fn batch_from(&self, batches: &[Vec<usize>], first: usize, rank: usize) -> Option<Vec<Row>> {
        let left = batches.len().checked_sub(first)?;
        if self.num_rounds(left, rank) == 0 {
            return None;
        }
        let number = first + rank;
        let (batch, filler) = match number.checked_sub(batches.len()) {
            None => (&batches[number], false),
            Some(missing) => (&batches[missing % batches.len()], true),
        };
        Some(batch.iter().map(|&index| Row { index, filler }).collect())
    }
}
