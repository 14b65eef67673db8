//! A rank that sums its number over all ranks: our half of the race `launch_first_collective`.
//!
//! With `--memory` it also says how much memory it has while all ranks are connected. What several ranks share is divided by them
//! (`Pss`), so that the sum over ranks is what the machine has to have.

use accelerate::tch::Tensor;
use accelerate::{Accelerator, ReduceOp};
use anyhow::{Context, Result};

fn main() -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).build()?;
    let number = Tensor::f_from_slice(&[accelerator.process_index() as f32 + 1.0])?;
    let total = accelerator.reduce(&number, ReduceOp::Sum)?;
    let sum = total.f_double_value(&[0])?;
    println!("rank={} world_size={} sum={sum:?}", accelerator.process_index(), accelerator.num_processes());
    if std::env::args().nth(1).as_deref() == Some("--memory") {
        let kib = proportional_kib()?;
        accelerator.wait_for_everyone()?;
        println!("memory_kib={kib}");
    }
    Ok(())
}

/// `Pss` of this process, in KiB.
fn proportional_kib() -> Result<u64> {
    let file = "/proc/self/smaps_rollup";
    let text = std::fs::read_to_string(file).with_context(|| format!("could not read {file}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).with_context(|| format!("{file} has no Pss"))?;
    let kib = line.split_whitespace().next().with_context(|| format!("{file} has no number for Pss"))?;
    Ok(kib.parse()?)
}
