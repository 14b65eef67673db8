//! Streams, read by every rank or dispatched by rank 0, on real ranks: threads connected by Gloo.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::data::{
    DataLoader, DataLoaderConfiguration, Iterable, IterableDataset, MapDataset, RowStream, Rows, VecDataset,
    skip_first_batches,
};
use accelerate::tch::Tensor;
use accelerate::{Accelerator, Error, Result, testing};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

/// `0..n`, and a number of rows that were read.
#[derive(Clone)]
struct Numbers {
    num_rows: i64,
    fails_at: Option<i64>,
    read: Arc<AtomicUsize>,
}

fn numbers(num_rows: i64) -> Numbers {
    Numbers { num_rows, fails_at: None, read: Arc::default() }
}

impl IterableDataset for Numbers {
    type Item = i64;
    fn iter(&self) -> Result<Box<dyn RowStream<i64>>> {
        let Self { num_rows, fails_at, read } = self.clone();
        Ok(Box::new(Rows((0..num_rows).map(move |row| {
            read.fetch_add(1, Ordering::Relaxed);
            if Some(row) == fails_at { Err(Error::other("the disk is gone")) } else { Ok(row) }
        }))))
    }
}

/// `0..4`, and the threads on which rows were read.
#[derive(Clone, Default)]
struct Threads(Arc<Mutex<Vec<ThreadId>>>);

impl IterableDataset for Threads {
    type Item = i64;
    fn iter(&self) -> Result<Box<dyn RowStream<i64>>> {
        let threads = Arc::clone(&self.0);
        Ok(Box::new(Rows((0..4).map(move |row| {
            threads.lock().unwrap().push(thread::current().id());
            Ok(row)
        }))))
    }
}

// So rows that draw from the default generator take turns with the loop.
#[test]
fn dispatched_rows_are_read_on_the_thread_of_the_loop() {
    let builder = Accelerator::builder().cpu(true).dataloader_config(configuration(true, false));
    testing::ranks(2, builder, |accelerator| {
        let dataset = Threads::default();
        let loader = accelerator.prepare(DataLoader::iterable(dataset.clone()).batch_size(1).build()?)?;
        assert_eq!(loader.iter()?.count(), 2);
        let threads = dataset.0.lock().unwrap();
        let num_read = if accelerator.is_main_process() { 4 } else { 0 };
        assert_eq!(*threads, vec![thread::current().id(); num_read]);
        Ok(())
    })
    .unwrap();
}

fn rows_of(batch: &Tensor) -> Vec<i64> {
    Vec::try_from(batch).unwrap()
}

fn configuration(dispatch: bool, split_batches: bool) -> DataLoaderConfiguration {
    DataLoaderConfiguration {
        dispatch_batches: Some(dispatch),
        split_batches: Some(split_batches),
        ..Default::default()
    }
}

type Seen = (Vec<Vec<i64>>, Vec<i64>, Vec<bool>);

/// Batches of this rank, what metrics gather, and `end_of_dataloader` at every batch.
fn pass<K: accelerate::data::LoaderKind>(
    accelerator: &Accelerator,
    loader: &accelerate::data::DataLoaderShard<Tensor, K>,
) -> Result<Seen> {
    let (mut batches, mut gathered, mut ends) = (Vec::new(), Vec::new(), Vec::new());
    for batch in loader.iter()? {
        let batch = batch?;
        ends.push(accelerator.end_of_dataloader());
        gathered.extend(rows_of(&accelerator.gather_for_metrics(&batch)?));
        batches.push(rows_of(&batch));
    }
    Ok((batches, gathered, ends))
}

fn stream_pass(world_size: usize, num_rows: i64, batch_size: usize, options: DataLoaderConfiguration) -> Vec<Seen> {
    let builder = Accelerator::builder().cpu(true).dataloader_config(options);
    testing::ranks(world_size, builder, |accelerator| {
        let loader = DataLoader::iterable(numbers(num_rows)).batch_size(batch_size).build()?;
        let loader = accelerator.prepare(loader)?;
        pass(&accelerator, &loader)
    })
    .unwrap()
}

/// Python Accelerate's batches (`accelerate-behaviour` of 1.15.0: `IterableDatasetShard`, `DataLoaderDispatcher`).
#[test]
fn batches_are_those_of_the_reference() {
    let batches = |seen: Vec<Seen>| seen.into_iter().map(|(batches, ..)| batches).collect::<Vec<_>>();
    let shared = batches(stream_pass(2, 10, 4, configuration(false, false)));
    assert_eq!(shared, [[[0, 1, 2, 3], [8, 9, 0, 1]], [[4, 5, 6, 7], [2, 3, 4, 5]]]);
    let dispatched = batches(stream_pass(2, 9, 4, configuration(true, false)));
    assert_eq!(dispatched, [[vec![0, 1, 2, 3], vec![8]], [vec![4, 5, 6, 7], vec![0]]]);
    let dispatched = batches(stream_pass(2, 3, 4, configuration(true, false)));
    assert_eq!(dispatched, [[[0, 1]], [[2, 0]]]);
    // The reference hands rank 2 an empty batch.
    let dispatched = batches(stream_pass(3, 1, 4, configuration(true, false)));
    assert_eq!(dispatched, [[[0]], [[0]], [[0]]]);
    let split = batches(stream_pass(2, 7, 4, configuration(true, true)));
    assert_eq!(split, [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]);
    let split = batches(stream_pass(2, 6, 4, configuration(false, true)));
    assert_eq!(split, [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]);
}

#[test]
fn metrics_see_every_row_once_and_the_end_is_known() {
    for world_size in 1..=4 {
        for num_rows in [1, 5, 8, 13] {
            for (dispatch, split) in [(false, false), (true, false), (true, true)] {
                let batch_size = if split { 2 * world_size } else { 3 };
                let case = format!("{num_rows} rows, {world_size} ranks, dispatch {dispatch}, split {split}");
                for (batches, mut gathered, ends) in
                    stream_pass(world_size, num_rows, batch_size, configuration(dispatch, split))
                {
                    gathered.sort_unstable();
                    assert_eq!(gathered, (0..num_rows).collect::<Vec<_>>(), "{case}");
                    assert_eq!(ends.iter().position(|end| *end), Some(batches.len() - 1), "{case}");
                }
            }
        }
    }
}

#[test]
fn a_dispatched_dataset_is_read_by_rank_zero_only() {
    let read: Vec<usize> = testing::ranks(
        3,
        Accelerator::builder().cpu(true).dataloader_config(configuration(true, false)),
        |accelerator| {
            let read = Arc::new(AtomicUsize::new(0));
            let counter = Arc::clone(&read);
            let dataset = MapDataset::new(VecDataset::new((0..20i64).collect()), move |row: i64| {
                counter.fetch_add(1, Ordering::Relaxed);
                Ok(row)
            });
            let loader = DataLoader::builder(dataset).batch_size(2).shuffle(true).num_workers(2).build()?;
            let loader = accelerator.prepare(loader)?;
            assert_eq!(loader.len(), 4);
            for _ in 0..2 {
                let (batches, mut gathered, _) = pass(&accelerator, &loader)?;
                gathered.sort_unstable();
                assert_eq!((batches.len(), gathered), (4, (0..20).collect()));
            }
            Ok(read.load(Ordering::Relaxed))
        },
    )
    .unwrap();
    // The last round has two rows, so one slot is filled up again.
    assert_eq!(read, [42, 0, 0]);
}

#[test]
fn batches_of_any_form_are_dispatched() {
    type Batch = (Tensor, std::collections::BTreeMap<String, Tensor>, Vec<String>);
    let forms = testing::ranks(
        2,
        Accelerator::builder().cpu(true).dataloader_config(configuration(true, false)),
        |accelerator| {
            // Texts of unequal length are padded within the batch of each rank.
            let collate = |rows: Vec<i64>| -> Result<Batch> {
                let longest = rows.iter().copied().max().unwrap_or(0);
                let padded = Tensor::zeros(
                    [rows.len() as i64, longest],
                    (accelerate::tch::Kind::Half, accelerate::tch::Device::Cpu),
                );
                let names = rows.iter().map(|row| format!("row {row}")).collect();
                Ok((padded, [("rows".to_owned(), Tensor::from_slice(&rows))].into(), names))
            };
            let loader = DataLoader::iterable(numbers(8)).batch_size(2).collate_fn(collate).build()?;
            let loader = accelerator.prepare(loader)?;
            loader
                .iter()?
                .map(|batch| batch.map(|(padded, map, names)| (padded.size(), rows_of(&map["rows"]), names.concat())))
                .collect::<Result<Vec<_>>>()
        },
    )
    .unwrap();
    let expected = |rows: [i64; 2]| (vec![2, rows[1]], rows.to_vec(), format!("row {}row {}", rows[0], rows[1]));
    assert_eq!(forms, [[expected([0, 1]), expected([4, 5])], [expected([2, 3]), expected([6, 7])]]);
}

#[test]
fn a_failure_of_rank_zero_reaches_all_ranks() {
    for num_workers in [0, 1] {
        let errors = testing::ranks(
            3,
            Accelerator::builder().cpu(true).dataloader_config(configuration(true, false)),
            |accelerator| {
                let stream = Numbers { fails_at: Some(7), ..numbers(100) };
                let loader = DataLoader::iterable(stream).batch_size(2).num_workers(num_workers).build()?;
                let loader = accelerator.prepare(loader)?;
                let results: Vec<_> = loader.iter()?.map(|batch| batch.map(|batch| rows_of(&batch))).collect();
                assert_eq!(results.len(), 2, "one whole round, then the error, then the end");
                Ok(results[1].as_ref().unwrap_err().to_string())
            },
        )
        .unwrap();
        assert!(errors[0].contains("row 7 of the stream"), "{}", errors[0]);
        for error in &errors[1..] {
            assert!(error.contains("rank 0") && error.contains("the disk is gone"), "{error}");
        }
    }
}

#[test]
fn a_dataset_that_cannot_be_opened_fails_on_all_ranks() {
    struct Missing;
    impl IterableDataset for Missing {
        type Item = i64;
        fn iter(&self) -> Result<Box<dyn RowStream<i64>>> {
            Err(Error::other("no such file"))
        }
    }
    let errors = testing::ranks(2, Default::default(), |accelerator| {
        let loader = accelerator.prepare(DataLoader::iterable(Missing).build()?)?;
        let first = loader.iter().and_then(|mut batches| batches.next().unwrap().map(|_| ()));
        Ok(first.unwrap_err().to_string())
    })
    .unwrap();
    assert!(errors.iter().all(|error| error.contains("no such file")), "{errors:?}");
}

#[test]
fn leaving_a_dispatched_loop_does_not_spoil_the_next_one() {
    let passes = testing::ranks(3, Default::default(), |accelerator| {
        let loader = accelerator.prepare(DataLoader::iterable(numbers(30)).batch_size(2).build()?)?;
        let first: Vec<_> = loader.iter()?.take(2).map(|batch| rows_of(&batch.unwrap())).collect();
        let second: Vec<_> = loader.iter()?.map(|batch| rows_of(&batch.unwrap())).collect();
        assert_eq!(first, second[..2]);
        Ok(second.concat())
    })
    .unwrap();
    let mut rows = passes.concat();
    rows.sort_unstable();
    assert_eq!(rows, (0..30).collect::<Vec<_>>());
}

#[test]
fn uneven_streams_hand_out_what_there_is() {
    let options = DataLoaderConfiguration { even_batches: Some(false), ..configuration(false, false) };
    let builder = Accelerator::builder().cpu(true).dataloader_config(options);
    let shares = testing::ranks(3, builder, |accelerator| {
        let loader = accelerator.prepare(DataLoader::iterable(numbers(9)).batch_size(2).build()?)?;
        loader.iter()?.map(|batch| Ok(rows_of(&batch?))).collect::<Result<Vec<_>>>()
    });
    assert_eq!(shares.unwrap(), [vec![vec![0, 1], vec![6, 7]], vec![vec![2, 3], vec![8]], vec![vec![4, 5]]]);
}

#[test]
fn skipping_a_stream_keeps_the_rest_and_its_fillers() {
    for dispatch in [false, true] {
        let builder = Accelerator::builder().cpu(true).dataloader_config(configuration(dispatch, false));
        let seen = testing::ranks(2, builder, |accelerator| {
            let loader = accelerator.prepare(DataLoader::iterable(numbers(11)).batch_size(2).build()?)?;
            let whole = pass(&accelerator, &loader)?;
            let skipped = pass(&accelerator, &skip_first_batches(&loader, 2))?;
            assert_eq!((&whole.0[2..], &whole.1[8..]), (&skipped.0[..], &skipped.1[..]), "dispatch {dispatch}");
            Ok(skipped.1)
        });
        assert_eq!(seen.unwrap(), [[8, 9, 10], [8, 9, 10]]);
    }
}

#[test]
fn workers_change_nothing() {
    for num_workers in [0, 1, 3] {
        let loader: DataLoader<Tensor, Iterable> =
            DataLoader::iterable(numbers(7)).batch_size(3).num_workers(num_workers).build().unwrap();
        let batches: Vec<_> = loader.iter().unwrap().map(|batch| rows_of(&batch.unwrap())).collect();
        assert_eq!(batches, [vec![0, 1, 2], vec![3, 4, 5], vec![6]]);
    }
}

#[test]
fn a_panic_in_the_stream_is_raised_where_batches_are_asked_for() {
    struct Panics;
    impl IterableDataset for Panics {
        type Item = i64;
        fn iter(&self) -> Result<Box<dyn RowStream<i64>>> {
            Ok(Box::new(Rows((0..5).map(|row| if row == 3 { panic!("row three") } else { Ok(row) }))))
        }
    }
    for num_workers in [0, 2] {
        let loader = DataLoader::iterable(Panics).num_workers(num_workers).build().unwrap();
        let mut batches = loader.iter().unwrap();
        let all = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| batches.by_ref().count()));
        let payload = all.unwrap_err();
        assert_eq!(payload.downcast_ref::<&str>(), Some(&"row three"));
    }
}

#[test]
fn dispatching_needs_device_placement() {
    let builder =
        Accelerator::builder().cpu(true).device_placement(false).dataloader_config(configuration(true, false));
    let errors = testing::ranks(2, builder, |accelerator| {
        Ok(accelerator.prepare(DataLoader::iterable(numbers(4)).build()?).unwrap_err().to_string())
    });
    assert!(errors.unwrap().iter().all(|error| error.contains("device_placement")));
}
