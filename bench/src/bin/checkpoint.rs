//! Saves and loads 512 MiB of state on two ranks, and reads what an index of 300 shards says: our half of
//! `cargo xtask bench checkpoint`.
//!
//! Each rank prints one line of JSON, as `bench/rival/checkpoint.py` does. Sizes stand in both programs.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use accelerate::checkpoint::{checkpoint_shapes, save_file};
use accelerate::nn::{Linear, LinearConfig, Module, ModuleFn, ParamStore, StateDict};
use accelerate::optim::{AcceleratedOptimizer, AdamW};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Accelerator, PreparedModel};
use anyhow::{Context, Result, ensure};
use bench::{formula, mean_square, peak_resident_bytes, resident_bytes};
use clap::{Parser, ValueEnum};
use serde_json::json;

/// Save and load the state of a run, or read what an index of many shards says.
#[derive(Debug, Parser)]
struct Arguments {
    /// What is timed
    #[arg(long)]
    mode: Mode,
    /// Folder of the files
    #[arg(long)]
    folder: PathBuf,
    /// How often
    #[arg(long)]
    times: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// `save_state` and `load_state` on all ranks
    State,
    /// `save_state_async`: how long the call takes, and how long steps take while it writes
    Async,
    /// The names and shapes of a model in 300 files
    Index,
}

/// With the two moments of AdamW, 512 MiB of float32.
const NUM_LAYERS: usize = 32;
const WIDTH: i64 = 1182;
const BATCH_SIZE: i64 = 16;

/// Steps before each save in the background.
const QUIET_STEPS: usize = 5;

const NUM_SHARDS: usize = 300;
const TENSORS_PER_SHARD: usize = 10;

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    match arguments.mode {
        Mode::State => time_state(&arguments),
        Mode::Async => time_async(&arguments),
        Mode::Index => time_index(&arguments),
    }
}

struct Training<M> {
    accelerator: Accelerator,
    model: PreparedModel<M>,
    optimizer: AcceleratedOptimizer<AdamW>,
    input: Tensor,
}

fn training() -> Result<Training<impl Module<Input = Tensor, Output = Tensor>>> {
    let accelerator = Accelerator::builder().cpu(true).build()?;
    let store = ParamStore::new(Device::Cpu);
    let layers = (0..NUM_LAYERS)
        .map(|layer| {
            Linear::new(
                &store.root() / "layers" / layer,
                WIDTH,
                WIDTH,
                LinearConfig { bias: false, ..Default::default() },
            )
        })
        .collect::<accelerate::Result<Vec<_>>>()?;
    for (index, param) in store.parameters().iter().enumerate() {
        param.copy_(&(formula(&param.shape(), index as f64)? * 0.05))?;
    }
    let optimizer = AdamW::builder(&store).lr(1e-4).weight_decay(0.01).build()?;
    let model = ModuleFn::new(&store, move |input: &Tensor| {
        let mut x = input.shallow_clone();
        for layer in &layers {
            x = x.f_add(&layer.forward(&x)?.f_tanh()?)?;
        }
        Ok(x)
    });
    let input = formula(&[BATCH_SIZE, WIDTH], accelerator.process_index() as f64)?;
    let (model, optimizer) = accelerator.prepare((model, optimizer))?;
    Ok(Training { accelerator, model, optimizer, input })
}

impl<M: Module<Input = Tensor, Output = Tensor>> Training<M> {
    fn step(&mut self) -> Result<()> {
        let loss = self.model.forward(&self.input)?.f_square()?.f_mean(Kind::Float)?;
        self.accelerator.backward(&loss)?;
        self.optimizer.step()?;
        self.optimizer.zero_grad()?;
        Ok(())
    }

    /// What a step takes until it is over on all ranks, in milliseconds.
    fn timed_step(&mut self) -> Result<f64> {
        let start = Instant::now();
        self.step()?;
        self.accelerator.wait_for_everyone()?;
        Ok(start.elapsed().as_secs_f64() * 1e3)
    }

    /// The mean squares of parameters and of the optimizer's moments.
    fn answer(&self) -> Result<[f64; 2]> {
        let state = self.optimizer.state_dict()?;
        let (mut total, mut count) = (0.0, 0);
        for (name, tensor) in &state.tensors {
            if name.starts_with("exp_avg") {
                total += tensor.f_to_kind(Kind::Double)?.f_square()?.f_sum(Kind::Double)?.f_double_value(&[])?;
                count += tensor.numel();
            }
        }
        Ok([mean_square(&self.model.params().parameters())?, total / count as f64])
    }
}

/// What it takes until all ranks are through, in milliseconds.
fn timed(accelerator: &Accelerator, work: impl FnOnce() -> accelerate::Result<PathBuf>) -> Result<f64> {
    accelerator.wait_for_everyone()?;
    let start = Instant::now();
    work()?;
    accelerator.wait_for_everyone()?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

fn time_state(arguments: &Arguments) -> Result<()> {
    let mut training = training()?;
    training.step()?;
    let answer = training.answer()?;
    let folder = |number: usize| arguments.folder.join(format!("ours_{number}"));
    let (mut save_ms, mut load_ms, mut grown_bytes) = (Vec::new(), Vec::new(), 0);
    for number in 0..arguments.times {
        reset_peak()?;
        let before = resident_bytes()?;
        save_ms.push(timed(&training.accelerator, || training.accelerator.save_state(folder(number)))?);
        grown_bytes = grown_bytes.max(peak_resident_bytes()?.saturating_sub(before));
    }
    for number in 0..arguments.times {
        // Everything has other numbers before it is loaded.
        training.step()?;
        ensure!(training.answer()? != answer, "a step has changed nothing");
        load_ms.push(timed(&training.accelerator, || training.accelerator.load_state(folder(number)))?);
        ensure!(training.answer()? == answer, "what was loaded is not what was saved");
    }
    let report = json!({
        "rank": training.accelerator.process_index(),
        "world_size": training.accelerator.num_processes(),
        "save_ms": save_ms,
        "load_ms": load_ms,
        "grown_bytes": grown_bytes,
        "answer": answer,
    });
    println!("report={report}");
    training.accelerator.wait_for_everyone()?;
    Ok(())
}

fn time_async(arguments: &Arguments) -> Result<()> {
    let mut training = training()?;
    training.step()?;
    let (mut stall_ms, mut quiet_ms, mut writing_ms) = (Vec::new(), Vec::new(), Vec::new());
    for number in 0..arguments.times {
        for _ in 0..QUIET_STEPS {
            quiet_ms.push(training.timed_step()?);
        }
        training.accelerator.wait_for_everyone()?;
        let start = Instant::now();
        training.accelerator.save_state_async(arguments.folder.join(format!("ours_{number}")))?;
        stall_ms.push(start.elapsed().as_secs_f64() * 1e3);
        while training.accelerator.is_saving()? {
            writing_ms.push(training.timed_step()?);
        }
        training.accelerator.wait_for_save()?;
    }
    let answer = training.answer()?;
    let report = json!({
        "rank": training.accelerator.process_index(),
        "world_size": training.accelerator.num_processes(),
        "stall_ms": stall_ms,
        "quiet_ms": quiet_ms,
        "writing_ms": writing_ms,
        "answer": answer,
    });
    println!("report={report}");
    training.accelerator.wait_for_everyone()?;
    Ok(())
}

/// Begins to measure the peak of this process's memory anew.
fn reset_peak() -> Result<()> {
    fs::write("/proc/self/clear_refs", "5").context("the peak of memory cannot be reset")
}

fn time_index(arguments: &Arguments) -> Result<()> {
    make_shards(&arguments.folder)?;
    let mut index_ms = Vec::new();
    for _ in 0..arguments.times {
        let start = Instant::now();
        let shapes = checkpoint_shapes(&arguments.folder)?;
        index_ms.push(start.elapsed().as_secs_f64() * 1e3);
        ensure!(shapes.len() == NUM_SHARDS * TENSORS_PER_SHARD, "{} tensors were found", shapes.len());
    }
    println!("report={}", json!({"rank": 0, "index_ms": index_ms}));
    Ok(())
}

/// As a model of a hub comes: an index and its shards, without a manifest.
fn make_shards(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    let mut weight_map = serde_json::Map::new();
    for shard in 0..NUM_SHARDS {
        let file = format!("model-{:05}-of-{NUM_SHARDS:05}.safetensors", shard + 1);
        let mut tensors = StateDict::default();
        for number in 0..TENSORS_PER_SHARD {
            let name = format!("model.layers.{shard}.mlp.{number}.weight");
            weight_map.insert(name.clone(), file.clone().into());
            tensors.insert(name, formula(&[32, 32], number as f64)?);
        }
        save_file(&tensors, folder.join(&file))?;
    }
    let index = json!({"metadata": {"total_size": NUM_SHARDS * TENSORS_PER_SHARD * 4096}, "weight_map": weight_map});
    Ok(fs::write(folder.join("model.safetensors.index.json"), index.to_string())?)
}
