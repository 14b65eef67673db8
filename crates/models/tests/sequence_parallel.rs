//! Models whose sequences ranks divide: losses are those of one rank with whole sequences.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{CheckpointOptions, Module, ParamStore};
use accelerate::optim::{AdamW, Optimizer};
use accelerate::tch::{self, Device, Kind, Tensor};
use accelerate::{
    Accelerator, AcceleratorBuilder, FullyShardedDataParallelPlugin, MixedPrecision, ParallelismConfig, PreparedModel,
    Result, SeedOptions, TorchTensorParallelPlugin, testing,
};
use accelerate_models::bert::{BertConfig, BertForSequenceClassification};
use accelerate_models::gpt2::{GPT2Config, GPT2LMHeadModel};
use accelerate_models::llama::{LlamaConfig, LlamaForCausalLM, LlamaModelType};
use accelerate_models::{CausalLM, CausalLMInput, CausalLMOutput, GenerationConfig, generate};
use rstest::rstest;
use serde_json::json;

/// Values that depend on the place alone, so that all ranks and runs have the same.
fn fill(store: &ParamStore) {
    for (index, param) in store.parameters().iter().enumerate() {
        let values = Tensor::arange(param.numel() as i64, (Kind::Double, Device::Cpu)) * 0.7 + index as f64;
        let values = (values.sin() * if param.shape().len() == 1 { 0.1 } else { 0.15 }).reshape(param.shape());
        let is_norm = param.name().contains("norm") || param.name().contains("ln_");
        let shift = if is_norm && param.name().ends_with("weight") { 1.0 } else { 0.0 };
        param.copy_(&(values + shift)).unwrap();
    }
}

const VOCAB: i64 = 37;

fn gpt2(n_head: i64) -> GPT2LMHeadModel {
    let config = GPT2Config {
        vocab_size: VOCAB,
        n_positions: 16,
        n_embd: 24,
        n_layer: 2,
        n_head,
        n_inner: Some(23),
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

/// One head of keys for two of queries; with a window, of five tokens in the first layer.
fn llama(window: Option<i64>) -> LlamaForCausalLM {
    let config = LlamaConfig {
        model_type: if window.is_some() { LlamaModelType::Mistral } else { LlamaModelType::Llama },
        vocab_size: VOCAB,
        hidden_size: 24,
        intermediate_size: 31,
        num_hidden_layers: 2,
        eos_token_id: Vec::new(),
        sliding_windows: window.map_or(Vec::new(), |window| vec![Some(window), None]),
        ..Default::default()
    };
    let store = ParamStore::new(Device::Cpu);
    let model = LlamaForCausalLM::new(&store.root(), &config.with_heads(4, 2)).unwrap();
    fill(&store);
    model
}

/// `gpt2`, `llama`, or `mistral` with its window.
fn run(model: &str, accelerator: &Accelerator, windows: i64, data: Data) -> Result<Vec<f64>> {
    match model {
        "gpt2" => train(accelerator, gpt2(4), windows, data),
        "mistral" => train(accelerator, llama(Some(5)), windows, data),
        _ => train(accelerator, llama(None), windows, data),
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Data {
    Plain,
    /// Rows begin with what fills them up, and labels are left out here and there, more of them on some ranks.
    Ragged,
}

const LENGTH: i64 = 12;

fn input(accelerator: &Accelerator, step: i64, data: Data) -> CausalLMInput {
    let all = (Tensor::arange(4 * LENGTH, (Kind::Int64, Device::Cpu)) * 5 + step % 7).remainder(VOCAB);
    let share = 4 / accelerator.mesh().num_shares() as i64;
    let first = accelerator.data_parallel_rank() as i64 * share;
    let input_ids = all.view([4, LENGTH]).narrow(0, first, share);
    if data == Data::Plain {
        return CausalLMInput { labels: Some(input_ids.copy()), input_ids, attention_mask: None };
    }
    let columns = Tensor::arange(LENGTH, (Kind::Int64, Device::Cpu)).view([1, LENGTH]);
    let attention_mask = columns.ge_tensor(&Tensor::from_slice(&[3i64, 0, 3, 0]).view([4, 1]).narrow(0, first, share));
    let is_left_out = columns.ge(9).logical_or(&attention_mask.logical_not());
    let labels = Some(input_ids.masked_fill(&is_left_out, -100));
    CausalLMInput { input_ids, attention_mask: Some(attention_mask.to_kind(Kind::Int64)), labels }
}

fn backward<M: Module<Input = CausalLMInput, Output = CausalLMOutput>>(
    accelerator: &Accelerator,
    model: &PreparedModel<M>,
    input: &CausalLMInput,
) -> Result<Tensor> {
    accelerator.maybe_context_parallel(input, &Default::default(), |own| {
        let loss = model.forward(&own)?.loss.expect("there are labels");
        accelerator.backward(&loss)?;
        Ok(loss.detach())
    })
}

/// Losses of windows of three micro-batches, with clipping.
fn train<M: Module<Input = CausalLMInput, Output = CausalLMOutput>>(
    accelerator: &Accelerator,
    model: M,
    windows: i64,
    data: Data,
) -> Result<Vec<f64>> {
    let optimizer = AdamW::new(model.params(), 3e-3)?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    steps(accelerator, &model, &mut optimizer, 0..3 * windows, data)
}

fn steps<M: Module<Input = CausalLMInput, Output = CausalLMOutput>, O: Optimizer>(
    accelerator: &Accelerator,
    model: &PreparedModel<M>,
    optimizer: &mut accelerate::optim::AcceleratedOptimizer<O>,
    steps: std::ops::Range<i64>,
    data: Data,
) -> Result<Vec<f64>> {
    let mut losses = Vec::new();
    for step in steps {
        accelerator.accumulate(model, || {
            let loss = backward(accelerator, model, &input(accelerator, step, data))?;
            if accelerator.sync_gradients() {
                let _norm = accelerator.clip_grad_norm_(model, 1.0)?;
            }
            optimizer.step()?;
            optimizer.zero_grad()?;
            losses.push(accelerator.reduce(&loss, accelerate::ReduceOp::Mean)?.double_value(&[]));
            Ok(())
        })?;
    }
    Ok(losses)
}

fn assert_close(found: &[f64], wanted: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    let largest = found.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(largest <= tolerance, "{what} differ by {largest:e}: {found:?} {wanted:?}");
}

fn one() -> AcceleratorBuilder {
    Accelerator::builder().gradient_accumulation_steps(3)
}

/// `dp` replicas, or shards with FSDP, and an axis of two ranks that divide sequences.
fn builder(axis: &str, dp: usize, is_sharded: bool) -> AcceleratorBuilder {
    let (strategy, cp_size, sp_size) = match axis {
        "sp" => ("allgather", None, Some(2)),
        "ring" => ("alltoall", Some(2), None),
        _ => ("allgather", Some(2), None),
    };
    let (dp_replicate_size, dp_shard_size) = if is_sharded { (None, Some(dp)) } else { (Some(dp), None) };
    let cp_comm_strategy = Some(strategy.to_owned());
    let axes = ParallelismConfig {
        cp_size,
        sp_size,
        cp_comm_strategy,
        dp_replicate_size,
        dp_shard_size,
        ..Default::default()
    };
    let builder = one().parallelism_config(axes);
    if is_sharded { builder.fsdp_plugin(FullyShardedDataParallelPlugin::default()) } else { builder }
}

#[rstest]
fn causal_models_train_as_on_one_rank(
    #[values("gpt2", "llama", "mistral")] model: &str,
    #[values("sp", "cp", "ring")] axis: &str,
) {
    const WINDOWS: i64 = 17;
    let wanted = testing::ranks(1, one(), |accelerator| run(model, &accelerator, WINDOWS, Data::Plain)).unwrap();
    assert!(wanted[0][0] - wanted[0][50] > 0.3, "nothing was learned: {:?}", wanted[0]);
    let found =
        testing::ranks(2, builder(axis, 1, false), |accelerator| run(model, &accelerator, WINDOWS, Data::Plain));
    for own in found.unwrap() {
        assert_close(&own, &wanted[0], 1e-5, model);
    }
}

/// Replicas, shards over all ranks, rows with what fills them up, and labels that are left out.
#[rstest]
fn meshes_and_ragged_rows_train_as_one_rank(
    #[values("gpt2", "mistral")] model: &str,
    #[values("sp", "cp", "ring")] axis: &str,
    #[values((2, false), (1, true), (2, true))] (dp, is_sharded): (usize, bool),
) {
    // Each replica's rows have as many labels, so that their mean is that of all.
    let wanted = testing::ranks(1, one(), |accelerator| run(model, &accelerator, 5, Data::Ragged)).unwrap();
    let builder = builder(axis, dp, is_sharded);
    let found = testing::ranks(2 * dp, builder, |accelerator| run(model, &accelerator, 5, Data::Ragged));
    for own in found.unwrap() {
        assert_close(&own, &wanted[0], 1e-5, model);
    }
}

#[rstest]
#[case("sp")]
#[case("cp")]
#[case("ring")]
fn bfloat16_and_checkpointed_activations_stay_within_their_spread(#[case] axis: &str) {
    let train = |accelerator: Accelerator| {
        let model = llama(None);
        model.params().gradient_checkpointing_enable(CheckpointOptions::default())?;
        train(&accelerator, model, 5, Data::Plain)
    };
    let precise = testing::ranks(1, one(), train).unwrap();
    let wanted = testing::ranks(1, one().mixed_precision(MixedPrecision::Bf16), train).unwrap();
    let spread = wanted[0].iter().zip(&precise[0]).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    let builder = builder(axis, 1, false);
    for own in testing::ranks(2, builder.clone().mixed_precision(MixedPrecision::Bf16), train).unwrap() {
        assert_close(&own, &wanted[0], 3.0 * spread, "bf16");
    }
    for own in testing::ranks(2, builder, train).unwrap() {
        assert_close(&own, &precise[0], 1e-5, "float32");
    }
}

/// A mask takes ring attention the way that makes scores, which are added up in 32 bits whatever autocast says.
#[rstest]
fn masks_in_bfloat16_are_as_precise_as_on_one_rank(#[values("sp", "cp", "ring")] axis: &str) {
    let logits = |accelerator: Accelerator| {
        let model = accelerator.prepare(llama(Some(5)))?;
        let batch = input(&accelerator, 0, Data::Ragged);
        accelerator.maybe_context_parallel(&batch, &Default::default(), |own| {
            let logits = tch::no_grad(|| model.forward(&own))?.logits;
            let logits = accelerator.gather_sequence(&logits, 1)?;
            Ok(Vec::<f64>::try_from(logits.to_kind(Kind::Double).reshape([-1]))?)
        })
    };
    let precise = testing::ranks(1, one(), logits).unwrap().swap_remove(0);
    let bf16 = |axes: AcceleratorBuilder| axes.mixed_precision(MixedPrecision::Bf16);
    let distance = |found: &[f64]| found.iter().zip(&precise).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
    let wanted = distance(&testing::ranks(1, bf16(one()), logits).unwrap()[0]);
    for own in testing::ranks(2, bf16(builder(axis, 1, false)), logits).unwrap() {
        assert!(distance(&own) < 1.3 * wanted, "{} and {wanted}", distance(&own));
    }
}

/// Ranks that divide a sequence have tokens of their own, and random numbers if asked.
#[test]
fn seeds_of_their_own_go_by_sequence_ranks_too() {
    let options = SeedOptions { device_specific: true, ..Default::default() };
    let seeds = testing::ranks(4, builder("cp", 2, false), |accelerator| accelerator.set_seed(7, options)).unwrap();
    assert_eq!(seeds, [7, 8, 9, 10]);
}

/// Collators make masks where there is nothing to hide.
#[rstest]
fn a_mask_of_tokens_alone_is_no_mask(#[values("sp", "cp")] axis: &str) {
    testing::ranks(2, builder(axis, 1, false), |accelerator| {
        let model = accelerator.prepare(llama(Some(5)))?;
        let plain = input(&accelerator, 0, Data::Plain);
        let mask = Some(plain.input_ids.ones_like());
        let masked = CausalLMInput { attention_mask: mask, ..input(&accelerator, 0, Data::Plain) };
        let loss = |batch: &CausalLMInput| {
            accelerator.maybe_context_parallel(batch, &Default::default(), |own| Ok(model.forward(&own)?.loss))
        };
        assert_eq!(loss(&plain)?, loss(&masked)?);
        Ok(())
    })
    .unwrap();
}

/// Saved in the middle of a run by one mesh, loaded by another, which goes on as one rank would.
#[rstest]
fn a_checkpoint_goes_on_in_any_mesh(
    #[values("one", "sp", "cp")] before: &str,
    #[values("one", "sp", "cp", "dp x cp", "fsdp x sp")] after: &str,
) {
    let folder = tempfile::tempdir().unwrap();
    let mesh = |name: &str| match name {
        "one" => (1, one()),
        "dp x cp" => (4, builder("cp", 2, false)),
        "fsdp x sp" => (2, builder("sp", 1, true)),
        axis => (2, builder(axis, 1, false)),
    };
    let wanted = testing::ranks(1, one(), |accelerator| run("gpt2", &accelerator, 4, Data::Plain)).unwrap();
    let part = |accelerator: Accelerator, range: std::ops::Range<i64>| {
        let model = gpt2(4);
        let optimizer = AdamW::new(model.params(), 3e-3)?;
        let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
        let is_second = range.start > 0;
        if is_second {
            accelerator.load_state(folder.path().join("state"))?;
        }
        let losses = steps(&accelerator, &model, &mut optimizer, range, Data::Plain)?;
        if !is_second {
            accelerator.save_state(folder.path().join("state"))?;
        }
        Ok(losses)
    };
    let (num_ranks, builder) = mesh(before);
    testing::ranks(num_ranks, builder, |accelerator| part(accelerator, 0..6)).unwrap();
    let (num_ranks, builder) = mesh(after);
    for own in testing::ranks(num_ranks, builder, |accelerator| part(accelerator, 6..12)).unwrap() {
        assert_close(&own, &wanted[0][6..], 1e-5, "losses after the checkpoint");
    }
}

/// Outside of the closure each rank has whole sequences, with the same results.
#[rstest]
#[case("sp")]
#[case("cp")]
fn whole_sequences_are_computed_as_on_one_rank(#[case] axis: &str) {
    let work = |accelerator: Accelerator| {
        let model = accelerator.prepare(llama(None))?;
        let batch = input(&accelerator, 0, Data::Ragged);
        let logits = accelerator.maybe_context_parallel(&batch, &Default::default(), |own| {
            let output = tch::no_grad(|| model.forward(&own))?;
            accelerator.gather_sequence(&output.logits, 1)
        })?;
        let whole = tch::no_grad(|| model.forward(&batch))?.logits;
        let mut perplexity = accelerate::metrics::Perplexity::default();
        perplexity.add_batch(&accelerator, &logits, batch.labels.as_ref().expect("there are labels"))?;
        assert!((&logits - &whole).abs().max().double_value(&[]) < 1e-5);
        let options = GenerationConfig { max_new_tokens: 6, ..Default::default() };
        let tokens = generate(&*model, &Tensor::from_slice2(&[[3i64, 1, 4], [1, 5, 9]]), None, &options)?;
        assert!(model.max_length().is_none());
        let mut values = Vec::<f64>::try_from(tokens.view([-1]).to_kind(Kind::Double))?;
        values.push(perplexity.compute());
        Ok(values)
    };
    let wanted = testing::ranks(1, Default::default(), work).unwrap();
    for own in testing::ranks(2, builder(axis, 1, false), work).unwrap() {
        assert_close(&own, &wanted[0], 1e-4, "tokens and perplexity");
    }
}

#[test]
fn what_cannot_be_divided_is_named_on_every_rank() {
    are_named_on_every_rank(&[
        ("sp", "3 heads of attention do not divide among 2 ranks", |accelerator| {
            backward(accelerator, &accelerator.prepare(gpt2(3))?, &input(accelerator, 0, Data::Plain)).map(drop)
        }),
        ("sp", "a sequence of 11 tokens does not divide into 2 equal parts", |accelerator| shorter(accelerator, 11)),
        ("cp", "a sequence of 10 tokens does not divide into 4 equal parts", |accelerator| shorter(accelerator, 10)),
        ("cp", "does not compute attention by nn::ScaledDotProductAttention", |accelerator| {
            let store = ParamStore::new(Device::Cpu);
            let config = BertConfig::small(VOCAB, 2, 12);
            accelerator.prepare(BertForSequenceClassification::new(&store.root(), &config)?).map(drop)
        }),
        ("cp", "this rank has 6 of a sequence of 12", |accelerator| {
            let model = accelerator.prepare(llama(None))?;
            let whole = input(accelerator, 0, Data::Plain);
            accelerator.maybe_context_parallel(&whole, &Default::default(), |_| model.forward(&whole).map(drop))
        }),
        ("sp", "have to give it the same input", |accelerator| {
            let model = accelerator.prepare(llama(None))?;
            let other = input(accelerator, accelerator.process_index() as i64, Data::Plain);
            backward(accelerator, &model, &other).map(drop)
        }),
    ]);
}

#[test]
fn what_is_not_for_some_tokens_is_named_on_every_rank() {
    are_named_on_every_rank(&[
        ("cp", "have to give it the same input", |accelerator| {
            // Features, which no tokenizer has made whole numbers.
            let features = Tensor::ones([1, 4, 3], (Kind::Float, Device::Cpu)) * accelerator.process_index() as f64;
            accelerator.maybe_context_parallel(&features, &Default::default(), |_| Ok(()))
        }),
        ("cp", "they are some tokens of each rank", |accelerator| {
            let logits = Tensor::ones([1, 4, 3], (Kind::Float, Device::Cpu)) * accelerator.process_index() as f64;
            accelerator.gather_for_metrics(&logits).map(drop)
        }),
        ("cp", "generate before or after", |accelerator| {
            let model = accelerator.prepare(llama(None))?;
            let _tokens = accelerator.maybe_context_parallel(
                &input(accelerator, 0, Data::Plain),
                &Default::default(),
                |own| {
                    generate(
                        &*model,
                        &own.input_ids,
                        None,
                        &GenerationConfig { max_new_tokens: 1, ..Default::default() },
                    )
                },
            )?;
            Ok(())
        }),
        ("sp", "a model that has not been prepared", |accelerator| {
            let (prepared, other) = (accelerator.prepare(llama(None))?, llama(None));
            accelerator.maybe_context_parallel(&input(accelerator, 0, Data::Plain), &Default::default(), |own| {
                prepared.forward(&own)?;
                other.forward(&own).map(drop)
            })
        }),
        ("cp", "gather_sequence is called outside of maybe_context_parallel", |accelerator| {
            accelerator.gather_sequence(&Tensor::from_slice(&[1i64]), 0).map(drop)
        }),
        ("cp", "they are some tokens of each rank", |accelerator| {
            let model = accelerator.prepare(llama(None))?;
            let plain = input(accelerator, 0, Data::Plain);
            let tokens = accelerator.maybe_context_parallel(&plain, &Default::default(), |own| {
                model.forward(&own)?;
                Ok(own.input_ids)
            })?;
            accelerator.gather_for_metrics(&tokens).map(drop)
        }),
    ]);
}

/// The axis, some words of the error, and what is done.
type Case = (&'static str, &'static str, fn(&Accelerator) -> Result<()>);

fn are_named_on_every_rank(cases: &[Case]) {
    let mut others = Vec::new();
    for (axis, words, case) in cases {
        let texts = testing::ranks(2, builder(axis, 1, false), |accelerator| {
            Ok(case(&accelerator).map_or_else(|error| error.to_string(), |()| "no error".to_owned()))
        });
        others.extend(texts.unwrap().into_iter().filter(|text| !text.contains(words)).map(|text| (words, text)));
    }
    assert!(others.is_empty(), "{others:#?}");
}

fn shorter(accelerator: &Accelerator, length: i64) -> Result<()> {
    let model = accelerator.prepare(gpt2(4))?;
    let mut batch = input(accelerator, 0, Data::Plain);
    batch.input_ids = batch.input_ids.narrow(1, 0, length);
    batch.labels = Some(batch.input_ids.copy());
    backward(accelerator, &model, &batch).map(drop)
}

/// Layers, heads and tokens are divided at the same time; with a head of its own also the logits, of an odd vocabulary.
#[rstest]
fn layers_and_sequences_are_divided_together(
    #[values("sp", "ring")] axis: &str,
    #[values(None, Some("colwise"), Some("colwise_gather_output"))] head: Option<&str>,
    #[values(Data::Plain, Data::Ragged)] data: Data,
) {
    let wanted = testing::ranks(1, one(), |accelerator| run("llama", &accelerator, 4, data)).unwrap();
    let (cp_size, sp_size) = if axis == "sp" { (None, Some(2)) } else { (Some(2), None) };
    let axes = ParallelismConfig {
        cp_size,
        sp_size,
        tp_size: Some(2),
        cp_comm_strategy: Some("alltoall".into()),
        ..Default::default()
    };
    let plan = head.map(|head| {
        json!({ "layers.*.mlp.up_proj": "colwise", "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise", "lm_head": head })
    });
    let plugin = TorchTensorParallelPlugin {
        tensor_parallel_degree: None,
        parallelize_plan: plan.and_then(|plan| plan.as_object().cloned()),
        ..Default::default()
    };
    let builder = one().parallelism_config(axes).torch_tp_plugin(plugin);
    let found = testing::ranks(4, builder, |accelerator| run("llama", &accelerator, 4, data));
    for own in found.unwrap() {
        assert_close(&own, &wanted[0], 1e-5, "losses");
    }
}
