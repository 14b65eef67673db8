//! Computes what models out of folders give: our half of `cargo xtask parity models`.
//!
//! Reads each folder that `parity/models/run.py` has written, and writes `ours.json` into it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use accelerate::tch::{self, Kind, Tensor};
use accelerate_models::bert::{Batch, BertForSequenceClassification};
use accelerate_models::gpt2::GPT2LMHeadModel;
use accelerate_models::llama::LlamaForCausalLM;
use accelerate_models::resnet::ResNetForImageClassification;
use accelerate_models::vit::ViTForImageClassification;
use accelerate_models::{CausalLM, CausalLMInput, GenerationConfig, LoadOptions, PretrainedModel, generate};
use anyhow::{Context, Result, bail};
use clap::Parser;
use serde::{Deserialize, Serialize};

/// Compute what models out of folders give.
#[derive(Debug, Parser)]
struct Arguments {
    /// The folders of the cases
    cases: Vec<PathBuf>,
}

#[derive(Debug, Deserialize)]
struct Numbers {
    shape: Vec<i64>,
    values: Vec<f64>,
}

#[derive(Debug, Default, Serialize)]
struct Outcome {
    logits: Vec<f64>,
    loss: Option<f64>,
    greedy: Option<Vec<Vec<i64>>>,
    sampled: Option<Vec<Vec<i64>>>,
}

#[derive(Debug, Deserialize)]
struct ModelType {
    model_type: String,
}

type Inputs = BTreeMap<String, Numbers>;

// The settings stand in `parity/models/run.py` as well.
const MAX_NEW_TOKENS: usize = 8;
const SEED: i64 = 5;

fn main() -> Result<()> {
    for folder in Arguments::parse().cases {
        let outcome = compute(&folder).with_context(|| format!("the case {}", folder.display()))?;
        fs::write(folder.join("ours.json"), serde_json::to_string(&outcome)?)?;
    }
    Ok(())
}

fn compute(folder: &Path) -> Result<Outcome> {
    let inputs: Inputs = serde_json::from_str(&fs::read_to_string(folder.join("inputs.json"))?)?;
    let ModelType { model_type } = serde_json::from_str(&fs::read_to_string(folder.join("config.json"))?)?;
    match model_type.as_str() {
        "bert" => bert(&loaded(folder)?, &inputs),
        "gpt2" => causal_lm(&loaded::<GPT2LMHeadModel>(folder)?, &inputs),
        "llama" | "mistral" | "qwen2" => causal_lm(&loaded::<LlamaForCausalLM>(folder)?, &inputs),
        "vit" => Ok(of_logits(&loaded::<ViTForImageClassification>(folder)?.logits(&image(&inputs)?)?)?),
        "resnet" => Ok(of_logits(&loaded::<ResNetForImageClassification>(folder)?.logits(&image(&inputs)?)?)?),
        other => bail!("no model is compared whose type is {other:?}"),
    }
}

fn loaded<M: PretrainedModel>(folder: &Path) -> Result<M> {
    let (model, report) = M::from_pretrained(folder, &LoadOptions::default())?;
    if !(report.missing_keys.is_empty() && report.unexpected_keys.is_empty()) {
        bail!("Transformers' own file does not fit: {report:?}");
    }
    model.params().eval();
    Ok(model)
}

fn tensor(inputs: &Inputs, name: &str) -> Result<Option<Tensor>> {
    let Some(Numbers { shape, values }) = inputs.get(name) else { return Ok(None) };
    Ok(Some(Tensor::f_from_slice(values)?.f_view(&shape[..])?))
}

fn tokens(inputs: &Inputs, name: &str) -> Result<Option<Tensor>> {
    Ok(tensor(inputs, name)?.map(|tensor| tensor.f_to_kind(Kind::Int64)).transpose()?)
}

fn image(inputs: &Inputs) -> Result<Tensor> {
    Ok(tensor(inputs, "pixel_values")?.context("no pixel_values")?.f_to_kind(Kind::Float)?)
}

fn of_logits(logits: &Tensor) -> Result<Outcome> {
    let logits = Vec::<f64>::try_from(&logits.f_detach()?.f_to_kind(Kind::Double)?.f_reshape([-1])?)?;
    Ok(Outcome { logits, ..Default::default() })
}

fn bert(model: &BertForSequenceClassification, inputs: &Inputs) -> Result<Outcome> {
    let get = |name: &str| tokens(inputs, name)?.with_context(|| format!("no {name}"));
    let input_ids = get("input_ids")?;
    let labels = input_ids.f_zeros_like()?.f_select(1, 0)?;
    let (attention_mask, token_type_ids) = (get("attention_mask")?, get("token_type_ids")?);
    of_logits(&model.logits(&Batch { input_ids, attention_mask, token_type_ids, labels })?)
}

/// The tokens, but for those that fill up a row, and those that would be told from one that does.
fn labels_of(input_ids: &Tensor, attention_mask: Option<&Tensor>) -> Result<Tensor> {
    let Some(mask) = attention_mask else { return Ok(input_ids.shallow_clone()) };
    let before = Tensor::f_cat(&[mask.f_narrow(1, 0, 1)?, mask.f_narrow(1, 0, mask.size2()?.1 - 1)?], 1)?;
    let is_learned = mask.f_mul(&before)?.f_to_kind(Kind::Bool)?;
    Ok(input_ids.f_where_self(&is_learned, &Tensor::from(-100i64))?)
}

fn causal_lm<M: CausalLM>(model: &M, inputs: &Inputs) -> Result<Outcome> {
    let input_ids = tokens(inputs, "input_ids")?.context("no input_ids")?;
    let attention_mask = tokens(inputs, "attention_mask")?;
    let labels = Some(labels_of(&input_ids, attention_mask.as_ref())?);
    let input = CausalLMInput { input_ids, attention_mask, labels };
    let output = model.forward(&input)?;
    let mask = input.attention_mask.as_ref();
    let logits = match mask {
        None => output.logits,
        Some(mask) => output.logits.f_masked_select(&mask.f_to_kind(Kind::Bool)?.f_unsqueeze(-1)?)?,
    };
    let mut outcome = of_logits(&logits)?;
    outcome.loss = output.loss.map(|loss| loss.f_double_value(&[])).transpose()?;
    let length = input.input_ids.size2()?.1;
    let ends_with_tokens =
        |mask: &Tensor| Ok::<_, anyhow::Error>(mask.f_select(1, -1)?.f_min()?.f_int64_value(&[])? == 1);
    if mask.map(ends_with_tokens).transpose()?.unwrap_or(true) {
        let follow = |options: GenerationConfig| -> Result<Vec<Vec<i64>>> {
            let texts = generate(model, &input.input_ids, mask, &options)?;
            let rows = texts.f_narrow(1, length, texts.size2()?.1 - length)?;
            rows.f_unbind(0)?.iter().map(|row| Ok(Vec::try_from(row)?)).collect()
        };
        let greedy = GenerationConfig { max_new_tokens: MAX_NEW_TOKENS, ..Default::default() };
        let sampling = GenerationConfig { do_sample: true, temperature: 0.8, top_k: 20, top_p: 0.9, ..greedy.clone() };
        outcome.greedy = Some(follow(greedy)?);
        tch::manual_seed(SEED);
        outcome.sampled = Some(follow(sampling)?);
    }
    Ok(outcome)
}
