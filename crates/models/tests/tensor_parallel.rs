//! Models whose layers ranks compute together by the models' own plans: losses are those of one rank.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{CheckpointOptions, Module, ParamStore};
use accelerate::optim::AdamW;
use accelerate::tch::{self, Device, Kind, Tensor};
use accelerate::{Accelerator, MixedPrecision, Result, TorchTensorParallelPlugin, testing};
use accelerate_models::bert::{Batch, BertConfig, BertForSequenceClassification};
use accelerate_models::gpt2::{GPT2Config, GPT2LMHeadModel};
use accelerate_models::llama::{LlamaConfig, LlamaForCausalLM};
use accelerate_models::vit::{ViTConfig, ViTForImageClassification};
use accelerate_models::{CausalLM, CausalLMInput, GenerationConfig, ImageClassificationInput, generate};
use rstest::rstest;
use serde_json::{Value, json};

/// Values that depend on the place alone, so that all ranks and runs have the same.
fn fill(store: &ParamStore) {
    for (index, param) in store.parameters().iter().enumerate() {
        let values = Tensor::arange(param.numel() as i64, (Kind::Double, Device::Cpu)) * 0.7 + index as f64;
        let spread = if param.shape().len() == 1 { 0.1 } else { 0.15 };
        let values = (values.sin() * spread).reshape(param.shape());
        let is_norm =
            param.name().contains("norm") || param.name().contains("ln_") || param.name().contains("LayerNorm");
        let shift = if is_norm && param.name().ends_with("weight") { 1.0 } else { 0.0 };
        param.copy_(&(values + shift)).unwrap();
    }
}

const VOCAB: i64 = 37;

/// Five heads on two ranks are three and two; 23 inner features are 12 and 11.
fn gpt2(tied: bool) -> GPT2LMHeadModel {
    let config = GPT2Config {
        vocab_size: VOCAB,
        n_positions: 16,
        n_embd: 20,
        n_layer: 2,
        n_head: 5,
        n_inner: Some(23),
        tie_word_embeddings: tied,
        resid_pdrop: 0.0,
        embd_pdrop: 0.0,
        attn_pdrop: 0.0,
        eos_token_id: Vec::new(),
        ..Default::default()
    };
    let store = ParamStore::new(Device::Cpu);
    let model = GPT2LMHeadModel::new(&store.root(), &config).unwrap();
    fill(&store);
    model
}

/// Three heads of keys, each for two of queries.
fn llama() -> LlamaForCausalLM {
    let config = LlamaConfig {
        vocab_size: VOCAB,
        hidden_size: 24,
        intermediate_size: 31,
        num_hidden_layers: 2,
        attention_bias: true,
        eos_token_id: Vec::new(),
        ..Default::default()
    };
    let store = ParamStore::new(Device::Cpu);
    let model = LlamaForCausalLM::new(&store.root(), &config.with_heads(6, 3)).unwrap();
    fill(&store);
    model
}

fn builder(degree: usize, plan: Option<Value>) -> accelerate::AcceleratorBuilder {
    let plugin = TorchTensorParallelPlugin {
        tensor_parallel_degree: Some(degree),
        parallelize_plan: plan.and_then(|plan| plan.as_object().cloned()),
        ..Default::default()
    };
    Accelerator::builder().torch_tp_plugin(plugin)
}

/// By the models' own plans, with tokens divided, too.
fn builder_of_tokens(degree: usize, plan: Option<Value>) -> accelerate::AcceleratorBuilder {
    let plugin = TorchTensorParallelPlugin {
        tensor_parallel_degree: Some(degree),
        parallelize_plan: plan.and_then(|plan| plan.as_object().cloned()),
        sequence_parallelism: Some(true),
    };
    Accelerator::builder().torch_tp_plugin(plugin)
}

/// Losses of `steps` windows of three micro-batches, with clipping.
fn train<M: Module<Input = CausalLMInput, Output = accelerate_models::CausalLMOutput>>(
    accelerator: &Accelerator,
    model: M,
    windows: i64,
) -> Result<Vec<f64>> {
    let optimizer = AdamW::new(model.params(), 3e-3)?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let num_shares = accelerator.mesh().num_shares() as i64;
    let mut losses = Vec::new();
    for step in 0..3 * windows {
        accelerator.accumulate(&model, || {
            let all = (Tensor::arange(4 * 9, (Kind::Int64, Device::Cpu)) * 5 + step % 7).remainder(VOCAB).view([4, 9]);
            let share = 4 / num_shares;
            let input_ids = all.narrow(0, accelerator.data_parallel_rank() as i64 * share, share);
            let labels = Some(input_ids.copy());
            let output = model.forward(&CausalLMInput { input_ids, attention_mask: None, labels })?;
            let loss = output.loss.unwrap();
            accelerator.backward(&loss)?;
            if accelerator.sync_gradients() {
                let _norm = accelerator.clip_grad_norm_(&model, 1.0)?;
            }
            optimizer.step()?;
            optimizer.zero_grad()?;
            losses.push(accelerator.reduce(&loss.detach(), accelerate::ReduceOp::Mean)?.double_value(&[]));
            Ok(())
        })?;
    }
    Ok(losses)
}

/// The tolerance is a part of the largest value: processors add up products in other orders, and round at its last digits.
fn assert_close(found: &[f64], wanted: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    let largest = found.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    let size = wanted.iter().fold(1.0, |size: f64, value| size.max(value.abs()));
    assert!(largest <= tolerance * size, "{what} differ by {largest:e}: {found:?} {wanted:?}");
}

/// The head's output is gathered, or not: then the loss comes from slices of the logits.
#[rstest]
#[case::gpt2_tied("tied", 2, 2, None)]
#[case::gpt2_on_a_mesh("tied", 4, 2, None)]
#[case::gpt2_untied("untied", 3, 3, None)]
#[case::gpt2_logits_in_slices("tied", 2, 2, Some("colwise"))]
#[case::llama("llama", 2, 2, None)]
#[case::llama_on_a_mesh("llama", 4, 2, None)]
#[case::llama_on_three("llama", 3, 3, Some("colwise"))]
fn causal_models_train_as_on_one_rank(
    #[case] model: &str,
    #[case] world_size: usize,
    #[case] degree: usize,
    #[case] head: Option<&str>,
) {
    let plan = head.map(|head| match model {
        "llama" => json!({
            "layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.k_proj": "colwise", "layers.*.self_attn.v_proj": "colwise",
            "layers.*.self_attn.o_proj": "rowwise", "lm_head": head,
        }),
        _ => json!({ "wte": "embedding_rowwise", "h.*.mlp.c_fc": "colwise", "h.*.mlp.c_proj": "rowwise", "lm_head": head }),
    });
    trains_as_on_one_rank(model, world_size, builder(degree, plan));
}

fn trains_as_on_one_rank(model: &str, world_size: usize, divided: accelerate::AcceleratorBuilder) {
    const WINDOWS: i64 = 17;
    let run = |accelerator: Accelerator| match model {
        "llama" => train(&accelerator, llama(), WINDOWS),
        tied => train(&accelerator, gpt2(tied == "tied"), WINDOWS),
    };
    let one = Accelerator::builder().gradient_accumulation_steps(3);
    let wanted = testing::ranks(1, one, run).unwrap();
    assert!(wanted[0][0] - wanted[0][50] > 0.3, "nothing was learned: {:?}", wanted[0]);
    for own in testing::ranks(world_size, divided.gradient_accumulation_steps(3), run).unwrap() {
        assert_close(&own, &wanted[0], 1e-5, model);
    }
}

/// Nine tokens, which do not divide evenly.
#[rstest]
#[case::gpt2_tied("tied", 2, 2, None)]
#[case::gpt2_on_a_mesh("tied", 4, 2, None)]
#[case::gpt2_untied("untied", 4, 4, None)]
#[case::gpt2_logits_in_slices("tied", 2, 2, Some("colwise"))]
#[case::llama("llama", 2, 2, None)]
#[case::llama_on_three("llama", 3, 3, None)]
fn causal_models_whose_tokens_are_divided_train_as_on_one_rank(
    #[case] model: &str,
    #[case] world_size: usize,
    #[case] degree: usize,
    #[case] head: Option<&str>,
) {
    let plan = head.map(|head| {
        json!({
            "wte": "embedding_rowwise", "h.*.attn.c_attn": "colwise", "h.*.attn.c_proj": "rowwise", "h.*.mlp.c_fc": "colwise",
            "h.*.mlp.c_proj": "rowwise", "lm_head": head,
        })
    });
    trains_as_on_one_rank(model, world_size, builder_of_tokens(degree, plan));
}

#[test]
fn bfloat16_and_checkpointed_activations_stay_within_their_spread() {
    let run = |accelerator: Accelerator| {
        let model = gpt2(true);
        let _ = model.params().gradient_checkpointing_enable(CheckpointOptions::default());
        train(&accelerator, model, 5)
    };
    let precise = testing::ranks(1, Accelerator::builder().gradient_accumulation_steps(3), run).unwrap();
    let bf16 = |builder: accelerate::AcceleratorBuilder| {
        builder.gradient_accumulation_steps(3).mixed_precision(MixedPrecision::Bf16)
    };
    let wanted = testing::ranks(1, bf16(Accelerator::builder()), run).unwrap();
    let spread = wanted[0].iter().zip(&precise[0]).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    for own in testing::ranks(2, bf16(builder(2, None)), run).unwrap() {
        assert_close(&own, &wanted[0], 3.0 * spread, "bf16");
    }
    for own in testing::ranks(2, bf16(builder_of_tokens(2, None)), run).unwrap() {
        assert_close(&own, &wanted[0], 3.0 * spread, "bf16 of tokens");
    }
    for builder in [builder(2, None), builder_of_tokens(2, None)] {
        for own in testing::ranks(2, builder.gradient_accumulation_steps(3), run).unwrap() {
            assert_close(&own, &precise[0], 1e-5, "float32");
        }
    }
}

#[rstest]
#[case(builder(2, None))]
#[case(builder(2, Some(json!({ "wte": "rowwise", "lm_head": "colwise" }))))]
#[case(builder_of_tokens(2, None))]
fn texts_are_continued_as_on_one_rank(#[case] divided: accelerate::AcceleratorBuilder) {
    let run = |accelerator: Accelerator| {
        let model = accelerator.prepare(gpt2(true))?;
        let prompt = Tensor::from_slice2(&[[3i64, 1, 4], [1, 5, 9]]);
        let options = GenerationConfig { max_new_tokens: 6, ..Default::default() };
        let tokens = generate(&*model, &prompt, None, &options)?;
        assert!(model.max_length().is_some());
        Ok(Vec::<i64>::try_from(tokens.view([-1]))?)
    };
    let wanted = testing::ranks(1, Default::default(), run).unwrap();
    for own in testing::ranks(2, divided, run).unwrap() {
        assert_eq!(own, wanted[0]);
    }
}

#[test]
fn encoders_give_the_logits_and_gradients_of_one_rank() {
    let bert = |accelerator: Accelerator| {
        let sizes = BertConfig::small(VOCAB, 3, 12);
        let config = BertConfig { hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0, ..sizes };
        let store = ParamStore::new(Device::Cpu);
        let model = BertForSequenceClassification::new(&store.root(), &config)?;
        fill(&store);
        let model = accelerator.prepare(model)?;
        let input_ids = Tensor::arange(14, (Kind::Int64, Device::Cpu)).view([2, 7]);
        let batch = Batch {
            attention_mask: input_ids.ones_like(),
            token_type_ids: input_ids.zeros_like(),
            input_ids,
            labels: Tensor::from_slice(&[0i64, 2]),
        };
        let output = model.forward(&batch)?;
        accelerator.backward(&output.loss)?;
        outcome(&accelerator, &model, &output.logits)
    };
    let vit = |accelerator: Accelerator| {
        let config = ViTConfig {
            image_size: [8, 8],
            patch_size: [4, 4],
            hidden_size: 12,
            intermediate_size: 15,
            num_hidden_layers: 2,
            num_attention_heads: 3,
            hidden_dropout_prob: 0.0,
            attention_probs_dropout_prob: 0.0,
            ..Default::default()
        };
        let store = ParamStore::new(Device::Cpu);
        let model = ViTForImageClassification::new(&store.root(), &config)?;
        fill(&store);
        let model = accelerator.prepare(model)?;
        let pixel_values = Tensor::arange(2 * 3 * 64, (Kind::Float, Device::Cpu)).sin().view([2, 3, 8, 8]);
        let labels = Some(Tensor::from_slice(&[0i64, 1]));
        let output = model.forward(&ImageClassificationInput { pixel_values, labels })?;
        accelerator.backward(output.loss.as_ref().unwrap())?;
        outcome(&accelerator, &model, &output.logits)
    };
    let runs: [&(dyn Fn(Accelerator) -> Result<Vec<f64>> + Sync); 2] = [&bert, &vit];
    for run in runs {
        let wanted = testing::ranks(1, Default::default(), run).unwrap();
        for own in testing::ranks(2, builder(2, None), run).unwrap() {
            assert_close(&own, &wanted[0], 3e-5, "logits and the norm of gradients");
        }
    }
}

fn outcome<M: Module>(
    accelerator: &Accelerator,
    model: &accelerate::PreparedModel<M>,
    logits: &Tensor,
) -> Result<Vec<f64>> {
    let norm = accelerator.clip_grad_norm_(model, 1e9)?.double_value(&[]);
    let mut values = Vec::<f64>::try_from(tch::no_grad(|| logits.detach().to_kind(Kind::Double).view([-1])))?;
    values.push(norm);
    Ok(values)
}
