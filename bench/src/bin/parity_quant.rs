//! Our half of `cargo xtask parity quant`: quantises the weights of files, saves them as bitsandbytes does, and loads what it has saved.

use std::path::PathBuf;

use accelerate::checkpoint::{LoadOptions, load_file, save_file};
use accelerate::nn::{Linear, LinearConfig, ParamStore, StateDict};
use accelerate::tch::{Device, Kind, Tensor, no_grad};
use accelerate::{BnbQuantizationConfig, load_and_quantize_model};
use anyhow::{Context, Result};
use clap::Parser;
use serde::Deserialize;

/// Quantise, save and load the weights of cases.
#[derive(Debug, Parser)]
struct Arguments {
    /// Where `cases.json` is, and for each case `<n>.source.safetensors` with `layer.weight` and `input`, and
    /// `<n>.python.safetensors`
    #[arg(long)]
    folder: PathBuf,
}

#[derive(Debug, Deserialize)]
struct Case {
    shape: [i64; 2],
    config: BnbQuantizationConfig,
}

fn main() -> Result<()> {
    let Arguments { folder } = Arguments::parse();
    let text = std::fs::read_to_string(folder.join("cases.json")).context("there is no cases.json")?;
    let cases: Vec<Case> = serde_json::from_str(&text)?;
    for (number, case) in cases.iter().enumerate() {
        let path = |what: &str| folder.join(format!("{number}.{what}.safetensors"));
        let source = load_file(path("source"))?;
        let input = source.get("input").context("there is no input")?;
        let options = LoadOptions { strict: false, ..Default::default() };
        // Codes of our own, and those that bitsandbytes has saved.
        let (store, layer) = model(case)?;
        load_and_quantize_model(&store, &case.config, Some(&path("source")), &options)?;
        save_file(&store.state_dict()?, path("rust"))?;
        let mut results = outputs("own", &store, &layer, input)?;
        let (store, layer) = model(case)?;
        load_and_quantize_model(&store, &case.config, Some(&path("python")), &options)?;
        results.extend(outputs("read", &store, &layer, input)?);
        save_file(&results.into_iter().collect::<StateDict>(), path("rust.results"))?;
    }
    Ok(())
}

fn model(case: &Case) -> Result<(ParamStore, Linear)> {
    let store = ParamStore::init_empty_weights(Device::Cpu);
    let [rows, columns] = case.shape;
    let layer = Linear::new(store.root() / "layer", columns, rows, LinearConfig { bias: false, ..Default::default() })?;
    Ok((store, layer))
}

/// Numbers of the weight, an output of each mode, and the gradient of the input.
fn outputs(name: &str, store: &ParamStore, layer: &Linear, input: &Tensor) -> Result<Vec<(String, Tensor)>> {
    store.train();
    let x = input.copy().set_requires_grad(true);
    let trained = layer.forward(&x)?;
    trained.sum(Kind::Float).backward();
    store.eval();
    let evaluated = no_grad(|| layer.forward(input))?;
    let tensors = [
        ("numbers", layer.weight.get()?),
        ("train", trained.detach()),
        ("gradient", x.grad().copy()),
        ("eval", evaluated),
    ];
    Ok(tensors.into_iter().map(|(what, tensor)| (format!("{name}.{what}"), tensor)).collect())
}
