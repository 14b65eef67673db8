//! How many threads a process computes with, where `OMP_NUM_THREADS` is a number that nobody means.

use super::Lookup;
use accelerate_core::environment::{UnusableThreads, check_num_threads};

/// Gives libtorch an even share of `num_cores` where `OMP_NUM_THREADS` cannot be meant, and returns what to say about it.
pub(super) fn settle(num_cores: usize, num_local_processes: usize, lookup: Lookup<'_>) -> Option<UnusableThreads> {
    let share = (num_cores / num_local_processes.max(1)).max(1);
    let unusable = check_num_threads(&lookup("OMP_NUM_THREADS")?, num_cores, share)?;
    tch::set_num_threads(i32::try_from(unusable.used).unwrap_or(i32::MAX));
    Some(unusable)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_nobody_means_is_replaced_by_an_even_share() {
        let before = tch::get_num_threads();
        for possible in [None, Some("2"), Some("2,1"), Some("")] {
            assert_eq!(settle(4, 2, &|_| possible.map(str::to_owned)), None);
        }
        assert_eq!(tch::get_num_threads(), before);
        for (value, num_local_processes, wanted) in [("0", 1, 3), ("abc", 1, 3), ("100000", 3, 1)] {
            let unusable = settle(3, num_local_processes, &|_| Some(value.to_owned())).unwrap();
            assert!(unusable.to_string().contains(value), "{unusable}");
            assert_eq!((unusable.used, tch::get_num_threads()), (wanted, wanted as i32));
        }
        tch::set_num_threads(before);
    }
}
