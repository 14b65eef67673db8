//! What is saved comes back, and looks like what Hugging Face writes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::checkpoint::{
    LoadOptions, load_checkpoint_in_model, load_file, modern_layer_norm_names, save_file, save_model_weights,
};
use accelerate::nn::*;
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{FloatType, SaveModelOptions};
use safetensors::tensor::{Dtype, TensorView};
use std::collections::HashMap;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

/// A model with a tied weight, a buffer, a scalar and an empty tensor; all values differ.
fn model(seed: f64) -> ParamStore {
    let store = ParamStore::new(Device::Cpu);
    let root = store.root();
    let words = Embedding::new(&root / "words", 6, 4, Default::default()).unwrap();
    BatchNorm1d::new(&root / "norm", 4, Default::default()).unwrap();
    (&root / "decoder").alias("weight", &words.weight).unwrap();
    root.param("scale", ([0i64; 0], Init::Ones)).unwrap();
    root.param("empty", ([0, 3], Init::Ones)).unwrap();
    for (index, param) in store.parameters().iter().chain(&store.buffers()).enumerate() {
        let values = Tensor::arange(param.numel() as i64, CPU) + seed + 100.0 * index as f64;
        param.copy_(&values.view(&param.shape()[..])).unwrap();
    }
    store
}

fn assert_same_values(a: &ParamStore, b: &ParamStore) {
    let (a, b) = (a.state_dict().unwrap(), b.state_dict().unwrap());
    assert_eq!(a.names().collect::<Vec<_>>(), b.names().collect::<Vec<_>>());
    for (name, tensor) in a.iter() {
        assert_eq!(Some(tensor), b.get(name), "{name}");
    }
}

fn listing(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn in_shards_of(max_shard_bytes: u64) -> SaveModelOptions {
    SaveModelOptions { max_shard_size: format!("{max_shard_bytes}B"), ..Default::default() }
}

#[test]
fn a_model_comes_back_from_one_file_or_many() {
    let cases = [(u64::MAX, 1), (60, 3), (1, 8)];
    for (max_shard_bytes, num_files) in cases {
        let folder = TempDir::new().unwrap();
        let files = save_model_weights(&model(1.0), folder.path(), &in_shards_of(max_shard_bytes)).unwrap();
        let shards = files.iter().filter(|file| file.extension().unwrap() == "safetensors").count();
        assert_eq!(shards, num_files, "{max_shard_bytes}");
        let loaded = model(2.0);
        load_checkpoint_in_model(&loaded, folder.path(), &LoadOptions::default()).unwrap();
        assert_same_values(&loaded, &model(1.0));
        // By the last file also: the single one or the index.
        let loaded = model(2.0);
        load_checkpoint_in_model(&loaded, files.last().unwrap(), &LoadOptions::default()).unwrap();
        assert_same_values(&loaded, &model(1.0));
    }
}

#[test]
fn the_index_is_that_of_hugging_face() {
    let folder = TempDir::new().unwrap();
    save_model_weights(&model(0.0), folder.path(), &in_shards_of(60)).unwrap();
    let text = fs::read_to_string(folder.path().join("model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(index["metadata"]["total_size"], 96 + 4 * 16 + 8 + 4);
    assert_eq!(index["weight_map"]["words.weight"], "model-00001-of-00003.safetensors");
    assert_eq!(index["weight_map"].as_object().unwrap().len(), 8);
    assert!(index["weight_map"].get("decoder.weight").is_none(), "a tied weight is written once");
}

#[test]
fn bytes_are_those_of_the_reference_writer_and_always_the_same() {
    let folder = TempDir::new().unwrap();
    let floats = Tensor::from_slice(&[1f32, -2.0, 3.5]);
    let state: StateDict = [
        ("b".to_string(), floats.shallow_clone()),
        ("ids".to_string(), Tensor::from_slice(&[1i64, 2])),
        ("a".to_string(), floats.shallow_clone()),
        ("mask".to_string(), Tensor::from_slice(&[true])),
    ]
    .into_iter()
    .collect();
    let bytes: Vec<u8> = [1f32, -2.0, 3.5].iter().flat_map(|x| x.to_le_bytes()).collect();
    let ids: Vec<u8> = [1i64, 2].iter().flat_map(|x| x.to_le_bytes()).collect();
    let views = [
        ("mask", TensorView::new(Dtype::BOOL, vec![1], &[1]).unwrap()),
        ("a", TensorView::new(Dtype::F32, vec![3], &bytes).unwrap()),
        ("ids", TensorView::new(Dtype::I64, vec![2], &ids).unwrap()),
        ("b", TensorView::new(Dtype::F32, vec![3], &bytes).unwrap()),
    ];
    let format = HashMap::from([("format".to_string(), "pt".to_string())]);
    let expected = safetensors::serialize(views, Some(format)).unwrap();
    for name in ["first", "second"] {
        let path = folder.path().join(name);
        save_file(&state, &path).unwrap();
        assert_eq!(fs::read(&path).unwrap(), expected);
    }
}

#[test]
fn every_element_type_and_form_comes_back() {
    let kinds = [
        Kind::Bool,
        Kind::Uint8,
        Kind::Int8,
        Kind::Int16,
        Kind::Int,
        Kind::Int64,
        Kind::Half,
        Kind::BFloat16,
        Kind::Float,
        Kind::Double,
        Kind::ComplexFloat,
        Kind::Float8e4m3fn,
        Kind::Float8e5m2,
    ];
    let shapes: [&[i64]; 4] = [&[], &[0], &[2, 0, 3], &[3, 4]];
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("all.safetensors");
    let mut state = StateDict::default();
    for kind in kinds {
        for shape in shapes {
            let numel: i64 = shape.iter().product();
            let tensor = Tensor::arange(numel, CPU).view(shape).to_kind(kind);
            state.insert(format!("{kind:?}{shape:?}"), tensor);
        }
    }
    // A view with strides, and rows out of the middle of something larger.
    let base = Tensor::arange(24, CPU).view([4, 6]);
    state.insert("transposed", base.transpose(0, 1));
    state.insert("rows", base.narrow(0, 1, 2));
    save_file(&state, &path).unwrap();
    let loaded = load_file(&path).unwrap();
    assert_eq!(loaded.len(), state.len());
    for (name, tensor) in state.iter() {
        let found = loaded.get(name).expect(name);
        assert_eq!((found.kind(), found.size()), (tensor.kind(), tensor.size()), "{name}");
        // Float8 tensors cannot be compared as they are.
        let as_doubles = |tensor: &Tensor| match tensor.kind() {
            Kind::ComplexFloat => tensor.view_as_real(),
            _ => tensor.to_kind(Kind::Double),
        };
        assert_eq!(as_doubles(found), as_doubles(tensor), "{name}");
    }
}

#[test]
fn a_tensor_too_large_to_be_copied_at_once_comes_back() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("large.safetensors");
    // More than two pieces of 8 MiB, and no whole number of them.
    let rows = Tensor::arange(3 * 700_001, (Kind::Double, Device::Cpu)).view([3, 700_001]);
    let state: StateDict = [("rows".to_string(), rows.shallow_clone()), ("columns".to_string(), rows.transpose(0, 1))]
        .into_iter()
        .collect();
    save_file(&state, &path).unwrap();
    let loaded = load_file(&path).unwrap();
    assert_eq!(loaded.get("rows"), Some(&rows));
    assert_eq!(loaded.get("columns"), Some(&rows.transpose(0, 1)));
}

#[test]
fn loading_casts_to_the_models_element_type() {
    let folder = TempDir::new().unwrap();
    let saved = model(1.0);
    saved.to_kind(Kind::BFloat16).unwrap();
    save_model_weights(&saved, folder.path(), &SaveModelOptions::default()).unwrap();
    let loaded = model(0.0);
    load_checkpoint_in_model(&loaded, folder.path(), &LoadOptions::default()).unwrap();
    let words = loaded.get("words.weight").unwrap();
    assert_eq!(words.kind(), Kind::Float);
    assert_eq!(words.get().unwrap(), saved.get("words.weight").unwrap().get().unwrap().to_kind(Kind::Float));
}

#[test]
fn a_tied_weight_may_be_in_the_file_under_its_other_name_or_twice() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    for names in [vec!["decoder.weight"], vec!["words.weight", "decoder.weight"]] {
        let mut state: StateDict =
            model(1.0).state_dict().unwrap().into_iter().filter(|(name, _)| name != "words.weight").collect();
        for name in names {
            state.insert(name, model(1.0).get("words.weight").unwrap().get().unwrap().detach());
        }
        save_file(&state, &path).unwrap();
        let loaded = model(2.0);
        load_checkpoint_in_model(&loaded, &path, &LoadOptions::default()).unwrap();
        assert_same_values(&loaded, &model(1.0));
    }
}

#[test]
fn a_file_whose_tied_weights_differ_is_refused() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    let mut state: StateDict = model(1.0).state_dict().unwrap().into_iter().collect();
    let words = model(1.0).get("words.weight").unwrap().get().unwrap().detach();
    state.insert("decoder.weight", &words * 2.0);
    save_file(&state, &path).unwrap();
    let loaded = model(2.0);
    let error = load_checkpoint_in_model(&loaded, &path, &LoadOptions::default()).unwrap_err();
    assert!(error.is_weights(), "{error}");
    let text = error.to_string();
    assert!(text.contains("`words.weight` and `decoder.weight` with other values"), "{text}");
    assert_same_values(&loaded, &model(2.0));
    load_checkpoint_in_model(&loaded, &path, &LoadOptions { strict: false, ..Default::default() }).unwrap();
    assert_same_values(&loaded, &model(1.0));
}

#[test]
fn parameters_that_share_memory_are_written_once_and_load() {
    let make = || {
        let store = ParamStore::new(Device::Cpu);
        let first = store.root().param("first", ([3], Init::Ones)).unwrap();
        store.root().param("second", first.get().unwrap()).unwrap();
        store
    };
    let folder = TempDir::new().unwrap();
    let saved = make();
    saved.get("first").unwrap().copy_(&Tensor::from_slice(&[1f32, 2.0, 3.0])).unwrap();
    let files = save_model_weights(&saved, folder.path(), &SaveModelOptions::default()).unwrap();
    assert_eq!(load_file(&files[0]).unwrap().names().collect::<Vec<_>>(), ["first"]);
    let loaded = make();
    load_checkpoint_in_model(&loaded, folder.path(), &LoadOptions::default()).unwrap();
    assert_same_values(&loaded, &saved);
}

#[test]
fn old_bert_files_load_through_a_key_map() {
    let store = ParamStore::new(Device::Cpu);
    let norm = LayerNorm::new(store.root() / "embeddings" / "LayerNorm", [2], Default::default()).unwrap();
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    let state: StateDict = [("gamma", 3.0), ("beta", 4.0)]
        .map(|(name, value)| (format!("bert.embeddings.LayerNorm.{name}"), Tensor::full([2], value, CPU)))
        .into_iter()
        .collect();
    save_file(&state, &path).unwrap();
    let options =
        LoadOptions::default().key_map(|name| modern_layer_norm_names(name.strip_prefix("bert.").unwrap_or(name)));
    load_checkpoint_in_model(&store, &path, &options).unwrap();
    assert_eq!(norm.weight.unwrap().get().unwrap().double_value(&[0]), 3.0);
    assert_eq!(norm.bias.unwrap().get().unwrap().double_value(&[0]), 4.0);
}

/// Saving over an earlier save leaves exactly the files of the later one, and the user's own.
#[test]
fn files_of_an_earlier_save_do_not_survive() {
    let sizes = [u64::MAX, 60, 1, 60, u64::MAX];
    let folder = TempDir::new().unwrap();
    let own = ["README.md", "config.json", "model_1.safetensors", "optimizer.safetensors"];
    for name in own {
        fs::write(folder.path().join(name), "mine").unwrap();
    }
    // What a process that was killed while it wrote has left.
    fs::write(folder.path().join(".model.4242.saving"), "half").unwrap();
    for (seed, size) in sizes.into_iter().enumerate() {
        let files = save_model_weights(&model(seed as f64), folder.path(), &in_shards_of(size)).unwrap();
        let mut expected: Vec<String> = own.map(str::to_owned).to_vec();
        expected.push("model.manifest.json".to_owned());
        expected.extend(files.iter().map(|file| file.file_name().unwrap().to_str().unwrap().to_owned()));
        expected.sort();
        assert_eq!(listing(folder.path()), expected);
        let loaded = model(99.0);
        load_checkpoint_in_model(&loaded, folder.path(), &LoadOptions::default()).unwrap();
        assert_same_values(&loaded, &model(seed as f64));
    }
}

#[test]
fn real_numbers_are_written_in_the_type_that_is_asked_for_and_nothing_else() {
    let kinds = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16, Kind::ComplexFloat, Kind::Int64, Kind::Bool];
    let store = ParamStore::new(Device::Cpu);
    for (index, kind) in kinds.into_iter().enumerate() {
        let values = (Tensor::arange(5, (Kind::Float, Device::Cpu)) - 1.3).to_kind(kind);
        store.root().buffer(&format!("b{index}"), values, Default::default()).unwrap();
    }
    let folder = TempDir::new().unwrap();
    for max_shard_bytes in [20, 1_000_000] {
        let options = SaveModelOptions { dtype: Some(FloatType::BFloat16), ..in_shards_of(max_shard_bytes) };
        let files = save_model_weights(&store, folder.path(), &options).unwrap();
        let mut found = Vec::new();
        for file in files.iter().filter(|file| file.extension().unwrap() == "safetensors") {
            let state = load_file(file).unwrap();
            found.extend(state.iter().map(|(name, tensor)| (name.to_owned(), tensor.shallow_clone())));
        }
        assert_eq!(found.len(), kinds.len());
        for (name, found) in found {
            let own = store.get(&name).unwrap().get().unwrap();
            let is_real = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16].contains(&own.kind());
            let wanted = if is_real { own.to_kind(Kind::BFloat16) } else { own };
            assert_eq!((found.kind(), &found), (wanted.kind(), &wanted), "{name}");
        }
    }
}

#[test]
fn two_models_share_a_folder_under_different_stems() {
    let folder = TempDir::new().unwrap();
    for stem in ["student", "teacher"] {
        let options = SaveModelOptions { stem: stem.into(), max_shard_size: "60B".into(), ..Default::default() };
        save_model_weights(&model(0.0), folder.path(), &options).unwrap();
    }
    assert_eq!(listing(folder.path()).len(), 10);
    let loaded = model(1.0);
    let index = folder.path().join("student.safetensors.index.json");
    load_checkpoint_in_model(&loaded, index, &LoadOptions::default()).unwrap();
    assert_same_values(&loaded, &model(0.0));
}

#[cfg(unix)]
#[test]
fn files_are_readable_like_any_other_the_user_makes() {
    use std::os::unix::fs::PermissionsExt;
    let folder = TempDir::new().unwrap();
    let plain = folder.path().join("plain");
    fs::write(&plain, "").unwrap();
    let files = save_model_weights(&model(0.0), folder.path(), &SaveModelOptions::default()).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(&files[0]), mode(&plain));
}
