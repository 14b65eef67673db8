//! Names, logits, losses and greedy tokens of small models equal those of Transformers (`parity/models/generate.py`).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{Module, Param, ParamStore};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate_models::bert::{Batch, BertForSequenceClassification};
use accelerate_models::gpt2::GPT2LMHeadModel;
use accelerate_models::llama::LlamaForCausalLM;
use accelerate_models::resnet::ResNetForImageClassification;
use accelerate_models::vit::ViTForImageClassification;
use accelerate_models::{CausalLM, CausalLMInput, GenerationConfig, PretrainedConfig, PretrainedModel, generate};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Kernels of matrix products differ between CPUs in the last bits.
const BOUND: f64 = 1e-5;

fn cases() -> Value {
    serde_json::from_str(include_str!("../../../parity/models/logits.json")).unwrap()
}

fn formula(shape: &[i64], phase: f64) -> Tensor {
    let count: i64 = shape.iter().product();
    let numbers = Tensor::arange(count, (Kind::Double, Device::Cpu)) * 0.7 + phase;
    numbers.sin().to_kind(Kind::Float).view(shape)
}

/// Fills a model as the script does, and compares names and shapes on the way.
fn fill(name: &str, store: &ParamStore, wanted: &Value) {
    let buffers = store.buffers().into_iter().filter(Param::is_persistent);
    let params: BTreeMap<String, Param> =
        store.parameters().into_iter().chain(buffers).map(|param| (param.name().to_owned(), param)).collect();
    let shapes: BTreeMap<&str, Vec<i64>> = params.iter().map(|(name, param)| (name.as_str(), param.shape())).collect();
    assert_eq!(serde_json::to_value(shapes).unwrap(), *wanted, "{name}: names and shapes");
    for (phase, (name, param)) in params.iter().enumerate() {
        if param.kind() != Kind::Float {
            continue;
        }
        let shape = param.shape();
        let values = formula(&shape, phase as f64) * if shape.len() == 4 { 0.05 } else { 0.25 };
        let is_scale = name.ends_with("weight") && shape.len() == 1;
        let values = if is_scale || name.ends_with("running_var") { values + 1.0 } else { values };
        param.copy_(&values).unwrap();
    }
}

fn build<M: PretrainedModel>(name: &str, case: &Value) -> M {
    let config = M::Config::from_json(&case["config"].to_string(), Path::new("config.json")).unwrap();
    let written = config.to_json().unwrap();
    let store = ParamStore::new(Device::Cpu);
    let model = M::from_config(&store.root(), &config).unwrap();
    let read = M::Config::from_json(&written, Path::new("written.json")).unwrap();
    assert_eq!(read.to_json().unwrap(), written, "{name}: the configuration that was written");
    store.eval();
    fill(name, &store, &case["names"]);
    model
}

fn tensor(case: &Value, key: &str) -> Option<Tensor> {
    let rows: Vec<Vec<i64>> = serde_json::from_value(case["inputs"].get(key)?.clone()).unwrap();
    Some(Tensor::from_slice2(&rows))
}

fn check_close(what: &str, found: &Tensor, wanted: &Value) {
    let shape: Vec<i64> = serde_json::from_value(wanted["shape"].clone()).unwrap();
    let values: Vec<f64> = serde_json::from_value(wanted["values"].clone()).unwrap();
    assert_eq!(found.size(), shape, "{what}");
    let difference = (found.to_kind(Kind::Double) - Tensor::from_slice(&values).view(&shape[..])).abs().max();
    let difference = difference.double_value(&[]);
    assert!(difference < BOUND, "{what}: differs by {difference:e}");
}

fn check_bert(name: &str, case: &Value) {
    let model: BertForSequenceClassification = build(name, case);
    let input_ids = tensor(case, "input_ids").unwrap();
    let (attention_mask, token_type_ids) =
        ["attention_mask", "token_type_ids"].map(|key| tensor(case, key).unwrap()).into();
    let labels = Tensor::zeros([2], (Kind::Int64, Device::Cpu));
    let batch = Batch { input_ids, attention_mask, token_type_ids, labels };
    check_close(name, &model.forward(&batch).unwrap().logits, &case["logits"]);
}

fn check_causal_lm<M: PretrainedModel + CausalLM>(name: &str, case: &Value) {
    let model: M = build(name, case);
    let input_ids = tensor(case, "input_ids").unwrap();
    let attention_mask = tensor(case, "attention_mask");
    let labels = match &attention_mask {
        None => input_ids.copy(),
        // Neither what fills up a row, nor what would be told from it.
        Some(mask) => {
            let (_, length) = mask.size2().unwrap();
            let before = Tensor::cat(&[mask.narrow(1, 0, 1), mask.narrow(1, 0, length - 1)], 1);
            input_ids.masked_fill(&(mask * before).eq(0), -100)
        }
    };
    let _ = labels.get(0).get(3).fill_(-100);
    let input = CausalLMInput { input_ids, attention_mask, labels: Some(labels) };
    let output = model.forward(&input).unwrap();
    let loss = output.loss.unwrap().double_value(&[]);
    assert!((loss - case["loss"].as_f64().unwrap()).abs() < BOUND, "{name}: loss {loss}");
    // What fills up a row says nothing that anybody would look at.
    if case["inputs"].get("attention_mask").is_none() {
        check_close(name, &output.logits, &case["logits"]);
    } else {
        let mask = input.attention_mask.as_ref().unwrap().to_kind(Kind::Bool).unsqueeze(-1);
        let shape: Vec<i64> = output.logits.size();
        let values: Vec<f64> = serde_json::from_value(case["logits"]["values"].clone()).unwrap();
        let wanted = Tensor::from_slice(&values).view(&shape[..]);
        let difference =
            (output.logits.to_kind(Kind::Double) - wanted).abs().masked_select(&mask).max().double_value(&[]);
        assert!(difference < BOUND, "{name}: differs by {difference:e}");
    }
    if let Some(greedy) = case.get("greedy") {
        let greedy: Vec<Vec<i64>> = serde_json::from_value(greedy.clone()).unwrap();
        let options = GenerationConfig { max_new_tokens: 8, ..Default::default() };
        let texts = generate(&model, &input.input_ids, input.attention_mask.as_ref(), &options).unwrap();
        let length = input.input_ids.size()[1];
        assert_eq!(texts.narrow(1, length, 8), Tensor::from_slice2(&greedy), "{name}: greedy tokens");
    }
}

fn check_images<M: PretrainedModel>(name: &str, case: &Value, logits: impl Fn(&M, &Tensor) -> Tensor) {
    let model: M = build(name, case);
    let shape: Vec<i64> = serde_json::from_value(case["image"].clone()).unwrap();
    check_close(name, &logits(&model, &formula(&shape, 0.5)), &case["logits"]);
}

/// All cases whose names begin so, each of which there is.
fn of_model(model: &str, check: impl Fn(&str, &Value)) {
    let cases = cases();
    let all = cases["cases"].as_object().unwrap();
    let chosen: Vec<_> = all.iter().filter(|(name, _)| name.split('_').next() == Some(model)).collect();
    assert!(chosen.len() >= 2, "{model}: {} cases", chosen.len());
    for (name, case) in chosen {
        check(name, case);
    }
}

#[test]
fn bert_computes_as_in_transformers() {
    of_model("bert", check_bert);
}

#[test]
fn gpt2_computes_as_in_transformers() {
    of_model("gpt2", check_causal_lm::<GPT2LMHeadModel>);
}

#[test]
fn llama_computes_as_in_transformers() {
    of_model("llama", check_causal_lm::<LlamaForCausalLM>);
}

#[test]
fn mistral_computes_as_in_transformers() {
    of_model("mistral", check_causal_lm::<LlamaForCausalLM>);
}

#[test]
fn qwen2_computes_as_in_transformers() {
    of_model("qwen2", check_causal_lm::<LlamaForCausalLM>);
}

#[test]
fn vit_computes_as_in_transformers() {
    of_model("vit", |name, case| {
        check_images::<ViTForImageClassification>(name, case, |model, images| model.logits(images).unwrap());
    });
}

#[test]
fn resnet_computes_as_in_transformers() {
    of_model("resnet", |name, case| {
        check_images::<ResNetForImageClassification>(name, case, |model, images| model.logits(images).unwrap());
    });
}

#[test]
fn the_numbers_are_those_of_the_versions_that_are_compared_with() {
    assert_eq!((cases()["torch"].as_str(), cases()["transformers"].as_str()), (Some("2.11.0"), Some("5.23.0")));
}
