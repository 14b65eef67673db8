//! Quantised weights that a device map keeps on a disk.
#![allow(clippy::unwrap_used)]

use accelerate::big_model::{DeviceMap, DispatchOptions, MapDevice, MaxMemory, dispatch_model, module_tree};
use accelerate::checkpoint::{
    LoadAndDispatchOptions, LoadOptions, load_checkpoint_in_model, load_file, save_file, save_model_weights,
};
use accelerate::nn::{LayerNorm, Linear, Module, ModuleFn, ParamStore, StateDict};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{
    Accelerator, BnbQuantizationConfig, QuantType, load_and_quantize_model, load_quantize_and_dispatch, testing,
};
use accelerate_core::config::QuantizationSettings;
use std::path::Path;

struct Model {
    store: ParamStore,
    layers: Vec<Linear>,
    norm: LayerNorm,
    head: Linear,
}

impl Model {
    fn new(store: ParamStore) -> Self {
        let layers = (0..3).map(|n| Linear::new(store.root() / "layers" / n, 64, 64, Default::default()).unwrap());
        let layers = layers.collect();
        let norm = LayerNorm::new(store.root() / "norm", [64], Default::default()).unwrap();
        let head = Linear::new(store.root() / "head", 64, 5, Default::default()).unwrap();
        Self { store, layers, norm, head }
    }

    fn forward(&self, input: &Tensor) -> Tensor {
        let forward = |input: Tensor, layer: &Linear| layer.forward(&input).unwrap().relu();
        let hidden = self.layers.iter().fold(input.shallow_clone(), forward);
        self.head.forward(&self.norm.forward(&hidden).unwrap()).unwrap()
    }
}

/// Numbers of about the size that layers begin with, the same in every run: how far codes are from them depends on them.
fn saved(folder: &Path) -> Model {
    let exact = Model::new(ParamStore::new(Device::Cpu));
    for param in exact.store.parameters().iter().filter(|param| param.shape().len() == 2) {
        let places = Tensor::arange(param.numel() as i64, (Kind::Int64, Device::Cpu)) + 1;
        let numbers = (places.square() * 37).remainder(1009).to_kind(Kind::Float) / 1009.0 - 0.5;
        param.copy_(&(numbers * 0.25).view(param.shape().as_slice())).unwrap();
    }
    save_model_weights(&exact.store, folder, &Default::default()).unwrap();
    exact
}

fn configs() -> [BnbQuantizationConfig; 3] {
    let four = BnbQuantizationConfig {
        load_in_4bit: Some(true),
        bnb_4bit_quant_type: Some(QuantType::Nf4),
        ..Default::default()
    };
    let nested = BnbQuantizationConfig { bnb_4bit_use_double_quant: Some(true), ..four.clone() };
    let eight = BnbQuantizationConfig {
        load_in_8bit: Some(true),
        torch_dtype: Some(accelerate::FloatType::Float32),
        ..Default::default()
    };
    [four, nested, eight]
}

fn map() -> DeviceMap {
    let disk = ["layers.1", "layers.2"].map(|path| (path, MapDevice::Disk));
    let cpu = ["layers.0", "norm", "head"].map(|path| (path, MapDevice::Cpu));
    disk.into_iter().chain(cpu).collect()
}

fn options(offload: &Path) -> LoadOptions {
    let dispatch = DispatchOptions { offload_dir: Some(offload.to_owned()), ..Default::default() };
    LoadOptions { device_map: Some(map()), dispatch, ..Default::default() }
}

fn input() -> Tensor {
    (Tensor::arange(5 * 64, (Kind::Float, Device::Cpu)) * 0.7).sin().view([5, 64])
}

/// The model as codes, kept where the options say.
fn loaded(config: &BnbQuantizationConfig, folder: &Path, options: &LoadOptions) -> accelerate::Result<Model> {
    let model = Model::new(ParamStore::init_empty_weights(Device::Cpu));
    load_and_quantize_model(&model.store, config, Some(folder), options)?;
    Ok(model)
}

/// What the model in memory computes, and its tensors.
fn in_memory(config: &BnbQuantizationConfig, folder: &Path) -> (Tensor, Vec<(String, Tensor)>) {
    let model = loaded(config, folder, &Default::default()).unwrap();
    let state = model.store.state_dict().unwrap();
    let tensors = state.iter().map(|(name, tensor)| (name.to_owned(), tensor.copy()));
    (model.forward(&input()), tensors.collect())
}

#[test]
fn codes_on_a_disk_compute_what_codes_in_memory_do() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path());
    for config in configs() {
        let (wanted, tensors) = in_memory(&config, folder.path());
        let (offload, files) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let model = loaded(&config, folder.path(), &options(offload.path())).unwrap();
        assert!(offload.path().join("layers.1.weight.dat").exists());
        assert!(!offload.path().join("layers.0.weight.dat").exists());
        for _ in 0..2 {
            assert_eq!(model.forward(&input()), wanted);
        }
        // The gradient of an input comes through.
        let input = input().set_requires_grad(true);
        model.forward(&input).sum(Kind::Float).backward();
        assert!(input.grad().abs().max().double_value(&[]) > 0.0);

        save_model_weights(&model.store, files.path(), &Default::default()).unwrap();
        let found = load_file(files.path().join("model.safetensors")).unwrap();
        for (name, tensor) in &tensors {
            assert_eq!(found.get(name).unwrap(), tensor, "{name}");
        }
        // Files with codes go onto a disk as they are.
        let other = tempfile::tempdir().unwrap();
        let again = loaded(&config, files.path(), &options(other.path())).unwrap();
        assert_eq!(again.forward(&self::input()), wanted);
    }
}

#[test]
fn a_model_that_is_quantised_is_dispatched_afterwards() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path());
    for config in configs() {
        let (wanted, _) = in_memory(&config, folder.path());
        let offload = tempfile::tempdir().unwrap();
        let model = loaded(&config, folder.path(), &Default::default()).unwrap();
        let error = dispatch_model(&model.store, &map(), &Default::default()).unwrap_err();
        assert!(error.is_big_model() && error.to_string().contains("layers.1"), "{error}");
        assert_eq!(model.forward(&input()), wanted);
        dispatch_model(&model.store, &map(), &options(offload.path()).dispatch).unwrap();
        assert_eq!(model.forward(&input()), wanted);
    }
}

#[test]
fn modules_that_are_kept_elsewhere_keep_their_numbers_if_asked() {
    let (folder, offload) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let exact = saved(folder.path());
    let [config, ..] = configs();
    let config = BnbQuantizationConfig { llm_int8_enable_fp32_cpu_offload: Some(true), ..config };
    let model = loaded(&config, folder.path(), &options(offload.path())).unwrap();
    let state = model.store.state_dict().unwrap();
    assert_eq!(state.get("layers.0.weight").unwrap().kind(), Kind::Uint8);
    for layer in ["layers.1.weight", "layers.2.weight"] {
        assert_eq!(state.get(layer).unwrap(), exact.store.state_dict().unwrap().get(layer).unwrap());
    }
    assert!((model.forward(&input()) - exact.forward(&input())).abs().max().double_value(&[]) < 0.2);

    // With 8 bits, whose other layers are in half precision by default, too.
    let config = BnbQuantizationConfig {
        load_in_8bit: Some(true),
        llm_int8_enable_fp32_cpu_offload: Some(true),
        ..Default::default()
    };
    let other = tempfile::tempdir().unwrap();
    let model = loaded(&config, folder.path(), &options(other.path())).unwrap();
    assert_eq!(model.forward(&input()).kind(), Kind::Float);
    let model = Model::new(ParamStore::init_empty_weights(Device::Cpu));
    let half = BnbQuantizationConfig { torch_dtype: Some(accelerate::FloatType::Float16), ..config.clone() };
    let refused = |config: &BnbQuantizationConfig, options: &LoadOptions| {
        load_and_quantize_model(&model.store, config, Some(folder.path()), options).unwrap_err().to_string()
    };
    let text = refused(&half, &options(other.path()));
    assert!(text.contains("torch_dtype") && text.contains("32 bits"), "{text}");
    let all = LoadOptions { device_map: Some(DeviceMap::all_on(MapDevice::Disk)), ..options(other.path()) };
    let text = refused(&config, &all);
    assert!(text.contains("none is quantised"), "{text}");
}

#[test]
fn a_map_is_found_for_the_size_of_the_codes() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path());
    for config in configs() {
        let (wanted, _) = in_memory(&config, folder.path());
        let layer = QuantizationSettings::from(config.clone()).check().unwrap().num_bytes(&[64, 64]) + 4 * 64;
        // Room for the largest layer is left free. With numbers, not even one layer would fit into the smaller one.
        for (bytes, on_cpu) in [(100_000, 3), (layer * 5 / 2, 1)] {
            let offload = tempfile::tempdir().unwrap();
            let model = Model::new(ParamStore::init_empty_weights(Device::Cpu));
            let options = LoadAndDispatchOptions {
                max_memory: Some(MaxMemory::from_texts([("cpu", bytes.to_string().as_str())]).unwrap()),
                load: LoadOptions { device_map: None, ..options(offload.path()) },
                ..Default::default()
            };
            let done = load_quantize_and_dispatch(&model.store, &config, folder.path(), &options).unwrap();
            let place = |n: usize| done.device_map.device_of(&format!("layers.{n}.weight")).unwrap();
            let found = (0..3).filter(|&n| place(n) == MapDevice::Cpu).count();
            assert_eq!(found, on_cpu, "{config:?} {}", done.table);
            assert_eq!(model.forward(&input()), wanted);
            // What was planned is what it takes, but for the text that says what the codes are.
            let taken = module_tree(&model.store).unwrap().module_bytes("layers.0", &Default::default()).unwrap();
            assert!((layer..layer + 200).contains(&taken), "{layer} {taken}");
        }
    }
}

#[test]
fn nothing_has_changed_after_an_error() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path());
    let [config, ..] = configs();
    let model = Model::new(ParamStore::new(Device::Cpu));
    let before = model.forward(&input());
    // A folder that is a file.
    let place = folder.path().join("file");
    std::fs::write(&place, "").unwrap();
    let error = load_and_quantize_model(&model.store, &config, Some(folder.path()), &options(&place)).unwrap_err();
    assert!(error.is_big_model(), "{error}");
    assert_eq!(model.forward(&input()), before);
}

#[test]
fn such_a_model_is_not_prepared() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path());
    let [config, ..] = configs();
    let errors = testing::ranks(2, Accelerator::builder(), |accelerator| {
        let offload = tempfile::tempdir().map_err(accelerate::Error::other)?;
        let model = Model::new(ParamStore::init_empty_weights(Device::Cpu));
        load_and_quantize_model(&model.store, &config, Some(folder.path()), &options(offload.path()))?;
        let store = model.store.clone();
        let module = ModuleFn::new(&store, move |input: &Tensor| Ok(model.forward(input)));
        Ok(accelerator.prepare(module).map(|model| model.params().num_parameters()).unwrap_err().to_string())
    })
    .unwrap();
    assert!(errors[0].contains("device map"), "{}", errors[0]);
}

/// What `local` of such a parameter is stands for it, and has no values.
#[test]
fn checkpoints_have_the_values_of_what_is_on_a_disk() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path());
    for config in configs().map(Some).into_iter().chain([None]) {
        let load = |map: bool, offload: &Path| -> accelerate::Result<Model> {
            let model = Model::new(ParamStore::init_empty_weights(Device::Cpu));
            let options = if map { options(offload) } else { LoadOptions::default() };
            match &config {
                Some(config) => load_and_quantize_model(&model.store, config, Some(folder.path()), &options)?,
                None if map => load_checkpoint_in_model(&model.store, folder.path(), &options)?,
                None => {
                    model.store.materialize()?;
                    load_checkpoint_in_model(&model.store, folder.path(), &options)?
                }
            };
            Ok(model)
        };
        let states = [false, true].map(|map| {
            let results = testing::ranks(1, Accelerator::builder(), |accelerator| {
                let (offload, checkpoint) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
                let model = load(map, offload.path())?;
                let store = model.store.clone();
                let module = ModuleFn::new(&store, move |input: &Tensor| Ok(model.forward(input)));
                let _model = accelerator.prepare(module)?;
                accelerator.save_state(checkpoint.path().join("now"))?;
                accelerator.save_state_async(checkpoint.path().join("later"))?;
                accelerator.end_training()?;
                let read = |name: &str| -> accelerate::Result<Vec<(String, Tensor)>> {
                    let state = load_file(checkpoint.path().join(name).join("model.safetensors"))?;
                    let mut tensors: Vec<_> = state.into_iter().map(|(name, tensor)| (name, tensor.copy())).collect();
                    tensors.sort_by(|(one, _), (other, _)| one.cmp(other));
                    Ok(tensors)
                };
                assert_eq!(read("now")?, read("later")?);
                read("now")
            });
            results.unwrap().remove(0)
        });
        assert_eq!(states[0], states[1], "{config:?}");
    }
}

/// The checks of a plain load hold here, too.
#[test]
fn tied_weights_that_differ_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let tied = |store: ParamStore| {
        let model = Model::new(store);
        let table = model.store.get("layers.0.weight").unwrap();
        model.store.root().alias("table.weight", &table).unwrap();
        model
    };
    let saved = tied(ParamStore::new(Device::Cpu));
    let mut state: StateDict = saved.store.state_dict().unwrap().into_iter().map(|(n, t)| (n, t.copy())).collect();
    state.insert("table.weight", saved.layers[0].weight.get().unwrap().detach() * 2.0);
    save_file(&state, folder.path().join("model.safetensors")).unwrap();
    let [config, ..] = configs();
    let model = tied(ParamStore::new(Device::Cpu));
    let error = load_and_quantize_model(&model.store, &config, Some(folder.path()), &Default::default()).unwrap_err();
    assert!(error.to_string().contains("`layers.0.weight` and `table.weight` with other values"), "{error}");
}

#[test]
fn scales_that_are_not_finite_are_told_where_they_would_be_those_of_all() {
    let model = Model::new(ParamStore::new(Device::Cpu));
    let weight = &model.layers[1].weight;
    let values = weight.get().unwrap().detach().copy();
    let _ = values.get(0).get(0).fill_(f64::INFINITY);
    weight.copy_(&values).unwrap();
    let [_, nested, _] = configs();
    let error = load_and_quantize_model(&model.store, &nested, None, &Default::default()).unwrap_err().to_string();
    assert!(error.contains("layers.1.weight has numbers that are not finite"), "{error}");
}
