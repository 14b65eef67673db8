//! Metrics over a whole data set, on any number of processes: each row counts once.
//!
//! `add_batch` is called inside the loop over a prepared loader and gathers with
//! [`Accelerator::gather_for_metrics`](crate::Accelerator::gather_for_metrics), which leaves out the rows that a loader added only to
//! keep processes even. So it is collective, and `compute` gives the same number on every process. Names and numbers are those of
//! scikit-learn and of Hugging Face's `evaluate`.

mod accuracy;
mod f1;
mod perplexity;

pub use accuracy::Accuracy;
pub use f1::{F1, F1Average};
pub use perplexity::Perplexity;

/// A part of a whole; of nothing it is not a number.
fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { f64::NAN } else { part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests;
