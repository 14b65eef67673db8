//! `test_ops.py`: every collective with its numbers.

use accelerate::tch::{Kind, Tensor};
use accelerate::{Accelerator, PadOptions, ReduceOp, main_println};
use anyhow::{Result, ensure};

pub(crate) fn run() -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).build()?;
    test_gather(&accelerator)?;
    test_gather_object(&accelerator)?;
    test_broadcast(&accelerator)?;
    test_pad_across_processes(&accelerator)?;
    test_reduce(&accelerator)?;
    test_op_checker(&accelerator)?;
    main_println!(accelerator, "test_ops: all checks passed");
    Ok(())
}

/// Rank r holds r * P + 1, ..., r * P + P.
fn create_tensor(accelerator: &Accelerator) -> Result<Tensor> {
    let (rank, world_size) = (accelerator.process_index() as i64, accelerator.num_processes() as i64);
    let start = rank * world_size;
    Ok(Tensor::f_arange_start(start + 1, start + world_size + 1, (Kind::Float, accelerator.device()))?)
}

fn test_gather(accelerator: &Accelerator) -> Result<()> {
    let gathered = Vec::<f32>::try_from(&accelerator.gather(&create_tensor(accelerator)?)?)?;
    let count = accelerator.num_processes().pow(2);
    ensure!(gathered.iter().copied().eq((1..=count).map(|value| value as f32)), "{gathered:?}");
    Ok(())
}

fn test_gather_object(accelerator: &Accelerator) -> Result<()> {
    let gathered = accelerator.gather_object(&[accelerator.process_index()])?;
    ensure!(gathered.iter().copied().eq(0..accelerator.num_processes()), "{gathered:?}");
    Ok(())
}

fn test_broadcast(accelerator: &Accelerator) -> Result<()> {
    let sent = Vec::<f32>::try_from(&accelerator.broadcast(&create_tensor(accelerator)?, 0)?)?;
    ensure!(sent.iter().copied().eq((1..=accelerator.num_processes()).map(|value| value as f32)), "{sent:?}");
    Ok(())
}

/// The main process has one row more than the others.
fn test_pad_across_processes(accelerator: &Accelerator) -> Result<()> {
    let length = accelerator.num_processes() as i64 + i64::from(accelerator.is_main_process());
    let tensor = Tensor::f_arange(length, (Kind::Int64, accelerator.device()))?;
    let padded = Vec::<i64>::try_from(&accelerator.pad_across_processes(&tensor, PadOptions::default())?)?;
    ensure!(padded.len() == accelerator.num_processes() + 1);
    if !accelerator.is_main_process() {
        ensure!(padded.last() == Some(&0));
    }
    Ok(())
}

/// On two ranks the numbers of the reference: [1, 2] and [3, 4] give [4, 6] and [2, 3].
fn test_reduce(accelerator: &Accelerator) -> Result<()> {
    let tensor = create_tensor(accelerator)?;
    let world_size = accelerator.num_processes();
    let column = |index: usize| (0..world_size).map(move |rank| (rank * world_size + index + 1) as f32);
    for (reduction, expected) in [
        (ReduceOp::Sum, (0..world_size).map(|index| column(index).sum::<f32>()).collect::<Vec<_>>()),
        (ReduceOp::Mean, (0..world_size).map(|index| column(index).sum::<f32>() / world_size as f32).collect()),
        (ReduceOp::Max, (0..world_size).map(|index| column(index).fold(0.0, f32::max)).collect()),
    ] {
        let reduced = Vec::<f32>::try_from(&accelerator.reduce(&tensor, reduction)?)?;
        ensure!(reduced == expected, "{reduction:?}: {reduced:?}, not {expected:?}");
    }
    Ok(())
}

/// Shapes that differ are an error on every rank; the reference checks only in debug mode.
fn test_op_checker(accelerator: &Accelerator) -> Result<()> {
    if accelerator.num_processes() == 1 {
        return Ok(());
    }
    let rows = accelerator.process_index() as i64 + 1;
    let tensor = Tensor::f_zeros([rows, 3], (Kind::Float, accelerator.device()))?;
    let Err(error) = accelerator.gather(&tensor) else { anyhow::bail!("unequal shapes were gathered") };
    ensure!(error.to_string().contains("pad_across_processes"), "{error}");
    Ok(())
}
