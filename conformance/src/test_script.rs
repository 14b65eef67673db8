//! `test_script.py`: process control, loader preparation, training against a single process, splitting.

use crate::training_check::training_check;
use accelerate::data::{DataLoader, VecDataset};
use accelerate::tch::{self, Kind, Tensor};
use accelerate::{Accelerator, DataLoaderConfiguration, RngType, SplitOptions, main_println};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

pub(crate) fn run(folder: Option<&Path>) -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).build()?;
    process_execution_check(&accelerator, folder)?;
    rng_sync_check(&accelerator)?;
    dl_preparation_check(&accelerator)?;
    seedable_sampler_check(&accelerator)?;
    split_between_processes_checks(&accelerator)?;
    trigger_check(&accelerator)?;
    for use_seedable_sampler in [false, true] {
        training_check(&accelerator, use_seedable_sampler)?;
    }
    main_println!(accelerator, "test_script: all checks passed");
    Ok(())
}

fn process_execution_check(accelerator: &Accelerator, folder: Option<&Path>) -> Result<()> {
    let (rank, last) = (accelerator.process_index(), accelerator.num_processes() - 1);
    ensure!(accelerator.on_main_process(|| ()).is_some() == (rank == 0));
    ensure!(accelerator.on_last_process(|| ()).is_some() == (rank == last));
    ensure!(accelerator.on_process(last, || ()).is_some() == (rank == last));
    ensure!(accelerator.on_local_main_process(|| ()).is_some() == (accelerator.local_process_index() == 0));
    let Some(folder) = folder else { return Ok(()) };
    let path = folder.join("order");
    let write = |text: &str| -> accelerate::Result<()> {
        let mut file =
            std::fs::OpenOptions::new().create(true).append(true).open(&path).map_err(accelerate::Error::other)?;
        file.write_all(text.as_bytes()).map_err(accelerate::Error::other)
    };
    accelerator.main_process_first(|| write(if accelerator.is_main_process() { "main " } else { "other " }))?;
    accelerator.wait_for_everyone()?;
    let text = std::fs::read_to_string(&path).context("the file that every rank wrote to")?;
    ensure!(text.starts_with("main ") && text.matches("other ").count() == last, "found {text:?}");
    Ok(())
}

fn numbers(length: usize, batch_size: usize, shuffle: bool) -> accelerate::Result<DataLoader<Tensor>> {
    let rows = (0..length as i64).collect();
    DataLoader::builder(VecDataset::new(rows)).batch_size(batch_size).shuffle(shuffle).build()
}

/// Ranks that are seeded differently draw the same once they have taken over rank 0's state, asked for or by a loader.
fn rng_sync_check(accelerator: &Accelerator) -> Result<()> {
    let rank = accelerator.process_index() as i64;
    let same_everywhere = || -> Result<bool> {
        let drawn = accelerator.gather(&tch::Tensor::randn([1], tch::kind::FLOAT_CPU))?;
        Ok(Vec::<f32>::try_from(&drawn)?.windows(2).all(|pair| pair[0] == pair[1]))
    };
    tch::manual_seed(rank);
    ensure!(accelerator.num_processes() == 1 || !same_everywhere()?, "seeds make no difference");
    tch::manual_seed(rank);
    accelerator.synchronize_rng_states(&[RngType::Torch])?;
    ensure!(same_everywhere()?, "the states differ after synchronisation");
    let configured = Accelerator::builder().rng_types([RngType::Torch]).build_from(accelerator)?;
    let loader = configured.prepare(numbers(8, 2, false)?)?;
    tch::manual_seed(rank);
    let _batches = loader.iter()?;
    ensure!(same_everywhere()?, "the states differ after a pass has begun");
    Ok(())
}

/// Every item exactly once, for all combinations of split and shuffle.
fn dl_preparation_check(accelerator: &Accelerator) -> Result<()> {
    let length = 32 * accelerator.num_processes();
    for split_batches in [false, true] {
        for shuffle in [false, true] {
            let config = DataLoaderConfiguration { split_batches: Some(split_batches), ..Default::default() };
            let configured = sibling(accelerator, config)?;
            // The reference uses 8, which four ranks and fewer, but not three, divide.
            let batch_size = if split_batches { 4 * accelerator.num_processes() } else { 8 };
            let loader = configured.prepare(numbers(length, batch_size, shuffle)?)?;
            for pass in 0..2 {
                let mut seen = Vec::new();
                for batch in loader.iter()? {
                    seen.extend(Vec::<i64>::try_from(&configured.gather(&batch?)?)?);
                }
                ensure!(shuffle || seen.iter().copied().eq(0..length as i64), "order {seen:?} in pass {pass}");
                seen.sort_unstable();
                ensure!(seen.iter().copied().eq(0..length as i64), "split {split_batches}, shuffle {shuffle}");
            }
        }
    }
    Ok(())
}

/// The same order for one process and many, another one in the next epoch.
fn seedable_sampler_check(accelerator: &Accelerator) -> Result<()> {
    let config =
        DataLoaderConfiguration { use_seedable_sampler: Some(true), data_seed: Some(42), ..Default::default() };
    let configured = sibling(accelerator, config)?;
    let length = 12 * accelerator.num_processes();
    let loader = configured.prepare(numbers(length, 12 / gcd(12, 4), true)?)?;
    let mut orders = Vec::new();
    for _ in 0..2 {
        let mut order = Vec::new();
        for batch in loader.iter()? {
            order.extend(Vec::<i64>::try_from(&configured.gather(&batch?)?)?);
        }
        orders.push(order);
    }
    ensure!(orders[0] != orders[1], "the shuffle does not change from epoch to epoch");
    let everywhere = configured.gather_object(&[orders.clone()])?;
    ensure!(everywhere.iter().all(|other| *other == orders), "ranks shuffle differently");
    Ok(())
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn split_between_processes_checks(accelerator: &Accelerator) -> Result<()> {
    let (rank, world_size) = (accelerator.process_index(), accelerator.num_processes());
    for (items, padding) in [(17, false), (17, true), (world_size, false), (2 * world_size, true)] {
        let list: Vec<usize> = (0..items).collect();
        let nested = BTreeMap::from([("a", list.clone()), ("b", list.iter().map(|item| 2 * item).collect())]);
        let mine = accelerator.split_between_processes(&list, SplitOptions { apply_padding: padding })?;
        let share = accelerator.split_between_processes(&nested, SplitOptions { apply_padding: padding })?;
        ensure!(share["a"] == mine && share["b"] == mine.iter().map(|item| 2 * item).collect::<Vec<_>>());
        let tensor = accelerator.split_between_processes(
            &Tensor::f_arange(items as i64, (Kind::Int64, accelerator.device()))?,
            SplitOptions { apply_padding: padding },
        )?;
        ensure!(Vec::<i64>::try_from(&tensor)?.iter().map(|item| *item as usize).eq(mine.iter().copied()));
        let all = accelerator.gather_object(&mine)?;
        let longest = items.div_ceil(world_size);
        if padding {
            ensure!(mine.len() == longest && all.len() == longest * world_size);
        } else {
            ensure!(all == list, "the shares of all ranks, in rank order, are the whole");
            ensure!(mine.len() == items / world_size + usize::from(rank < items % world_size));
        }
    }
    Ok(())
}

fn trigger_check(accelerator: &Accelerator) -> Result<()> {
    ensure!(!accelerator.check_trigger()?, "nobody raised the flag");
    if accelerator.is_last_process() {
        accelerator.set_trigger();
    }
    ensure!(accelerator.check_trigger()?, "the last rank raised the flag");
    ensure!(!accelerator.check_trigger()?, "the flag stays up");
    Ok(())
}

/// An accelerator with other settings in the same run.
fn sibling(accelerator: &Accelerator, config: DataLoaderConfiguration) -> Result<Accelerator> {
    Ok(Accelerator::builder().dataloader_config(config).build_from(accelerator)?)
}
