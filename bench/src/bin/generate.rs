//! Times tokens that GPT-2 adds to a text: our half of the race of `cargo xtask bench generate`.
//!
//! Prints one line of JSON, as `bench/rival/generate.py` does: the median time of a token, and the tokens.

use std::path::PathBuf;
use std::time::Instant;

use accelerate::tch::{Kind, Tensor};
use accelerate_models::gpt2::GPT2LMHeadModel;
use accelerate_models::{GenerationConfig, LoadOptions, PretrainedModel, generate};
use anyhow::Result;
use bench::median;
use clap::Parser;
use serde_json::json;

/// Time tokens that GPT-2 adds to a text.
#[derive(Debug, Parser)]
struct Arguments {
    /// The model
    #[arg(long)]
    folder: PathBuf,
    /// Tokens to add
    #[arg(long = "new_tokens")]
    new_tokens: usize,
    /// How often
    #[arg(long)]
    rounds: usize,
}

fn main() -> Result<()> {
    let Arguments { folder, new_tokens, rounds } = Arguments::parse();
    let options = LoadOptions { dtype: Some(Kind::BFloat16), ..Default::default() };
    let (model, _) = GPT2LMHeadModel::from_pretrained(folder, &options)?;
    // `bench/rival/generate.py` has it as well.
    let prompt: Vec<i64> = (0..16).map(|position| (7919 * position) % 50257).collect();
    let prompt = Tensor::f_from_slice(&prompt)?.f_unsqueeze(0)?;
    let config = GenerationConfig { max_new_tokens: new_tokens, ..Default::default() };
    let (mut micros, mut tokens) = (Vec::new(), Vec::<i64>::new());
    // The first round warms up.
    for round in 0..=rounds {
        let started = Instant::now();
        let texts = generate(&model, &prompt, None, &config)?;
        if round > 0 {
            micros.push(started.elapsed().as_secs_f64() / new_tokens as f64 * 1e6);
        }
        tokens = Vec::try_from(&texts.f_select(0, 0)?.f_narrow(0, 16, new_tokens as i64)?)?;
    }
    println!("report={}", json!({"micros": median(micros), "tokens": tokens}));
    Ok(())
}
