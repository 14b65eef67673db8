//! `test_metrics.py`: metrics of many processes equal those of one, whatever the number of rows.

use accelerate::data::{DataLoader, VecDataset};
use accelerate::tch::Tensor;
use accelerate::{Accelerator, DataLoaderConfiguration, main_println};
use anyhow::{Result, ensure};

pub(crate) fn run() -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).build()?;
    for rows in [82, 99, 512] {
        for split_batches in [false, true] {
            test_torch_metrics(&accelerator, rows, split_batches)?;
        }
    }
    test_drop_last(&accelerator)?;
    test_gather_for_metrics_with_non_tensor_objects(&accelerator)?;
    main_println!(accelerator, "test_metrics: all checks passed");
    Ok(())
}

fn loader(rows: usize, batch_size: usize, drop_last: bool) -> accelerate::Result<DataLoader<Tensor>> {
    let rows = (0..rows as i64).collect();
    DataLoader::builder(VecDataset::new(rows)).batch_size(batch_size).drop_last(drop_last).build()
}

/// A "model" that is right on all rows but every seventh; its accuracy must come out exactly.
fn test_torch_metrics(accelerator: &Accelerator, rows: usize, split_batches: bool) -> Result<()> {
    let config = DataLoaderConfiguration { split_batches: Some(split_batches), ..Default::default() };
    let configured = Accelerator::builder().dataloader_config(config).build_from(accelerator)?;
    let batch_size = if split_batches { 4 * accelerator.num_processes() } else { 16 };
    let loader = configured.prepare(loader(rows, batch_size, false)?)?;
    let (mut right, mut count) = (0, 0);
    for batch in loader.iter()? {
        let batch = batch?;
        let is_right = batch.f_remainder(7)?.f_ne(0)?;
        let (indices, is_right) = configured.gather_for_metrics(&(batch, is_right))?;
        right += is_right.f_sum(accelerate::tch::Kind::Int64)?.f_int64_value(&[])?;
        count += indices.size()[0] as usize;
    }
    let expected = (0..rows).filter(|row| row % 7 != 0).count() as i64;
    ensure!((right, count) == (expected, rows), "{right} of {count} rows, wanted {expected} of {rows}");
    Ok(())
}

fn test_drop_last(accelerator: &Accelerator) -> Result<()> {
    let per_round = 2 * accelerator.num_processes();
    let loader = accelerator.prepare(loader(3 * per_round - 1, 2, true)?)?;
    let mut count = 0;
    for batch in loader.iter()? {
        count += accelerator.gather_for_metrics(&batch?)?.size()[0] as usize;
    }
    let expected = if accelerator.num_processes() == 1 { 4 } else { 2 * per_round };
    ensure!(count == expected, "{count} rows, wanted {expected}");
    Ok(())
}

fn test_gather_for_metrics_with_non_tensor_objects(accelerator: &Accelerator) -> Result<()> {
    let loader = accelerator.prepare(loader(9, 2, false)?)?;
    let mut names = Vec::new();
    for batch in loader.iter()? {
        let mine: Vec<String> = Vec::<i64>::try_from(&batch?)?.iter().map(|row| format!("row {row}")).collect();
        names.extend(accelerator.gather_object_for_metrics(&mine)?);
    }
    ensure!(names.iter().cloned().eq((0..9).map(|row| format!("row {row}"))), "{names:?}");
    Ok(())
}
