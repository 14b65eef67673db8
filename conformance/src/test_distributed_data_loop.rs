//! `test_distributed_data_loop.py`: how many rows each rank gets, with and without even batches, and joins.

use crate::regression::RegressionModel;
use accelerate::data::{BatchSampler, DataLoader, VecDataset};
use accelerate::tch::Tensor;
use accelerate::{Accelerator, DataLoaderConfiguration, JoinOptions, PrepareModelOptions, main_println};
use anyhow::{Result, ensure};

pub(crate) fn run() -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).build()?;
    test_default_ensures_even_batch_sizes(&accelerator)?;
    test_can_disable_even_batches(&accelerator)?;
    test_data_loader_covers_everything(&accelerator)?;
    test_can_join_uneven_inputs(&accelerator)?;
    test_join_can_override_even_batches(&accelerator)?;
    test_join_can_override_for_mixed_type_dataloaders(&accelerator)?;
    test_join_has_no_effect_on_what_it_cannot_join(&accelerator)?;
    main_println!(accelerator, "test_distributed_data_loop: all checks passed");
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
    let config = DataLoaderConfiguration { even_batches: Some(false), ..Default::default() };
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

/// An accelerator in the same run whose loaders are even or not.
fn with_even_batches(accelerator: &Accelerator, even_batches: bool) -> accelerate::Result<Accelerator> {
    let config = DataLoaderConfiguration { even_batches: Some(even_batches), ..Default::default() };
    Accelerator::builder().dataloader_config(config).build_from(accelerator)
}

fn test_can_join_uneven_inputs(accelerator: &Accelerator) -> Result<()> {
    let uneven = with_even_batches(accelerator, false)?;
    let model = uneven.prepare(RegressionModel::new(uneven.device(), 1.0, 1.0)?)?;
    let loader = uneven.prepare(loader(3, 1)?)?;
    for _ in 0..2 {
        let mut batch_indices = Vec::new();
        uneven.join_uneven_inputs(&model, JoinOptions::default(), || {
            for (batch_index, batch) in loader.iter()?.enumerate() {
                uneven.backward(&model.forward(&batch?)?.f_sum(accelerate::tch::Kind::Float)?)?;
                batch_indices.push(batch_index);
            }
            Ok(())
        })?;
        uneven.wait_for_everyone()?;
        let expected = (0..3).filter(|batch| batch % uneven.num_processes() == uneven.process_index()).count();
        ensure!(batch_indices.iter().copied().eq(0..expected), "{batch_indices:?}");
    }
    Ok(())
}

fn test_join_can_override_even_batches(accelerator: &Accelerator) -> Result<()> {
    let even = with_even_batches(accelerator, true)?;
    let model = even.prepare(RegressionModel::new(even.device(), 1.0, 1.0)?)?;
    let (train, valid) = even.prepare((loader(3, 1)?, loader(3, 1)?))?;
    let default = train.len();
    let overridden =
        even.join_uneven_inputs(&model, JoinOptions { even_batches: Some(false) }, || Ok([train.len(), valid.len()]))?;
    let (rank, world_size) = (even.process_index(), even.num_processes());
    let uneven = 3 / world_size + usize::from(rank < 3 % world_size);
    ensure!(overridden == [uneven; 2], "{overridden:?} batches, wanted {uneven}");
    ensure!(default == 3_usize.div_ceil(world_size) && train.len() == default && valid.len() == default);
    Ok(())
}

/// Batches of one row each, as a sampler of the user's own.
#[derive(Debug)]
struct SingleRows(usize);

impl BatchSampler for SingleRows {
    fn batches(&self, _epoch: usize) -> accelerate::Result<Vec<Vec<usize>>> {
        Ok((0..self.0).map(|row| vec![row]).collect())
    }

    fn len(&self) -> usize {
        self.0
    }

    fn batch_size(&self) -> Option<usize> {
        None
    }
}

/// The reference mixes map-style and iterable datasets; here it is the kinds of sampler that differ.
fn test_join_can_override_for_mixed_type_dataloaders(accelerator: &Accelerator) -> Result<()> {
    let even = with_even_batches(accelerator, true)?;
    let model = even.prepare(RegressionModel::new(even.device(), 1.0, 1.0)?)?;
    let own = DataLoader::builder(VecDataset::new(vec![0i64, 1, 2])).batch_sampler(SingleRows(3)).build()?;
    let (train, own) = even.prepare((loader(3, 1)?, own))?;
    let overridden =
        even.join_uneven_inputs(&model, JoinOptions { even_batches: Some(false) }, || Ok([train.len(), own.len()]))?;
    let (rank, world_size) = (even.process_index(), even.num_processes());
    let uneven = 3 / world_size + usize::from(rank < 3 % world_size);
    ensure!(overridden == [uneven; 2], "{overridden:?} batches, wanted {uneven}");
    ensure!(own.len() == 3_usize.div_ceil(world_size), "the override outlived the join");
    Ok(())
}

/// `test_join_raises_warning_for_non_ddp_distributed`: there is nothing to join in a model that is only evaluated, and
/// the loop runs as it is.
fn test_join_has_no_effect_on_what_it_cannot_join(accelerator: &Accelerator) -> Result<()> {
    let uneven = with_even_batches(accelerator, false)?;
    let model = uneven.prepare_model(
        RegressionModel::new(uneven.device(), 1.0, 1.0)?,
        PrepareModelOptions { evaluation_mode: true, ..Default::default() },
    )?;
    let loader = uneven.prepare(loader(3, 1)?)?;
    let batches = uneven.join_uneven_inputs(&model, JoinOptions::default(), || {
        let mut batches = 0;
        for batch in loader.iter()? {
            model.forward(&batch?)?.f_sum(accelerate::tch::Kind::Float)?.f_backward()?;
            batches += 1;
        }
        Ok(batches)
    })?;
    ensure!(batches == loader.len(), "{batches} batches");
    Ok(())
}
