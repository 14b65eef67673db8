//! Reads an epoch and writes down after each batch which rows were seen and where the loader stands, until this run is
//! told to die. The next run, on any number of ranks, goes on from what was written.

use accelerate::Accelerator;
use accelerate::data::{
    DataLoader, DataLoaderConfiguration, DataLoaderShard, DataLoaderState, IterableDataset, LoaderKind, RowStream,
    Rows, VecDataset,
};
use accelerate::tch::{self, Tensor};
use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;

/// Rows of the epoch.
const NUM_ROWS: i64 = 97;

/// What this run is to do; `plan.json` in the folder.
#[derive(Debug, Deserialize)]
struct Plan {
    /// `seedable`, `random`, `stream` or `dispatched`.
    source: String,
    /// The batch, counted from 1, at which a rank dies.
    die_after: usize,
    /// Which rank dies.
    rank: usize,
    /// Does it die before the batch is written down?
    before_writing: bool,
    /// Differs from run to run; what is resumed must not depend on it.
    seed: i64,
}

/// What all runs together have done; `progress.json` in the folder.
#[derive(Debug, Default, Deserialize, Serialize)]
struct Progress {
    seen: Vec<i64>,
    state: Option<DataLoaderState>,
    done: bool,
}

struct Stream;

impl IterableDataset for Stream {
    type Item = i64;
    fn iter(&self) -> accelerate::Result<Box<dyn RowStream<i64>>> {
        Ok(Box::new(Rows((0..NUM_ROWS).map(Ok))))
    }
}

pub(crate) fn run(folder: Option<&Path>) -> anyhow::Result<()> {
    let folder = folder.context("this script needs --folder")?;
    let plan: Plan = serde_json::from_slice(&fs::read(folder.join("plan.json"))?)?;
    tch::manual_seed(plan.seed);
    let accelerator = Accelerator::builder()
        .cpu(true)
        .dataloader_config(DataLoaderConfiguration {
            use_seedable_sampler: Some(plan.source == "seedable"),
            dispatch_batches: Some(plan.source == "dispatched"),
            ..Default::default()
        })
        .build()?;
    let rows = DataLoader::builder(VecDataset::new((0..NUM_ROWS).collect())).batch_size(2).num_workers(1);
    match plan.source.as_str() {
        "seedable" | "random" => read(&accelerator, accelerator.prepare(rows.shuffle(true).build()?)?, &plan, folder),
        "stream" | "dispatched" => {
            let loader = DataLoader::iterable(Stream).batch_size(2).build()?;
            read(&accelerator, accelerator.prepare(loader)?, &plan, folder)
        }
        other => bail!("the source {other} is not known"),
    }
}

fn read<K: LoaderKind>(
    accelerator: &Accelerator,
    loader: DataLoaderShard<Tensor, K>,
    plan: &Plan,
    folder: &Path,
) -> anyhow::Result<()> {
    let path = folder.join("progress.json");
    let mut progress: Progress = match fs::read(&path) {
        Ok(bytes) => serde_json::from_slice(&bytes)?,
        Err(_) => Progress::default(),
    };
    // Everybody has read before the main process writes.
    accelerator.wait_for_everyone()?;
    if let Some(state) = progress.state.take() {
        loader.load_state_dict(state);
    }
    for (number, batch) in (1..).zip(loader.iter()?) {
        let rows = Vec::<i64>::try_from(&accelerator.gather_for_metrics(&batch?)?)?;
        let dies = number == plan.die_after && plan.rank % accelerator.num_processes() == accelerator.process_index();
        if dies && plan.before_writing {
            std::process::abort();
        }
        progress.seen.extend(rows);
        progress.state = Some(loader.state_dict()?);
        write(accelerator, &path, &progress)?;
        if dies {
            std::process::abort();
        }
    }
    progress.done = true;
    write(accelerator, &path, &progress)
}

/// Whole or not at all, whoever is killed when.
fn write(accelerator: &Accelerator, path: &Path, progress: &Progress) -> anyhow::Result<()> {
    if accelerator.is_main_process() {
        let new = path.with_extension("new");
        fs::write(&new, serde_json::to_vec(progress)?)?;
        fs::rename(&new, path)?;
    }
    Ok(())
}
