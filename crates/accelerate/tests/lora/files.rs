//! Adapters that PEFT has saved, and adapters that are saved here.

use super::model::{Model, cases, formula};
use super::vectors::{assert_close, expected, output};
use accelerate::checkpoint::{checkpoint_shapes, load_file, save_file, verify_saved_files};
use accelerate::lora::{
    AddAdapterOptions, InitLoraWeights, LoadAdapterOptions, LoraBias, LoraConfig, PeftModel, SavePretrainedOptions,
    get_peft_model,
};
use accelerate::nn::{Module, StateDict};
use accelerate::tch::{Device, Tensor};
use std::path::{Path, PathBuf};

/// What PEFT has saved after training.
pub(crate) fn saved_by_peft(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../parity/lora/adapters").join(case)
}

#[test]
fn adapters_of_peft_give_what_they_give_in_python() {
    let expected = expected();
    for (name, config) in cases() {
        let model = Model::new(Device::Cpu).unwrap();
        model.store.eval();
        let peft = PeftModel::from_pretrained(&model.store, saved_by_peft(name), Default::default()).unwrap();
        assert_close(&output(&model), &expected["cases"][name]["output"], name);
        assert!(model.store.trainable_parameters().is_empty(), "{name}");
        assert_eq!(peft.adapters(), ["default"]);
        let found = peft.peft_config("default").unwrap();
        assert_eq!((found.r, found.lora_alpha, found.bias), (config.r, config.lora_alpha, config.bias), "{name}");
    }
}

#[test]
fn what_is_saved_is_what_was_loaded() {
    let expected = expected();
    let folder = tempfile::tempdir().unwrap();
    for (name, _) in cases() {
        let theirs = saved_by_peft(name);
        let model = Model::new(Device::Cpu).unwrap();
        let peft = PeftModel::from_pretrained(&model.store, &theirs, Default::default()).unwrap();
        let ours = folder.path().join(name);
        let files = peft.save_pretrained(&ours, &Default::default()).unwrap();
        assert_eq!(files, [ours.join("adapter_model.safetensors")]);
        verify_saved_files(&ours).unwrap();
        // Names, shapes and numbers.
        let shapes = |folder: &Path| {
            let mut shapes = checkpoint_shapes(folder.join("adapter_model.safetensors")).unwrap();
            shapes.sort();
            shapes
        };
        assert_eq!(shapes(&ours), shapes(&theirs), "{name}");
        let read = |folder: &Path| load_file(folder.join("adapter_model.safetensors")).unwrap();
        let (found, wanted) = (read(&ours), read(&theirs));
        for (key, tensor) in wanted.iter() {
            assert_eq!(found.get(key), Some(tensor), "{name}: {key}");
        }
        let again = Model::new(Device::Cpu).unwrap();
        PeftModel::from_pretrained(&again.store, &ours, Default::default()).unwrap();
        again.store.eval();
        assert_close(&output(&again), &expected["cases"][name]["output"], name);
    }
}

#[test]
fn several_adapters_have_folders_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let model = Model::new(Device::Cpu).unwrap();
    let config = |targets: &str| LoraConfig {
        target_modules: Some([targets].into()),
        init_lora_weights: InitLoraWeights::Random,
        ..Default::default()
    };
    let peft = get_peft_model(&model.store, config("q_proj")).unwrap();
    peft.add_adapter("second", config("up_proj"), AddAdapterOptions::default()).unwrap();
    peft.set_adapter(&["default", "second"]).unwrap();
    let wanted = output(&model);
    peft.save_pretrained(folder.path(), &Default::default()).unwrap();

    let other = Model::new(Device::Cpu).unwrap();
    let loaded = PeftModel::from_pretrained(&other.store, folder.path(), Default::default()).unwrap();
    let options = LoadAdapterOptions { is_trainable: true, ..Default::default() };
    loaded.load_adapter(folder.path().join("second"), "second", options).unwrap();
    loaded.set_adapter(&["default", "second"]).unwrap();
    assert_eq!(output(&other), wanted);
    // One is for inference, the other is trained.
    let trained: Vec<String> =
        other.params().trainable_parameters().iter().map(|param| param.name().to_owned()).collect();
    assert!(trained.len() == 4 && trained.iter().all(|name| name.contains(".second.")), "{trained:?}");

    // An adapter that is there takes the values of the file.
    for (_, param) in other.store.named_parameters().iter().filter(|(name, _)| name.contains(".second.")) {
        param.copy_(&formula(&param.shape(), 3.0)).unwrap();
    }
    assert_ne!(output(&other), wanted);
    loaded.load_adapter(folder.path().join("second"), "second", options).unwrap();
    assert_eq!(output(&other), wanted);

    let only = tempfile::tempdir().unwrap();
    let options = SavePretrainedOptions { selected_adapters: Some(vec!["second".to_owned()]), ..Default::default() };
    assert_eq!(
        peft.save_pretrained(only.path(), &options).unwrap(),
        [only.path().join("second/adapter_model.safetensors")]
    );
    let options = SavePretrainedOptions { is_main_process: false, ..Default::default() };
    assert!(peft.save_pretrained(only.path().join("nothing"), &options).unwrap().is_empty());
    assert!(!only.path().join("nothing").exists());
}

/// A copy of a layer and the layer's own bias have one name in files, and only the copy is trained.
#[test]
fn biases_of_copied_layers_are_those_of_the_copies() {
    let (folder, model) = (tempfile::tempdir().unwrap(), Model::new(Device::Cpu).unwrap());
    let config = LoraConfig {
        target_modules: Some(["q_proj"].into()),
        modules_to_save: vec!["score".to_owned()],
        bias: LoraBias::All,
        init_lora_weights: InitLoraWeights::Random,
        ..Default::default()
    };
    let peft = get_peft_model(&model.store, config).unwrap();
    let own = model.store.get("score.bias").unwrap();
    assert!(!own.requires_grad());
    let trained = model.store.get("score.modules_to_save.default.bias").unwrap();
    trained.copy_(&formula(&trained.shape(), 4.0)).unwrap();
    let wanted = output(&model);
    peft.save_pretrained(folder.path(), &Default::default()).unwrap();
    let path = folder.path().join("adapter_model.safetensors");
    let saved = load_file(&path).unwrap();
    assert_eq!(saved.get("base_model.model.score.bias").unwrap(), &trained.get().unwrap().detach());
    let load = || {
        let again = Model::new(Device::Cpu).unwrap();
        PeftModel::from_pretrained(&again.store, folder.path(), Default::default()).map(|_| output(&again))
    };
    assert_eq!(load().unwrap(), wanted);

    // PEFT writes the copy under a second name, and what the model has of its own.
    let with = |name: &str, tensor: Tensor| {
        let mut state: StateDict = load_file(&path).unwrap().into_iter().map(|(n, t)| (n, t.copy())).collect();
        state.insert(name, tensor);
        std::fs::remove_file(&path).unwrap();
        // PEFT writes none.
        let _ = std::fs::remove_file(folder.path().join("adapter_model.manifest.json"));
        save_file(&state, &path).unwrap();
    };
    with("base_model.model.score.modules_to_save.bias", trained.get().unwrap().detach().copy());
    with("base_model.model.score.original_module.bias", own.get().unwrap().detach().copy());
    let q_proj = model.store.get("layers.0.q_proj.weight").unwrap().get().unwrap().detach().copy();
    with("base_model.model.layers.0.q_proj.base_layer.weight", q_proj.copy());
    assert_eq!(load().unwrap(), wanted);
    with("base_model.model.layers.0.q_proj.base_layer.weight", q_proj * 2.0);
    let text = load().unwrap_err().to_string();
    assert!(text.contains("layers.0.q_proj.base_layer.weight is other than the model's own"), "{text}");
}
