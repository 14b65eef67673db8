//! Takes steps of QLoRA on a model of 1.1 billion parameters, and reports memory and losses: `cargo xtask bench qlora`.
//!
//! Each rank prints one line of JSON.

use std::time::Instant;

use accelerate::checkpoint::LoadOptions;
use accelerate::lora::{LoraConfig, get_peft_model};
use accelerate::nn::ParamStore;
use accelerate::optim::AdamW;
use accelerate::tch::{Kind, Tensor};
use accelerate::{
    Accelerator, AutoWrapPolicy, BnbQuantizationConfig, FloatType, FullyShardedDataParallelPlugin, QuantType,
    ShardingStrategy, load_and_quantize_model, set_seed,
};
use accelerate_models::CausalLMInput;
use accelerate_models::llama::{LlamaConfig, LlamaForCausalLM};
use anyhow::{Context, Result};
use bench::{peak_resident_bytes, resident_bytes};
use clap::Parser;
use serde_json::json;

/// Fine-tune a Llama of 1.1 billion random parameters in 4 bits, and report memory and losses.
#[derive(Debug, Parser)]
struct Arguments {
    /// Each rank keeps a part of the model, and not all of it
    #[arg(long = "use_fsdp")]
    use_fsdp: bool,
    /// Steps
    #[arg(long, default_value_t = 2)]
    steps: usize,
    /// Tokens in the one row of each rank
    #[arg(long = "block_size", default_value_t = 128)]
    block_size: i64,
    /// Layers, of which TinyLlama has 22
    #[arg(long = "num_layers", default_value_t = 22)]
    num_layers: usize,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let builder = Accelerator::builder().cpu(true);
    let accelerator = match arguments.use_fsdp {
        true => builder.fsdp_plugin(FullyShardedDataParallelPlugin {
            sharding_strategy: Some(ShardingStrategy::FullShard),
            auto_wrap_policy: Some(AutoWrapPolicy::TransformerBasedWrap),
            ..Default::default()
        }),
        false => builder,
    }
    .build()?;
    set_seed(0);
    let config = tiny_llama(arguments.num_layers);
    let store = ParamStore::init_empty_weights(accelerator.device());
    store.to_kind(Kind::BFloat16)?;
    let model = LlamaForCausalLM::new(&store.root(), &config)?;
    load_and_quantize_model(&store, &four_bit(), None, &LoadOptions::default())?;
    let adapter =
        LoraConfig { r: 16, lora_alpha: 32.0, target_modules: Some("all-linear".into()), ..Default::default() };
    let (trained, all) = get_peft_model(&store, adapter)?.num_parameters();
    store.gradient_checkpointing_enable(Default::default())?;
    let optimizer = AdamW::new(&store, 1e-3)?;
    let quantised_bytes = resident_bytes()?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;

    let rank = accelerator.process_index() as i64;
    let tokens = Tensor::f_arange(arguments.block_size, (Kind::Int64, accelerator.device()))?;
    let input_ids = (tokens * 7 + rank).f_remainder(config.vocab_size)?.f_unsqueeze(0)?;
    let input = CausalLMInput { labels: Some(input_ids.shallow_clone()), input_ids, attention_mask: None };
    let (mut losses, mut step_ms) = (Vec::new(), Vec::new());
    for _step in 0..arguments.steps {
        let started = Instant::now();
        let loss = model.forward(&input)?.loss.context("a batch without labels")?;
        accelerator.backward(&loss)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        losses.push(loss.f_double_value(&[])?);
        step_ms.push(started.elapsed().as_secs_f64() * 1e3);
    }
    let report = json!({
        "rank": rank,
        "world_size": accelerator.num_processes(),
        "step_ms": step_ms,
        "losses": losses,
        "num_parameters": all,
        "num_trained": trained,
        "quantised_resident_bytes": quantised_bytes,
        "resident_bytes": resident_bytes()?,
        "peak_resident_bytes": peak_resident_bytes()?,
    });
    println!("report={report}");
    accelerator.wait_for_everyone()?;
    Ok(())
}

/// The shape of TinyLlama.
fn tiny_llama(num_hidden_layers: usize) -> LlamaConfig {
    LlamaConfig {
        vocab_size: 32_000,
        hidden_size: 2048,
        intermediate_size: 5632,
        num_hidden_layers,
        max_position_embeddings: 2048,
        ..Default::default()
    }
    .with_heads(32, 4)
}

fn four_bit() -> BnbQuantizationConfig {
    BnbQuantizationConfig {
        load_in_4bit: Some(true),
        bnb_4bit_quant_type: Some(QuantType::Nf4),
        bnb_4bit_use_double_quant: Some(true),
        bnb_4bit_compute_dtype: Some(FloatType::BFloat16),
        ..Default::default()
    }
}
