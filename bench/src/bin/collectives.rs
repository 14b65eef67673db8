//! Sums over ranks, one after the other: our half of the races `allreduce_1k` to `allreduce_100m`.
//!
//! Each rank prints one line of JSON for each size, as `bench/rival/collectives.py` does.

use std::time::Instant;

use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Accelerator, ReduceOp};
use anyhow::Result;
use bench::{formula, median};
use serde_json::json;

/// How many bytes of float32 are added, how often, and how often before that is timed.
const SIZES: [(&str, i64, usize, usize); 5] = [
    ("1k", 1 << 10, 2000, 200),
    ("1m", 1 << 20, 200, 20),
    ("4m", 4 << 20, 60, 6),
    ("25m", 25 << 20, 20, 4),
    ("100m", 100 << 20, 8, 2),
];

fn main() -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).build()?;
    let group = accelerator.group();
    for (name, num_bytes, count, warmup) in SIZES {
        let numel = num_bytes / Kind::Float.elt_size_in_bytes() as i64;
        let own = formula(&[numel], group.rank() as f64)?;
        let mut sum = Tensor::f_empty([numel], (Kind::Float, Device::Cpu))?;
        let mut micros = Vec::with_capacity(count);
        for call in 0..warmup + count {
            sum.f_copy_(&own)?;
            group.barrier()?;
            let started = Instant::now();
            group.all_reduce(&sum, ReduceOp::Sum)?;
            if call >= warmup {
                micros.push(started.elapsed().as_secs_f64() * 1e6);
            }
        }
        let answer = sum.f_to_kind(Kind::Double)?.f_square()?.f_sum(Kind::Double)?.f_double_value(&[])?;
        let (rank, world_size) = (group.rank(), group.world_size());
        println!(
            "report={}",
            json!({
                "name": name, "rank": rank, "world_size": world_size, "micros": median(micros), "answer": answer,
            })
        );
    }
    accelerator.wait_for_everyone()?;
    Ok(())
}
