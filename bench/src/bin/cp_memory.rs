//! Computes the loss of one long text and its gradients, of which each rank has some tokens, and reports memory: both sides of
//! `cargo xtask bench cp_memory`, one of which is a single rank.

use accelerate::nn::ParamStore;
use accelerate::{Accelerator, ParallelismConfig};
use accelerate_models::CausalLMInput;
use accelerate_models::llama::{LlamaConfig, LlamaForCausalLM};
use anyhow::Result;
use bench::steps::fill;
use bench::{peak_resident_bytes, resident_bytes};
use clap::Parser;
use serde_json::json;

/// Compute the loss of one long text and its gradients, and report how much memory that took on this rank.
#[derive(Debug, Parser)]
struct Arguments {
    /// Tokens of the text
    #[arg(long)]
    length: i64,
    /// How many ranks divide it
    #[arg(long = "cp_size")]
    cp_size: usize,
}

fn main() -> Result<()> {
    let Arguments { length, cp_size } = Arguments::parse();
    let cp_comm_strategy = Some("alltoall".to_owned());
    let axes = ParallelismConfig { cp_size: Some(cp_size), cp_comm_strategy, ..Default::default() };
    let accelerator = Accelerator::builder().cpu(true).parallelism_config(axes).build()?;
    accelerate::tch::set_num_threads(1);
    let config = LlamaConfig {
        vocab_size: 1000,
        hidden_size: 128,
        intermediate_size: 352,
        num_hidden_layers: 4,
        max_position_embeddings: length,
        eos_token_id: Vec::new(),
        ..Default::default()
    };
    let store = ParamStore::new(accelerator.device());
    let model = LlamaForCausalLM::new(&store.root(), &config.with_heads(4, 2))?;
    fill(&store)?;
    let model = accelerator.prepare(model)?;
    let tokens: Vec<i64> = (0..length).map(|position| position * 7 % 1000).collect();
    let input_ids = accelerate::tch::Tensor::f_from_slice(&tokens)?.f_unsqueeze(0)?;
    let labels = Some(input_ids.shallow_clone());
    let input = CausalLMInput { input_ids, attention_mask: None, labels };
    let before = resident_bytes()?;
    let loss = accelerator.maybe_context_parallel(&input, &Default::default(), |own| {
        let loss = model.forward(&own)?.loss.ok_or_else(|| accelerate::Error::other("the model gave no loss"))?;
        accelerator.backward(&loss)?;
        Ok(loss.f_double_value(&[])?)
    })?;
    let taken = peak_resident_bytes()?.saturating_sub(before);
    let norm = accelerator.clip_grad_norm_(&model, 1e9)?.f_double_value(&[])?;
    println!("report={}", json!({ "taken_bytes": taken, "answer": [loss, norm] }));
    accelerator.wait_for_everyone()?;
    Ok(())
}
