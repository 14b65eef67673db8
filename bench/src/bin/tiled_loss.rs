//! Computes the loss of a long text and its gradients, in tiles, and reports memory: our half of `cargo xtask bench tiled_loss`.

use accelerate::nn::{Linear, LinearConfig, ParamStore, tiled_cross_entropy};
use accelerate::tch::{self, Device, Kind, Tensor};
use anyhow::{Context, Result};
use bench::steps::noise;
use bench::{peak_resident_bytes, resident_bytes};
use clap::Parser;
use serde_json::json;

/// Compute the loss of a long text and its gradients, and report how much memory that took.
#[derive(Debug, Parser)]
struct Arguments {
    /// Tokens
    #[arg(long)]
    length: i64,
    /// Features of a token
    #[arg(long)]
    width: i64,
    /// Tokens that there are
    #[arg(long)]
    vocabulary: i64,
    /// Tiles of the text
    #[arg(long)]
    tiles: usize,
}

fn main() -> Result<()> {
    let Arguments { length, width, vocabulary, tiles } = Arguments::parse();
    tch::set_num_threads(1);
    let store = ParamStore::new(Device::Cpu);
    let config = LinearConfig { bias: false, ..Default::default() };
    let head = Linear::new(store.root() / "lm_head", width, vocabulary, config)?;
    let weight = head.weight.clone();
    weight.copy_(&(noise(&[vocabulary, width], 0)? * 0.02))?;
    let hidden = noise(&[length, width], 1)?.f_set_requires_grad(true)?;
    let labels = (Tensor::f_arange(length, (Kind::Int64, Device::Cpu))? * 7).f_remainder(vocabulary)?;
    let before = resident_bytes()?;
    let loss = tiled_cross_entropy(&hidden, &labels, -100, tiles, head)?;
    loss.f_backward()?;
    let taken = peak_resident_bytes()?.saturating_sub(before);
    let gradient = weight.grad().context("the head got no gradient")?;
    let answer = [
        loss.f_double_value(&[])?,
        gradient.f_norm()?.f_double_value(&[])?,
        hidden.f_grad()?.f_norm()?.f_double_value(&[])?,
    ];
    println!("report={}", json!({ "taken_bytes": taken, "answer": answer }));
    Ok(())
}
