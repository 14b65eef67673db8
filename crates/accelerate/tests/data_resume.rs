//! A run that is stopped at any batch goes on, on any number of ranks, with the rows it has not seen.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::data::{
    BatchSampler, DataLoader, DataLoaderConfiguration, DataLoaderShard, DataLoaderState, IterableDataset, LoaderKind,
    RandomSampler, RowStream, Rows, VecDataset, WeightedRandomSampler,
};
use accelerate::tch::{self, Tensor};
use accelerate::{Accelerator, Error, Result, testing};
use proptest::prelude::*;

fn rows_of(batch: &Tensor) -> Vec<i64> {
    Vec::try_from(batch).unwrap()
}

/// What a loader is made of.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Source {
    Sequential,
    Seedable,
    /// A random sampler that draws from a generator of the ranks' own.
    Generator,
    Weighted,
    Ragged,
    Stream,
    SeekableStream,
    Dispatched,
    DispatchedStream,
}

const SOURCES: [Source; 9] = [
    Source::Sequential,
    Source::Seedable,
    Source::Generator,
    Source::Weighted,
    Source::Ragged,
    Source::Stream,
    Source::SeekableStream,
    Source::Dispatched,
    Source::DispatchedStream,
];

const NUM_ROWS: i64 = 23;

struct Stream {
    seekable: bool,
}

struct Seekable(i64);

impl Iterator for Seekable {
    type Item = Result<i64>;
    fn next(&mut self) -> Option<Self::Item> {
        self.0 += 1;
        (self.0 <= NUM_ROWS).then_some(Ok(self.0 - 1))
    }
}

impl RowStream<i64> for Seekable {
    fn state(&self) -> Option<Vec<u8>> {
        Some(self.0.to_le_bytes().to_vec())
    }
    fn seek(&mut self, state: &[u8]) -> Result<bool> {
        self.0 = i64::from_le_bytes(state.try_into().map_err(Error::other)?);
        Ok(true)
    }
    fn skip_rows(&mut self, num_rows: u64) -> Result<u64> {
        assert_eq!(num_rows, 0, "it can seek");
        Ok(0)
    }
}

impl IterableDataset for Stream {
    type Item = i64;
    fn iter(&self) -> Result<Box<dyn RowStream<i64>>> {
        if self.seekable {
            return Ok(Box::new(Seekable(0)));
        }
        Ok(Box::new(Rows((0..NUM_ROWS).map(Ok))))
    }
}

/// Batches of 1, 2, 3, 1, 2, 3, ... rows.
struct Ragged;

impl BatchSampler for Ragged {
    fn len(&self) -> usize {
        12
    }
    fn batches(&self, epoch: usize) -> Result<Vec<Vec<usize>>> {
        let mut rows = (0..NUM_ROWS as usize).map(|row| (row + epoch) % NUM_ROWS as usize);
        Ok((0..12).map(|batch| rows.by_ref().take(1 + batch % 3).collect()).collect())
    }
}

fn configuration(source: Source) -> DataLoaderConfiguration {
    DataLoaderConfiguration {
        use_seedable_sampler: Some(source == Source::Seedable),
        dispatch_batches: Some(matches!(source, Source::Dispatched | Source::DispatchedStream)),
        ..Default::default()
    }
}

/// Runs `body` with a prepared loader of the source on every rank.
fn run<T: Send>(
    source: Source,
    world_size: usize,
    seed: i64,
    body: impl Fn(&Accelerator, &dyn Loader) -> Result<T> + Sync,
) -> Vec<T> {
    let builder = Accelerator::builder().cpu(true).dataloader_config(configuration(source));
    // Ranks are threads here and share one default generator, from which each has to take its seed.
    let turns = std::sync::Mutex::new(());
    testing::ranks(world_size, builder, |accelerator| {
        let rows = VecDataset::new((0..NUM_ROWS).collect());
        let weights = || WeightedRandomSampler::new(vec![1.0; NUM_ROWS as usize], NUM_ROWS as usize);
        let streamed = matches!(source, Source::Stream | Source::SeekableStream | Source::DispatchedStream);
        if streamed {
            let stream = Stream { seekable: source == Source::SeekableStream };
            let loader = accelerator.prepare(DataLoader::iterable(stream).batch_size(2).build()?)?;
            return body(&accelerator, &loader);
        }
        let builder = DataLoader::builder(rows);
        let loader = match source {
            Source::Ragged => builder.batch_sampler(Ragged),
            Source::Weighted => builder.batch_size(2).sampler(weights()?),
            Source::Generator | Source::Dispatched => {
                let generator = accelerate::data::Generator::new_cpu()?;
                generator.manual_seed(seed as u64)?;
                builder.batch_size(2).sampler(RandomSampler::new(NUM_ROWS as usize).generator(generator))
            }
            Source::Sequential => builder.batch_size(2),
            _ => builder.batch_size(2).shuffle(true),
        };
        let loader = {
            // Dispatching connects the ranks, for which all of them have to be here.
            let _mine = (source != Source::Dispatched).then(|| turns.lock().unwrap());
            tch::manual_seed(seed);
            accelerator.prepare(loader.build()?)?
        };
        body(&accelerator, &loader)
    })
    .unwrap()
}

/// The prepared loaders of both kinds.
trait Loader {
    /// Rows that metrics see in up to `num_batches` batches, and the state after them.
    fn train(&self, accelerator: &Accelerator, num_batches: usize) -> Result<(Vec<i64>, DataLoaderState)>;
    fn load(&self, state: DataLoaderState);
}

impl<K: LoaderKind> Loader for DataLoaderShard<Tensor, K> {
    fn train(&self, accelerator: &Accelerator, num_batches: usize) -> Result<(Vec<i64>, DataLoaderState)> {
        let mut seen = Vec::new();
        let mut batches = self.iter()?;
        for _ in 0..num_batches {
            let Some(batch) = batches.next() else { return Ok((seen, self.state_dict()?)) };
            let rows: Vec<i64> = rows_of(&batch?);
            let kept = accelerator.gather_object_for_metrics(&rows)?;
            seen.extend(kept);
        }
        Ok((seen, self.state_dict()?))
    }

    fn load(&self, state: DataLoaderState) {
        self.load_state_dict(state);
    }
}

/// The rows of epoch 0 and 1 of an undisturbed run on one rank.
fn undisturbed(source: Source, seed: i64) -> [Vec<i64>; 2] {
    run(source, 1, seed, |accelerator, loader| {
        Ok([loader.train(accelerator, usize::MAX)?.0, loader.train(accelerator, usize::MAX)?.0])
    })
    .remove(0)
}

fn through_json(state: &DataLoaderState) -> DataLoaderState {
    serde_json::from_str(&serde_json::to_string(state).unwrap()).unwrap()
}

fn sorted(mut rows: Vec<i64>) -> Vec<i64> {
    rows.sort_unstable();
    rows
}

fn check(source: Source, before: usize, stop: usize, after: usize) {
    // Ranks are threads here: all of them would draw weighted rows from the one default generator at once.
    let (before, after) = if source == Source::Weighted { (1, 1) } else { (before, after) };
    let case = format!("{source:?}, {before} ranks, stopped after {stop} batches, {after} ranks");
    let first = run(source, before, 5, |accelerator, loader| loader.train(accelerator, stop));
    let (seen, state) = first[0].clone();
    for (other, position) in &first {
        assert_eq!((other, position.rows_delivered), (&seen, state.rows_delivered), "{case}");
    }
    let state = through_json(&state);
    // Another seed: what is resumed must not depend on it.
    let rest = run(source, after, 99, |accelerator, loader| {
        loader.load(state.clone());
        let rest = loader.train(accelerator, usize::MAX)?.0;
        Ok((rest, loader.train(accelerator, usize::MAX)?.0))
    });
    for (rest, next_epoch) in rest {
        // A run that had completed the epoch goes on with the next one.
        let mut epoch = if state.epoch == 0 { seen.clone() } else { Vec::new() };
        epoch.extend(&rest);
        if source != Source::Weighted {
            assert_eq!(sorted(epoch), (0..NUM_ROWS).collect::<Vec<_>>(), "{case}");
        } else {
            assert_eq!(epoch.len(), NUM_ROWS as usize, "{case}");
        }
        if state.epoch == 0 && matches!(source, Source::Seedable | Source::Ragged | Source::Sequential) {
            // The next epoch is that of the undisturbed run, in whatever order ranks have it.
            assert_eq!(sorted(next_epoch), sorted(undisturbed(source, 5)[1].clone()), "{case}");
        }
    }
}

#[test]
fn every_source_goes_on_in_every_world() {
    for source in SOURCES {
        for (before, stop, after) in [(1, 0, 1), (1, 3, 2), (2, 2, 1), (2, 3, 3), (3, 1, 2), (3, 4, 3), (1, 12, 2)] {
            check(source, before, stop, after);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_row_is_lost_and_none_comes_twice(
        source in prop::sample::select(SOURCES.to_vec()),
        before in 1..4_usize,
        stop in 0..13_usize,
        after in 1..4_usize,
    ) {
        check(source, before, stop, after);
    }
}

/// On as many ranks as before, the batches are those that would have come, fillers included.
#[test]
fn the_same_world_gets_the_same_batches() {
    for source in SOURCES.into_iter().filter(|source| *source != Source::Weighted) {
        let batches = |loader: &dyn Loader, accelerator: &Accelerator| loader.train(accelerator, usize::MAX);
        let whole = run(source, 2, 5, |accelerator, loader| Ok(batches(loader, accelerator)?.0));
        let first = run(source, 2, 5, |accelerator, loader| loader.train(accelerator, 3));
        let state = &first[0].1;
        let rest = run(source, 2, 99, |accelerator, loader| {
            loader.load(state.clone());
            Ok(batches(loader, accelerator)?.0)
        });
        for rank in 0..2 {
            let joined: Vec<i64> = first[rank].0.iter().chain(&rest[rank]).copied().collect();
            assert_eq!(joined, whole[rank], "{source:?}, rank {rank}");
        }
    }
}

#[test]
fn another_dataset_is_refused() {
    let state = {
        let loader = DataLoader::builder(VecDataset::new((0..10i64).collect())).batch_size(2).build().unwrap();
        loader.iter().unwrap().next();
        loader.state_dict().unwrap()
    };
    let other = DataLoader::builder(VecDataset::new((0..12i64).collect())).batch_size(2).build().unwrap();
    other.load_state_dict(state.clone());
    let error = other.iter().unwrap_err().to_string();
    assert!(error.contains("12 entries, saved: 10") && error.contains("do not load the state"), "{error}");
    // The user may decide otherwise.
    other.load_state_dict(DataLoaderState::new(state.epoch, 0));
    assert_eq!(other.iter().unwrap().count(), 6);
}

#[test]
fn a_place_behind_the_end_is_refused() {
    for shuffle in [false, true] {
        let builder = DataLoader::builder(VecDataset::new((0..10i64).collect())).batch_size(2).shuffle(shuffle);
        let loader = builder.build().unwrap();
        for rows_delivered in [11, 1 << 40, u64::MAX] {
            loader.load_state_dict(DataLoaderState::new(0, rows_delivered));
            let error = loader.iter().unwrap_err().to_string();
            assert!(error.contains("of this pass, and it has only 10"), "{error}");
        }
        loader.load_state_dict(DataLoaderState::new(0, 10));
        assert_eq!(loader.iter().unwrap().count(), 0);
    }
}

#[test]
fn a_stream_that_has_become_shorter_is_refused() {
    let loader = DataLoader::iterable(Stream { seekable: false }).batch_size(2).build().unwrap();
    loader.load_state_dict(DataLoaderState::new(0, 40));
    let error = loader.iter().unwrap_err().to_string();
    assert!(error.contains("ended after 23 rows") && error.contains("row 40"), "{error}");
}

#[test]
fn what_is_resumed_does_not_move_the_default_generator() {
    let loader = || DataLoader::builder(VecDataset::new((0..10i64).collect())).shuffle(true).build().unwrap();
    let first = loader();
    first.iter().unwrap().next();
    let state = first.state_dict().unwrap();
    let second = loader();
    second.load_state_dict(state);
    tch::manual_seed(3);
    let expected = Tensor::randn([4], tch::kind::FLOAT_CPU);
    tch::manual_seed(3);
    let mut batches = second.iter().unwrap();
    assert_eq!(Tensor::randn([4], tch::kind::FLOAT_CPU), expected);
    assert_eq!(batches.by_ref().count(), 9);
}

#[test]
fn the_state_is_that_of_the_batch_in_hand() {
    let loader =
        DataLoader::builder(VecDataset::new((0..10i64).collect())).batch_size(2).num_workers(2).build().unwrap();
    let mut batches = loader.iter().unwrap();
    for done in 1..=5 {
        assert!(batches.next().unwrap().is_ok());
        assert_eq!(loader.state_dict().unwrap().rows_delivered, 2 * done);
    }
    assert_eq!(loader.state_dict().unwrap().epoch, 0);
    assert!(batches.next().is_none());
    assert_eq!(loader.state_dict().unwrap(), DataLoaderState::new(1, 0));
}
