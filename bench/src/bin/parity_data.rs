//! Runs through loaders and writes which rows each rank gets: our half of `cargo xtask parity data`.
//!
//! Writes `rank<r>.json` as `parity/data_streams.py` does: for every case the batches of this rank in each epoch,
//! what `gather_for_metrics` returned, and what the default generator gives next. Rows are their own numbers.

use std::fs;
use std::path::PathBuf;

use accelerate::data::{
    BatchSampler, DataLoader, DataLoaderBuilder, DataLoaderShard, DefaultCollate, Generator, IterableDataset,
    LoaderKind, RowStream, Rows, SubsetRandomSampler, VecDataset, WeightedRandomSampler, skip_first_batches,
};
use accelerate::tch::{self, Device, Kind, Tensor};
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
    sampler: String,
    seedable: bool,
    own_generator: bool,
    seed_per_rank: bool,
    split_batches: bool,
    even_batches: bool,
    dispatch_batches: bool,
    seed: u64,
    skip: usize,
    metrics: bool,
}

impl Case {
    fn seed_of(&self, rank: usize) -> u64 {
        self.seed + if self.seed_per_rank { 100 * rank as u64 } else { 0 }
    }
}

/// Rows of this rank by epoch and batch, and the rows that metrics saw by epoch.
#[derive(Debug, Default, Serialize)]
struct Outcome {
    epochs: Vec<Vec<Vec<i64>>>,
    metrics: Vec<Vec<i64>>,
    next_draw: i64,
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
    tch::manual_seed(case.seed_of(accelerator.process_index()) as i64);
    let accelerator = Accelerator::builder()
        .dataloader_config(DataLoaderConfiguration {
            split_batches: Some(case.split_batches),
            even_batches: Some(case.even_batches),
            dispatch_batches: Some(case.dispatch_batches),
            use_seedable_sampler: Some(case.seedable),
            data_seed: (case.seedable).then_some(case.seed),
            ..Default::default()
        })
        .build_from(accelerator)?;
    let rows = DataLoader::builder(VecDataset::new((0..case.rows as i64).collect()));
    match case.kind.as_str() {
        "map" => {
            let rows = rows.batch_size(case.batch_size).drop_last(case.drop_last);
            let loader = with_sampler(rows, case, accelerator.process_index())?;
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

type Loader = DataLoaderBuilder<VecDataset<i64>, DefaultCollate>;

fn with_sampler(loader: Loader, case: &Case, rank: usize) -> Result<Loader> {
    let mut generator = None;
    if case.own_generator {
        let own = Generator::new_cpu()?;
        own.manual_seed(case.seed_of(rank) + 7)?;
        generator = Some(own);
    }
    Ok(match (case.sampler.as_str(), generator) {
        ("sequential", _) => loader,
        ("random", Some(generator)) => loader.shuffle(true).generator(generator),
        ("random", None) => loader.shuffle(true),
        ("weighted", generator) => {
            let weights = (0..case.rows).map(|row| 1.0 + (row % 3) as f64).collect();
            let sampler = WeightedRandomSampler::new(weights, case.rows)?;
            loader.sampler(match generator {
                Some(generator) => sampler.generator(generator),
                None => sampler,
            })
        }
        ("subset", generator) => {
            let sampler = SubsetRandomSampler::new((0..case.rows).step_by(2).collect());
            loader.sampler(match generator {
                Some(generator) => sampler.generator(generator),
                None => sampler,
            })
        }
        (other, _) => bail!("the sampler {other} is not known; wanted sequential, random, weighted or subset"),
    })
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
    outcome.next_draw = Tensor::empty([0; 0], (Kind::Int64, Device::Cpu)).random_().int64_value(&[]);
    Ok(outcome)
}
