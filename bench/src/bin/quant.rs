//! Times layers with weights of 4 and 8 bits: our half of the races of `cargo xtask bench quant`.
//!
//! Prints one line of JSON, as `bench/rival/quant.py` does: the median time, and the mean square of an output.

use std::path::PathBuf;
use std::time::Instant;

use accelerate::checkpoint::{LoadOptions, save_file};
use accelerate::nn::{Linear, LinearConfig, ParamStore, StateDict};
use accelerate::tch::{Device, Kind, Tensor, no_grad};
use accelerate::{BnbQuantizationConfig, FloatType, QuantType, load_and_quantize_model};
use anyhow::{Context, Result};
use bench::{formula, median};
use clap::{Parser, ValueEnum};
use serde_json::json;

/// Time layers with quantised weights.
#[derive(Debug, Parser)]
struct Arguments {
    /// What to measure
    #[arg(long)]
    mode: Mode,
    /// Rows of the input
    #[arg(long, default_value_t = 1)]
    rows: i64,
    /// Passes, the warm-up included
    #[arg(long)]
    steps: usize,
    /// Passes that are not timed
    #[arg(long)]
    warmup: usize,
    /// Where the file of a model of one GiB is, or is written
    #[arg(long)]
    folder: PathBuf,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Mode {
    /// A forward pass with 4 bits
    Nf4,
    /// A forward pass with 8 bits
    Int8,
    /// Codes of a weight
    Quantize,
    /// A model from a file
    Load,
}

const SIZE: i64 = 4096;
/// Of 64 MiB each.
const LAYERS: usize = 16;

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let mut micros = Vec::new();
    let mut answer = 0.0;
    let input = formula(&[arguments.rows, SIZE], 0.25)?;
    let mut kept: Option<Linear> = None;
    for step in 0..arguments.steps {
        let (elapsed, output) = match arguments.mode {
            Mode::Nf4 | Mode::Int8 => {
                let layer = match kept.take() {
                    Some(layer) => layer,
                    None => quantised(arguments.mode)?,
                };
                let input = input.to_kind(Kind::BFloat16);
                let start = Instant::now();
                let output = no_grad(|| layer.forward(&input))?;
                let elapsed = start.elapsed();
                kept = Some(layer);
                (elapsed, output)
            }
            Mode::Quantize => {
                let (store, layer) = one_layer()?;
                let start = Instant::now();
                load_and_quantize_model(&store, &config(arguments.mode), None, &LoadOptions::default())?;
                let elapsed = start.elapsed();
                (elapsed, no_grad(|| layer.forward(&input))?)
            }
            Mode::Load => {
                let path = arguments.folder.join("model.safetensors");
                if !path.exists() {
                    write_model(&path)?;
                }
                let store = ParamStore::init_empty_weights(Device::Cpu);
                let layers: Vec<Linear> = (0..LAYERS)
                    .map(|place| {
                        Linear::new(
                            store.root() / "layers" / place,
                            SIZE,
                            SIZE,
                            LinearConfig { bias: false, ..Default::default() },
                        )
                    })
                    .collect::<accelerate::Result<_>>()?;
                let start = Instant::now();
                load_and_quantize_model(&store, &config(arguments.mode), Some(&path), &LoadOptions::default())?;
                let elapsed = start.elapsed();
                (elapsed, no_grad(|| layers[3].forward(&input))?)
            }
        };
        answer = output.to_kind(Kind::Double).square().mean(Kind::Double).double_value(&[]);
        if arguments.warmup <= step {
            micros.push(elapsed.as_secs_f64() * 1e6);
        }
    }
    println!("report={}", json!({"rank": 0, "micros": median(micros), "answer": answer}));
    Ok(())
}

fn config(mode: Mode) -> BnbQuantizationConfig {
    let is_int8 = matches!(mode, Mode::Int8);
    BnbQuantizationConfig {
        load_in_8bit: Some(is_int8),
        load_in_4bit: Some(!is_int8),
        bnb_4bit_quant_type: Some(QuantType::Nf4),
        torch_dtype: Some(FloatType::Float32),
        llm_int8_skip_modules: Some(Vec::new()),
        ..Default::default()
    }
}

fn one_layer() -> Result<(ParamStore, Linear)> {
    let store = ParamStore::new(Device::Cpu);
    let layer = Linear::new(store.root() / "layer", SIZE, SIZE, LinearConfig { bias: false, ..Default::default() })?;
    layer.weight.copy_(&weight(0)?)?;
    Ok((store, layer))
}

fn weight(place: usize) -> Result<Tensor> {
    Ok(formula(&[SIZE, SIZE], place as f64)? * 0.02)
}

fn quantised(mode: Mode) -> Result<Linear> {
    let (store, layer) = one_layer()?;
    load_and_quantize_model(&store, &config(mode), None, &LoadOptions::default())?;
    store.eval();
    Ok(layer)
}

fn write_model(path: &std::path::Path) -> Result<()> {
    std::fs::create_dir_all(path.parent().context("a file in a folder")?)?;
    let weights = (0..LAYERS).map(|place| Ok((format!("layers.{place}.weight"), weight(place)?)));
    let state: StateDict = weights.collect::<Result<_>>()?;
    Ok(save_file(&state, path)?)
}
