//! Batches on their way to the device.

use accelerate::DataLoaderConfiguration;
use accelerate::data::{DataLoader, TensorDataset};
use accelerate::tch::{Device, Kind, Tensor};
use anyhow::{Result, ensure};

use crate::check::{Context, Found};

const ROWS: i64 = 512;
/// 1 MiB in a batch of 16 rows: long enough on its way to be overwritten there, if anything does.
const WIDTH: i64 = 1 << 14;
const BATCH_SIZE: usize = 16;

/// Each row is full of its own number. The device is kept busy before each batch is asked for, so that copies wait in its queue
/// while the loader makes the next batches, in memory that it may have used before.
pub(crate) fn pinned(context: &Context<'_>) -> Result<Found> {
    let numbers = Tensor::f_arange(ROWS, (Kind::Float, Device::Cpu))?;
    let rows = numbers.f_view([ROWS, 1])?.f_expand([ROWS, WIDTH], false)?.f_contiguous()?;
    let busy = Tensor::f_ones([2048, 2048], (Kind::Float, context.device))?;
    let mut num_batches = 0;
    for (non_blocking, num_workers) in [(false, 0), (true, 0), (true, 2)] {
        let configuration = DataLoaderConfiguration { non_blocking: Some(non_blocking), ..Default::default() };
        let accelerator = context.builder().dataloader_config(configuration).build()?;
        let dataset = TensorDataset::new((rows.shallow_clone(), numbers.shallow_clone()))?;
        let loader = DataLoader::builder(dataset).batch_size(BATCH_SIZE).num_workers(num_workers).build()?;
        let loader = accelerator.prepare(loader)?;
        let mut batches: Vec<(Tensor, Tensor)> = Vec::new();
        for batch in loader.iter()? {
            if context.is_cuda() {
                for _ in 0..20 {
                    let _ = busy.f_matmul(&busy)?;
                }
            }
            let batch = batch?;
            ensure!(batch.0.device() == context.device, "a batch is on {:?}", batch.0.device());
            batches.push(batch);
        }
        let what = format!("non_blocking {non_blocking}, {num_workers} workers");
        context.close(&format!("batches, {what}"), batches.len() as f64, ROWS as f64 / BATCH_SIZE as f64, 0.0)?;
        for (index, (wide, narrow)) in batches.iter().enumerate() {
            let wanted = numbers.f_narrow(0, (index * BATCH_SIZE) as i64, BATCH_SIZE as i64)?;
            context.same(&format!("numbers of batch {index}, {what}"), narrow, &wanted)?;
            let narrow = narrow.f_to_device(wide.device())?;
            for (edge, found) in [("least", wide.f_amin([1], false)?), ("largest", wide.f_amax([1], false)?)] {
                context.same(&format!("the {edge} of each row of batch {index}, {what}"), &found, &narrow)?;
            }
        }
        num_batches += batches.len();
    }
    Found::figure(format!("{num_batches} batches of 1 MiB"))
}
