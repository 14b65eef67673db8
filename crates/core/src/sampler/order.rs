//! The order in which an epoch visits the rows.

use super::Row;
use std::sync::Arc;

/// The order in which an epoch visits the rows of a dataset. Clones share it.
///
/// ```
/// use accelerate_core::sampler::RowOrder;
///
/// assert_eq!(RowOrder::Sequential(3).iter().collect::<Vec<_>>(), [0, 1, 2]);
/// assert_eq!(RowOrder::from(vec![2, 0]).get(0), Some(2));
/// ```
#[derive(Clone, Debug)]
pub enum RowOrder {
    /// That many rows, from the first to the last. Nothing is written down, so it costs the same for any number.
    Sequential(usize),
    /// Row numbers, one after the other.
    // A vector inside, because turning one into a slice of its own would copy the order of every epoch.
    Listed(Arc<Vec<usize>>),
}

impl RowOrder {
    /// Rows that the epoch visits.
    ///
    /// ```
    /// assert_eq!(accelerate_core::sampler::RowOrder::Sequential(3).len(), 3);
    /// ```
    pub fn len(&self) -> usize {
        match self {
            Self::Sequential(num_rows) => *num_rows,
            Self::Listed(rows) => rows.len(),
        }
    }

    /// Are there no rows?
    ///
    /// ```
    /// assert!(accelerate_core::sampler::RowOrder::from(vec![]).is_empty());
    /// ```
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The row at a position of the order.
    ///
    /// ```
    /// assert_eq!(accelerate_core::sampler::RowOrder::Sequential(3).get(3), None);
    /// ```
    pub fn get(&self, position: usize) -> Option<usize> {
        match self {
            Self::Sequential(num_rows) => (position < *num_rows).then_some(position),
            Self::Listed(rows) => rows.get(position).copied(),
        }
    }

    /// All rows, in order.
    ///
    /// ```
    /// let order = accelerate_core::sampler::RowOrder::from(vec![4, 1]);
    /// assert_eq!(order.iter().sum::<usize>(), 5);
    /// ```
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.len()).filter_map(|position| self.get(position))
    }

    /// Rows in place of positions. Positions behind the end are left out.
    ///
    /// ```
    /// use accelerate_core::sampler::{Row, RowOrder};
    ///
    /// let order = RowOrder::from(vec![7, 5, 3]);
    /// let rows = order.rows_at(vec![Row { index: 1, filler: false }, Row { index: 0, filler: true }]);
    /// assert_eq!(rows, [Row { index: 5, filler: false }, Row { index: 7, filler: true }]);
    /// ```
    pub fn rows_at(&self, positions: Vec<Row>) -> Vec<Row> {
        match self {
            Self::Sequential(_) => positions,
            Self::Listed(rows) => {
                let row = |at: Row| rows.get(at.index).map(|&index| Row { index, ..at });
                positions.into_iter().filter_map(row).collect()
            }
        }
    }
}

impl From<Vec<usize>> for RowOrder {
    fn from(rows: Vec<usize>) -> Self {
        Self::Listed(Arc::new(rows))
    }
}
