//! Labels of a whole table: how many there are, and whether they fit a model.

use super::{DataError, RowProblem, Table};
use accelerate::data::readers::Place;
use std::collections::BTreeSet;

impl Table {
    /// Number of different labels, which must be 0, 1, 2, ... without a gap.
    ///
    /// # Errors
    /// When a label between 0 and the largest is missing, or when there is only one.
    pub fn num_labels(&self) -> Result<usize, DataError> {
        // A set, not a vector up to the largest: one mistyped label must not ask for gigabytes.
        let labels: BTreeSet<usize> = self.rows.iter().map(|row| row.label).collect();
        let path = || self.source.clone();
        if let Some((missing, _)) = labels.iter().enumerate().find(|&(wanted, &found)| wanted != found) {
            let largest = labels.last().copied().unwrap_or_default();
            return Err(DataError::LabelGap { path: path(), missing, largest });
        }
        if labels.len() < 2 {
            return Err(DataError::OneLabel { path: path(), num_rows: self.rows.len() });
        }
        Ok(labels.len())
    }

    /// Checks that a model with `num_labels` outputs knows every label.
    ///
    /// # Errors
    /// Names the first row whose label is `num_labels` or larger.
    pub fn check_labels(&self, num_labels: usize) -> Result<(), DataError> {
        match self.rows.iter().find(|row| row.label >= num_labels) {
            None => Ok(()),
            Some(row) => Err(DataError::Row {
                place: Place { path: self.source.clone(), position: row.position },
                problem: RowProblem::LabelOutOfRange { found: row.label, num_labels },
            }),
        }
    }
}
