//! The model: names, shapes, what padding may change, and weights from folders of any age.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{Module, ParamStore};
use accelerate::tch::{self, Device, Kind, Tensor};
use accelerate_models::PretrainedConfig;
use accelerate_models::bert::{Batch, BertConfig, BertForSequenceClassification, has_classifier, load_weights};
use rstest::rstest;
use std::path::Path;
use tempfile::TempDir;

fn config() -> BertConfig {
    BertConfig { hidden_size: 8, intermediate_size: 12, ..BertConfig::small(20, 3, 10) }
}

fn model(config: &BertConfig, seed: i64) -> (ParamStore, BertForSequenceClassification) {
    tch::manual_seed(seed);
    let store = ParamStore::new(Device::Cpu);
    let model = BertForSequenceClassification::new(&store.root(), config).unwrap();
    store.eval();
    (store, model)
}

fn batch(texts: &[&[i64]]) -> Batch {
    let length = texts.iter().map(|ids| ids.len()).max().unwrap();
    let matrix = |row: &dyn Fn(&[i64]) -> Vec<i64>| {
        let mut flat = Vec::new();
        for ids in texts {
            flat.extend(row(ids));
            flat.resize(flat.len().next_multiple_of(length), 0);
        }
        Tensor::from_slice(&flat).view([texts.len() as i64, length as i64])
    };
    Batch {
        input_ids: matrix(&|ids| ids.to_vec()),
        attention_mask: matrix(&|ids| vec![1; ids.len()]),
        token_type_ids: matrix(&|ids| vec![0; ids.len()]),
        labels: Tensor::from_slice(&vec![2i64; texts.len()]),
    }
}

fn largest_difference(a: &Tensor, b: &Tensor) -> f64 {
    (a - b).abs().max().double_value(&[])
}

/// Keys of `transformers.BertForSequenceClassification(config).state_dict()`, in its order.
fn keys_of_transformers(num_layers: usize) -> Vec<String> {
    let mut keys = Vec::new();
    let mut both = |module: String| {
        keys.push(format!("{module}.weight"));
        keys.push(format!("{module}.bias"));
    };
    both("bert.embeddings.LayerNorm".to_owned());
    for layer in 0..num_layers {
        for module in [
            "attention.self.query",
            "attention.self.key",
            "attention.self.value",
            "attention.output.dense",
            "attention.output.LayerNorm",
            "intermediate.dense",
            "output.dense",
            "output.LayerNorm",
        ] {
            both(format!("bert.encoder.layer.{layer}.{module}"));
        }
    }
    both("bert.pooler.dense".to_owned());
    both("classifier".to_owned());
    let tables = ["word", "position", "token_type"];
    keys.extend(tables.map(|table| format!("bert.embeddings.{table}_embeddings.weight")));
    keys.sort();
    keys
}

#[test]
fn names_are_those_of_transformers() {
    let (store, _) = model(&config(), 0);
    let mut names: Vec<String> = store.named_parameters().into_iter().map(|(name, _)| name).collect();
    names.sort();
    assert_eq!(names, keys_of_transformers(2));
    let shape = |name: &str| store.get(name).unwrap().shape();
    assert_eq!(shape("bert.embeddings.position_embeddings.weight"), [10, 8]);
    assert_eq!(shape("bert.encoder.layer.1.intermediate.dense.weight"), [12, 8]);
    assert_eq!(shape("classifier.weight"), [3, 8]);
}

#[test]
fn new_weights_are_normal_and_the_padding_row_is_zero() {
    let config = BertConfig::small(500, 2, 64);
    let (store, _) = model(&config, 0);
    let get = |name: &str| store.get(name).unwrap().get().unwrap();
    let words = get("bert.embeddings.word_embeddings.weight");
    assert_eq!(words.get(0).abs().max().double_value(&[]), 0.0);
    let std = words.std(true).double_value(&[]);
    assert!((std - 0.02).abs() < 0.001, "{std}");
    assert_eq!(get("classifier.bias").abs().max().double_value(&[]), 0.0);
    assert_eq!(get("bert.embeddings.LayerNorm.weight").min().double_value(&[]), 1.0);
}

#[test]
fn padding_changes_nothing() {
    let (_, model) = model(&config(), 1);
    let alone = model.logits(&batch(&[&[2, 7, 3]])).unwrap();
    let padded = model.logits(&batch(&[&[2, 7, 3], &[2, 9, 8, 7, 6, 3]])).unwrap();
    assert!(largest_difference(&alone, &padded.narrow(0, 0, 1)) < 1e-6);
    let other = model.logits(&batch(&[&[2, 8, 3]])).unwrap();
    assert!(largest_difference(&alone, &other) > 1e-6, "the words make no difference");
}

#[test]
fn word_order_matters_and_dropout_only_in_training() {
    let (store, model) = model(&config(), 1);
    let (forth, back) = (batch(&[&[2, 7, 8, 3]]), batch(&[&[2, 8, 7, 3]]));
    let logits = |batch| model.logits(batch).unwrap();
    assert!(largest_difference(&logits(&forth), &logits(&back)) > 1e-7);
    assert_eq!(logits(&forth), logits(&forth));
    store.train();
    assert_ne!(logits(&forth), logits(&forth));
}

#[test]
fn every_parameter_learns() {
    let (store, model) = model(&config(), 1);
    let output = model.forward(&batch(&[&[2, 7, 8, 3], &[2, 9, 3]])).unwrap();
    assert_eq!(output.logits.size(), [2, 3]);
    let log_probabilities = output.logits.log_softmax(-1, Kind::Float);
    let wanted = -log_probabilities.select(1, 2).mean(Kind::Float);
    assert!(largest_difference(&output.loss, &wanted) < 1e-6, "the loss is the mean cross-entropy");
    output.loss.backward();
    for (name, param) in store.named_parameters() {
        // A key's bias moves all scores of a query alike, which softmax does not see.
        if name.ends_with("self.key.bias") {
            continue;
        }
        let grad = param.grad().unwrap_or_else(|| panic!("{name} has no gradient"));
        assert!(grad.abs().max().double_value(&[]) > 0.0, "{name} has no gradient");
    }
}

/// Writes a model's weights under other names.
fn save_as(store: &ParamStore, folder: &Path, rename: impl Fn(&str) -> Option<String>) {
    let tensors: Vec<(String, Tensor)> = store
        .named_parameters()
        .into_iter()
        .filter_map(|(name, param)| Some((rename(&name)?, param.get().unwrap().detach())))
        .collect();
    Tensor::write_safetensors(&tensors, folder.join("model.safetensors")).unwrap();
}

fn old_norms(name: &str) -> String {
    name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
}

#[rstest]
#[case::as_saved_today(|name: &str| Some(name.to_owned()), &[])]
#[case::old_norms(|name: &str| Some(old_norms(name)), &[])]
#[case::pretrained(|name: &str| (!name.starts_with("classifier")).then(|| name.to_owned()), &["classifier.weight", "classifier.bias"])]
#[case::bare_model(|name: &str| name.strip_prefix("bert.").map(old_norms), &["classifier.weight", "classifier.bias"])]
#[case::without_pooler(
    |name: &str| (!name.starts_with("classifier") && !name.contains("pooler")).then(|| name.to_owned()),
    &["bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"]
)]
fn folders_of_any_age_load_by_name(#[case] rename: fn(&str) -> Option<String>, #[case] new: &[&str]) {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("config.json"), config().to_json().unwrap()).unwrap();
    let (saved, _) = model(&config(), 1);
    save_as(&saved, folder.path(), rename);

    let read = BertConfig::from_folder(folder.path()).unwrap();
    assert_eq!(read, config());
    let (loaded, _) = model(&read, 2);
    assert_eq!(load_weights(&loaded, folder.path()).unwrap(), new);
    assert_eq!(has_classifier(folder.path()).unwrap(), new.is_empty());
    for (name, param) in saved.named_parameters() {
        let is_equal = param.get().unwrap() == loaded.get(&name).unwrap().get().unwrap();
        // New biases are zero in both models.
        assert!(is_equal || new.contains(&name.as_str()), "{name} was not loaded");
    }
}

#[test]
fn several_files_with_an_index_load_too() {
    let folder = TempDir::new().unwrap();
    let (saved, saved_model) = model(&config(), 1);
    let tensors: Vec<(String, Tensor)> =
        saved.named_parameters().into_iter().map(|(name, param)| (name, param.get().unwrap().detach())).collect();
    let (first, second) = tensors.split_at(10);
    let mut weight_map = serde_json::Map::new();
    for (file, part) in [("model-00001-of-00002.safetensors", first), ("model-00002-of-00002.safetensors", second)] {
        Tensor::write_safetensors(part, folder.path().join(file)).unwrap();
        weight_map.extend(part.iter().map(|(name, _)| (name.clone(), file.into())));
    }
    let index = serde_json::json!({ "metadata": {}, "weight_map": weight_map });
    std::fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();

    let (loaded, loaded_model) = model(&config(), 2);
    load_weights(&loaded, folder.path()).unwrap();
    let batch = batch(&[&[2, 7, 3]]);
    assert_eq!(saved_model.logits(&batch).unwrap(), loaded_model.logits(&batch).unwrap());
}

#[test]
fn all_weights_that_do_not_fit_are_listed() {
    let folder = TempDir::new().unwrap();
    let (saved, _) = model(&BertConfig { intermediate_size: 16, ..config() }, 1);
    save_as(&saved, folder.path(), |name| match name {
        "bert.embeddings.LayerNorm.bias" => None,
        "classifier.bias" => None,
        "bert.pooler.dense.bias" => Some("bert.pooler.sparse.bias".to_owned()),
        name => Some(name.to_owned()),
    });
    let (loaded, _) = model(&config(), 2);
    let before = loaded.get("classifier.weight").unwrap().get().unwrap().copy();
    let error = load_weights(&loaded, folder.path()).unwrap_err();
    assert!(error.is_weights(), "{error}");
    let message = error.to_string();
    for part in [
        "3 missing",
        "bert.embeddings.LayerNorm.bias",
        "classifier.bias",
        "bert.pooler.dense.bias",
        "1 unexpected: bert.pooler.sparse.bias",
        "bert.encoder.layer.0.intermediate.dense.weight is [16, 8] but the model has [12, 8]",
        "bert.encoder.layer.1.output.dense.weight is [8, 16] but the model has [8, 12]",
        &folder.path().display().to_string(),
    ] {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
    assert_eq!(before, loaded.get("classifier.weight").unwrap().get().unwrap(), "nothing may change before the error");
}

#[test]
fn a_folder_without_weights_is_named() {
    let folder = TempDir::new().unwrap();
    let (store, _) = model(&config(), 1);
    let message = load_weights(&store, folder.path()).unwrap_err().to_string();
    assert!(
        message.contains("there is neither model.safetensors nor")
            && message.contains(&folder.path().display().to_string()),
        "{message}"
    );
}

#[rstest]
#[case::other_model(r#"{"model_type": "roberta"}"#, r#"model_type is "roberta"; wanted "bert""#)]
#[case::heads(
    r#"{"hidden_size": 10, "num_attention_heads": 4}"#,
    "num_attention_heads is 4; wanted a divisor of hidden_size, which is 10"
)]
#[case::positions(r#"{"position_embedding_type": "relative_key"}"#, r#"position_embedding_type is "relative_key""#)]
#[case::nothing_wide(r#"{"hidden_size": 0}"#, "hidden_size is 0; wanted a number from 1")]
#[case::padding(r#"{"vocab_size": 10, "pad_token_id": 10}"#, "pad_token_id is 10; wanted a token from 0 to 9")]
#[case::labels(r#"{"id2label": {"0": "no", "2": "yes"}}"#, "id2label is [0, 2]; wanted names for 0, 1, 2")]
#[case::activation(r#"{"hidden_act": "mish"}"#, "does not describe a BERT model: hidden_act: unknown variant `mish`")]
#[case::not_json("hidden_size: 10", "does not describe a BERT model")]
fn configurations_that_cannot_be_honoured_are_refused(#[case] json: &str, #[case] message: &str) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("config.json");
    std::fs::write(&path, json).unwrap();
    let error = BertConfig::from_folder(folder.path()).unwrap_err().to_string();
    assert!(error.contains(message) && error.contains(&path.display().to_string()), "{error}");
}

#[test]
fn configurations_of_transformers_are_read_and_written() {
    let json = r#"{"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 16, "num_attention_heads": 2,
        "hidden_act": "gelu_new", "id2label": {"0": "negative", "1": "neutral", "2": "positive"},
        "label2id": {"negative": 0, "neutral": 1, "positive": 2}, "classifier_dropout": null, "use_cache": true}"#;
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("config.json"), json).unwrap();
    let config = BertConfig::from_folder(folder.path()).unwrap();
    assert_eq!((config.num_labels(), config.hidden_size, config.vocab_size), (3, 16, 30522));
    std::fs::write(folder.path().join("config.json"), config.to_json().unwrap()).unwrap();
    assert_eq!(BertConfig::from_folder(folder.path()).unwrap(), config);
    let written = std::fs::read_to_string(folder.path().join("config.json")).unwrap();
    for part in [
        r#""model_type": "bert""#,
        r#""BertForSequenceClassification""#,
        r#""hidden_act": "gelu_new""#,
        r#""positive": 2"#,
    ] {
        assert!(written.contains(part), "{part} is not in {written}");
    }
}
