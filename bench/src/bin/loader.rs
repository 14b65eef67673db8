//! Runs through a loader and reports its pace: our half of the races of `cargo xtask bench loader`.
//!
//! Each rank prints one line of JSON, as `bench/rival/loader.py` does: a time, and the sum of all tokens that it got.

use std::time::{Duration, Instant};

use accelerate::data::{
    DataLoader, DataLoaderShard, IterableDataset, LoaderKind, MapDataset, RowStream, Rows, TensorDataset, VecDataset,
    skip_first_batches,
};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Accelerator, DataLoaderConfiguration};
use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use serde_json::json;

const TOKENS: i64 = 128;
const BATCH_SIZE: usize = 32;
const SKIPPED_BATCHES: usize = 10_000;

/// Run through a loader and report how long it takes.
#[derive(Debug, Parser)]
struct Arguments {
    /// What to measure
    #[arg(long)]
    mode: Mode,
    /// Threads that make batches ahead of time
    #[arg(long = "num_workers", default_value_t = 0)]
    num_workers: usize,
    /// Batches of a pass
    #[arg(long, default_value_t = 500)]
    batches: usize,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Mode {
    /// Microseconds per batch of rows that lie in memory
    Memory,
    /// Microseconds per batch of rows that take a millisecond each
    Work,
    /// Microseconds until the first batch behind many that are left out
    Skip,
    /// Microseconds until the first batch
    FirstBatch,
    /// Microseconds per batch that rank 0 reads for all
    Dispatch,
}

/// Token `column` of row `row`.
fn token(row: i64, column: i64) -> i64 {
    (row * 31 + column * 7) % 50_257
}

fn tokens(num_rows: i64) -> Tensor {
    let rows = Tensor::arange(num_rows, (Kind::Int64, Device::Cpu)).unsqueeze(1) * 31;
    let columns = Tensor::arange(TOKENS, (Kind::Int64, Device::Cpu)).unsqueeze(0) * 7;
    (rows + columns).remainder(50_257)
}

/// Rows one after the other.
struct Stream(i64);

impl IterableDataset for Stream {
    type Item = Vec<i64>;
    fn iter(&self) -> accelerate::Result<Box<dyn RowStream<Vec<i64>>>> {
        let row = |row| Ok((0..TOKENS).map(|column| token(row, column)).collect());
        Ok(Box::new(Rows((0..self.0).map(row))))
    }
}

/// Keeps the processor busy for a millisecond, as decoding an image would.
fn work(row: i64) -> accelerate::Result<Vec<i64>> {
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(1) {
        std::hint::spin_loop();
    }
    Ok((0..TOKENS).map(|column| token(row, column)).collect())
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let dispatch_batches = matches!(arguments.mode, Mode::Dispatch);
    let configuration = DataLoaderConfiguration { dispatch_batches: Some(dispatch_batches), ..Default::default() };
    let accelerator = Accelerator::builder().cpu(true).dataloader_config(configuration).build()?;
    let num_rows = arguments.batches * BATCH_SIZE;
    let (micros, sum) = match arguments.mode {
        Mode::Memory | Mode::FirstBatch => {
            let loader = DataLoader::builder(TensorDataset::new(tokens(num_rows as i64))?).batch_size(BATCH_SIZE);
            let loader = accelerator.prepare(loader.num_workers(arguments.num_workers).build()?)?;
            match arguments.mode {
                Mode::FirstBatch => first_batch(&loader)?,
                _ => pace(&loader, arguments.batches)?,
            }
        }
        Mode::Work => {
            let rows = MapDataset::new(VecDataset::new((0..num_rows as i64).collect()), work);
            let loader = DataLoader::builder(rows).batch_size(BATCH_SIZE).num_workers(arguments.num_workers);
            pace(&accelerator.prepare(loader.build()?)?, arguments.batches)?
        }
        Mode::Skip => {
            let num_rows = (SKIPPED_BATCHES + 1) * BATCH_SIZE;
            let loader = DataLoader::builder(TensorDataset::new(tokens(num_rows as i64))?).batch_size(BATCH_SIZE);
            let loader = accelerator.prepare(loader.build()?)?;
            let start = Instant::now();
            let resumed = skip_first_batches(&loader, SKIPPED_BATCHES);
            let batch = resumed.iter()?.next().context("no batch is left")??;
            (start.elapsed().as_secs_f64() * 1e6, sum_of(&batch))
        }
        Mode::Dispatch => {
            let rows = num_rows * accelerator.num_processes();
            let loader = DataLoader::iterable(Stream(rows as i64)).batch_size(BATCH_SIZE).build()?;
            pace(&accelerator.prepare(loader)?, arguments.batches)?
        }
    };
    let (rank, world_size) = (accelerator.process_index(), accelerator.num_processes());
    println!("report={}", json!({"rank": rank, "world_size": world_size, "micros": micros, "sum": sum}));
    accelerator.wait_for_everyone()?;
    Ok(())
}

fn sum_of(batch: &Tensor) -> i64 {
    batch.sum(Kind::Int64).int64_value(&[])
}

/// Microseconds per batch of the second pass, the first one warms up; and the sum of its tokens.
fn pace<K: LoaderKind>(loader: &DataLoaderShard<Tensor, K>, num_batches: usize) -> Result<(f64, i64)> {
    let mut last = (0.0, 0);
    for _ in 0..2 {
        let (mut sum, start) = (0, Instant::now());
        for batch in loader.iter()? {
            sum += sum_of(&batch?);
        }
        last = (start.elapsed().as_secs_f64() * 1e6 / num_batches as f64, sum);
    }
    Ok(last)
}

/// Microseconds from the beginning of a pass to its first batch, in a program that has just begun.
fn first_batch(loader: &DataLoaderShard<Tensor>) -> Result<(f64, i64)> {
    let start = Instant::now();
    let batch = loader.iter()?.next().context("there is no batch")??;
    Ok((start.elapsed().as_secs_f64() * 1e6, sum_of(&batch)))
}
