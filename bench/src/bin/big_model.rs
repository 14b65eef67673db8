//! Computes a model whose weights are in a folder on the disk: our half of the races of `cargo xtask bench big_model`.
//!
//! Prints one line of JSON: milliseconds of a forward pass with nothing in the page cache and the median of those after it, and the sum
//! of absolute outputs of all passes, each once. The rival in Python has made the folder, and reads it as well.

use std::path::PathBuf;
use std::time::Instant;

use accelerate::big_model::disk_offload;
use accelerate::nn::{Linear, LinearConfig, ParamStore};
use accelerate::tch::{self, Device, Kind, Tensor};
use anyhow::{Context, Result};
use bench::median;
use clap::Parser;
use serde_json::json;

/// Time a model whose weights are on a disk.
#[derive(Debug, Parser)]
struct Arguments {
    /// The folder with the weights
    #[arg(long)]
    folder: PathBuf,
    /// Passes with the files in the page cache
    #[arg(long, default_value_t = 5)]
    passes: usize,
    /// Leave the page cache as it is before the first timed pass
    #[arg(long)]
    keep_caches: bool,
}

/// Those of `bench/rival/big_model.py`.
const NUM_LAYERS: usize = 32;
const WIDTH: i64 = 2048;

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    tch::set_num_threads(1);
    let store = ParamStore::init_empty_weights(Device::Cpu);
    let layer = |number: usize| {
        Linear::new(store.root() / (2 * number), WIDTH, WIDTH, LinearConfig { bias: false, ..Default::default() })
    };
    let layers = (0..NUM_LAYERS).map(layer).collect::<accelerate::Result<Vec<Linear>>>()?;
    disk_offload(&store, &arguments.folder, &Default::default())?;
    let numbers = Tensor::f_arange(WIDTH, (Kind::Float, Device::Cpu))?.f_remainder(17)?.f_unsqueeze(0)?;
    let input = numbers.f_div_scalar(8)?.f_sub_scalar(1)?;
    let _no_grad = tch::no_grad_guard();
    let (mut millis, mut answers) = (Vec::new(), Vec::new());
    // The first pass is that of nobody: it makes what is made once.
    for number in 0..arguments.passes + 2 {
        if number == 1 && !arguments.keep_caches {
            std::fs::write("/proc/sys/vm/drop_caches", "3").context("dropping the page cache needs root")?;
        }
        let start = Instant::now();
        let mut hidden = input.shallow_clone();
        for layer in &layers {
            hidden = layer.forward(&hidden)?.f_relu()?;
        }
        millis.push(start.elapsed().as_secs_f64() * 1e3);
        answers.push(hidden.f_to_kind(Kind::Double)?.f_abs()?.f_sum(Kind::Double)?.f_double_value(&[])?);
    }
    answers.sort_by(f64::total_cmp);
    answers.dedup();
    let (cold, warm) = (millis.get(1).copied(), median(millis.split_off(2)));
    println!("report={}", json!({"cold": cold, "warm": warm, "answers": answers}));
    Ok(())
}
