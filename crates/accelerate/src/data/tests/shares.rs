//! Who gets which rows, and what is told about them.

use super::*;
use crate::data::{BatchSampler, Sampler};
use crate::session::LoaderPosition;
use proptest::prelude::*;
use std::collections::BTreeMap;

fn configuration(split_batches: bool, even_batches: bool) -> DataLoaderSettings {
    DataLoaderSettings { split_batches, even_batches, ..Default::default() }
}

fn shares(
    num_rows: usize,
    batch_size: usize,
    num_processes: usize,
    configuration: &DataLoaderSettings,
) -> Vec<Vec<Vec<i64>>> {
    let of_rank = |rank| {
        let loader = numbered(num_rows).batch_size(batch_size).build().unwrap();
        let loader = shard(loader, rank, num_processes, configuration);
        let batches = pass(loader.iter().unwrap());
        assert_eq!(loader.len(), batches.len(), "len() of rank {rank}");
        batches
    };
    (0..num_processes).map(of_rank).collect()
}

/// Rows, batch size, processes, split_batches, and the batches of every rank.
type Deal = (usize, usize, usize, bool, &'static [&'static [&'static [i64]]]);

#[test]
fn rows_are_dealt_as_by_the_reference() {
    let cases: [Deal; 5] = [
        (
            22,
            4,
            2,
            false,
            &[
                &[&[0, 1, 2, 3], &[8, 9, 10, 11], &[16, 17, 18, 19]],
                &[&[4, 5, 6, 7], &[12, 13, 14, 15], &[20, 21, 0, 1]],
            ],
        ),
        (6, 4, 2, true, &[&[&[0, 1], &[4, 5]], &[&[2, 3], &[0, 1]]]),
        (
            21,
            3,
            2,
            false,
            &[
                &[&[0, 1, 2], &[6, 7, 8], &[12, 13, 14], &[18, 19, 20]],
                &[&[3, 4, 5], &[9, 10, 11], &[15, 16, 17], &[0, 1, 2]],
            ],
        ),
        (2, 4, 2, false, &[&[&[0, 1, 0, 1]], &[&[0, 1, 0, 1]]]),
        (5, 4, 3, false, &[&[&[0, 1, 2, 3]], &[&[4, 0, 1, 2]], &[&[3, 4, 0, 1]]]),
    ];
    for (num_rows, batch_size, num_processes, split, wanted) in cases {
        let found = shares(num_rows, batch_size, num_processes, &configuration(split, true));
        assert_eq!(found, wanted, "{num_rows} rows, batch size {batch_size}, {num_processes} ranks, split {split}");
    }
}

#[test]
fn without_even_batches_some_ranks_end_earlier() {
    assert_eq!(
        shares(7, 2, 2, &configuration(false, false)),
        [vec![vec![0, 1], vec![4, 5]], vec![vec![2, 3], vec![6]]]
    );
    assert_eq!(shares(3, 1, 2, &configuration(false, false)), [vec![vec![0], vec![2]], vec![vec![1]]]);
}

#[test]
fn one_process_keeps_its_short_last_batch() {
    assert_eq!(shares(5, 4, 1, &configuration(false, true)), [[vec![0, 1, 2, 3], vec![4]]]);
    assert_eq!(shares(5, 4, 1, &configuration(true, true)), [[vec![0, 1, 2, 3], vec![4]]]);
}

#[test]
fn sizes_speak_of_all_processes() {
    let loader = || numbered(22).batch_size(6).build().unwrap();
    let whole = shard(loader(), 1, 3, &configuration(false, true));
    assert_eq!((whole.total_batch_size(), whole.total_dataset_length(), whole.len()), (Some(18), 22, 2));
    let split = shard(loader(), 1, 3, &configuration(true, true));
    assert_eq!((split.total_batch_size(), split.total_dataset_length(), split.len()), (Some(6), 22, 4));
}

/// What a rank's loader told the gradient state while each of its batches was out.
fn positions(loader: &NumberedShard) -> Vec<LoaderPosition> {
    let state = loader.gradient_state.clone();
    let told = loader.iter().unwrap().map(|batch| {
        let _ = batch.unwrap();
        state.active_position().unwrap()
    });
    told.collect()
}

#[test]
fn the_end_is_known_while_the_last_batch_is_out() {
    for rank in 0..2 {
        let loader = numbered(10).batch_size(2).build().unwrap();
        let loader = shard(loader, rank, 2, &DataLoaderSettings::default());
        assert!(!at_end(&loader.gradient_state), "outside of a loop");
        let ends: Vec<_> = positions(&loader).iter().map(|told| told.end_of_dataloader).collect();
        assert_eq!(ends, [false, false, true], "rank {rank}");
        assert_eq!(loader.gradient_state.active_position(), None, "after the loop");
    }
}

#[test]
fn a_rank_that_gets_nothing_in_the_last_round_never_sees_the_end() {
    let loader = numbered(3).build().unwrap();
    let loader = shard(loader, 1, 2, &configuration(false, false));
    let ends: Vec<_> = positions(&loader).iter().map(|told| told.end_of_dataloader).collect();
    assert_eq!(ends, [false]);
}

#[test]
fn fillers_do_not_count() {
    let loader = numbered(7).batch_size(3).build().unwrap();
    let loader = shard(loader, 0, 2, &DataLoaderSettings::default());
    let told = positions(&loader);
    assert_eq!(told[0].counted_rows, [[true; 3], [true; 3]]);
    assert_eq!(told[1].counted_rows, [[true, false, false], [false; 3]]);
}

#[test]
fn indivisible_batches_are_refused_with_the_nearest_sizes() {
    let text = |batch_size: usize| {
        let loader = numbered(20).batch_size(batch_size).build().unwrap();
        let error = loader.prepare_at(place(0, 4), &configuration(true, true)).unwrap_err();
        assert!(error.is_data());
        error.to_string()
    };
    let message = text(6);
    assert!(message.contains("6 is not a multiple of 4; use a batch size of 4 or 8, or"), "{message}");
    let message = text(3);
    assert!(message.contains("3 is not a multiple of 4; use a batch size of 4, or"), "{message}");
}

#[test]
fn dispatch_can_be_turned_off_by_name() {
    let explicit = DataLoaderSettings { dispatch_batches: Some(false), ..Default::default() };
    assert_eq!(shares(4, 1, 2, &explicit), [[[0], [2]], [[1], [3]]]);
}

struct Fixed(Vec<Vec<usize>>, Option<usize>, bool);

impl BatchSampler for Fixed {
    fn len(&self) -> usize {
        self.0.len()
    }
    fn batches(&self, _: usize) -> Result<Vec<Vec<usize>>> {
        Ok(self.0.clone())
    }
    fn batch_size(&self) -> Option<usize> {
        self.1
    }
    fn drop_last(&self) -> bool {
        self.2
    }
}

fn shares_of_batches(sampler: impl Fn() -> Fixed, configuration: &DataLoaderSettings) -> Vec<Vec<Vec<i64>>> {
    let of_rank = |rank| {
        let loader = numbered(10).batch_sampler(sampler()).build().unwrap();
        let loader = shard(loader, rank, 2, configuration);
        let batches = pass(loader.iter().unwrap());
        assert_eq!(loader.len(), batches.len());
        batches
    };
    (0..2).map(of_rank).collect()
}

#[test]
fn batches_of_varying_sizes_are_dealt_whole() {
    let batches = vec![vec![1], vec![2, 3], vec![4, 5, 6]];
    let sampler = |drop_last| Fixed(batches.clone(), None, drop_last);
    let even = shares_of_batches(|| sampler(false), &configuration(false, true));
    assert_eq!(even, [vec![vec![1], vec![4, 5, 6]], vec![vec![2, 3], vec![1]]]);
    let uneven = shares_of_batches(|| sampler(false), &configuration(false, false));
    assert_eq!(uneven, [vec![vec![1], vec![4, 5, 6]], vec![vec![2, 3]]]);
    let dropped = shares_of_batches(|| sampler(true), &configuration(false, true));
    assert_eq!(dropped, [[vec![1]], [vec![2, 3]]]);
}

#[test]
fn batches_of_one_size_are_filled_up_or_split() {
    let batches = vec![vec![9, 8], vec![7, 6], vec![5]];
    let sampler = || Fixed(batches.clone(), Some(2), false);
    let even = shares_of_batches(sampler, &configuration(false, true));
    assert_eq!(even, [[vec![9, 8], vec![5, 9]], [vec![7, 6], vec![8, 7]]]);
    let split = shares_of_batches(sampler, &configuration(true, true));
    assert_eq!(split, [[[9], [7], [5]], [[8], [6], [9]]]);
}

#[test]
fn batch_samplers_that_break_their_word_are_refused_by_number() {
    let text = |batches: Vec<Vec<usize>>, batch_size| {
        let loader = numbered(10).batch_sampler(Fixed(batches, batch_size, false)).build().unwrap();
        let loader = shard(loader, 0, 2, &DataLoaderSettings::default());
        let error = loader.iter().unwrap_err();
        assert!(error.is_data());
        error.to_string()
    };
    let short = text(vec![vec![1, 2], vec![3], vec![4, 5]], Some(2));
    assert!(short.contains("batch 1 of the batch sampler has 1 rows") && short.contains("promises 2"), "{short}");
    let long = text(vec![vec![1, 2], vec![3, 4, 5]], Some(2));
    assert!(long.contains("batch 1 of the batch sampler has 3 rows"), "{long}");
    assert!(text(vec![vec![1], vec![]], None).contains("batch 1 of the batch sampler has no rows"));
}

#[test]
fn batches_of_varying_sizes_cannot_be_split() {
    let loader = numbered(10).batch_sampler(Fixed(vec![vec![1]], None, false)).build().unwrap();
    let error = loader.prepare_at(place(0, 2), &configuration(true, true)).unwrap_err();
    assert!(error.to_string().contains("BatchSampler::batch_size"), "{error}");
}

#[test]
fn a_configured_sampler_is_left_alone() {
    struct EverySecond(usize);
    impl Sampler for EverySecond {
        fn len(&self) -> usize {
            4
        }
        fn indices(&self, _: usize) -> Result<Vec<usize>> {
            Ok((0..4).map(|row| 2 * row + self.0).collect())
        }
    }
    let own = DataLoaderSettings { use_configured_sampler: true, ..Default::default() };
    for rank in 0..2 {
        let loader = numbered(8).batch_size(3).sampler(EverySecond(rank)).build().unwrap();
        let loader = shard(loader, rank, 2, &own);
        let first = rank as i64;
        assert_eq!(pass(loader.iter().unwrap()), [vec![first, first + 2, first + 4], vec![first + 6]]);
        let told = positions(&loader);
        // What the other ranks' samplers do is not known.
        assert!(told.iter().all(|told| told.counted_rows.is_empty()));
        assert_eq!(told.iter().map(|told| told.end_of_dataloader).collect::<Vec<_>>(), [false, true]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..Default::default() })]

    #[test]
    fn every_row_counts_exactly_once(
        num_rows in 0usize..60,
        batch_size in 1usize..8,
        num_processes in 1usize..5,
        split in any::<bool>(),
        even in any::<bool>(),
        skipped in 0usize..3,
    ) {
        let batch_size = if split { batch_size * num_processes } else { batch_size };
        let configuration = configuration(split, even);
        let loaders: Vec<_> = (0..num_processes)
            .map(|rank| {
                let loader = numbered(num_rows).batch_size(batch_size).build().unwrap();
                shard(loader, rank, num_processes, &configuration)
            })
            .collect();
        let mut seen: BTreeMap<i64, usize> = BTreeMap::new();
        for (rank, whole) in loaders.iter().enumerate() {
            let loader = crate::data::skip_first_batches(whole, skipped);
            let batches = loader.iter().unwrap();
            prop_assert_eq!(batches.len(), loader.len());
            for batch in batches {
                let rows = rows_of(&batch.unwrap());
                let told = loader.gradient_state.active_position().unwrap();
                prop_assert_eq!(told.counted_rows.len(), num_processes);
                prop_assert_eq!(rows.len(), told.counted_rows[rank].len());
                let counted = rows.iter().zip(&told.counted_rows[rank]).filter(|(_, counts)| **counts);
                counted.for_each(|(&row, _)| *seen.entry(row).or_default() += 1);
            }
        }
        let total = loaders[0].total_batch_size().unwrap();
        let wanted: BTreeMap<i64, usize> = ((skipped * total).min(num_rows)..num_rows).map(|row| (row as i64, 1)).collect();
        prop_assert_eq!(seen, wanted);
    }
}
