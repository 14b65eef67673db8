//! Files that lie, and adapters of other models: typed errors, and a model that is as it was.

use super::files::saved_by_peft;
use super::model::Model;
use super::vectors::output;
use accelerate::checkpoint::{load_file, save_file};
use accelerate::lora::{LoadAdapterOptions, PeftModel, get_peft_model};
use accelerate::nn::{Linear, ParamStore, StateDict};
use accelerate::tch::{Device, Kind, Tensor};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// The adapter "list" with changes.
fn adapter(folder: &Path, config: impl FnOnce(&mut Value), tensors: impl FnOnce(Vec<(String, Tensor)>) -> StateDict) {
    let theirs = saved_by_peft("list");
    let text = fs::read_to_string(theirs.join("adapter_config.json")).unwrap();
    let mut file: Value = serde_json::from_str(&text).unwrap();
    config(&mut file);
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("adapter_config.json"), file.to_string()).unwrap();
    let read = load_file(theirs.join("adapter_model.safetensors")).unwrap();
    save_file(&tensors(read.into_iter().collect()), folder.join("adapter_model.safetensors")).unwrap();
}

/// Loading fails so, and the model is as it was: with no adapter, and with one that is to be overwritten.
fn check(folder: &Path, wanted: &str) {
    let model = Model::new(Device::Cpu).unwrap();
    let state = |store: &ParamStore| -> Vec<(String, bool)> {
        store.parameters().iter().map(|param| (param.name().to_owned(), param.requires_grad())).collect()
    };
    let before = (output(&model), state(&model.store));
    let error = PeftModel::from_pretrained(&model.store, folder, Default::default()).unwrap_err();
    assert!(error.is_weights() && error.to_string().contains(wanted), "wanted {wanted}: {error}");
    assert_eq!((output(&model), state(&model.store)), before, "{wanted}");

    let peft = get_peft_model(&model.store, super::model::case("list")).unwrap();
    let before = (output(&model), state(&model.store));
    for name in ["default", "second"] {
        let error = peft.load_adapter(folder, name, LoadAdapterOptions::default()).unwrap_err();
        assert!(error.is_weights() && error.to_string().contains(wanted), "wanted {wanted}: {error}");
        assert_eq!((output(&model), state(&model.store)), before, "{wanted}");
        assert_eq!(peft.adapters(), ["default"]);
    }
}

#[test]
fn configurations_are_not_believed() {
    let folder = tempfile::tempdir().unwrap();
    let rows: Vec<(&str, Value, &str)> = vec![
        ("peft_type", json!("ADALORA"), "type \"ADALORA\""),
        ("peft_type", Value::Null, "of type null"),
        ("r", json!(-1), "`r` is -1, and a whole number is wanted"),
        ("r", json!(0), "r is 0"),
        ("r", json!(1_000_000_000_000_u64), "the rank of an adapter goes from 1"),
        ("r", json!(3), "has shape [2, 10], not [3, 10]"),
        ("r", json!("2"), "`r` is \"2\""),
        ("lora_alpha", json!("much"), "`lora_alpha` is \"much\""),
        ("lora_dropout", json!(1.5), "lora_dropout is 1.5"),
        ("target_modules", json!("(a"), "the pattern \"(a\" of target_modules"),
        ("target_modules", json!("((a+)+)+$|.*(?=x)(x+x+)+y"), "no layer of the model"),
        ("target_modules", json!("a".repeat(10_000)), "it has 10000 bytes"),
        ("target_modules", json!(["k_proj"]), "its layers are embed"),
        ("target_modules", json!([1]), "a list of names, or a pattern"),
        ("target_modules", Value::Null, "target_modules is missing"),
        ("rank_pattern", json!({"q_proj": 5}), "not [5, 6]"),
        ("rank_pattern", json!({"q_proj": 0}), "rank_pattern[\"q_proj\"] is 0"),
        ("rank_pattern", json!({"(": 2}), "the pattern \"(\" of rank_pattern"),
        ("bias", json!("some"), "the choices are none, all, lora_only"),
        ("bias", json!("all"), "layers.0.q_proj.base_layer.bias is missing"),
        ("task_type", json!("CHESS"), "task_type is \"CHESS\""),
        ("init_lora_weights", json!("pissa"), "`init_lora_weights` is \"pissa\""),
        ("use_dora", json!(true), "`use_dora` is true, and this is not there"),
        ("layer_replication", json!([[0, 1]]), "`layer_replication` is [[0,1]]"),
        ("use_new_thing", json!(true), "`use_new_thing` is true, of which nothing is known"),
        ("modules_to_save", json!(["score"]), "score.weight is missing"),
        ("lora_bias", json!(true), "lora_B.bias is missing"),
    ];
    for (key, value, wanted) in rows {
        adapter(folder.path(), |config| config[key] = value, |tensors| tensors.into_iter().collect());
        check(folder.path(), wanted);
    }
    // What is off, or says nothing, is no reason.
    let silent = |config: &mut Value| {
        config["use_new_thing"] = json!(false);
        config["new_config"] = json!({});
        config["peft_version"] = json!("99");
    };
    adapter(folder.path(), silent, |tensors| tensors.into_iter().collect());
    PeftModel::from_pretrained(&Model::new(Device::Cpu).unwrap().store, folder.path(), Default::default()).unwrap();
}

#[test]
fn tensors_are_not_believed() {
    let folder = tempfile::tempdir().unwrap();
    let first = "base_model.model.layers.0.q_proj.lora_A.weight";
    type Change = Box<dyn Fn(Vec<(String, Tensor)>) -> StateDict>;
    let changed = |change: fn(Tensor) -> Tensor| -> Change {
        Box::new(move |tensors| {
            let change = |(name, tensor): (String, Tensor)| match name == first {
                true => (name, change(tensor)),
                false => (name, tensor),
            };
            tensors.into_iter().map(change).collect()
        })
    };
    let rows: Vec<(Change, String)> = vec![
        (changed(|tensor| tensor.tr().contiguous()), format!("{first} has shape [6, 2], not [2, 6]")),
        (changed(|tensor| tensor.narrow(0, 0, 1).contiguous()), format!("{first} has shape [1, 6], not [2, 6]")),
        (changed(|tensor| tensor.reshape([12])), format!("{first} has shape [12], not [2, 6]")),
        (changed(|tensor| tensor.to_kind(Kind::Int64)), format!("{first} has elements of type Int64")),
        (changed(|tensor| tensor / 0.0), format!("{first} has numbers that are not finite")),
        (
            Box::new(move |tensors| tensors.into_iter().filter(|(name, _)| name != first).collect()),
            format!("{first} is missing"),
        ),
        (
            Box::new(|mut tensors| {
                tensors.push((
                    "base_model.model.layers.7.q_proj.lora_A.weight".into(),
                    Tensor::ones([2, 6], (Kind::Float, Device::Cpu)),
                ));
                tensors.into_iter().collect()
            }),
            "layers.7.q_proj.lora_A.weight is of no layer of it".to_owned(),
        ),
        // Of a file of another kind, such as the whole model.
        (
            Box::new(|_| [("weight".to_owned(), Tensor::from(1f32))].into_iter().collect()),
            "weight is of no layer".to_owned(),
        ),
    ];
    for (change, wanted) in rows {
        adapter(folder.path(), |_| {}, change);
        check(folder.path(), &wanted);
    }
}

#[test]
fn files_that_are_damaged_or_not_there_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    check(folder.path(), "there is no adapter_config.json in");
    fs::write(path("config.json"), "{}").unwrap();
    check(folder.path(), "there is a model (config.json)");
    fs::create_dir(path("second")).unwrap();
    fs::write(path("second/adapter_config.json"), "{}").unwrap();
    check(folder.path(), "adapters are in its folders second: name one of these");
    fs::write(path("adapter_config.json"), "{").unwrap();
    check(folder.path(), "it is not JSON");
    fs::write(path("adapter_config.json"), "[]").unwrap();
    check(folder.path(), "it is not an object");
    fs::write(path("adapter_config.json"), " ".repeat(2 << 20)).unwrap();
    check(folder.path(), "at most 1048576 are read");
    adapter(folder.path(), |_| {}, |tensors| tensors.into_iter().collect());
    let whole = fs::read(path("adapter_model.safetensors")).unwrap();
    fs::write(path("adapter_model.safetensors"), &whole[..whole.len() - 1]).unwrap();
    check(folder.path(), "adapter_model.safetensors is not a safetensors file");
    fs::remove_file(path("adapter_model.safetensors")).unwrap();
    check(folder.path(), "adapter_model.safetensors");
}

#[test]
fn an_adapter_of_another_model_is_not_loaded() {
    let store = ParamStore::new(Device::Cpu);
    for (name, in_features) in [("q_proj", 6), ("down_proj", 12)] {
        Linear::new(store.root() / "layers" / 0 / name, in_features, 6, Default::default()).unwrap();
    }
    let error = PeftModel::from_pretrained(&store, saved_by_peft("list"), Default::default()).unwrap_err();
    let text = error.to_string();
    assert!(error.is_weights() && text.contains("layers.1.q_proj.lora_A.weight is of no layer of it"), "{text}");
    assert!(text.contains("layers.0.down_proj.lora_A.weight has shape [2, 10], not [2, 12]"), "{text}");
    assert_eq!(store.parameters().len(), 4);
}
