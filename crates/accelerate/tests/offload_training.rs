//! What is trained of a model that was kept elsewhere, and where its folder is.
#![allow(clippy::unwrap_used)]

use accelerate::big_model::{DeviceMap, DispatchOptions, MapDevice, disk_offload, dispatch_model};
use accelerate::lora::{AddAdapterOptions, InitLoraWeights, LoraConfig, PeftModel, get_peft_model};
use accelerate::nn::{Linear, ParamStore};
use accelerate::tch::{Device, Kind, Tensor};

fn model() -> (ParamStore, Linear) {
    let store = ParamStore::new(Device::Cpu);
    let layer = Linear::new(store.root() / "proj", 4, 4, Default::default()).unwrap();
    (store, layer)
}

fn input() -> Tensor {
    Tensor::ones([4], (Kind::Float, Device::Cpu))
}

fn trained(store: &ParamStore) -> Vec<String> {
    store.trainable_parameters().iter().map(|param| param.name().to_owned()).collect()
}

fn bring_back(store: &ParamStore) {
    dispatch_model(store, &DeviceMap::all_on(MapDevice::Cpu), &Default::default()).unwrap();
}

#[test]
fn what_comes_back_from_a_disk_is_trained_again() {
    let ((store, layer), folder) = (model(), tempfile::tempdir().unwrap());
    layer.bias.as_ref().unwrap().set_requires_grad(false).unwrap();
    disk_offload(&store, folder.path(), &Default::default()).unwrap();
    assert!(trained(&store).is_empty());
    // To another file, and back.
    disk_offload(&store, folder.path().join("other"), &Default::default()).unwrap();
    bring_back(&store);
    assert_eq!(trained(&store), ["proj.weight"]);
    layer.forward(&input()).unwrap().sum(Kind::Float).backward();
    assert_eq!(layer.weight.grad().unwrap(), Tensor::ones([4, 4], (Kind::Float, Device::Cpu)));
}

#[test]
fn what_was_frozen_on_the_disk_stays_frozen() {
    let ((store, _layer), folder) = (model(), tempfile::tempdir().unwrap());
    disk_offload(&store, folder.path(), &Default::default()).unwrap();
    let config = LoraConfig { target_modules: Some(["proj"].into()), ..Default::default() };
    let _peft = get_peft_model(&store, config).unwrap();
    let adapter = ["proj.lora_A.default.weight", "proj.lora_B.default.weight"];
    assert_eq!(trained(&store), adapter);
    bring_back(&store);
    assert_eq!(trained(&store), adapter);
    // With the adapter this time.
    disk_offload(&store, folder.path(), &Default::default()).unwrap();
    assert!(trained(&store).is_empty());
    bring_back(&store);
    assert_eq!(trained(&store), adapter);
}

#[test]
fn a_folder_stays_where_it_is_when_the_program_goes_elsewhere() {
    let ((store, layer), folder) = (model(), tempfile::tempdir().unwrap());
    let wanted = layer.forward(&input()).unwrap();
    let before = std::env::current_dir().unwrap();
    std::env::set_current_dir(folder.path()).unwrap();
    disk_offload(&store, "weights", &Default::default()).unwrap();
    std::env::set_current_dir(before).unwrap();
    assert!(folder.path().join("weights/proj.weight.dat").exists());
    assert_eq!(layer.forward(&input()).unwrap(), wanted);
}

#[test]
fn a_folder_without_a_name_is_none() {
    let (store, _layer) = model();
    let map: DeviceMap = [("proj.weight", MapDevice::Disk), ("proj.bias", MapDevice::Cpu)].into_iter().collect();
    for offload_dir in [None, Some("".into())] {
        let options = DispatchOptions { offload_dir, ..Default::default() };
        let error = dispatch_model(&store, &map, &options).unwrap_err().to_string();
        assert!(
            error.contains("puts 1 tensor on the disk (proj.weight), and there is no folder to keep them in"),
            "{error}"
        );
    }
}

/// Two layers with adapters, of which a map has the second on a disk.
fn half_on_a_disk(folder: &std::path::Path) -> (ParamStore, [Linear; 2], PeftModel) {
    let store = ParamStore::new(Device::Cpu);
    let layers = ["a", "b"].map(|name| Linear::new(store.root() / name, 4, 4, Default::default()).unwrap());
    let peft = get_peft_model(&store, adapter()).unwrap();
    peft.add_adapter("other", adapter(), AddAdapterOptions::default()).unwrap();
    let map: DeviceMap = [("a", MapDevice::Cpu), ("b", MapDevice::Disk)].into_iter().collect();
    let options = DispatchOptions { offload_dir: Some(folder.to_owned()), ..Default::default() };
    dispatch_model(&store, &map, &options).unwrap();
    (store, layers, peft)
}

fn adapter() -> LoraConfig {
    let init_lora_weights = InitLoraWeights::Random;
    LoraConfig { target_modules: Some(["a", "b"].into()), r: 2, init_lora_weights, ..Default::default() }
}

#[test]
fn what_cannot_be_merged_for_good_leaves_all_layers_as_they_were() {
    let folder = tempfile::tempdir().unwrap();
    let (store, [a, b], peft) = half_on_a_disk(folder.path());
    let output = || b.forward(&a.forward(&input()).unwrap()).unwrap();
    let before = output();
    let error = peft.merge_and_unload().unwrap_err();
    assert!(error.is_big_model() && error.to_string().contains("b.weight is kept elsewhere"), "{error}");
    assert_eq!(output(), before);
    bring_back(&store);
    peft.merge_and_unload().unwrap();
    assert!(output().allclose(&before, 1e-5, 1e-6, false));
    assert!(store.parameters().iter().all(|param| !param.name().contains("lora")));
}

#[test]
fn adapters_take_turns_where_some_are_on_a_disk() {
    let folder = tempfile::tempdir().unwrap();
    let (store, [a, b], peft) = half_on_a_disk(folder.path());
    let output = || b.forward(&a.forward(&input()).unwrap()).unwrap();
    let first = output();
    let of = |name: &str, layers: &[&str]| -> Vec<String> {
        let both = |layer: &&str| ["A", "B"].map(|part| format!("{layer}.lora_{part}.{name}.weight"));
        layers.iter().flat_map(both).collect()
    };
    assert_eq!(trained(&store), of("default", &["a"]));
    peft.set_adapter(&["other"]).unwrap();
    assert_eq!((peft.active_adapters(), trained(&store)), (vec!["other".to_owned()], of("other", &["a"])));
    assert_ne!(output(), first);
    peft.set_adapter(&[]).unwrap();
    assert!(trained(&store).is_empty());
    peft.set_adapter(&["default"]).unwrap();
    assert_eq!(output(), first);
    peft.delete_adapter("default").unwrap();
    assert_eq!(peft.active_adapters(), ["other"]);
    bring_back(&store);
    assert_eq!(trained(&store), of("other", &["a", "b"]));
}

/// Written pages would come back out of the file with the next pass, all but those of small tensors.
#[test]
fn writing_to_what_is_mapped_is_noticed() {
    let ((store, layer), folder) = (model(), tempfile::tempdir().unwrap());
    let wanted = layer.forward(&input()).unwrap();
    disk_offload(&store, folder.path(), &Default::default()).unwrap();
    assert_eq!(layer.forward(&input()).unwrap(), wanted);
    let _zeros = layer.weight.get().unwrap().fill_(0.0);
    let error = layer.forward(&input()).unwrap_err();
    assert!(error.is_big_model() && error.to_string().contains("was written to in place"), "{error}");
}
