//! Trains a GPT-2 whose layers ranks compute together, replicated or sharded over other ranks, and reports time and losses: our half of
//! `cargo xtask bench tp_step`.
//!
//! Each rank prints one line of JSON, as `bench/rival/tp_step.py` does.

use accelerate::nn::ParamStore;
use accelerate::optim::AdamW;
use accelerate::{Accelerator, AutoWrapPolicy, FullyShardedDataParallelPlugin, TorchTensorParallelPlugin};
use accelerate_models::CausalLMInput;
use accelerate_models::gpt2::{GPT2Config, GPT2LMHeadModel};
use anyhow::{Context, Result};
use bench::steps::{LENGTH, NUM_HEADS, NUM_LAYERS, Steps, VOCABULARY, WIDTH, fill, texts};
use clap::Parser;

/// Train a GPT-2 whose layers all ranks compute together, and report milliseconds per step and losses.
#[derive(Debug, Parser)]
struct Arguments {
    /// Texts per step, the same on ranks that compute layers together
    #[arg(long = "batch_size")]
    batch_size: i64,
    /// How many ranks compute a layer together
    #[arg(long = "tensor_parallel_degree")]
    tensor_parallel_degree: usize,
    /// Shard the model over the other ranks, a unit for each block
    #[arg(long)]
    fsdp: bool,
    /// Divide the tokens between the layers, too
    #[arg(long = "sequence_parallel")]
    sequence_parallel: bool,
    #[command(flatten)]
    steps: Steps,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let plugin = TorchTensorParallelPlugin {
        tensor_parallel_degree: Some(arguments.tensor_parallel_degree),
        sequence_parallelism: Some(arguments.sequence_parallel),
        ..Default::default()
    };
    let mut builder = Accelerator::builder().cpu(true).torch_tp_plugin(plugin);
    if arguments.fsdp {
        let auto_wrap_policy = Some(AutoWrapPolicy::TransformerBasedWrap);
        builder = builder.fsdp_plugin(FullyShardedDataParallelPlugin { auto_wrap_policy, ..Default::default() });
    }
    let accelerator = builder.build()?;
    let config = GPT2Config {
        vocab_size: VOCABULARY,
        n_positions: LENGTH,
        n_embd: WIDTH,
        n_layer: NUM_LAYERS,
        n_head: NUM_HEADS,
        resid_pdrop: 0.0,
        embd_pdrop: 0.0,
        attn_pdrop: 0.0,
        ..Default::default()
    };
    let store = ParamStore::new(accelerator.device());
    let model = GPT2LMHeadModel::new(&store.root(), &config)?;
    fill(&store)?;
    let input_ids = texts(arguments.batch_size, accelerator.data_parallel_rank() as i64)?;
    let labels = Some(input_ids.shallow_clone());
    let input = CausalLMInput { input_ids, attention_mask: None, labels };
    let optimizer = AdamW::builder(&store).lr(1e-4).weight_decay(0.01).build()?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let compute_loss = || model.forward(&input)?.loss.context("the model gave no loss");
    let timed = arguments.steps.train(&accelerator, &mut optimizer, compute_loss)?;
    println!("report={}", timed.report(&accelerator)?);
    accelerator.wait_for_everyone()?;
    Ok(())
}
