//! Rows that draw from the default generator: a run that is stopped at any batch goes on with the same random numbers, in its rows and
//! in its loop, although rounds are read ahead of the loop.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::data::Generator;
use accelerate::data::{
    DataLoader, DataLoaderConfiguration, DataLoaderShard, DataLoaderState, Dataset, IterableDataset, LoaderKind,
    RowStream, Rows,
};
use accelerate::tch::{self, Tensor};
use accelerate::{Accelerator, AcceleratorBuilder, Result, testing};
use rstest::rstest;

const NUM_ROWS: usize = 11;
const BATCH_SIZE: usize = 2;

/// A number that nobody else draws.
fn draw() -> Result<f64> {
    Ok(Tensor::f_rand([], tch::kind::DOUBLE_CPU)?.f_double_value(&[])?)
}

/// Row numbers with noise.
struct Noisy;

impl Dataset for Noisy {
    type Item = f64;
    fn len(&self) -> usize {
        NUM_ROWS
    }
    fn get(&self, index: usize) -> Result<f64> {
        Ok(index as f64 + draw()?)
    }
}

impl IterableDataset for Noisy {
    type Item = f64;
    fn iter(&self) -> Result<Box<dyn RowStream<f64>>> {
        Ok(Box::new(Rows((0..NUM_ROWS).map(|row| Noisy.get(row)))))
    }
}

/// Draws for the whole batch, as a collator does that masks words.
fn noisy_batch(rows: Vec<f64>) -> Result<Tensor> {
    let noise = draw()?;
    Ok(Tensor::f_from_slice(&rows)?.f_add_scalar(noise)?)
}

/// What a rank sees: its batches, and what its loop draws after each.
type Seen = Vec<(Vec<f64>, f64)>;

/// Where a run stands: its loader, and the default generator.
type Saved = (DataLoaderState, Tensor);

/// Up to `num_batches` batches. Ranks are threads here that share one default generator, so the loop of the first one alone draws.
fn train<K: LoaderKind>(
    accelerator: &Accelerator,
    loader: &DataLoaderShard<Tensor, K>,
    from: Option<Saved>,
    num_batches: usize,
) -> Result<(Seen, Saved)> {
    let (is_main, generator) = (accelerator.is_main_process(), Generator::default_cpu()?);
    let (state, resumed) = from.unzip();
    state.into_iter().for_each(|state| loader.load_state_dict(state));
    // The other ranks draw a seed when their pass begins, and rank 0 must not see that.
    if !is_main {
        accelerator.wait_for_everyone()?;
    } else if resumed.is_none() {
        tch::manual_seed(7);
    }
    let mut batches = loader.iter()?;
    if is_main {
        let begun = resumed.map_or_else(|| generator.state(), Ok)?;
        accelerator.wait_for_everyone()?;
        accelerator.wait_for_everyone()?;
        generator.set_state(&begun)?;
    } else {
        accelerator.wait_for_everyone()?;
    }
    accelerator.wait_for_everyone()?;
    let mut seen = Vec::new();
    for batch in batches.by_ref().take(num_batches) {
        let rows = Vec::<f64>::try_from(&batch?)?;
        seen.push((rows, if is_main { draw()? } else { 0.0 }));
        accelerator.wait_for_everyone()?;
    }
    Ok((seen, (loader.state_dict()?, generator.state()?)))
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Source {
    Rows,
    Stream,
}

fn run(source: Source, world_size: usize, from: Option<&[Saved]>, num_batches: usize) -> Vec<(Seen, Saved)> {
    let dataloader_config = DataLoaderConfiguration { dispatch_batches: Some(world_size > 1), ..Default::default() };
    let builder: AcceleratorBuilder = Accelerator::builder().cpu(true).dataloader_config(dataloader_config);
    let from: Option<Vec<(String, Vec<u8>)>> = from.map(|saved| {
        let portable =
            |(state, generator): &Saved| (serde_json::to_string(state).unwrap(), Vec::try_from(generator).unwrap());
        saved.iter().map(portable).collect()
    });
    testing::ranks(world_size, builder, |accelerator| {
        let from = from.as_ref().map(|saved| {
            let (state, generator) = &saved[accelerator.process_index()];
            (serde_json::from_str(state).unwrap(), Tensor::from_slice(generator))
        });
        match source {
            Source::Rows => {
                let loader = DataLoader::builder(Noisy).batch_size(BATCH_SIZE).collate_fn(noisy_batch).build()?;
                train(&accelerator, &accelerator.prepare(loader)?, from, num_batches)
            }
            Source::Stream => {
                let loader = DataLoader::iterable(Noisy).batch_size(BATCH_SIZE).collate_fn(noisy_batch).build()?;
                train(&accelerator, &accelerator.prepare(loader)?, from, num_batches)
            }
        }
    })
    .unwrap()
}

#[rstest]
#[case(Source::Rows, 1)]
#[case(Source::Stream, 1)]
#[case(Source::Rows, 2)]
#[case(Source::Stream, 2)]
#[case(Source::Stream, 3)]
fn a_run_goes_on_with_the_same_random_numbers(#[case] source: Source, #[case] world_size: usize) {
    let whole = run(source, world_size, None, usize::MAX);
    let num_batches = whole[0].0.len();
    assert_eq!(num_batches, NUM_ROWS.div_ceil(BATCH_SIZE * world_size));
    for stop in 1..num_batches {
        let first = run(source, world_size, None, stop);
        let saved: Vec<Saved> = first.iter().map(|(_, (state, generator))| (state.clone(), generator.copy())).collect();
        // One batch, and then the rest: a state is good for a second time.
        let second = run(source, world_size, Some(&saved), 1);
        let saved: Vec<Saved> =
            second.iter().map(|(_, (state, generator))| (state.clone(), generator.copy())).collect();
        let rest = run(source, world_size, Some(&saved), usize::MAX);
        for rank in 0..world_size {
            let joined: Seen = [&first, &second, &rest].into_iter().flat_map(|seen| seen[rank].0.clone()).collect();
            assert_eq!(joined, whole[rank].0, "stopped after {stop} batches, rank {rank}");
        }
    }
}

/// Before the first batch of a resumed pass, the loader still stands where it was saved.
#[test]
fn a_state_that_is_saved_again_at_once_is_the_same() {
    let (_, (state, _)) = run(Source::Stream, 1, None, 2).remove(0);
    assert!(serde_json::to_string(&state).unwrap().contains("look_ahead"));
    let loader: DataLoader<Tensor, _> = DataLoader::iterable(Noisy).batch_size(BATCH_SIZE).build().unwrap();
    loader.load_state_dict(state.clone());
    assert_eq!(loader.state_dict().unwrap(), state);
    let _batches = loader.iter().unwrap();
    assert_eq!(loader.state_dict().unwrap(), state);
}

/// Rows that draw nothing leave nothing in the state.
#[test]
fn rows_that_draw_nothing_have_no_random_numbers_in_the_state() {
    struct Plain;
    impl IterableDataset for Plain {
        type Item = f64;
        fn iter(&self) -> Result<Box<dyn RowStream<f64>>> {
            Ok(Box::new(Rows((0..NUM_ROWS).map(|row| Ok(row as f64)))))
        }
    }
    let loader: DataLoader<Tensor, _> = DataLoader::iterable(Plain).batch_size(BATCH_SIZE).build().unwrap();
    let mut batches = loader.iter().unwrap();
    let _first = batches.next().unwrap().unwrap();
    assert!(!serde_json::to_string(&loader.state_dict().unwrap()).unwrap().contains("look_ahead"));
}

#[test]
fn a_checkpoint_keeps_the_random_numbers_of_rows_that_were_read_ahead() {
    let folder = tempfile::tempdir().unwrap();
    let loader_of =
        |accelerator: &Accelerator| accelerator.prepare(DataLoader::iterable(Noisy).batch_size(BATCH_SIZE).build()?);
    let rest = |batches: &mut dyn Iterator<Item = Result<Tensor>>| -> Vec<(Vec<f64>, f64)> {
        batches.map(|batch| (Vec::try_from(&batch.unwrap()).unwrap(), draw().unwrap())).collect()
    };
    let accelerator = Accelerator::builder().cpu(true).build().unwrap();
    let loader = loader_of(&accelerator).unwrap();
    tch::manual_seed(7);
    let mut batches = loader.iter().unwrap();
    let _first = (batches.next().unwrap().unwrap(), draw().unwrap());
    accelerator.save_state(folder.path()).unwrap();
    let wanted = rest(&mut batches);
    tch::manual_seed(99);
    accelerator.load_state(folder.path()).unwrap();
    assert_eq!(rest(&mut loader.iter().unwrap()), wanted);
}
