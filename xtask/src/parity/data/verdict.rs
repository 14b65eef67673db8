//! Equal, different on purpose, or wrong.

use super::Outcome;
use super::cases::Case;

/// Why the reference is not followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Fault {
    Fails,
    EmptyBatch,
    Metrics,
    SameEpoch,
    SkippedBatches,
    FilledStream,
    OtherFillers,
}

impl Fault {
    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::Fails => "the reference's dispatcher fails where there is no whole round; here the pass is empty",
            Self::EmptyBatch => "the reference hands out an empty batch; here rows go round until every rank has one",
            Self::SameEpoch => "the reference repeats the order of a resumed epoch in the next one; here epochs go on",
            Self::Metrics => "the reference's metrics count fillers, or lose rows; here every row counts once",
            Self::SkippedBatches => {
                "under dispatch the reference skips batches of rank 0; here rounds of all ranks, as without dispatch"
            }
            Self::OtherFillers => {
                "after skipping under dispatch the reference fills up with rows of the round that it begins with; here with \
                 those that the order begins with, as without dispatch"
            }
            Self::FilledStream => {
                "the reference fills up streams without even_batches, too; here rows go as far as they go"
            }
        }
    }
}

#[derive(Debug, PartialEq)]
pub(super) enum Verdict {
    Equal,
    ByDesign(Fault),
    Different,
}

/// What differs on purpose is expected in every row: anything beside it is `Different`.
pub(super) fn judge(case: &Case, theirs: &[Outcome], ours: &[Outcome]) -> Verdict {
    if theirs == ours {
        return Verdict::Equal;
    }
    let fails = |outcomes: &[Outcome]| outcomes.iter().any(|outcome| outcome.error.is_some());
    if fails(ours) || !metrics_are_exact(case, ours) {
        return Verdict::Different;
    }
    if fails(theirs) {
        // What the reference had seen before is lost with it.
        return if has_no_whole_round(case, ours.len()) { Verdict::ByDesign(Fault::Fails) } else { Verdict::Different };
    }
    if theirs.iter().zip(ours).any(|(theirs, ours)| theirs.next_draw != ours.next_draw) {
        return Verdict::Different;
    }
    let sides = Sides { case, theirs, ours };
    let mut found = None;
    for epoch in 0..2 {
        match sides.fault_of(epoch) {
            None if sides.same_batches(epoch) => {}
            Some(fault) => found = found.or(Some(fault)),
            None => return Verdict::Different,
        }
    }
    match found {
        Some(fault) => Verdict::ByDesign(fault),
        None if !metrics_are_exact(case, theirs) => Verdict::ByDesign(Fault::Metrics),
        None => Verdict::Different,
    }
}

fn has_no_whole_round(case: &Case, world_size: usize) -> bool {
    let is_empty = |epoch| case.rows_after(world_size, case.skipped_by_reference(world_size, epoch)) == 0;
    case.dispatch_batches && (is_empty(0) || is_empty(1))
}

/// What all ranks saw of one case.
struct Sides<'a> {
    case: &'a Case,
    theirs: &'a [Outcome],
    ours: &'a [Outcome],
}

impl Sides<'_> {
    fn world_size(&self) -> usize {
        self.ours.len()
    }

    fn same_batches(&self, epoch: usize) -> bool {
        self.theirs.iter().zip(self.ours).all(|(theirs, ours)| theirs.epochs[epoch] == ours.epochs[epoch])
    }

    /// The documented difference that the batches of an epoch show, if they differ by nothing else.
    fn fault_of(&self, epoch: usize) -> Option<Fault> {
        if self.same_batches(epoch) {
            return None;
        }
        let Case { skip, dispatch_batches: dispatch, .. } = *self.case;
        if self.case.kind == "stream" && !self.case.even_batches && !dispatch {
            return self.differ_by_fillers(epoch).then_some(Fault::FilledStream);
        }
        if epoch == 1 && skip > 0 && self.case.seedable && self.case.sampler == "random" {
            return self.reference_repeats_the_order().then_some(Fault::SameEpoch);
        }
        let (theirs, ours) = (self.rows_of_theirs(epoch)?, self.rows_of_ours(epoch)?);
        let (skipped_by_reference, skipped) = (self.skipped_by_reference(epoch), self.skipped(epoch));
        if skipped_by_reference < skipped {
            // The rest of one order, which begins later here.
            let later = theirs.get(skipped - skipped_by_reference..).unwrap_or_default();
            return is_same_beginning(later, &ours).then_some(Fault::SkippedBatches);
        }
        if theirs != ours || !dispatch {
            return None;
        }
        if epoch == 0 && skip > 0 && self.case.kind == "map" && self.reference_fills_from_where_it_begins(theirs.len())
        {
            return Some(Fault::OtherFillers);
        }
        let has_empty_batch =
            |outcomes: &[Outcome]| outcomes.iter().any(|rank| rank.epochs[epoch].iter().any(Vec::is_empty));
        (has_empty_batch(self.theirs) && !has_empty_batch(self.ours)).then_some(Fault::EmptyBatch)
    }

    /// Are batches of the first epoch as long as ours, and what follows `count` rows in the reference the first of these?
    fn reference_fills_from_where_it_begins(&self, count: usize) -> bool {
        let sizes = |outcome: &Outcome| outcome.epochs[0].iter().map(Vec::len).collect::<Vec<_>>();
        let rows = in_order(self.theirs, 0);
        let (once, fillers) = rows.split_at(count.min(rows.len()));
        self.theirs.iter().zip(self.ours).all(|(theirs, ours)| sizes(theirs) == sizes(ours))
            && once.starts_with(fillers)
    }

    fn skipped_by_reference(&self, epoch: usize) -> usize {
        self.case.skipped_by_reference(self.world_size(), epoch)
    }

    fn skipped(&self, epoch: usize) -> usize {
        if epoch == 0 { self.case.skip * self.case.round(self.world_size()) } else { 0 }
    }

    /// The reference's rows in their order, without the fillers at the end; `None` when there are too few.
    fn rows_of_theirs(&self, epoch: usize) -> Option<Vec<i64>> {
        let count = self.case.rows_after(self.world_size(), self.skipped_by_reference(epoch));
        in_order(self.theirs, epoch).get(..count).map(<[i64]>::to_vec)
    }

    fn rows_of_ours(&self, epoch: usize) -> Option<Vec<i64>> {
        let count = self.case.rows_after(self.world_size(), self.skipped(epoch));
        in_order(self.ours, epoch).get(..count).map(<[i64]>::to_vec)
    }

    /// Has the reference's second epoch the order of which it has seen a part in the first?
    fn reference_repeats_the_order(&self) -> bool {
        let rows = (self.rows_of_theirs(0), self.rows_of_theirs(1));
        let (Some(resumed), Some(next)) = rows else { return false };
        is_same_beginning(next.get(self.skipped_by_reference(0)..).unwrap_or_default(), &resumed)
    }

    /// Are our batches those of the reference without fillers, and without batches of fillers alone?
    fn differ_by_fillers(&self, epoch: usize) -> bool {
        let mut left = self.case.rows_after(self.world_size(), self.skipped(epoch));
        let mut wanted = vec![Vec::new(); self.world_size()];
        let num_rounds = self.theirs.iter().map(|rank| rank.epochs[epoch].len()).max().unwrap_or(0);
        for round in 0..num_rounds {
            for (rank, outcome) in self.theirs.iter().enumerate() {
                let batch = outcome.epochs[epoch].get(round).map_or(&[][..], Vec::as_slice);
                let batch = &batch[..batch.len().min(left)];
                left -= batch.len();
                if !batch.is_empty() {
                    wanted[rank].push(batch.to_vec());
                }
            }
        }
        left == 0 && wanted.iter().zip(self.ours).all(|(wanted, ours)| *wanted == ours.epochs[epoch])
    }
}

/// The rows of an epoch, round by round and rank by rank: the order that they were dealt in.
fn in_order(outcomes: &[Outcome], epoch: usize) -> Vec<i64> {
    let num_rounds = outcomes.iter().map(|outcome| outcome.epochs[epoch].len()).max().unwrap_or(0);
    let batches =
        (0..num_rounds).flat_map(|round| outcomes.iter().filter_map(move |rank| rank.epochs[epoch].get(round)));
    batches.flatten().copied().collect()
}

/// Rounds that are dropped may end one order sooner than the other.
fn is_same_beginning(first: &[i64], second: &[i64]) -> bool {
    first.iter().zip(second).all(|(first, second)| first == second)
}

/// Did metrics see what the ranks saw, each row as often as the sampler gave it?
fn metrics_are_exact(case: &Case, outcomes: &[Outcome]) -> bool {
    (0..2).all(|epoch| {
        let skipped = if epoch == 0 { case.skip * case.round(outcomes.len()) } else { 0 };
        let count = case.rows_after(outcomes.len(), skipped);
        let rows = in_order(outcomes, epoch);
        let is_whole =
            |rows: &[i64]| rows.len() == count && (case.sampler == "weighted" || num_distinct(rows) == count);
        if case.kind == "ragged" {
            return num_distinct(&rows) == case.rows;
        }
        let Some(once) = rows.get(..count) else { return false };
        if !is_whole(once) {
            return false;
        }
        let is_exact = |metrics: &[i64]| sorted(metrics) == sorted(once);
        !case.metrics || outcomes.iter().all(|outcome| is_exact(&outcome.metrics[epoch]))
    })
}

fn sorted(rows: &[i64]) -> Vec<i64> {
    let mut rows = rows.to_vec();
    rows.sort_unstable();
    rows
}

fn num_distinct(rows: &[i64]) -> usize {
    let mut rows = sorted(rows);
    rows.dedup();
    rows.len()
}

#[cfg(test)]
mod tests {
    use super::super::cases::plain;
    use super::*;

    type Batches = &'static [&'static [i64]];

    /// What two ranks saw, the same in both epochs.
    fn two_ranks(batches: [Batches; 2], metrics: &[i64]) -> Vec<Outcome> {
        let of_rank = |batches: Batches| {
            let batches: Vec<Vec<i64>> = batches.iter().map(|batch| batch.to_vec()).collect();
            Outcome {
                epochs: vec![batches.clone(), batches],
                metrics: vec![metrics.to_vec(), metrics.to_vec()],
                next_draw: 0,
                error: None,
            }
        };
        batches.map(of_rank).to_vec()
    }

    /// With another first epoch.
    fn resumed(first: [Batches; 2], whole: [Batches; 2]) -> Vec<Outcome> {
        let mut outcomes = two_ranks(whole, &[]);
        for (outcome, first) in outcomes.iter_mut().zip(two_ranks(first, &[])) {
            outcome.epochs[0] = first.epochs[0].clone();
        }
        outcomes
    }

    fn check(case: &Case, theirs: &[Outcome], ours: &[Outcome], wanted: Verdict) {
        assert_eq!(judge(case, theirs, ours), wanted, "{case:?}\n{theirs:?}\n{ours:?}");
    }

    #[test]
    fn only_known_faults_are_excused() {
        let case = Case { batch_size: 2, ..plain(3) };
        let right = two_ranks([&[&[0, 1]], &[&[2, 0]]], &[0, 1, 2]);
        check(&case, &right, &right, Verdict::Equal);
        let counted_twice = two_ranks([&[&[0, 1]], &[&[2, 0]]], &[0, 1, 2, 0]);
        check(&case, &counted_twice, &right, Verdict::ByDesign(Fault::Metrics));
        check(&case, &right, &counted_twice, Verdict::Different);
        let other = two_ranks([&[&[1, 0]], &[&[2, 0]]], &[0, 1, 2]);
        check(&case, &right, &other, Verdict::Different);
        let empty = two_ranks([&[&[0, 1, 2]], &[&[]]], &[0, 1, 2]);
        check(&case, &empty, &right, Verdict::Different);
        let dispatched = Case { dispatch_batches: true, ..case.clone() };
        check(&dispatched, &empty, &right, Verdict::ByDesign(Fault::EmptyBatch));
        check(&dispatched, &empty, &other, Verdict::Different);
        let mut drawn_once_more = counted_twice.clone();
        drawn_once_more[1].next_draw = 7;
        check(&case, &drawn_once_more, &right, Verdict::Different);
    }

    #[test]
    fn streams_without_even_batches_may_lack_fillers_and_nothing_else() {
        let even = Case { kind: "stream", batch_size: 2, metrics: false, ..plain(5) };
        let case = Case { even_batches: false, ..even.clone() };
        let filled = two_ranks([&[&[0, 1], &[4, 0]], &[&[2, 3], &[1, 2]]], &[]);
        let ours = two_ranks([&[&[0, 1], &[4]], &[&[2, 3]]], &[]);
        check(&case, &filled, &ours, Verdict::ByDesign(Fault::FilledStream));
        check(&even, &filled, &ours, Verdict::Different);
        let lost = two_ranks([&[&[0, 1]], &[&[2, 3]]], &[]);
        check(&case, &filled, &lost, Verdict::Different);
        let half_filled = two_ranks([&[&[0, 1], &[4, 0]], &[&[2, 3]]], &[]);
        check(&case, &filled, &half_filled, Verdict::Different);
    }

    #[test]
    fn skipping_under_dispatch_differs_by_whole_batches_of_one_order() {
        const WHOLE: [Batches; 2] = [&[&[3, 1], &[0, 2]], &[&[5, 4], &[7, 6]]];
        let case =
            Case { batch_size: 2, sampler: "random", dispatch_batches: true, skip: 1, metrics: false, ..plain(8) };
        let theirs = resumed([&[&[5, 4], &[7]], &[&[0, 2], &[6]]], WHOLE);
        let ours = resumed([&[&[0, 2]], &[&[7, 6]]], WHOLE);
        check(&case, &theirs, &ours, Verdict::ByDesign(Fault::SkippedBatches));
        check(&Case { dispatch_batches: false, ..case.clone() }, &theirs, &ours, Verdict::Different);
        let other_rows = resumed([&[&[5, 2]], &[&[7, 6]]], WHOLE);
        check(&case, &theirs, &other_rows, Verdict::Different);
        let too_many = resumed([&[&[5, 4], &[7]], &[&[0, 2], &[6]]], [WHOLE[1], WHOLE[0]]);
        check(&case, &theirs, &too_many, Verdict::Different);
        let split = Case { split_batches: true, batch_size: 4, ..plain(7) };
        let split = Case { skip: 1, dispatch_batches: true, metrics: false, ..split };
        const HALVES: [Batches; 2] = [&[&[0, 1], &[4, 5]], &[&[2, 3], &[6, 0]]];
        let ours = resumed([&[&[4, 5]], &[&[6, 0]]], HALVES);
        let theirs_filled = |filler: Batches| resumed([&[&[4, 5]], filler], HALVES);
        check(&split, &theirs_filled(&[&[6, 4]]), &ours, Verdict::ByDesign(Fault::OtherFillers));
        check(&split, &theirs_filled(&[&[6, 5]]), &ours, Verdict::Different);
    }

    #[test]
    fn a_resumed_epoch_may_only_be_repeated_as_it_was() {
        const WHOLE: [Batches; 2] = [&[&[3, 1], &[0, 2]], &[&[5, 4], &[7, 6]]];
        const NEXT: [Batches; 2] = [&[&[0, 2], &[4, 5]], &[&[6, 7], &[1, 3]]];
        const REST: [Batches; 2] = [&[&[0, 2]], &[&[7, 6]]];
        let case = Case { batch_size: 2, sampler: "random", seedable: true, skip: 1, metrics: false, ..plain(8) };
        let (theirs, ours) = (resumed(REST, WHOLE), resumed(REST, NEXT));
        check(&case, &theirs, &ours, Verdict::ByDesign(Fault::SameEpoch));
        check(&Case { seedable: false, ..case.clone() }, &theirs, &ours, Verdict::Different);
        check(&case, &ours, &theirs, Verdict::Different);
    }
}
