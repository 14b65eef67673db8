//! Runs through loaders and writes which rows each rank gets: our half of `cargo xtask parity data`.
//!
//! Writes `rank<r>.json` as `parity/data_streams.py` does: for every case the batches of this rank in each epoch,
//! and what `gather_for_metrics` returned. Rows are their own numbers.

use std::fs;
use std::path::PathBuf;

use accelerate::data::{
    BatchSampler, DataLoader, DataLoaderShard, IterableDataset, LoaderKind, RowStream, Rows, VecDataset,
    skip_first_batches,
};
use accelerate::tch::{self, Tensor};
use accelerate::{Accelerator, DataLoaderConfiguration};
use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use serde::{Deserialize, Serialize};

/// Run through the loaders of all cases and write the rows of this rank.
#[derive(Debug, Parser)]
struct Arguments {
    /// The list of cases
    #[arg(long)]
    cases: PathBuf,
    /// How many ranks must take part
    #[arg(long = "world_size")]
    world_size: usize,
    /// The folder to write to
    #[arg(long)]
    output: PathBuf,
}

/// One configuration of a loader.
#[derive(Debug, Deserialize)]
struct Case {
    kind: String,
    rows: usize,
    batch_size: usize,
    drop_last: bool,
    shuffle: String,
    split_batches: bool,
    even_batches: bool,
    dispatch_batches: bool,
    seed: u64,
    skip: usize,
    metrics: bool,
}

/// Rows of this rank by epoch and batch, and the rows that metrics saw by epoch.
#[derive(Debug, Default, Serialize)]
struct Outcome {
    epochs: Vec<Vec<Vec<i64>>>,
    metrics: Vec<Vec<i64>>,
}

struct Stream(usize);

impl IterableDataset for Stream {
    type Item = i64;
    fn iter(&self) -> accelerate::Result<Box<dyn RowStream<i64>>> {
        Ok(Box::new(Rows((0..self.0 as i64).map(Ok))))
    }
}

/// Batches of 1, 2, 3, 1, 2, 3, ... rows: a batch sampler without a batch size.
struct Ragged(Vec<Vec<usize>>);

impl Ragged {
    fn new(rows: usize) -> Self {
        let mut rows = (0..rows).peekable();
        let mut batches = Vec::new();
        while rows.peek().is_some() {
            batches.push(rows.by_ref().take(1 + batches.len() % 3).collect());
        }
        Self(batches)
    }
}

impl BatchSampler for Ragged {
    fn len(&self) -> usize {
        self.0.len()
    }
    fn batches(&self, _: usize) -> accelerate::Result<Vec<Vec<usize>>> {
        Ok(self.0.clone())
    }
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let accelerator = Accelerator::builder().cpu(true).build()?;
    let num_processes = accelerator.num_processes();
    let wanted = arguments.world_size;
    ensure!(num_processes == wanted, "{num_processes} processes take part; {wanted} were asked for");
    let cases = fs::read(&arguments.cases).with_context(|| format!("could not read {}", arguments.cases.display()))?;
    let cases: Vec<Case> = serde_json::from_slice(&cases)?;
    let outcomes = cases
        .iter()
        .map(|case| run(&accelerator, case).with_context(|| format!("{case:?}")))
        .collect::<Result<Vec<_>>>()?;
    fs::create_dir_all(&arguments.output)?;
    let path = arguments.output.join(format!("rank{}.json", accelerator.process_index()));
    fs::write(path, serde_json::to_string(&outcomes)?)?;
    accelerator.wait_for_everyone()?;
    Ok(())
}

fn run(accelerator: &Accelerator, case: &Case) -> Result<Outcome> {
    tch::manual_seed(case.seed as i64);
    let accelerator = Accelerator::builder()
        .dataloader_config(DataLoaderConfiguration {
            split_batches: Some(case.split_batches),
            even_batches: Some(case.even_batches),
            dispatch_batches: Some(case.dispatch_batches),
            use_seedable_sampler: Some(case.shuffle == "seedable"),
            data_seed: (case.shuffle == "seedable").then_some(case.seed),
            ..Default::default()
        })
        .build_from(accelerator)?;
    let rows = DataLoader::builder(VecDataset::new((0..case.rows as i64).collect()));
    match case.kind.as_str() {
        "map" => {
            let loader = rows.batch_size(case.batch_size).shuffle(case.shuffle != "no").drop_last(case.drop_last);
            passes(&accelerator, case, accelerator.prepare(loader.build()?)?)
        }
        "ragged" => {
            let loader = rows.batch_sampler(Ragged::new(case.rows));
            passes(&accelerator, case, accelerator.prepare(loader.build()?)?)
        }
        "stream" => {
            let loader = DataLoader::iterable(Stream(case.rows)).batch_size(case.batch_size).drop_last(case.drop_last);
            passes(&accelerator, case, accelerator.prepare(loader.build()?)?)
        }
        other => bail!("the kind {other} is not known; wanted map, ragged or stream"),
    }
}

fn passes<K: LoaderKind>(
    accelerator: &Accelerator,
    case: &Case,
    loader: DataLoaderShard<Tensor, K>,
) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    for epoch in 0..2 {
        let skip = if epoch == 0 { case.skip } else { 0 };
        let (mut batches, mut gathered) = (Vec::new(), Vec::new());
        for batch in skip_first_batches(&loader, skip).iter()? {
            let batch = batch?;
            batches.push(Vec::<i64>::try_from(&batch)?);
            if case.metrics {
                gathered.extend(Vec::<i64>::try_from(&accelerator.gather_for_metrics(&batch)?)?);
            }
        }
        outcome.epochs.push(batches);
        outcome.metrics.push(gathered);
    }
    Ok(outcome)
}
