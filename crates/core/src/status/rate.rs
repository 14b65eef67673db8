//! How fast a rank gets on.

/// The last times at which samples were handed out to a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// When, in nanoseconds of the machine's clock, and how many samples all ranks had got until then, the oldest first.
    pub times: Vec<(u64, u64)>,
}

impl Progress {
    /// Samples that have been handed out.
    pub fn samples(&self) -> u64 {
        self.times.last().map_or(0, |last| last.1)
    }
}

/// Samples per second over the last batches. A rank that gets no more batches becomes slower and slower: once the next batch
/// takes longer than those before, the time until `now` counts as well. `None` before the second batch.
///
/// ```
/// use accelerate_core::status::{Progress, samples_per_second};
/// let second = 1_000_000_000;
/// let progress = Progress { times: vec![(0, 8), (second, 16), (2 * second, 24)] };
/// assert_eq!(samples_per_second(&progress, 2 * second), Some(8.0));
/// assert_eq!(samples_per_second(&progress, 16 * second), Some(1.0));
/// ```
pub fn samples_per_second(progress: &Progress, now: u64) -> Option<f64> {
    let [first, .., last] = progress.times.as_slice() else { return None };
    let samples = last.1.checked_sub(first.1)?;
    let lasted = last.0.checked_sub(first.0)?;
    let usual = lasted / (progress.times.len() as u64 - 1);
    let waited = now.saturating_sub(last.0);
    // Batches are never quite as long as each other.
    let is_late = usual.saturating_mul(2) < waited;
    let nanoseconds = if is_late { lasted.saturating_add(waited) } else { lasted };
    (nanoseconds > 0).then(|| samples as f64 / (nanoseconds as f64 / 1e9))
}
