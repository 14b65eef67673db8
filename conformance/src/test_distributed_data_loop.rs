//! `test_distributed_data_loop.py`: how many rows each rank gets, with and without even batches.

use accelerate::data::{DataLoader, VecDataset};
use accelerate::tch::Tensor;
use accelerate::{Accelerator, DataLoaderConfiguration};
use anyhow::{Result, ensure};

pub(crate) fn run() -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).build()?;
    test_default_ensures_even_batch_sizes(&accelerator)?;
    test_can_disable_even_batches(&accelerator)?;
    test_data_loader_covers_everything(&accelerator)?;
    accelerator.print(format_args!("test_distributed_data_loop: all checks passed"));
    Ok(())
}

fn loader(rows: usize, batch_size: usize) -> accelerate::Result<DataLoader<Tensor>> {
    DataLoader::builder(VecDataset::new((0..rows as i64).collect())).batch_size(batch_size).build()
}

fn batch_sizes(accelerator: &Accelerator, rows: usize, batch_size: usize) -> Result<Vec<Vec<usize>>> {
    let loader = accelerator.prepare(loader(rows, batch_size)?)?;
    let mut sizes = Vec::new();
    for batch in loader.iter()? {
        sizes.push(batch?.size()[0] as usize);
    }
    Ok(accelerator.gather_object(&[sizes])?)
}

fn test_default_ensures_even_batch_sizes(accelerator: &Accelerator) -> Result<()> {
    for (rows, batch_size) in [(3, 1), (7, 2), (22, 4)] {
        let sizes = batch_sizes(accelerator, rows, batch_size)?;
        let rounds = rows.div_ceil(batch_size).div_ceil(accelerator.num_processes());
        let short = accelerator.num_processes() == 1 && rows % batch_size != 0;
        for per_rank in &sizes {
            let even = per_rank.len() == rounds && per_rank.iter().all(|size| *size == batch_size);
            // A single process keeps its short last batch: there is nobody to be even with.
            ensure!(even || short, "{rows} rows in batches of {batch_size}: {sizes:?}");
        }
        if accelerator.num_processes() == 2 && rows == 3 {
            ensure!(sizes == [[1, 1], [1, 1]]);
        }
    }
    Ok(())
}

fn test_can_disable_even_batches(accelerator: &Accelerator) -> Result<()> {
    let config = DataLoaderConfiguration { even_batches: false, ..Default::default() };
    let uneven = Accelerator::builder().dataloader_config(config).build_from(accelerator)?;
    for (rows, batch_size) in [(3, 1), (7, 2), (22, 4)] {
        let sizes = batch_sizes(&uneven, rows, batch_size)?;
        let total: usize = sizes.iter().flatten().sum();
        ensure!(total == rows, "{rows} rows in batches of {batch_size}: {sizes:?}");
        if uneven.num_processes() == 2 {
            let expected: Option<[Vec<usize>; 2]> = match rows {
                3 => Some([vec![1, 1], vec![1]]),
                7 => Some([vec![2, 2], vec![2, 1]]),
                _ => None,
            };
            ensure!(expected.is_none_or(|expected| sizes == expected), "{sizes:?}");
        }
    }
    Ok(())
}

fn test_data_loader_covers_everything(accelerator: &Accelerator) -> Result<()> {
    let loader = accelerator.prepare(loader(22, 4)?)?;
    let mut seen = Vec::new();
    for batch in loader.iter()? {
        seen.extend(Vec::<i64>::try_from(&batch?)?);
    }
    let mut everywhere = accelerator.gather_object(&seen)?;
    everywhere.sort_unstable();
    everywhere.dedup();
    ensure!(everywhere.iter().copied().eq(0..22), "{everywhere:?}");
    Ok(())
}
