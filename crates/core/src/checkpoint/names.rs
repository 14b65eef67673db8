//! Names and numbers of checkpoints, and which of them have to go.

use super::MOST_STEPS;

/// Before the number of a rank, the name of the object that is its gradients, which wait for a step.
pub const GRADIENTS: &str = "gradients_";
/// Before the number of a rank, the name of what its communication hooks keep from step to step.
pub const COMM_HOOK: &str = "comm_hook_";
/// Before the number of a rank, the name of those tensors that it holds otherwise than the first rank of its folder.
pub const KEPT_BY_RANK: &str = "kept_by_rank_";

/// Is this the name of an object that one rank alone has?
///
/// ```
/// use accelerate_core::checkpoint::is_of_one_rank;
/// assert!(is_of_one_rank("gradients_3"));
/// assert!(!is_of_one_rank("model"));
/// ```
pub fn is_of_one_rank(object: &str) -> bool {
    after_prefix(object).is_some()
}

/// Is this the object of one rank that a run of `world_size` ranks does not have? `gradients_07` is none of rank 7, and what ranks hold
/// otherwise than the first of their folder, rank 0 never does.
pub(super) fn is_of_no_rank(object: &str, world_size: usize) -> bool {
    after_prefix(object).is_some_and(|(prefix, number)| {
        let rank = number.parse().ok().filter(|rank: &usize| *rank < world_size && rank.to_string() == number);
        rank.is_none_or(|rank| rank == 0 && prefix == KEPT_BY_RANK)
    })
}

fn after_prefix(object: &str) -> Option<(&'static str, &str)> {
    let prefixes = [GRADIENTS, COMM_HOOK, KEPT_BY_RANK].into_iter();
    prefixes.filter_map(|prefix| Some((prefix, object.strip_prefix(prefix)?))).next()
}

/// The folder of the checkpoint of this number.
///
/// ```
/// assert_eq!(accelerate_core::checkpoint::checkpoint_name(12), "checkpoint_12");
/// ```
pub fn checkpoint_name(number: usize) -> String {
    format!("checkpoint_{number}")
}

/// The number of the checkpoint in a folder of this name.
///
/// ```
/// use accelerate_core::checkpoint::checkpoint_number;
/// assert_eq!(checkpoint_number("checkpoint_12"), Some(12));
/// assert_eq!(checkpoint_number("checkpoint_18446744073709551615"), None);
/// for other in ["checkpoint_", "checkpoint_012", "checkpoint_+1", "checkpoint_1.old", "checkpoint-1", "Checkpoint_1"] {
///     assert_eq!(checkpoint_number(other), None, "{other}");
/// }
/// ```
pub fn checkpoint_number(folder_name: &str) -> Option<usize> {
    let number = folder_name.strip_prefix("checkpoint_")?.parse().ok()?;
    // Another spelling of a number is the name of another folder, and no run has so many that the next one could not be counted.
    (checkpoint_name(number) == folder_name && number < MOST_STEPS).then_some(number)
}

/// Which automatically named checkpoints stay when a new one is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// How many of the newest stay. `None`: all.
    pub total_limit: Option<usize>,
    /// Beside those, each whose number is a multiple of this.
    pub keep_every: Option<usize>,
    /// Beside those, so many with the largest metrics.
    pub keep_best: Option<usize>,
}

/// A checkpoint that counts, and how good the run was then.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Completed {
    /// In the name of its folder.
    pub number: usize,
    /// Larger is better. `None` where the program has said nothing.
    pub metric: Option<f64>,
}

impl Retention {
    /// The numbers of those checkpoints that go once `newest` is there, the oldest first. The newest one stays in any case. Of equal
    /// metrics the later one is the better; NaN is none.
    ///
    /// ```
    /// use accelerate_core::checkpoint::{Completed, Retention};
    ///
    /// let found = [(10, 0.5), (2, 0.9), (9, 0.6), (5, 0.1)].map(|(number, it)| Completed { number, metric: Some(it) });
    /// let newest = Retention { total_limit: Some(2), ..Default::default() };
    /// assert_eq!(newest.outdated(&found, 10), [2, 5]);
    /// assert_eq!(Retention { keep_every: Some(5), ..newest }.outdated(&found, 10), [2]);
    /// assert_eq!(Retention { keep_best: Some(1), ..newest }.outdated(&found, 10), [5]);
    /// assert!(Retention::default().outdated(&found, 10).is_empty());
    /// ```
    pub fn outdated(self, completed: &[Completed], newest: usize) -> Vec<usize> {
        let Some(total_limit) = self.total_limit else { return Vec::new() };
        let mut others: Vec<usize> = completed.iter().map(|it| it.number).filter(|&number| number != newest).collect();
        others.sort_unstable();
        let num_kept = total_limit.saturating_sub(1).min(others.len());
        others.truncate(others.len() - num_kept);
        let best = self.best(completed);
        others.retain(|number| !self.is_kept_anyway(*number) && !best.contains(number));
        others
    }

    fn is_kept_anyway(self, number: usize) -> bool {
        self.keep_every.is_some_and(|every| every > 0 && number.is_multiple_of(every))
    }

    fn best(self, completed: &[Completed]) -> Vec<usize> {
        let metric = |it: &Completed| Some((it.metric.filter(|metric| !metric.is_nan())?, it.number));
        let mut ranked: Vec<(f64, usize)> = completed.iter().filter_map(metric).collect();
        ranked.sort_unstable_by(|(a, first), (b, second)| b.total_cmp(a).then(second.cmp(first)));
        ranked.into_iter().take(self.keep_best.unwrap_or(0)).map(|(_, number)| number).collect()
    }
}
