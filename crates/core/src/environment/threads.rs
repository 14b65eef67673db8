//! Whether `OMP_NUM_THREADS` is a number that a process can compute with.

use crate::names::counted;
use crate::settings::shortened;
use std::fmt;

/// The most threads of a process for each core that it may use. More of them wait for one another more than they compute.
pub const MAX_THREADS_PER_CORE: usize = 8;

/// A value of `OMP_NUM_THREADS` that nobody means, and what is used in its place. Printed, it is a warning.
///
/// OpenMP would pass over such a value in silence, or start as many threads.
///
/// ```
/// use accelerate_core::environment::check_num_threads;
/// let unusable = check_num_threads("0", 8, 4).unwrap();
/// assert_eq!(unusable.used, 4);
/// assert!(unusable.to_string().starts_with("OMP_NUM_THREADS is \"0\", but must be a whole number from 1 to 64"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnusableThreads {
    /// The value, shortened.
    pub found: String,
    /// The largest number that is used as it is.
    pub most: usize,
    /// The number of threads that is used in its place.
    pub used: usize,
}

impl fmt::Display for UnusableThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { found, most, used } = self;
        write!(
            f,
            "OMP_NUM_THREADS is {found:?}, but must be a whole number from 1 to {most}; each process computes with {} \
             instead. Set it to a number of threads, as --num_cpu_threads_per_process does, or unset it",
            counted(*used, "thread")
        )
    }
}

/// Is this value of `OMP_NUM_THREADS` one that a process should not compute with? `num_cores` are those of this machine, and
/// `used` is the number of threads in its place. `None` for a number that is possible, for a list of them, of which each is
/// the number at one depth of nesting, and for nothing at all.
///
/// ```
/// use accelerate_core::environment::check_num_threads;
/// assert_eq!(check_num_threads("4", 8, 8), None);
/// assert!(check_num_threads("100000", 8, 8).is_some());
/// ```
pub fn check_num_threads(value: &str, num_cores: usize, used: usize) -> Option<UnusableThreads> {
    let most = num_cores.max(1).saturating_mul(MAX_THREADS_PER_CORE);
    let is_possible = |number: &str| number.trim().parse().is_ok_and(|number: usize| (1..=most).contains(&number));
    if value.trim().is_empty() || value.split(',').all(is_possible) {
        return None;
    }
    Some(UnusableThreads { found: shortened(value), most, used })
}
