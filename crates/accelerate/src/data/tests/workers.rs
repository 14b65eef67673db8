//! Batches made on threads in the background.

use super::*;
use crate::Error;
use crate::data::{MapDataset, skip_first_batches};
use std::panic::{AssertUnwindSafe, catch_unwind};

#[test]
fn threads_change_neither_order_nor_batches() {
    for num_workers in [1, 2, 3, 8] {
        let loader = numbered(50).batch_size(3).num_workers(num_workers).build().unwrap();
        let loader = shard(loader, 1, 2, &DataLoaderSettings::default());
        let alone = numbered(50).batch_size(3).build().unwrap();
        let alone = shard(alone, 1, 2, &DataLoaderSettings::default());
        assert_eq!(pass(loader.iter().unwrap()), pass(alone.iter().unwrap()), "{num_workers} threads");
        let (loader, alone) = (skip_first_batches(&loader, 4), skip_first_batches(&alone, 4));
        assert_eq!(pass(loader.iter().unwrap()), pass(alone.iter().unwrap()), "{num_workers} threads, skipping");
    }
}

#[test]
fn threads_end_when_the_pass_is_left() {
    let witness = Arc::new(());
    let kept = Arc::clone(&witness);
    let dataset = MapDataset::new(VecDataset::new((0..1000).collect()), move |row: i64| {
        let _keep = &kept;
        Ok(row)
    });
    let loader = DataLoader::builder(dataset).num_workers(2).build().unwrap();
    let mut batches = loader.iter().unwrap();
    let _ = batches.next().unwrap().unwrap();
    drop(loader);
    assert_eq!(Arc::strong_count(&witness), 2, "the pass still holds the dataset");
    drop(batches);
    assert_eq!(Arc::strong_count(&witness), 1, "no thread is left that could");
}

#[test]
fn a_bad_row_arrives_in_its_turn_and_the_pass_goes_on() {
    let dataset =
        MapDataset::new(
            VecDataset::new((0..6).collect()),
            |row: i64| {
                if row == 2 { Err(Error::other("torn")) } else { Ok(row) }
            },
        );
    let loader = DataLoader::builder(dataset).batch_size(2).num_workers(2).build().unwrap();
    let outcomes: Vec<_> = loader.iter().unwrap().map(|batch| batch.map(|batch| rows_of(&batch))).collect();
    assert_eq!(outcomes[0].as_ref().unwrap(), &[0, 1]);
    assert_eq!(outcomes[1].as_ref().unwrap_err().to_string(), "row 2 of the dataset: torn");
    assert_eq!(outcomes[2].as_ref().unwrap(), &[4, 5]);
    assert_eq!(outcomes.len(), 3);
}

#[test]
fn a_panic_goes_on_where_the_batch_is_asked_for() {
    for num_workers in [0, 1, 2] {
        let dataset = MapDataset::new(VecDataset::new((0..4).collect()), |row: i64| {
            assert_ne!(row, 1, "the dataset gave up");
            Ok(row)
        });
        let loader = DataLoader::builder(dataset).num_workers(num_workers).build().unwrap();
        let mut batches = loader.iter().unwrap();
        let _ = batches.next().unwrap().unwrap();
        let panic = catch_unwind(AssertUnwindSafe(|| batches.next())).unwrap_err();
        let text = panic.downcast_ref::<String>().unwrap();
        assert!(text.contains("the dataset gave up"), "{text}");
        drop(batches);
    }
}
