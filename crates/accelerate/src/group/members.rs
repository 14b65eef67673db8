//! Who belongs to a group, and what messages call them.

use std::sync::Arc;

/// The processes of a group. Ranks of a group that is a part of another count from 0; people know processes by their ranks in
/// the whole job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Members {
    /// Their ranks in the job, by rank in the group.
    job_ranks: Arc<[usize]>,
    rank: usize,
    /// Is the group the whole job?
    is_whole: bool,
}

impl Members {
    /// All processes of the job, seen by rank `rank`.
    pub(crate) fn all(rank: usize, world_size: usize) -> Self {
        Self { job_ranks: (0..world_size).collect(), rank, is_whole: true }
    }

    /// Those of these that have the ranks `ranks`, seen by the `rank`-th of them.
    pub(super) fn part(&self, ranks: &[usize], rank: usize) -> Self {
        let job_ranks: Arc<[usize]> = ranks.iter().map(|&rank| self.in_job(rank)).collect();
        let is_whole = self.is_whole && job_ranks == self.job_ranks;
        Self { job_ranks, rank, is_whole }
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn world_size(&self) -> usize {
        self.job_ranks.len()
    }

    /// The rank in the job of rank `rank`.
    pub(super) fn in_job(&self, rank: usize) -> usize {
        self.job_ranks.get(rank).copied().unwrap_or(rank)
    }

    /// This process in messages: `rank 1 of 4`, or `rank 3 of ranks 1, 3`.
    pub(super) fn own_place(&self) -> String {
        let own = self.in_job(self.rank);
        if self.is_whole {
            return format!("rank {own} of {}", self.world_size());
        }
        let ranks: Vec<_> = self.job_ranks.iter().map(usize::to_string).collect();
        format!("rank {own} of ranks {}", ranks.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_called_by_their_ranks_in_the_job() {
        let all = Members::all(3, 4);
        let odd = all.part(&[1, 3], 1);
        assert_eq!((all.own_place().as_str(), odd.own_place().as_str()), ("rank 3 of 4", "rank 3 of ranks 1, 3"));
        assert_eq!((odd.rank(), odd.world_size(), odd.in_job(0)), (1, 2, 1));
        assert_eq!(odd.part(&[1], 0).own_place(), "rank 3 of ranks 3");
        assert_eq!(all.part(&[0, 1, 2, 3], 3), all);
    }
}
