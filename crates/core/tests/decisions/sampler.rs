//! Fillers, resumption and the properties that hold for every size.

use accelerate_core::sampler::{
    BatchSamplerShard, IterableDatasetShard, Row, SeedableRandomSampler, SlotSource, dispatch_slots,
};
use proptest::prelude::*;
use rstest::rstest;

const EVEN: BatchSamplerShard =
    BatchSamplerShard { num_processes: 2, batch_size: 4, drop_last: false, split_batches: false, even_batches: true };

/// All batches of a rank; a filler row is written as a negative number, counted from -1 for row 0.
fn batches_of(shard: &BatchSamplerShard, num_rows: usize, rank: usize) -> Vec<Vec<i64>> {
    let order: Vec<usize> = (0..num_rows).collect();
    let sign = |row: Row| match row.filler {
        true => -1 - row.index as i64,
        false => row.index as i64,
    };
    shard
        .rounds(&order)
        .filter_map(|round| round[rank].clone())
        .map(|batch| batch.into_iter().map(sign).collect())
        .collect()
}

/// Batches written as `0 1 | 4 5`; nothing at all is no batch.
fn written(text: &str) -> Vec<Vec<i64>> {
    let numbers = |batch: &str| batch.split_whitespace().map(|n| n.parse().unwrap()).collect();
    text.split('|').map(numbers).filter(|batch: &Vec<i64>| !batch.is_empty()).collect()
}

#[rstest]
#[case::two_fillers_at_the_end(EVEN, 22, &[
    "0 1 2 3 | 8 9 10 11 | 16 17 18 19",
    "4 5 6 7 | 12 13 14 15 | 20 21 -1 -2",
])]
#[case::split(BatchSamplerShard { split_batches: true, ..EVEN }, 22, &[
    "0 1 | 4 5 | 8 9 | 12 13 | 16 17 | 20 21",
    "2 3 | 6 7 | 10 11 | 14 15 | 18 19 | -1 -2",
])]
#[case::a_whole_batch_of_fillers(BatchSamplerShard { batch_size: 3, ..EVEN }, 21, &[
    "0 1 2 | 6 7 8 | 12 13 14 | 18 19 20",
    "3 4 5 | 9 10 11 | 15 16 17 | -1 -2 -3",
])]
#[case::fewer_rows_than_one_batch(EVEN, 2, &["0 1 -1 -2", "-1 -2 -1 -2"])]
#[case::three_processes(BatchSamplerShard { num_processes: 3, ..EVEN }, 5, &[
    "0 1 2 3",
    "4 -1 -2 -3",
    "-4 -5 -1 -2",
])]
#[case::uneven(BatchSamplerShard { even_batches: false, batch_size: 2, ..EVEN }, 7, &[
    "0 1 | 4 5",
    "2 3 | 6",
])]
#[case::drop_last(BatchSamplerShard { drop_last: true, batch_size: 3, ..EVEN }, 11, &[
    "0 1 2",
    "3 4 5",
])]
#[case::no_rows(EVEN, 0, &["", ""])]
fn fillers_are_marked(#[case] shard: BatchSamplerShard, #[case] num_rows: usize, #[case] wanted: &[&str]) {
    for (rank, wanted) in wanted.iter().map(|text| written(text)).enumerate() {
        assert_eq!(batches_of(&shard, num_rows, rank), wanted, "rank {rank}");
        assert_eq!(shard.num_rounds(num_rows, rank), wanted.len(), "rank {rank}");
    }
}

#[rstest]
#[case::no_rows_in_a_batch(BatchSamplerShard { batch_size: 0, ..EVEN }, "batch size is 0")]
#[case::no_processes(BatchSamplerShard { num_processes: 0, ..EVEN }, "number of processes is 0")]
#[case::indivisible(
    BatchSamplerShard { split_batches: true, batch_size: 5, ..EVEN },
    "must be a multiple of the number of processes (2); use a batch size of 6"
)]
fn impossible_sizes_are_refused_and_still_do_no_harm(#[case] shard: BatchSamplerShard, #[case] message: &str) {
    let error = shard.check().unwrap_err();
    assert!(error.is_data());
    assert!(error.to_string().contains(message), "{error}");
    let rows: usize = shard.rounds(&[0, 1, 2, 3, 4]).flatten().flatten().map(|batch| batch.len()).sum();
    assert!(rows == 0 || rows == 6);
}

#[test]
fn ranks_that_do_not_exist_get_nothing() {
    assert_eq!(EVEN.batch(&[0, 1, 2], 0, 2), None);
    assert_eq!(EVEN.num_rounds(3, 2), 0);
    assert_eq!(EVEN.batch(&[0, 1, 2], usize::MAX, 0), None);
}

#[test]
fn absurd_sizes_do_not_overflow() {
    let huge = BatchSamplerShard { batch_size: usize::MAX, even_batches: false, ..EVEN };
    assert_eq!(huge.total_rounds(3), 1);
    assert_eq!(huge.batch(&[0, 1, 2], 0, 0).unwrap().len(), 3);
    assert_eq!(huge.batch(&[0, 1, 2], 0, 1), None);
    assert_eq!(huge.rounds_from(&[0, 1, 2], usize::MAX).count(), 0);
}

#[test]
fn rows_come_in_the_order_of_the_epoch_and_so_do_fillers() {
    let batch = EVEN.batch(&[30, 10, 20], 0, 1).unwrap();
    assert_eq!(batch.iter().map(|row| row.index).collect::<Vec<_>>(), [10, 20, 30, 10]);
}

#[test]
fn rounds_know_how_many_are_left() {
    let order: Vec<usize> = (0..20).collect();
    let mut rounds = EVEN.rounds(&order);
    let mut left = Vec::new();
    loop {
        left.push((rounds.len(), rounds.rows_delivered()));
        if rounds.next().is_none() {
            break;
        }
    }
    assert_eq!(left, [(3, 0), (2, 8), (1, 16), (0, 20)]);
    assert_eq!((rounds.next(), rounds.rows_delivered()), (None, 20));
    assert_eq!(EVEN.rounds(&order).nth(usize::MAX), None);
}

/// Any shard over at most 60 rows; split only when it is divisible.
fn any_shard() -> impl Strategy<Value = (BatchSamplerShard, usize)> {
    (1..5_usize, 1..6_usize, any::<[bool; 3]>(), 0..60_usize).prop_map(
        |(num_processes, size, [drop_last, split_batches, even_batches], num_rows)| {
            let batch_size = if split_batches { size * num_processes } else { size };
            let shard = BatchSamplerShard { num_processes, batch_size, drop_last, split_batches, even_batches };
            (shard, num_rows)
        },
    )
}

proptest! {
    #[test]
    fn every_row_is_delivered_once((shard, num_rows) in any_shard(), seed in 1..1000_usize) {
        // A permutation, so that positions and indices cannot be mistaken for each other.
        let mut order: Vec<usize> = (0..num_rows).collect();
        order.sort_by_key(|index| (index + 1).wrapping_mul(seed * 2 + 1) % 61);
        let mut delivered: Vec<usize> = shard
            .rounds(&order)
            .flatten().flatten().flatten()
            .filter(|row| !row.filler)
            .map(|row| row.index)
            .collect();
        delivered.sort_unstable();
        let num_kept = match shard.drop_last {
            true => num_rows - num_rows % shard.total_batch_size(),
            false => num_rows,
        };
        let mut kept = order[..num_kept].to_vec();
        kept.sort_unstable();
        prop_assert_eq!(delivered, kept);
    }

    #[test]
    fn ranks_stay_even((shard, num_rows) in any_shard()) {
        let order: Vec<usize> = (0..num_rows).collect();
        for round in shard.rounds(&order) {
            prop_assert_eq!(round.len(), shard.num_processes);
            for batch in &round {
                let rows = batch.as_ref().map_or(0, Vec::len);
                if shard.even_batches || shard.drop_last {
                    prop_assert_eq!(rows, shard.rank_batch_size());
                } else {
                    prop_assert!(rows <= shard.rank_batch_size());
                    prop_assert!(batch.iter().flatten().all(|row| !row.filler));
                    prop_assert!(batch.as_ref().is_none_or(|batch| !batch.is_empty()));
                }
            }
        }
    }

    #[test]
    fn counts_agree_with_rounds((shard, num_rows) in any_shard()) {
        let order: Vec<usize> = (0..num_rows).collect();
        let rounds: Vec<_> = shard.rounds(&order).collect();
        prop_assert_eq!(rounds.len(), shard.total_rounds(num_rows));
        for rank in 0..shard.num_processes {
            let batches = rounds.iter().filter(|round| round[rank].is_some()).count();
            prop_assert_eq!(batches, shard.num_rounds(num_rows, rank));
        }
    }

    #[test]
    fn any_round_can_be_the_first((shard, num_rows) in any_shard(), start in 0..30_usize) {
        let order: Vec<usize> = (0..num_rows).collect();
        let all: Vec<_> = shard.rounds(&order).collect();
        let rest: Vec<_> = shard.rounds_from(&order, start).collect();
        prop_assert_eq!(&rest[..], all.get(start..).unwrap_or_default());
        for (number, round) in all.iter().enumerate() {
            for (rank, batch) in round.iter().enumerate() {
                prop_assert_eq!(batch, &shard.batch(&order, number, rank));
            }
        }
    }

    #[test]
    fn an_epoch_survives_a_change_of_the_number_of_processes(
        (before, num_rows) in any_shard(),
        (after, _) in any_shard(),
        rounds_before in 0..10_usize,
    ) {
        let before = BatchSamplerShard { drop_last: false, ..before };
        let after = BatchSamplerShard { drop_last: false, ..after };
        let order: Vec<usize> = (0..num_rows).collect();
        let mut first = before.rounds(&order);
        let mut rows: Vec<Row> = first.by_ref().take(rounds_before).flatten().flatten().flatten().collect();
        rows.extend(after.rounds_after_rows(&order, first.rows_delivered()).flatten().flatten().flatten());
        let mut delivered: Vec<usize> =
            rows.into_iter().filter(|row| !row.filler).map(|row| row.index).collect();
        delivered.sort_unstable();
        prop_assert_eq!(delivered, order);
    }

    #[test]
    fn a_dispatched_chunk_reaches_every_rank(
        chunk in 1..40_usize, first in 1..40_usize, num_processes in 1..6_usize,
    ) {
        let ranks = dispatch_slots(chunk, first, num_processes);
        let sizes: Vec<usize> = ranks.iter().map(Vec::len).collect();
        prop_assert!(sizes.iter().all(|&size| size > 0 && size == sizes[0]));
        let real: Vec<SlotSource> =
            ranks.iter().flatten().filter(|slot| !slot.filler).map(|slot| slot.source).collect();
        prop_assert_eq!(real, (0..chunk).map(SlotSource::Current).collect::<Vec<_>>());
        for slot in ranks.iter().flatten().filter(|slot| slot.filler) {
            prop_assert!(matches!(slot.source, SlotSource::First(position) if position < first));
        }
    }
}

/// (number of rows in the chunk, in the first chunk, processes) to, per rank, positions in the current chunk,
/// with fillers written as negative positions in the first, counted from -1.
#[rstest]
#[case::nine_rows_in_batches_of_four((1, 8, 2), "0 | -1")]
#[case::three_rows((3, 3, 2), "0 1 | 2 -1")]
#[case::fewer_rows_than_ranks((1, 1, 3), "0 | -1 | -1")]
#[case::a_full_chunk((4, 4, 2), "0 1 | 2 3")]
fn dispatch_never_hands_out_an_empty_batch(
    #[case] (chunk, first, num_processes): (usize, usize, usize),
    #[case] wanted: &str,
) {
    let ranks = dispatch_slots(chunk, first, num_processes);
    let found: Vec<Vec<i64>> = ranks
        .into_iter()
        .map(|rank| {
            rank.into_iter()
                .map(|slot| match slot.source {
                    SlotSource::Current(position) => position as i64,
                    SlotSource::First(position) => -1 - position as i64,
                })
                .collect()
        })
        .collect();
    assert_eq!(found, written(wanted));
}

#[test]
fn an_empty_chunk_is_dispatched_to_nobody() {
    assert!(dispatch_slots(0, 4, 2).is_empty());
    assert!(dispatch_slots(4, 4, 0).is_empty());
}

#[test]
fn a_stream_marks_its_fillers() {
    let shard = IterableDatasetShard { num_processes: 2, batch_size: 4, drop_last: false, split_batches: false };
    let of_rank = |rank| shard.slots(2, 8, rank).unwrap();
    assert_eq!(of_rank(0).iter().map(|slot| slot.filler).collect::<Vec<_>>(), [false, false, true, true]);
    assert!(of_rank(1).iter().all(|slot| slot.filler));
    assert_eq!(shard.slots(0, 8, 0), None);
    assert_eq!(shard.slots(8, 8, 2), None);
}

#[test]
fn epochs_have_seeds_of_their_own() {
    let mut sampler = SeedableRandomSampler { data_seed: 42, epoch: 0 };
    let seeds: Vec<u64> = std::iter::repeat_with(|| {
        let seed = sampler.seed();
        sampler.finish_epoch();
        seed
    })
    .take(3)
    .collect();
    assert_eq!(seeds, [42, 43, 44]);
    assert_eq!(SeedableRandomSampler { epoch: 9, ..sampler }.seed(), 51);
}
