//! Names and numbers of checkpoints, and which of them have to go.

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
/// for other in ["checkpoint_", "checkpoint_012", "checkpoint_+1", "checkpoint_1.old", "checkpoint-1", "Checkpoint_1"] {
///     assert_eq!(checkpoint_number(other), None, "{other}");
/// }
/// ```
pub fn checkpoint_number(folder_name: &str) -> Option<usize> {
    let number = folder_name.strip_prefix("checkpoint_")?.parse().ok()?;
    // Another spelling of a number is the name of another folder.
    (checkpoint_name(number) == folder_name).then_some(number)
}

/// The numbers of those checkpoints that go once `newest` is there, the oldest first: with it, at most `total_limit` are left.
/// The newest one stays whatever the limit.
///
/// ```
/// use accelerate_core::checkpoint::outdated;
/// assert_eq!(outdated(&[10, 2, 9], 10, Some(2)), [2]);
/// assert_eq!(outdated(&[10, 2, 9], 10, Some(0)), [2, 9]);
/// assert!(outdated(&[10, 2, 9], 10, None).is_empty());
/// ```
pub fn outdated(committed: &[usize], newest: usize, total_limit: Option<usize>) -> Vec<usize> {
    let Some(total_limit) = total_limit else { return Vec::new() };
    let mut others: Vec<usize> = committed.iter().copied().filter(|&number| number != newest).collect();
    others.sort_unstable();
    let num_kept = total_limit.saturating_sub(1).min(others.len());
    others.truncate(others.len() - num_kept);
    others
}
