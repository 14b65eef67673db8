//! Computes attention whose heads and tokens ranks exchange, forward and backward, and reports time and an answer: our half of
//! `cargo xtask bench sp_step`. Each rank prints one line of JSON, as `bench/rival/sp_attention.py` does.

use std::time::Instant;

use accelerate::nn::{AttentionOptions, Init, ModuleFn, ParamStore, ScaledDotProductAttention};
use accelerate::tch::{Kind, Tensor};
use accelerate::{Accelerator, ParallelismConfig};
use anyhow::Result;
use bench::steps::noise;
use clap::Parser;
use serde_json::json;

/// Compute attention of which each rank has some tokens, and report milliseconds per pass and what came out.
#[derive(Debug, Parser)]
struct Arguments {
    /// Sequences
    #[arg(long = "batch_size")]
    batch_size: i64,
    /// Tokens of a whole sequence
    #[arg(long)]
    length: i64,
    /// Heads
    #[arg(long)]
    heads: i64,
    /// Numbers of a head
    #[arg(long = "head_dim")]
    head_dim: i64,
    /// Passes, the warm-up included
    #[arg(long)]
    steps: usize,
    /// Passes that are not timed
    #[arg(long)]
    warmup: usize,
}

fn main() -> Result<()> {
    let Arguments { batch_size, length, heads, head_dim, steps, warmup } = Arguments::parse();
    let num_ranks = std::env::var("WORLD_SIZE").ok().and_then(|size| size.parse().ok()).unwrap_or(1);
    let axes = ParallelismConfig { sp_size: Some(num_ranks), ..Default::default() };
    let accelerator = Accelerator::builder().cpu(true).parallelism_config(axes).build()?;
    let store = ParamStore::new(accelerator.device());
    store.root().param("unused", ([1], Init::Ones))?.set_requires_grad(false)?;
    let attention = ScaledDotProductAttention::new(&store.root());
    let model = ModuleFn::new(&store, move |[query, key, value]: &[Tensor; 3]| {
        let options = AttentionOptions { is_causal: true, ..Default::default() };
        // As models have it: tokens first in memory.
        let heads = [query, key, value].map(|tensor| tensor.f_transpose(1, 2));
        let [query, key, value] = heads;
        attention.forward(&query?, &key?, &value?, options)
    });
    let model = accelerator.prepare(model)?;
    let whole: Vec<Tensor> =
        (0..3).map(|seed| noise(&[batch_size, length, heads, head_dim], seed)).collect::<Result<_>>()?;
    let (step_ms, losses) = accelerator.maybe_context_parallel(&whole, &Default::default(), |own| {
        let (mut step_ms, mut losses) = (Vec::new(), Vec::new());
        let leaf = |tensor: &Tensor| tensor.f_contiguous()?.f_set_requires_grad(true);
        let inputs = [leaf(&own[0])?, leaf(&own[1])?, leaf(&own[2])?];
        for step in 0..steps {
            let started = Instant::now();
            let loss = model.forward(&inputs)?.f_square()?.f_mean(Kind::Float)?;
            accelerator.backward(&loss)?;
            if warmup <= step {
                step_ms.push(started.elapsed().as_secs_f64() * 1e3);
            }
            let mut norms = 0.0;
            for input in &inputs {
                norms += input.f_grad()?.f_norm()?.f_double_value(&[])?;
                let _ = input.f_grad()?.f_zero_()?;
            }
            losses.push(loss.f_double_value(&[])? + norms);
        }
        Ok((step_ms, losses))
    })?;
    let report = json!({
        "rank": accelerator.process_index(),
        "world_size": accelerator.num_processes(),
        "step_ms": step_ms,
        "losses": losses,
        "peak_resident_bytes": bench::peak_resident_bytes()?,
    });
    println!("report={report}");
    accelerator.wait_for_everyone()?;
    Ok(())
}
