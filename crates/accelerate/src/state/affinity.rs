//! Cores for each process of a machine (`set_numa_affinity` of the reference, `utils/environment.py`).

use crate::error::{Result, StateError};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::ops::Range;

/// Keeps this thread, and those that it starts from now on, on a share of the cores that this process may use: the share
/// number `local_rank` of `num_local_processes`. With more processes than cores they share cores in turn.
pub(crate) fn pin(local_rank: usize, num_local_processes: usize) -> Result<()> {
    let allowed = sched_getaffinity(None).map_err(|source| StateError::Affinity { source: source.into() })?;
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
    let mut own = CpuSet::new();
    cores[share(cores.len(), local_rank, num_local_processes)].iter().for_each(|&core| own.set(core));
    sched_setaffinity(None, &own).map_err(|source| StateError::Affinity { source: source.into() }.into())
}

/// The places in the list of cores that one of several processes has, never none.
fn share(num_cores: usize, local_rank: usize, num_local_processes: usize) -> Range<usize> {
    let num_processes = num_local_processes.max(1);
    if num_cores < num_processes {
        let core = local_rank % num_cores.max(1);
        return core..(core + 1).min(num_cores);
    }
    let (each, rest) = (num_cores / num_processes, num_cores % num_processes);
    let begin = local_rank * each + local_rank.min(rest);
    begin..(begin + each + usize::from(local_rank < rest)).min(num_cores)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_core_has_one_process_and_every_process_a_core() {
        for num_cores in 1..9 {
            for num_processes in 1..=num_cores {
                let shares = (0..num_processes).flat_map(|rank| share(num_cores, rank, num_processes));
                assert!(shares.eq(0..num_cores), "{num_cores} {num_processes}");
            }
        }
        assert_eq!((share(2, 0, 5), share(2, 3, 5), share(2, 4, 5)), (0..1, 1..2, 0..1));
    }

    /// In a thread of its own, which alone is pinned.
    #[test]
    fn a_process_is_kept_on_its_share() {
        std::thread::spawn(|| {
            let before = sched_getaffinity(None).unwrap().count();
            pin(0, 2).unwrap();
            let after = sched_getaffinity(None).unwrap().count();
            assert_eq!(after, if before == 1 { 1 } else { before.div_ceil(2) });
        })
        .join()
        .unwrap();
    }
}
