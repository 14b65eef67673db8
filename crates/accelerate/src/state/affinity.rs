//! Cores for each process of a machine (`set_numa_affinity` of the reference, `utils/environment.py`).

use crate::error::{Result, StateError};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// The cores that the process may use by itself, noted before it was kept on some of them. It is the process's and not an
/// accelerator's: from what the first accelerator has left, a second one would take a share of a share.
static CORES_AT_START: Mutex<Option<CpuSet>> = Mutex::new(None);

/// Keeps this thread, and those that it starts from now on, on a share of the cores that this process may use: the share
/// number `local_rank` of `num_local_processes`. With more processes than cores they share cores in turn. Pinned again, it is
/// kept on the same share.
pub(crate) fn pin(local_rank: usize, num_local_processes: usize) -> Result<()> {
    let allowed = cores_at_start()?;
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
    let mut own = CpuSet::new();
    cores[share(cores.len(), local_rank, num_local_processes)].iter().for_each(|&core| own.set(core));
    sched_setaffinity(None, &own).map_err(|source| StateError::Affinity { source: source.into() }.into())
}

/// Is this process kept on these cores, or on some of them? They are written as launchers do (`0-3,8`).
pub(crate) fn is_kept_on(list: &str) -> bool {
    let said = |cores: &mut CpuSet| -> Option<()> {
        for run in list.trim().split(',') {
            let (first, last) = run.split_once('-').unwrap_or((run, run));
            let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
            (last < CpuSet::MAX_CPU).then_some(())?;
            (first..=last).for_each(|core| cores.set(core));
        }
        Some(())
    };
    let mut cores = CpuSet::new();
    let is_list = said(&mut cores).is_some();
    let is_within = |own: CpuSet| (0..CpuSet::MAX_CPU).all(|core| !own.is_set(core) || cores.is_set(core));
    is_list && sched_getaffinity(None).is_ok_and(is_within)
}

fn cores_at_start() -> Result<CpuSet> {
    let mut at_start = CORES_AT_START.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(cores) = *at_start {
        return Ok(cores);
    }
    let cores = sched_getaffinity(None).map_err(|source| StateError::Affinity { source: source.into() })?;
    *at_start = Some(cores);
    Ok(cores)
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
    fn a_list_of_cores_is_believed_where_the_process_is_kept_on_them() {
        std::thread::spawn(|| {
            let first = (0..CpuSet::MAX_CPU).find(|&core| cores_at_start().unwrap().is_set(core)).unwrap();
            let mut only = CpuSet::new();
            only.set(first);
            sched_setaffinity(None, &only).unwrap();
            for own in [format!("{first}"), format!("{first}-{first}\n"), format!("{first}-{}", first + 1)] {
                assert!(is_kept_on(&own), "{own}");
            }
            for other in [format!("{}", first + 1), String::new(), "all".to_owned(), "0-99999999".to_owned()] {
                assert!(!is_kept_on(&other), "{other}");
            }
        })
        .join()
        .unwrap();
    }

    /// In a thread of its own, which alone is pinned. What the first pin has left is no limit for the second.
    #[test]
    fn a_process_is_kept_on_its_share_of_the_cores_that_it_had_at_the_start() {
        std::thread::spawn(|| {
            let cores = || {
                let set = sched_getaffinity(None).unwrap();
                (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect::<Vec<_>>()
            };
            let before = cores();
            for (local_rank, again) in [(0, false), (1, false), (1, true)] {
                pin(local_rank, 2).unwrap();
                let wanted = &before[share(before.len(), local_rank, 2)];
                assert_eq!(cores(), wanted, "share {local_rank} of {before:?}, again: {again}");
            }
        })
        .join()
        .unwrap();
    }
}
