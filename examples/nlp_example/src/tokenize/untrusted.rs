//! What a tokenizer of somebody else has to fulfil: the library believes its files, and panics where they are wrong.

use accelerate_models::files::shortened;
use serde_json::Value;
use std::panic::{AssertUnwindSafe, catch_unwind};
use tokenizers::{ModelWrapper, Tokenizer};

/// None of them makes a text longer than by a constant factor, however often it follows another. Others could double it with
/// each step.
const NORMALIZERS: [&str; 9] =
    ["BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "StripAccents", "Strip", "Nmt"];
const PRE_TOKENIZERS: [&str; 7] = [
    "BertPreTokenizer",
    "Whitespace",
    "WhitespaceSplit",
    "Punctuation",
    "Digits",
    "CharDelimiterSplit",
    "UnicodeScripts",
];
const MOST_STEPS: usize = 32;

/// Letters of several scripts, digits, signs, and a word longer than any.
const TRIAL: &str = "A good film, isn't it? 12 \u{e9}t\u{e9}s \u{5091} \u{1f600} \u{10ffff}";
const LONG_WORD_LETTERS: usize = 300;

/// Can this tokenizer be used for single texts?
///
/// # Errors
/// What is wrong with it.
pub(super) fn check(tokenizer: &Tokenizer) -> Result<(), String> {
    if !matches!(tokenizer.get_model(), ModelWrapper::WordPiece(_)) {
        return Err("its model is of another type; wanted WordPiece, which BERT has".to_owned());
    }
    let value = |part: serde_json::Result<Value>| part.map_err(|error| error.to_string());
    let normalizer = value(serde_json::to_value(tokenizer.get_normalizer()))?;
    check_steps("normalizer", &steps(&normalizer, "normalizers"), &NORMALIZERS)?;
    let pre_tokenizer = value(serde_json::to_value(tokenizer.get_pre_tokenizer()))?;
    check_steps("pre_tokenizer", &steps(&pre_tokenizer, "pretokenizers"), &PRE_TOKENIZERS)?;
    let vocabulary = tokenizer.get_vocab(true);
    let num_tokens = vocabulary.values().max().map_or(0, |&id| u64::from(id) + 1);
    if let Some(processor) = tokenizer.get_post_processor() {
        check_processor(&value(serde_json::to_value(processor))?, num_tokens)?;
    }
    let text = format!("{TRIAL} {}", "a".repeat(LONG_WORD_LETTERS));
    match catch_unwind(AssertUnwindSafe(|| tokenizer.encode_fast(text, true))) {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(format!("it fails on a text: {}", shortened(&error.to_string()))),
        Err(_) => Err("it fails on a text, because its parts contradict each other".to_owned()),
    }
}

/// The types of all steps, those in sequences included.
fn steps(part: &Value, list: &str) -> Vec<String> {
    match part["type"].as_str() {
        Some("Sequence") => part[list].as_array().into_iter().flatten().flat_map(|step| steps(step, list)).collect(),
        Some(name) => vec![name.to_owned()],
        None => Vec::new(),
    }
}

fn check_steps(part: &str, steps: &[String], known: &[&str]) -> Result<(), String> {
    if steps.len() > MOST_STEPS {
        return Err(format!("its {part} has {} steps; wanted at most {MOST_STEPS}", steps.len()));
    }
    match steps.iter().find(|step| !known.contains(&step.as_str())) {
        Some(step) => Err(format!("its {part} has a step {}; wanted only {}", shown(step), known.join(", "))),
        None => Ok(()),
    }
}

/// The library writes processors as it reads them: each with its type, those of a sequence in a list.
fn check_processor(processor: &Value, num_tokens: u64) -> Result<(), String> {
    for inner in processor["processors"].as_array().into_iter().flatten() {
        check_processor(inner, num_tokens)?;
    }
    for key in ["cls", "sep"] {
        if let Some(id) = processor[key][1].as_u64() {
            check_id(processor[key][0].as_str().unwrap_or(key), id, num_tokens)?;
        }
    }
    match processor["type"].as_str() {
        Some("TemplateProcessing") => check_template(processor, num_tokens),
        _ => Ok(()),
    }
}

fn check_template(template: &Value, num_tokens: u64) -> Result<(), String> {
    let special_tokens = &template["special_tokens"];
    let pieces = |which: &str| template[which].as_array().cloned().unwrap_or_default();
    for piece in pieces("single").iter().chain(&pieces("pair")) {
        let Some(name) = piece["SpecialToken"]["id"].as_str() else { continue };
        if special_tokens.get(name).is_none() {
            return Err(format!("its template names the token {}, which is not among its special_tokens", shown(name)));
        }
    }
    let single = pieces("single");
    let sequences: Vec<&str> = single.iter().filter_map(|piece| piece["Sequence"]["id"].as_str()).collect();
    if sequences != ["A"] {
        let found = shown(&sequences.join(" "));
        return Err(format!("the template `single` has the sequences {found}; wanted A alone, which is the text"));
    }
    for (name, token) in special_tokens.as_object().into_iter().flatten() {
        let list = |key: &str| token[key].as_array().cloned().unwrap_or_default();
        let (ids, texts) = (list("ids"), list("tokens"));
        if ids.len() != texts.len() {
            let (ids, texts) = (ids.len(), texts.len());
            return Err(format!("its special token {} has {ids} ids and {texts} tokens; wanted as many", shown(name)));
        }
        for id in ids.iter().filter_map(Value::as_u64) {
            check_id(name, id, num_tokens)?;
        }
    }
    Ok(())
}

fn check_id(name: &str, id: u64, num_tokens: u64) -> Result<(), String> {
    if id < num_tokens {
        return Ok(());
    }
    Err(format!("its special token {} has the id {id}, and the vocabulary has ids below {num_tokens}", shown(name)))
}

fn shown(name: &str) -> String {
    let mut short: String = name.chars().take(60).collect();
    if short.len() < name.len() {
        short.push_str("...");
    }
    format!("{short:?}")
}
