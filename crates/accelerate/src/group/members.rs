//! Who belongs to a group, and what messages call them.

use std::sync::Arc;

/// The processes of a group. Ranks of a subgroup count from 0; people know processes by their ranks in
/// the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Members {
    /// Their ranks in the job, by rank in the group.
    job_ranks: Arc<[usize]>,
    rank: usize,
    /// Is the group the job?
    is_job: bool,
}

impl Members {
    /// All processes of the job, seen by rank `rank`.
    pub(crate) fn all(rank: usize, world_size: usize) -> Self {
        Self { job_ranks: (0..world_size).collect(), rank, is_job: true }
    }

    /// Those of these that have the ranks `ranks`, seen by the `rank`-th of them.
    pub(super) fn subgroup(&self, ranks: &[usize], rank: usize) -> Self {
        let job_ranks: Arc<[usize]> = ranks.iter().map(|&rank| self.in_job(rank)).collect();
        let is_job = self.is_job && job_ranks == self.job_ranks;
        Self { job_ranks, rank, is_job }
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
        if self.is_job {
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
    fn subgroups_are_called_by_their_ranks_in_the_job() {
        let all = Members::all(3, 4);
        let odd = all.subgroup(&[1, 3], 1);
        assert_eq!((all.own_place().as_str(), odd.own_place().as_str()), ("rank 3 of 4", "rank 3 of ranks 1, 3"));
        assert_eq!((odd.rank(), odd.world_size(), odd.in_job(0)), (1, 2, 1));
        assert_eq!(odd.subgroup(&[1], 0).own_place(), "rank 3 of ranks 3");
        assert_eq!(all.subgroup(&[0, 1, 2, 3], 3), all);
    }
}
