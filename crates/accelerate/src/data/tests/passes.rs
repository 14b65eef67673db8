//! Passes: epochs, skipping, leaving early, errors.

use super::*;
use crate::Error;
use crate::data::{
    BatchSampler, Dataset, Generator, IterableDataset, MapDataset, RowStream, Sampler, SeedableRandomSampler,
    SendToDeviceOptions, skip_first_batches,
};
use rstest::rstest;
use std::sync::atomic::{AtomicUsize, Ordering};
use tch::{Device, Kind};

fn seedable(num_rows: usize) -> NumberedShard {
    let loader = numbered(num_rows).batch_size(2).shuffle(true).build().unwrap();
    let configuration = DataLoaderSettings { use_seedable_sampler: true, data_seed: Some(11), ..Default::default() };
    shard(loader, 0, 1, &configuration)
}

fn order_of_epoch(num_rows: usize, epoch: usize) -> Vec<i64> {
    let order = SeedableRandomSampler::new(num_rows, 11).indices(epoch).unwrap();
    order.into_iter().map(|row| row as i64).collect()
}

#[test]
fn completed_passes_count_and_broken_off_ones_do_not() {
    let loader = seedable(10);
    assert_eq!(pass(loader.iter().unwrap()).concat(), order_of_epoch(10, 0));
    assert_eq!(loader.epoch(), 1);
    assert_eq!(pass(loader.iter().unwrap().take(5)).concat(), order_of_epoch(10, 1));
    assert_eq!(loader.epoch(), 1, "the iterator never returned None");
    assert_eq!(pass(loader.iter().unwrap()).concat(), order_of_epoch(10, 1));
    assert_eq!(loader.epoch(), 2);
}

#[test]
fn the_epoch_can_be_set_also_during_a_pass() {
    let loader = seedable(10);
    loader.set_epoch(7);
    let mut batches = loader.iter().unwrap();
    let first = rows_of(&batches.next().unwrap().unwrap());
    assert_eq!(first, order_of_epoch(10, 7)[..2]);
    loader.set_epoch(3);
    batches.for_each(drop);
    assert_eq!(loader.epoch(), 3, "the user's word stands");
}

#[test]
fn the_dataset_hears_of_the_epoch() {
    #[derive(Default)]
    struct Listener(AtomicUsize);
    impl Dataset for Listener {
        type Item = i64;
        fn len(&self) -> usize {
            1
        }
        fn get(&self, _: usize) -> Result<i64> {
            Ok(self.0.load(Ordering::Relaxed) as i64)
        }
        fn set_epoch(&self, epoch: usize) {
            self.0.store(epoch, Ordering::Relaxed);
        }
    }
    let loader = DataLoader::builder(Listener::default()).build().unwrap();
    let loader = loader.prepare_at(place(0, 1), &DataLoaderSettings::default()).unwrap();
    let heard: Vec<_> = (0..3).map(|_| pass(loader.iter().unwrap()).concat()).collect();
    assert_eq!(heard, [[0], [1], [2]]);
}

#[test]
fn skipped_batches_are_neither_read_nor_forgotten() {
    let read = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&read);
    let dataset = MapDataset::new(VecDataset::new((0..7).collect()), move |row: i64| {
        log.lock().unwrap().push(row);
        Ok(row)
    });
    let loader = DataLoader::builder(dataset).batch_size(2).build().unwrap();
    let loader = loader.prepare_at(place(1, 2), &DataLoaderSettings::default()).unwrap();
    let resumed = skip_first_batches(&loader, 1);
    assert_eq!((loader.len(), resumed.len()), (2, 1));
    let mut batches = resumed.iter().unwrap();
    assert_eq!(rows_of(&batches.next().unwrap().unwrap()), [6, 0]);
    let told = loader.gradient_state.active_position().unwrap();
    assert!(told.end_of_dataloader);
    assert_eq!(told.counted_rows, [[true, true], [true, false]]);
    assert_eq!(*read.lock().unwrap(), [6, 0]);
}

#[test]
fn a_resumed_pass_is_followed_by_the_next_epoch() {
    let loader = seedable(10);
    loader.set_epoch(4);
    let resumed = skip_first_batches(&loader, 3);
    assert_eq!(pass(resumed.iter().unwrap()).concat(), order_of_epoch(10, 4)[6..]);
    assert_eq!(pass(loader.iter().unwrap()).concat(), order_of_epoch(10, 5));
}

/// A generator of the sampler draws one order after the other, so the order of a later epoch depends on all before.
#[rstest]
#[case::within_the_pass(2)]
#[case::after_its_last_batch(5)]
#[case::after_the_pass(6)]
fn a_saved_pass_that_another_epoch_follows_has_drawn_its_order(#[case] batches_before_saving: usize) {
    let seeded = |seed| {
        let generator = Generator::new_cpu().unwrap();
        generator.manual_seed(seed).unwrap();
        shard(numbered(10).batch_size(2).shuffle(true).generator(generator).build().unwrap(), 0, 1, &Default::default())
    };
    let running = seeded(3);
    let mut batches = running.iter().unwrap();
    batches.by_ref().take(batches_before_saving).for_each(drop);
    let saved = running.state_dict().unwrap();
    batches.for_each(drop);
    running.set_epoch(1);
    let wanted = pass(running.iter().unwrap());

    let resumed = seeded(4);
    resumed.load_state_dict(saved.clone());
    resumed.set_epoch(1);
    let saved_again = resumed.state_dict().unwrap();
    assert_eq!(pass(resumed.iter().unwrap()), wanted);

    let resumed_twice = seeded(5);
    resumed_twice.load_state_dict(saved_again);
    resumed_twice.set_epoch(1);
    assert_eq!(pass(resumed_twice.iter().unwrap()), wanted);

    let in_the_same_epoch = seeded(6);
    in_the_same_epoch.load_state_dict(saved);
    let rest = pass(in_the_same_epoch.iter().unwrap());
    assert_eq!(rest.len(), if batches_before_saving == 6 { 5 } else { 5 - batches_before_saving });
}

#[test]
fn skipping_adds_up_and_may_leave_nothing() {
    let loader = numbered(7).batch_size(2).build().unwrap();
    let twice = skip_first_batches(&skip_first_batches(&loader, 1), 2);
    assert_eq!(pass(twice.iter().unwrap()), [[6]]);
    let beyond = skip_first_batches(&loader, 9);
    assert!(beyond.is_empty());
    assert_eq!(beyond.iter().unwrap().count(), 0);
}

#[test]
fn the_innermost_loop_is_the_active_one() {
    let state = GradientState::new(Default::default(), Default::default()).unwrap();
    let loader = |num_rows| {
        let place = Place { gradient_state: state.clone(), ..place(0, 1) };
        let loader = numbered(num_rows).build().unwrap();
        loader.prepare_at(place, &DataLoaderSettings::default()).unwrap()
    };
    let (training, evaluation) = (loader(2), loader(1));
    let mut outer = training.iter().unwrap();
    let _ = outer.next().unwrap().unwrap();
    assert!(!at_end(&state));
    for batch in evaluation.iter().unwrap() {
        let _ = batch.unwrap();
        assert!(at_end(&state));
    }
    assert!(!at_end(&state), "the outer loop is active again");
    let _ = outer.next().unwrap().unwrap();
    assert!(at_end(&state));
    assert!(outer.next().is_none());
    assert_eq!(state.active_position(), None, "the loop is over though its iterator is still there");
}

#[test]
fn a_loop_that_is_left_is_over() {
    let loader = seedable(10);
    for batch in loader.iter().unwrap() {
        if rows_of(&batch.unwrap()) != [-1, -1] {
            break;
        }
    }
    assert_eq!(loader.gradient_state.active_position(), None);
}

#[test]
fn a_bad_row_is_named_and_its_cause_kept() {
    #[derive(Debug, thiserror::Error)]
    #[error("line {line}: the label is missing")]
    struct BadLine {
        line: usize,
        source: std::num::ParseIntError,
    }
    let dataset = MapDataset::new(VecDataset::new((0..4).collect()), |row: i64| {
        let cause = || "x".parse::<i64>().unwrap_err();
        if row == 2 { Err(Error::other(BadLine { line: 3, source: cause() })) } else { Ok(row) }
    });
    let loader = DataLoader::builder(dataset).batch_size(2).build().unwrap();
    let mut batches = loader.iter().unwrap();
    assert!(batches.next().unwrap().is_ok());
    let error = batches.next().unwrap().unwrap_err();
    assert_eq!(error.to_string(), "row 2 of the dataset: line 3: the label is missing");
    let cause = std::error::Error::source(&error).unwrap();
    assert_eq!(cause.to_string(), "invalid digit found in string");
}

#[test]
fn a_batch_that_cannot_be_built_names_its_rows() {
    let loader = numbered(20)
        .batch_size(10)
        .collate_fn(|rows| if rows.contains(&0) { Err(Error::other("no")) } else { Ok(rows) })
        .build()
        .unwrap();
    let mut batches = loader.iter().unwrap();
    let error = batches.next().unwrap().unwrap_err();
    assert_eq!(error.to_string(), "batch of rows 0, 1, 2, 3, 4, 5, 6, 7, ... of the dataset: no");
    assert_eq!(batches.next().unwrap().unwrap(), (10..20).collect::<Vec<i64>>(), "the pass goes on");
    assert!(batches.next().is_none());
}

#[test]
fn options_that_exclude_each_other_are_refused_by_name() {
    struct NoBatches;
    impl BatchSampler for NoBatches {
        fn len(&self) -> usize {
            0
        }
        fn batches(&self, _: usize) -> Result<Vec<Vec<usize>>> {
            Ok(Vec::new())
        }
    }
    let text = |builder: DataLoaderBuilder<VecDataset<i64>, DefaultCollate>| builder.build().unwrap_err().to_string();
    let cases = [
        (numbered(3).batch_sampler(NoBatches).batch_size(2), "batch_sampler and DataLoaderBuilder::batch_size"),
        (numbered(3).batch_sampler(NoBatches).shuffle(true), "batch_sampler and DataLoaderBuilder::shuffle"),
        (numbered(3).batch_sampler(NoBatches).drop_last(true), "batch_sampler and DataLoaderBuilder::drop_last"),
        (numbered(3).sampler(SeedableRandomSampler::new(3, 0)).shuffle(true), "sampler and DataLoaderBuilder::shuffle"),
        (numbered(3).batch_size(0), "batch_size is 0, but must be at least 1"),
        (numbered(3).num_workers(1).prefetch_factor(0), "prefetch_factor is 0, but must be at least 1"),
        (numbered(3).prefetch_factor(2), "num_workers is 0"),
    ];
    for (builder, wanted) in cases {
        let message = text(builder);
        assert!(message.contains(wanted), "{message}");
    }
}

#[test]
fn drop_last_leaves_short_batches_out() {
    let loader = numbered(7).batch_size(3).drop_last(true).build().unwrap();
    assert_eq!(pass(loader.iter().unwrap()), [[0, 1, 2], [3, 4, 5]]);
    let loader = shard(loader, 0, 2, &DataLoaderSettings::default());
    assert_eq!(pass(loader.iter().unwrap()), [[0, 1, 2]]);
}

#[test]
fn an_empty_dataset_has_no_batches() {
    let loader = numbered(0).batch_size(3).build().unwrap();
    assert!(loader.is_empty());
    let loader = shard(loader, 0, 2, &DataLoaderSettings::default());
    assert!(loader.is_empty());
    assert_eq!(loader.iter().unwrap().count(), 0);
}

/// As in PyTorch: nobody means to shuffle nothing, and a training that does would end without a word.
#[test]
fn an_empty_dataset_is_not_shuffled() {
    let error = numbered(0).batch_size(3).shuffle(true).build().unwrap_err();
    assert!(error.is_data() && error.to_string().contains("has no rows"), "{error}");
}

#[test]
fn batches_are_moved_to_the_device() {
    let gpu = tch::Device::Cuda(0);
    let place = Place { device: Some(gpu), ..place(0, 1) };
    let loader = numbered(3).build().unwrap();
    let loader = loader.prepare_at(place, &DataLoaderSettings::default()).unwrap();
    for batch in loader.iter().unwrap() {
        // Without a GPU, the attempt to get there is what shows.
        match batch {
            Ok(batch) => assert_eq!(batch.device(), gpu),
            Err(_) => assert!(!tch::Cuda::is_available()),
        }
    }
    assert_eq!(loader.epoch(), 1);
}

#[test]
fn batches_for_a_gpu_are_pinned_where_copies_need_not_wait() {
    let (cpu, gpu) = (Some(Device::Cpu), Some(Device::Cuda(0)));
    for (device, non_blocking, is_pinned) in
        [(gpu, true, true), (gpu, false, false), (cpu, true, false), (None, true, false)]
    {
        let configuration = DataLoaderSettings { non_blocking, ..Default::default() };
        let place = Place { device, ..place(0, 1) };
        let loader = numbered(2).build().unwrap().prepare_at(place, &configuration).unwrap();
        for loader in [&loader, &skip_first_batches(&loader, 1)] {
            assert_eq!(loader.pinning().is_some(), is_pinned, "{device:?} {non_blocking}");
            assert_eq!(loader.sent(), device.map(|device| (device, SendToDeviceOptions { non_blocking })));
        }
    }
}

/// An order that is drawn when the stream is opened.
struct Permuted;

struct PermutedRows(std::vec::IntoIter<i64>);

impl Iterator for PermutedRows {
    type Item = Result<i64>;

    fn next(&mut self) -> Option<Result<i64>> {
        self.0.next().map(Ok)
    }
}

impl RowStream<i64> for PermutedRows {}

impl IterableDataset for Permuted {
    type Item = i64;

    fn iter(&self) -> Result<Box<dyn RowStream<i64>>> {
        Ok(Box::new(PermutedRows(rows_of(&Tensor::randperm(12, (Kind::Int64, Device::Cpu))).into_iter())))
    }
}

/// The loop draws from the same generator.
#[test]
fn a_stream_that_draws_its_order_goes_on_with_the_rows_that_are_left() {
    let loader = || {
        let loader = DataLoader::iterable(Permuted).batch_size(2).build().unwrap();
        loader.prepare_at(place(0, 1), &DataLoaderSettings::default()).unwrap()
    };
    tch::manual_seed(5);
    let running = loader();
    let mut batches = running.iter().unwrap();
    let seen = pass(batches.by_ref().take(2));
    let _ = Tensor::rand([7], (Kind::Float, Device::Cpu));
    let saved = running.state_dict().unwrap();
    let rest = pass(batches);
    assert_eq!((seen.concat().len(), rest.concat().len()), (4, 8));

    tch::manual_seed(6);
    let resumed = loader();
    resumed.load_state_dict(saved.clone());
    let mut batches = resumed.iter().unwrap();
    assert_eq!(resumed.state_dict().unwrap(), saved);
    let first = rows_of(&batches.next().unwrap().unwrap());
    assert_eq!([vec![first], pass(batches)].concat(), rest);
}
