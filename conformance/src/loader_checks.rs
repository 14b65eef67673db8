//! The checks of loaders of `test_script.py`: every row is seen once, in an order that a seed decides.

use accelerate::data::{BatchSampler, DataLoader, DataLoaderShard, VecDataset};
use accelerate::tch::Tensor;
use accelerate::{Accelerator, DataLoaderConfiguration, set_seed};
use anyhow::{Result, ensure};

pub(crate) fn loader_checks(accelerator: &Accelerator) -> Result<()> {
    // The second is the reference's `central_dl_preparation_check`: the main process reads, and sends each rank its rows.
    for dispatch_batches in [false, true] {
        dl_preparation_check(accelerator, dispatch_batches)?;
    }
    custom_sampler_check(accelerator)?;
    check_seedable_sampler(accelerator)?;
    check_seedable_sampler_with_data_seed(accelerator)
}

/// A loader of the numbers from 0.
pub(crate) fn numbers(length: usize, batch_size: usize, shuffle: bool) -> accelerate::Result<DataLoader<Tensor>> {
    let rows = (0..length as i64).collect();
    DataLoader::builder(VecDataset::new(rows)).batch_size(batch_size).shuffle(shuffle).build()
}

/// Every item exactly once, for all combinations of split and shuffle.
fn dl_preparation_check(accelerator: &Accelerator, dispatch_batches: bool) -> Result<()> {
    let length = 32 * accelerator.num_processes();
    for split_batches in [false, true] {
        for shuffle in [false, true] {
            let config = DataLoaderConfiguration {
                split_batches: Some(split_batches),
                dispatch_batches: Some(dispatch_batches),
                ..Default::default()
            };
            let configured = sibling(accelerator, config.clone())?;
            // The reference uses 8, which four ranks and fewer, but not three, divide.
            let batch_size = if split_batches { 4 * accelerator.num_processes() } else { 8 };
            let loader = configured.prepare(numbers(length, batch_size, shuffle)?)?;
            for pass in 0..2 {
                let mut seen = of_all_ranks(&configured, &loader)?;
                ensure!(shuffle || seen.iter().copied().eq(0..length as i64), "order {seen:?} in pass {pass}");
                seen.sort_unstable();
                ensure!(seen.iter().copied().eq(0..length as i64), "{config:?}, shuffle {shuffle}: {seen:?}");
            }
        }
    }
    Ok(())
}

/// Batches of 5 rows and of 3, from the last row to the first.
struct Backwards {
    length: usize,
}

impl BatchSampler for Backwards {
    fn len(&self) -> usize {
        self.length / 8 * 2
    }

    fn batches(&self, _epoch: usize) -> accelerate::Result<Vec<Vec<usize>>> {
        let rows: Vec<usize> = (0..self.length).rev().collect();
        Ok(rows.chunks(8).flat_map(|rows| [rows[..5].to_vec(), rows[5..].to_vec()]).collect())
    }
}

/// A batch sampler of the user's own decides what is in a batch, after preparation as before.
fn custom_sampler_check(accelerator: &Accelerator) -> Result<()> {
    let (rank, world_size) = (accelerator.process_index(), accelerator.num_processes());
    let sampler = Backwards { length: 32 * world_size };
    let wanted = sampler.batches(0)?;
    let rows: Vec<i64> = (0..sampler.length as i64).collect();
    let loader = accelerator.prepare(DataLoader::builder(VecDataset::new(rows)).batch_sampler(sampler).build()?)?;
    let mut num_batches = 0;
    for (index, batch) in loader.iter()?.enumerate() {
        let found = Vec::<i64>::try_from(&batch?)?;
        let wanted = &wanted[index * world_size + rank];
        ensure!(found.iter().map(|&row| row as usize).eq(wanted.iter().copied()), "{found:?} in place of {wanted:?}");
        num_batches += 1;
    }
    ensure!(num_batches * world_size == wanted.len(), "{num_batches} batches of {} in all", wanted.len());
    Ok(())
}

/// The same seed and epoch give the same rows, three passes long.
fn check_seedable_sampler(accelerator: &Accelerator) -> Result<()> {
    let configured =
        sibling(accelerator, DataLoaderConfiguration { use_seedable_sampler: Some(true), ..Default::default() })?;
    set_seed(42);
    let loader = configured.prepare(numbers(10 * accelerator.num_processes(), 2, true)?)?;
    let passes = || -> Result<Vec<Vec<i64>>> { (0..3).map(|_| of_this_rank(&loader)).collect() };
    let first = passes()?;
    ensure!(first[0] != first[1], "the shuffle does not change from epoch to epoch");
    set_seed(42);
    loader.set_epoch(0);
    let second = passes()?;
    ensure!(first == second, "the same seed and epoch gave {first:?} and then {second:?}");
    Ok(())
}

/// The same order on all ranks, another one in the next epoch.
fn check_seedable_sampler_with_data_seed(accelerator: &Accelerator) -> Result<()> {
    let config =
        DataLoaderConfiguration { use_seedable_sampler: Some(true), data_seed: Some(42), ..Default::default() };
    let configured = sibling(accelerator, config)?;
    let loader = configured.prepare(numbers(12 * accelerator.num_processes(), 3, true)?)?;
    let orders = [of_all_ranks(&configured, &loader)?, of_all_ranks(&configured, &loader)?];
    ensure!(orders[0] != orders[1], "the shuffle does not change from epoch to epoch");
    let everywhere = configured.gather_object(std::slice::from_ref(&orders))?;
    ensure!(everywhere.iter().all(|other| *other == orders), "ranks shuffle differently");
    Ok(())
}

/// What one pass gives this rank.
fn of_this_rank(loader: &DataLoaderShard<Tensor>) -> Result<Vec<i64>> {
    let mut seen = Vec::new();
    for batch in loader.iter()? {
        seen.extend(Vec::<i64>::try_from(&batch?)?);
    }
    Ok(seen)
}

/// What one pass gives all ranks, batch by batch in the order of ranks. Collective.
fn of_all_ranks(accelerator: &Accelerator, loader: &DataLoaderShard<Tensor>) -> Result<Vec<i64>> {
    let mut seen = Vec::new();
    for batch in loader.iter()? {
        seen.extend(Vec::<i64>::try_from(&accelerator.gather(&batch?)?)?);
    }
    Ok(seen)
}

/// An accelerator with other settings in the same run.
fn sibling(accelerator: &Accelerator, config: DataLoaderConfiguration) -> Result<Accelerator> {
    Ok(Accelerator::builder().dataloader_config(config).build_from(accelerator)?)
}
