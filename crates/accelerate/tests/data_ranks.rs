//! Prepared loaders on real ranks: threads connected by Gloo.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::data::{
    DataLoader, DataLoaderConfiguration, Sampler, VecDataset, WeightedRandomSampler, skip_first_batches,
};
use accelerate::testing;
use accelerate::{Accelerator, Error, Result};

fn numbered(num_rows: i64) -> VecDataset<i64> {
    VecDataset::new((0..num_rows).collect())
}

fn rows_of(batch: &accelerate::tch::Tensor) -> Vec<i64> {
    Vec::try_from(batch).unwrap()
}

/// Every row exactly once, in any order.
fn assert_whole(mut rows: Vec<i64>, num_rows: i64, case: &str) {
    rows.sort_unstable();
    assert_eq!(rows, (0..num_rows).collect::<Vec<_>>(), "{case}");
}

#[test]
fn metrics_see_every_row_once_in_every_mode() {
    for world_size in [1, 2, 3] {
        for (split_batches, use_seedable_sampler, num_workers) in
            [(false, false, 0), (true, false, 1), (false, true, 2), (true, true, 0)]
        {
            let case = format!("{world_size} ranks, split {split_batches}, seedable {use_seedable_sampler}");
            let configuration = DataLoaderConfiguration {
                split_batches: Some(split_batches),
                use_seedable_sampler: Some(use_seedable_sampler),
                ..Default::default()
            };
            let builder = Accelerator::builder().cpu(true).dataloader_config(configuration);
            let epochs = testing::ranks(world_size, builder, |accelerator| {
                let loader = DataLoader::builder(numbered(23)).batch_size(6).shuffle(true).num_workers(num_workers);
                let loader = accelerator.prepare(loader.build()?)?;
                let epoch = || {
                    let mut seen = Vec::new();
                    for batch in loader.iter()? {
                        seen.extend(rows_of(&accelerator.gather_for_metrics(&batch?)?));
                    }
                    Ok::<_, Error>(seen)
                };
                Ok([epoch()?, epoch()?])
            })
            .unwrap();
            for epochs in epochs {
                assert_ne!(epochs[0], epochs[1], "{case}: epochs are shuffled anew");
                epochs.into_iter().for_each(|seen| assert_whole(seen, 23, &case));
            }
        }
    }
}

#[test]
fn metrics_are_whole_after_skipping_too() {
    let seen = testing::ranks(2, Default::default(), |accelerator| {
        let loader = accelerator.prepare(DataLoader::builder(numbered(10)).batch_size(2).build()?)?;
        let resumed = skip_first_batches(&loader, 1);
        let mut seen = Vec::new();
        for batch in resumed.iter()? {
            seen.extend(rows_of(&accelerator.gather_for_metrics(&batch?)?));
        }
        Ok(seen)
    });
    assert_eq!(seen.unwrap(), [[4, 5, 6, 7, 8, 9], [4, 5, 6, 7, 8, 9]]);
}

#[test]
fn an_uneven_sampler_is_overruled_by_rank_zero() {
    struct Shifted(usize);
    impl Sampler for Shifted {
        fn len(&self) -> usize {
            6
        }
        fn indices(&self, _: usize) -> Result<Vec<usize>> {
            Ok((0..6).map(|row| (row + self.0) % 6).collect())
        }
    }
    let shares = testing::ranks(3, Default::default(), |accelerator| {
        let sampler = Shifted(accelerator.process_index());
        let loader = DataLoader::builder(numbered(6)).batch_size(2).sampler(sampler).build()?;
        let loader = accelerator.prepare(loader)?;
        loader.iter()?.map(|batch| Ok(rows_of(&batch?))).collect::<Result<Vec<_>>>()
    });
    assert_eq!(shares.unwrap(), [[[0, 1]], [[2, 3]], [[4, 5]]]);
}

#[test]
fn a_prepared_loader_is_prepared_only_once() {
    let shares = testing::ranks(2, Default::default(), |accelerator| {
        let loader = accelerator.prepare(DataLoader::builder(numbered(8)).batch_size(2).build()?)?;
        let loader = accelerator.prepare(loader)?;
        loader.iter()?.map(|batch| Ok(rows_of(&batch?))).collect::<Result<Vec<_>>>()
    });
    assert_eq!(shares.unwrap(), [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]);
}

#[test]
fn an_indivisible_batch_is_refused_on_every_rank() {
    let configuration = DataLoaderConfiguration { split_batches: Some(true), ..Default::default() };
    let builder = Accelerator::builder().cpu(true).dataloader_config(configuration);
    let messages = testing::ranks(2, builder, |accelerator| {
        let loader = DataLoader::builder(numbered(8)).batch_size(3).build()?;
        Ok(accelerator.prepare(loader).unwrap_err().to_string())
    });
    for message in messages.unwrap() {
        assert!(message.contains("3 is not a multiple of 2; use a batch size of 2 or 4"), "{message}");
    }
}

/// Rank 0 alone draws the order, from the user's generator and nothing else: numbers made by tests/data_golden.py.
#[test]
fn a_dispatched_order_is_drawn_from_the_generator_of_the_user_as_by_the_reference() {
    let golden: serde_json::Value = serde_json::from_str(include_str!("data_golden.json")).unwrap();
    for world_size in [1, 2, 3] {
        let configuration = DataLoaderConfiguration { dispatch_batches: Some(true), ..Default::default() };
        let builder = Accelerator::builder().cpu(true).dataloader_config(configuration);
        let epochs = testing::ranks(world_size, builder, |accelerator| {
            let generator = accelerate::data::Generator::new_cpu()?;
            generator.manual_seed(9)?;
            let loader = DataLoader::builder(numbered(20)).batch_size(3).shuffle(true).generator(generator).build()?;
            let loader = accelerator.prepare(loader)?;
            let epoch = || loader.iter()?.map(|batch| Ok(rows_of(&batch?))).collect::<Result<Vec<_>>>();
            Ok([epoch()?, epoch()?])
        })
        .unwrap();
        let wanted = &golden["prepared"][world_size.to_string()]["own_generator_dispatched"];
        for (rank, epochs) in epochs.iter().enumerate() {
            assert_eq!(serde_json::json!(epochs), wanted[rank]["epochs"], "rank {rank} of {world_size}");
        }
    }
}

/// Under dispatch rank 0 alone draws, and goes on with the default generator in every pass.
#[test]
fn a_sampler_gets_a_generator_only_where_all_ranks_draw_its_order() {
    for dispatch in [false, true] {
        let configuration = DataLoaderConfiguration {
            dispatch_batches: Some(dispatch),
            use_seedable_sampler: Some(false),
            ..Default::default()
        };
        let builder = Accelerator::builder().cpu(true).dataloader_config(configuration);
        let states = testing::ranks(2, builder, |accelerator| {
            let loader = DataLoader::builder(numbered(8)).batch_size(2).shuffle(true).build()?;
            accelerator.prepare(loader)?.state_dict()
        });
        for state in states.unwrap() {
            assert_eq!(serde_json::to_value(&state).unwrap()["random"].is_null(), dispatch, "{state:?}");
        }
    }
}

/// Ranks that weigh rows differently, by what each of them has counted for instance, go by the order of rank 0.
#[test]
fn weights_that_differ_between_ranks_give_way_to_those_of_rank_zero() {
    let rows = testing::ranks(2, Default::default(), |accelerator| {
        let only = |row: usize| (0..4).map(|other| if other == row { 1.0 } else { 0.0 }).collect();
        let sampler = WeightedRandomSampler::new(only(accelerator.process_index()), 4)?;
        let loader = accelerator.prepare(DataLoader::builder(numbered(4)).batch_size(2).sampler(sampler).build()?)?;
        loader.iter()?.map(|batch| Ok(rows_of(&batch?))).collect::<Result<Vec<_>>>()
    });
    assert_eq!(rows.unwrap(), [[[0, 0]], [[0, 0]]]);
}
