//! The grid of loader configurations.

use serde::Serialize;

/// One configuration of a loader; both programs read it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Case {
    /// `map`, `ragged` (a batch sampler with batches of unequal size) or `stream`.
    pub(super) kind: &'static str,
    pub(super) rows: usize,
    pub(super) batch_size: usize,
    pub(super) drop_last: bool,
    /// `sequential`, `random`, `weighted` or `subset` (every second row).
    pub(super) sampler: &'static str,
    pub(super) seedable: bool,
    /// The sampler draws from a generator of the user, as does the loader that is told to shuffle.
    pub(super) own_generator: bool,
    /// Every rank is seeded differently.
    pub(super) seed_per_rank: bool,
    pub(super) split_batches: bool,
    pub(super) even_batches: bool,
    pub(super) dispatch_batches: bool,
    pub(super) seed: u64,
    /// Batches to leave out in the first epoch.
    pub(super) skip: usize,
    /// Gather every batch for metrics: possible where all ranks have one.
    pub(super) metrics: bool,
}

impl Case {
    /// Rows that the sampler visits in a pass.
    pub(super) fn num_samples(&self) -> usize {
        if self.sampler == "subset" { self.rows.div_ceil(2) } else { self.rows }
    }

    /// Rows of a whole round of all ranks.
    pub(super) fn round(&self, world_size: usize) -> usize {
        if self.split_batches { self.batch_size } else { self.batch_size * world_size }
    }

    /// Rows that the reference leaves out at the beginning of an epoch.
    pub(super) fn skipped_by_reference(&self, world_size: usize, epoch: usize) -> usize {
        let per_batch = match self.dispatch_batches && self.kind == "map" {
            true => self.batch_size,
            false => self.round(world_size),
        };
        if epoch == 0 { self.skip * per_batch } else { 0 }
    }

    /// Rows that count in an epoch, where `skipped` are left out at its beginning.
    pub(super) fn rows_after(&self, world_size: usize, skipped: usize) -> usize {
        if !self.drop_last {
            return self.num_samples().saturating_sub(skipped);
        }
        // Batches that are not full are dropped first, and then rounds.
        let whole_batches = self.num_samples() / self.batch_size * self.batch_size;
        let round = self.round(world_size);
        whole_batches.saturating_sub(skipped) / round * round
    }

    /// The reference's dispatcher hands out empty batches where the first round and as many fillers do not make one row
    /// for each rank, and its metrics then wait for ever.
    fn hands_out_empty_batches(&self, world_size: usize) -> bool {
        let is_short = |epoch| {
            let left = self.rows_after(world_size, self.skipped_by_reference(world_size, epoch));
            2 * left.min(self.round(world_size)) < world_size
        };
        self.dispatch_batches && !self.drop_last && (is_short(0) || is_short(1))
    }
}

/// Kinds of dataset, orders, and every way of sharing them.
pub(super) fn cases(world_size: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    let both = [false, true];
    let mut add = |case: Case| {
        let metrics = case.metrics && !case.hands_out_empty_batches(world_size);
        cases.push(Case { seed: 1000 + cases.len() as u64, metrics, ..case });
    };
    for rows in [1, 7, 16, 23, 48] {
        for split_batches in both {
            for drop_last in both {
                // A batch that is split has to be divisible by the number of ranks.
                let batch_size = if split_batches { 12usize.next_multiple_of(world_size) } else { 3 };
                let case = Case { batch_size, drop_last, split_batches, ..plain(rows) };
                for (sampler, seedable) in [("sequential", false), ("random", false), ("random", true)] {
                    let case = Case { sampler, seedable, ..case.clone() };
                    add(Case { even_batches: false, metrics: false, ..case.clone() });
                    for dispatch_batches in both {
                        add(Case { skip: 1, dispatch_batches, ..case.clone() });
                        add(Case { dispatch_batches, ..case.clone() });
                    }
                }
                for dispatch_batches in both {
                    for skip in [0, 1] {
                        let stream = Case { kind: "stream", dispatch_batches, skip, ..case.clone() };
                        add(stream.clone());
                        // Without fillers some ranks have no batch to gather, unless rank 0 reads for all.
                        add(Case { even_batches: false, metrics: dispatch_batches, ..stream });
                    }
                }
                if [7, 23].contains(&rows) {
                    of_generators(&case).into_iter().for_each(&mut add);
                }
            }
        }
        for even_batches in both {
            // Batches of unequal size cannot be gathered.
            add(Case { kind: "ragged", batch_size: 1, even_batches, metrics: false, ..plain(rows) });
        }
    }
    cases
}

/// Rows of a file in their order.
pub(super) fn plain(rows: usize) -> Case {
    Case {
        kind: "map",
        rows,
        batch_size: 3,
        drop_last: false,
        sampler: "sequential",
        seedable: false,
        own_generator: false,
        seed_per_rank: false,
        split_batches: false,
        even_batches: true,
        dispatch_batches: false,
        seed: 0,
        skip: 0,
        metrics: true,
    }
}

/// Every sampler with a generator of its own, of the user, or of nobody.
fn of_generators(case: &Case) -> Vec<Case> {
    let mut cases = Vec::new();
    for sampler in ["random", "weighted", "subset"] {
        let case = Case { sampler, ..case.clone() };
        cases.push(Case { seed_per_rank: true, ..case.clone() });
        cases.push(Case { seed_per_rank: true, own_generator: true, ..case.clone() });
        cases.push(Case { seedable: true, own_generator: true, ..case.clone() });
        for skip in [0, 1] {
            for dispatch_batches in [false, true] {
                let case = Case { skip, dispatch_batches, ..case.clone() };
                cases.push(Case { own_generator: true, ..case.clone() });
                if sampler != "random" {
                    cases.push(case);
                }
            }
        }
        if sampler != "random" {
            cases.push(Case { seedable: true, ..case.clone() });
            cases.push(Case { even_batches: false, metrics: false, ..case.clone() });
        }
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grid_is_large_and_no_case_comes_twice() {
        for world_size in [1, 2, 7] {
            let cases = cases(world_size);
            assert!(cases.len() >= 500, "{}", cases.len());
            for (at, case) in cases.iter().enumerate() {
                let same = |other: &&Case| Case { seed: 0, ..(*other).clone() } == Case { seed: 0, ..case.clone() };
                assert_eq!(cases.iter().filter(same).count(), 1, "case {at}: {case:?}");
            }
        }
    }

    #[test]
    fn rows_that_count_are_those_of_whole_rounds() {
        let case = Case { rows: 23, ..plain(23) };
        for (case, skipped, wanted) in [
            (case.clone(), 0, 23),
            (case.clone(), 6, 17),
            (Case { drop_last: true, ..case.clone() }, 0, 18),
            // The last batch is dropped before rounds are made.
            (Case { drop_last: true, ..case.clone() }, 3, 18),
            (Case { drop_last: true, ..case.clone() }, 6, 12),
            (Case { sampler: "subset", ..case }, 0, 12),
        ] {
            assert_eq!(case.rows_after(2, skipped), wanted, "{case:?} without {skipped} rows");
        }
    }
}
