//! Models out of folders: what fits loads, whatever else is named, and nothing is half-loaded.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::BnbQuantizationConfig;
use accelerate::big_model::{DeviceMap, DeviceMapStrategy, DispatchOptions, MapDevice, MaxMemory};
use accelerate::checkpoint::{load_checkpoint_in_model, save_model_weights};
use accelerate::lora::{LoraConfig, get_peft_model};
use accelerate::nn::{Module, ParamStore};
use accelerate::tch::{self, Device, Kind, Tensor};
use accelerate_models::gpt2::{GPT2Config, GPT2LMHeadModel, GPT2Model};
use accelerate_models::llama::{LlamaConfig, LlamaForCausalLM};
use accelerate_models::resnet::{ResNetConfig, ResNetForImageClassification};
use accelerate_models::vit::{ViTConfig, ViTForImageClassification};
use accelerate_models::{CausalLMInput, LoadOptions, PretrainedConfig, PretrainedModel};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

fn gpt2() -> GPT2Config {
    GPT2Config { vocab_size: 20, n_positions: 8, n_embd: 8, n_layer: 2, n_head: 2, ..Default::default() }
}

fn llama() -> LlamaConfig {
    let sizes = LlamaConfig { vocab_size: 20, hidden_size: 8, intermediate_size: 12, ..Default::default() };
    LlamaConfig { num_hidden_layers: 2, ..sizes }.with_heads(4, 2)
}

fn resnet() -> ResNetConfig {
    ResNetConfig { embedding_size: 4, hidden_sizes: vec![4, 8], depths: vec![1, 1], ..ResNetConfig::resnet18(3) }
}

fn vit() -> ViTConfig {
    let sizes = ViTConfig { hidden_size: 8, num_hidden_layers: 2, num_attention_heads: 2, ..Default::default() };
    ViTConfig { intermediate_size: 12, image_size: [8; 2], patch_size: [4; 2], ..sizes }
}

/// A model with weights, and a folder with its configuration.
fn saved<M: PretrainedModel>(config: &M::Config) -> (TempDir, M) {
    tch::manual_seed(3);
    let folder = TempDir::new().unwrap();
    let model = M::from_config(&ParamStore::new(Device::Cpu).root(), config).unwrap();
    fs::write(folder.path().join("config.json"), config.to_json().unwrap()).unwrap();
    (folder, model)
}

fn tensors(store: &ParamStore) -> BTreeMap<String, Tensor> {
    store.state_dict().unwrap().into_iter().collect()
}

/// Writes weights under other names; what gets none is left out.
fn write_as(store: &ParamStore, folder: &Path, rename: impl Fn(&str) -> Option<String>) {
    let named: Vec<(String, Tensor)> =
        tensors(store).into_iter().filter_map(|(name, tensor)| Some((rename(&name)?, tensor.copy()))).collect();
    Tensor::write_safetensors(&named, folder.join("model.safetensors")).unwrap();
}

fn check_round_trip<M: PretrainedModel>(config: &M::Config) {
    let (folder, model) = saved::<M>(config);
    save_model_weights(model.params(), folder.path(), &Default::default()).unwrap();
    let (loaded, report) = M::from_pretrained(folder.path(), &LoadOptions::default()).unwrap();
    assert!(report.missing_keys.is_empty() && report.unexpected_keys.is_empty(), "{report:?}");
    assert_eq!(tensors(loaded.params()), tensors(model.params()));
    assert!(loaded.params().parameters().iter().all(|param| param.requires_grad()));
}

#[test]
fn weights_become_codes_while_they_are_loaded() {
    let config = LlamaConfig { hidden_size: 64, intermediate_size: 96, ..llama() }.with_heads(4, 2);
    let (folder, model) = saved::<LlamaForCausalLM>(&config);
    save_model_weights(model.params(), folder.path(), &Default::default()).unwrap();
    for quantization in [
        BnbQuantizationConfig { load_in_4bit: Some(true), bnb_4bit_use_double_quant: Some(true), ..Default::default() },
        BnbQuantizationConfig { load_in_8bit: Some(true), ..Default::default() },
    ] {
        let options = LoadOptions { quantization_config: Some(quantization.clone()), ..Default::default() };
        let (loaded, report) = LlamaForCausalLM::from_pretrained(folder.path(), &options).unwrap();
        assert!(report.missing_keys.is_empty() && report.unexpected_keys.is_empty(), "{report:?}");
        // The same as of a model that was loaded first.
        let (wanted, _) = LlamaForCausalLM::from_pretrained(folder.path(), &LoadOptions::default()).unwrap();
        accelerate::load_and_quantize_model(wanted.params(), &quantization, None, &Default::default()).unwrap();
        assert_eq!(tensors(loaded.params()), tensors(wanted.params()), "{quantization:?}");
        assert!(tensors(loaded.params()).len() > tensors(model.params()).len());
        // And once more out of files that have codes.
        let again = TempDir::new().unwrap();
        fs::copy(folder.path().join("config.json"), again.path().join("config.json")).unwrap();
        save_model_weights(loaded.params(), again.path(), &Default::default()).unwrap();
        let error = LlamaForCausalLM::from_pretrained(again.path(), &LoadOptions::default()).unwrap_err().to_string();
        assert!(error.contains("has codes of 4 or 8 bits"), "{error}");
        let (again, report) = LlamaForCausalLM::from_pretrained(again.path(), &options).unwrap();
        assert!(report.missing_keys.is_empty() && report.unexpected_keys.is_empty(), "{report:?}");
        assert_eq!(tensors(again.params()), tensors(loaded.params()), "{quantization:?}");
    }
}

#[test]
fn images_of_32_bits_go_into_a_model_of_16() {
    let (_, model) = saved::<ViTForImageClassification>(&vit());
    model.params().eval();
    let images = Tensor::arange(2 * 3 * 64, (Kind::Float, Device::Cpu)).view([2, 3, 8, 8]) / 400.0;
    for kind in [Kind::BFloat16, Kind::Half] {
        model.params().to_kind(kind).unwrap();
        let logits = model.logits(&images).unwrap();
        assert_eq!((logits.kind(), logits), (kind, model.logits(&images.to_kind(kind)).unwrap()));
    }
}

/// A file that does not have the weights is told of as such, and not by memory that there is not.
#[test]
fn sizes_without_weights_take_no_memory() {
    let folder = TempDir::new().unwrap();
    let config = LlamaConfig { vocab_size: 45_000_000, hidden_size: 2048, ..llama() }.with_heads(4, 2);
    fs::write(folder.path().join("config.json"), config.to_json().unwrap()).unwrap();
    let other = [("other", Tensor::zeros([2], (Kind::Float, Device::Cpu)))];
    Tensor::write_safetensors(&other, folder.path().join("model.safetensors")).unwrap();
    let error = LlamaForCausalLM::from_pretrained(folder.path(), &LoadOptions::default()).unwrap_err();
    assert!(error.is_weights() && error.to_string().contains("do not fit the model"), "{error}");
}

/// The head of a tied model shares the table of the words, which becomes codes where the list of layers to skip does not have it.
#[test]
fn a_table_of_codes_gives_numbers_of_the_models_type() {
    let config =
        LlamaConfig { hidden_size: 64, intermediate_size: 96, tie_word_embeddings: true, ..llama() }.with_heads(4, 2);
    let (folder, model) = saved::<LlamaForCausalLM>(&config);
    model.params().to_kind(Kind::Half).unwrap();
    save_model_weights(model.params(), folder.path(), &Default::default()).unwrap();
    let quantization = BnbQuantizationConfig {
        load_in_4bit: Some(true),
        llm_int8_skip_modules: Some(vec!["q_proj".to_owned()]),
        ..Default::default()
    };
    let options = LoadOptions { quantization_config: Some(quantization), ..Default::default() };
    let (loaded, _) = LlamaForCausalLM::from_pretrained(folder.path(), &options).unwrap();
    let input_ids = Tensor::from_slice2(&[[3i64, 1, 4]]);
    let output = loaded.forward(&CausalLMInput { input_ids, attention_mask: None, labels: None }).unwrap();
    assert_eq!(output.logits.isfinite().all().int64_value(&[]), 1);
}

#[test]
fn a_map_says_where_numbers_and_codes_are_kept() {
    let config = LlamaConfig { hidden_size: 64, intermediate_size: 96, ..llama() }.with_heads(4, 2);
    let (folder, model) = saved::<LlamaForCausalLM>(&config);
    save_model_weights(model.params(), folder.path(), &Default::default()).unwrap();
    let four_bit = BnbQuantizationConfig { load_in_4bit: Some(true), ..Default::default() };
    for (quantization_config, bytes) in [(None, "100KB"), (Some(four_bit), "40KB")] {
        let offload = TempDir::new().unwrap();
        let options = LoadOptions { quantization_config, ..Default::default() };
        let (wanted, _) = LlamaForCausalLM::from_pretrained(folder.path(), &options).unwrap();
        let options = LoadOptions {
            device_map: Some(DeviceMapStrategy::Auto.into()),
            max_memory: Some(MaxMemory::from_texts([("cpu", bytes)]).unwrap()),
            no_split_module_classes: vec!["model.layers.*".to_owned()],
            dispatch: DispatchOptions { offload_dir: Some(offload.path().to_owned()), ..Default::default() },
            ..options
        };
        let (loaded, report) = LlamaForCausalLM::from_pretrained(folder.path(), &options).unwrap();
        assert!(report.missing_keys.is_empty() && report.unexpected_keys.is_empty(), "{report:?}");
        assert!(offload.path().join("index.json").exists());
        let table = report.device_map.unwrap().to_string();
        assert!(table.contains("device cpu") && table.contains("device disk"), "{table}");
        let ids = Tensor::from_slice2(&[[2i64, 7, 3, 1]]);
        let logits = |model: &LlamaForCausalLM| {
            model.params().eval();
            let input = CausalLMInput { input_ids: ids.shallow_clone(), attention_mask: None, labels: None };
            model.forward(&input).unwrap().logits
        };
        assert_eq!(logits(&loaded), logits(&wanted));
    }
    // Without a folder for the disk, nothing is loaded.
    let options = LoadOptions { device_map: Some(DeviceMap::all_on(MapDevice::Disk).into()), ..Default::default() };
    let error = LlamaForCausalLM::from_pretrained(folder.path(), &options).map(|_| ()).unwrap_err();
    assert!(error.is_big_model(), "{error}");
}

#[test]
fn what_config_json_says_of_codes_counts() {
    let (folder, _) = saved::<LlamaForCausalLM>(&llama());
    let path = folder.path().join("config.json");
    let mut config: serde_json::Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let mut error = |method: serde_json::Value, quantization_config| {
        config["quantization_config"] = method;
        fs::write(&path, config.to_string()).unwrap();
        let options = LoadOptions { quantization_config, ..Default::default() };
        LlamaForCausalLM::from_pretrained(folder.path(), &options).map(|_| ()).unwrap_err().to_string()
    };
    let four_bit = || Some(BnbQuantizationConfig { load_in_4bit: Some(true), ..Default::default() });
    let text = error(serde_json::json!({ "quant_method": "bitsandbytes", "load_in_4bit": true }), None);
    assert!(text.contains("LoadOptions::quantization_config"), "{text}");
    let text = error(serde_json::json!({ "quant_method": "gptq" }), four_bit());
    assert!(text.contains("\"gptq\"") && text.contains("bitsandbytes"), "{text}");
}

#[test]
fn codes_and_adapters_reach_gpt2() {
    let config = GPT2Config { n_embd: 64, ..gpt2() };
    let (folder, model) = saved::<GPT2LMHeadModel>(&config);
    save_model_weights(model.params(), folder.path(), &Default::default()).unwrap();
    let four_bit = BnbQuantizationConfig { load_in_4bit: Some(true), ..Default::default() };
    let options = LoadOptions { quantization_config: Some(four_bit), ..Default::default() };
    let (loaded, _) = GPT2LMHeadModel::from_pretrained(folder.path(), &options).unwrap();
    let input_ids = Tensor::from_slice2(&[[2i64, 7, 3, 1]]);
    let forward = |model: &GPT2LMHeadModel| {
        let labels = Some(input_ids.shallow_clone());
        let input = CausalLMInput { input_ids: input_ids.shallow_clone(), attention_mask: None, labels };
        model.forward(&input).unwrap()
    };
    model.params().eval();
    loaded.params().eval();
    let apart = (forward(&loaded).logits - forward(&model).logits).abs().max().double_value(&[]);
    assert!(apart > 0.0 && apart < 0.1, "{apart}");
    let lora = LoraConfig { target_modules: Some("all-linear".into()), ..Default::default() };
    let peft = get_peft_model(loaded.params(), lora).unwrap();
    let names = peft.targeted_module_names();
    let layers = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"];
    let wanted: Vec<String> = (0..2).flat_map(|h| layers.map(|layer| format!("transformer.h.{h}.{layer}"))).collect();
    assert_eq!(names, wanted);
    forward(&loaded).loss.unwrap().backward();
    let trained = loaded.params().trainable_parameters();
    assert!(trained.len() == 16 && trained.iter().all(|param| param.grad().is_some()));
}

#[test]
fn a_head_that_files_lack_is_new_in_a_quantised_model_as_well() {
    let config = LlamaConfig { hidden_size: 64, intermediate_size: 96, ..llama() }.with_heads(4, 2);
    let (folder, model) = saved::<LlamaForCausalLM>(&config);
    write_as(model.params(), folder.path(), |name| name.strip_prefix("model.").map(str::to_owned));
    let four_bit = BnbQuantizationConfig { load_in_4bit: Some(true), ..Default::default() };
    let options = LoadOptions { quantization_config: Some(four_bit), ..Default::default() };
    let (loaded, report) = LlamaForCausalLM::from_pretrained(folder.path(), &options).unwrap();
    assert_eq!(report.missing_keys, ["lm_head.weight"]);
    let tensors = tensors(loaded.params());
    assert!(tensors.contains_key("model.layers.0.self_attn.q_proj.weight.absmax"), "{:?}", tensors.keys());
    let std = tensors["lm_head.weight"].std(true).double_value(&[]);
    assert!((std - config.initializer_range).abs() < config.initializer_range / 10.0, "{std}");
}

/// As the page on models says.
#[test]
fn a_bare_model_loads_by_a_key_map() {
    let (folder, model) = saved::<GPT2LMHeadModel>(&gpt2());
    save_model_weights(model.params(), folder.path(), &Default::default()).unwrap();
    let store = ParamStore::new(Device::Cpu);
    let bare = GPT2Model::new(&store.root(), &gpt2()).unwrap();
    let options = accelerate::checkpoint::LoadOptions::default()
        .key_map(|name| name.strip_prefix("transformer.").unwrap_or(name).to_owned());
    load_checkpoint_in_model(&store, folder.path(), &options).unwrap();
    drop(bare);
    let wanted = tensors(model.params());
    for (name, tensor) in tensors(&store) {
        assert_eq!(tensor, wanted[&format!("transformer.{name}")], "{name}");
    }
}

#[test]
fn what_was_saved_loads() {
    check_round_trip::<GPT2LMHeadModel>(&gpt2());
    check_round_trip::<GPT2LMHeadModel>(&GPT2Config { tie_word_embeddings: false, ..gpt2() });
    check_round_trip::<LlamaForCausalLM>(&llama());
    check_round_trip::<LlamaForCausalLM>(&LlamaConfig { tie_word_embeddings: true, ..llama() });
    check_round_trip::<ResNetForImageClassification>(&resnet());
    check_round_trip::<ViTForImageClassification>(&vit());
}

/// The files of GPT-2 on the Hub have no `transformers.`, and masks as buffers.
#[test]
fn files_of_the_bare_model_and_of_old_versions_load() {
    let (folder, model) = saved::<GPT2LMHeadModel>(&gpt2());
    let mut named: Vec<(String, Tensor)> = tensors(model.params())
        .into_iter()
        .map(|(name, tensor)| (name.strip_prefix("transformer.").unwrap().to_owned(), tensor.copy()))
        .collect();
    named.push(("h.0.attn.bias".to_owned(), Tensor::ones([1, 1, 8, 8], (Kind::Float, Device::Cpu)).tril(0)));
    named.push(("h.1.attn.masked_bias".to_owned(), Tensor::from(-1e4f32)));
    Tensor::write_safetensors(&named, folder.path().join("model.safetensors")).unwrap();
    let (loaded, report) = GPT2LMHeadModel::from_pretrained(folder.path(), &LoadOptions::default()).unwrap();
    assert!(report.missing_keys.is_empty() && report.unexpected_keys.is_empty(), "{report:?}");
    assert_eq!(tensors(loaded.params()), tensors(model.params()));
    // Tied weights may stand under their other name.
    write_as(model.params(), folder.path(), |name| {
        Some(if name == "transformer.wte.weight" { "lm_head.weight".to_owned() } else { name.to_owned() })
    });
    let (loaded, _) = GPT2LMHeadModel::from_pretrained(folder.path(), &LoadOptions::default()).unwrap();
    assert_eq!(tensors(loaded.params()), tensors(model.params()));
}

#[test]
fn a_head_that_is_not_there_is_new_and_reported() {
    let (folder, model) = saved::<ViTForImageClassification>(&vit());
    write_as(model.params(), folder.path(), |name| name.strip_prefix("vit.").map(str::to_owned));
    let (loaded, report) = ViTForImageClassification::from_pretrained(folder.path(), &LoadOptions::default()).unwrap();
    assert_eq!(report.missing_keys, ["classifier.weight", "classifier.bias"]);
    let new = tensors(loaded.params());
    assert!(new["classifier.weight"].abs().max().double_value(&[]) < 0.2);
    assert!(new["classifier.weight"].std(true).double_value(&[]) > 1e-3);
    assert_eq!(new["classifier.bias"].abs().max().double_value(&[]), 0.0);
    assert_eq!(new["vit.layernorm.weight"], tensors(model.params())["vit.layernorm.weight"]);
}

#[test]
fn what_does_not_fit_is_named_and_changes_nothing() {
    let (folder, model) = saved::<LlamaForCausalLM>(&llama());
    let strict = LoadOptions::default();
    let tolerant = LoadOptions { strict: false, ..Default::default() };
    let load = |options: &LoadOptions| LlamaForCausalLM::from_pretrained(folder.path(), options);
    let message = || load(&strict).unwrap_err().to_string();

    write_as(model.params(), folder.path(), |name| (name != "model.norm.weight").then(|| name.to_owned()));
    assert!(message().contains("1 missing: model.norm.weight"), "{}", message());
    let (loaded, report) = load(&tolerant).unwrap();
    assert_eq!(report.missing_keys, ["model.norm.weight"]);
    // A scale that nobody has trained is 1.
    assert_eq!(tensors(loaded.params())["model.norm.weight"], Tensor::ones([8], (Kind::Float, Device::Cpu)));

    write_as(model.params(), folder.path(), |name| Some(name.replace("layers.1.mlp.up_proj", "layers.1.mlp.up")));
    let found = message();
    assert!(
        found.contains("model.layers.1.mlp.up_proj.weight") && found.contains("model.layers.1.mlp.up.weight"),
        "{found}"
    );
    assert_eq!(load(&tolerant).unwrap().1.unexpected_keys, ["model.layers.1.mlp.up.weight"]);

    let (_, wider) = saved::<LlamaForCausalLM>(&LlamaConfig { intermediate_size: 14, ..llama() });
    write_as(wider.params(), folder.path(), |name| Some(name.to_owned()));
    for options in [&strict, &tolerant] {
        let found = load(options).unwrap_err().to_string();
        assert!(found.contains("down_proj.weight of shape [8, 14]") && found.contains("[8, 12]"), "{found}");
    }

    fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    assert!(load(&strict).unwrap_err().is_weights());
    fs::remove_file(folder.path().join("config.json")).unwrap();
    assert!(message().contains("config.json"), "{}", message());

    let adapter = r#"{"base_model_name_or_path": "someone/base"}"#;
    fs::write(folder.path().join("adapter_config.json"), adapter).unwrap();
    let found = message();
    assert!(found.contains("holds an adapter") && found.contains(", \"someone/base\", then call"), "{found}");
}

#[test]
fn the_element_type_is_what_was_asked_for_or_what_the_configuration_says() {
    let (folder, model) = saved::<GPT2LMHeadModel>(&gpt2());
    save_model_weights(model.params(), folder.path(), &Default::default()).unwrap();
    let path = folder.path().join("config.json");
    let plain = fs::read_to_string(&path).unwrap();
    let with = |key: &str| plain.replacen('{', &format!("{{{key},"), 1);
    for (text, dtype, wanted) in [
        (plain.clone(), None, Kind::Float),
        (with(r#""torch_dtype": "float16""#), None, Kind::Half),
        (with(r#""dtype": "bfloat16""#), None, Kind::BFloat16),
        (with(r#""dtype": "bfloat16""#), Some(Kind::Double), Kind::Double),
        (with(r#""dtype": "float8_e4m3fn""#), Some(Kind::Float), Kind::Float),
    ] {
        fs::write(&path, &text).unwrap();
        let options = LoadOptions { dtype, ..Default::default() };
        let (loaded, _) = GPT2LMHeadModel::from_pretrained(folder.path(), &options).unwrap();
        assert!(loaded.params().parameters().iter().all(|param| param.kind() == wanted), "{text}");
    }
    fs::write(&path, with(r#""dtype": "float8_e4m3fn""#)).unwrap();
    let error = GPT2LMHeadModel::from_pretrained(folder.path(), &LoadOptions::default()).unwrap_err().to_string();
    assert!(error.contains(r#"dtype is "float8_e4m3fn"; wanted float32"#), "{error}");
}

/// Which of two values is the head's, nobody can know.
#[test]
fn a_tied_head_with_values_of_its_own_is_an_error() {
    let (folder, model) = saved::<LlamaForCausalLM>(&llama());
    write_as(model.params(), folder.path(), |name| Some(name.to_owned()));
    let tied = LlamaConfig { tie_word_embeddings: true, ..llama() };
    fs::write(folder.path().join("config.json"), tied.to_json().unwrap()).unwrap();
    let load = |strict: bool| {
        LlamaForCausalLM::from_pretrained(folder.path(), &LoadOptions { strict, ..Default::default() }).map(drop)
    };
    let error = load(true).unwrap_err().to_string();
    assert!(error.contains("lm_head.weight") && error.contains("tie_word_embeddings"), "{error}");
    load(false).unwrap();
}
