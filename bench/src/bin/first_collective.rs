//! A rank that sums its number over all ranks: our half of the race `launch_first_collective`.

use accelerate::tch::Tensor;
use accelerate::{Accelerator, ReduceOp, Result};

fn main() -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).build()?;
    let number = Tensor::f_from_slice(&[accelerator.process_index() as f32 + 1.0])?;
    let total = accelerator.reduce(&number, ReduceOp::Sum)?;
    let sum = total.f_double_value(&[0])?;
    println!("rank={} world_size={} sum={sum:?}", accelerator.process_index(), accelerator.num_processes());
    Ok(())
}
