//! Several adapters of one model: which of them act, and which are trained.

use super::model::{Model, formula};
use super::vectors::output;
use accelerate::lora::{AddAdapterOptions, InitLoraWeights, LoraBias, LoraConfig, PeftModel, get_peft_model};
use accelerate::nn::{AnyLayer, DenseKernel, Embedding, Linear, LinearKernel, Param, ParamStore};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Accelerator, BnbQuantizationConfig, Result, load_and_quantize_model};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

fn config(targets: &[&str]) -> LoraConfig {
    let names: Vec<String> = targets.iter().map(|name| (*name).to_owned()).collect();
    let init_lora_weights = InitLoraWeights::Random;
    LoraConfig { target_modules: Some(names.into()), init_lora_weights, r: 2, ..Default::default() }
}

/// A model with the adapters `default`, on q_proj, and `second`, on up_proj.
fn two_adapters() -> (Model, PeftModel, Tensor) {
    let model = Model::new(Device::Cpu).unwrap();
    let before = output(&model);
    let peft = get_peft_model(&model.store, config(&["q_proj"])).unwrap();
    peft.add_adapter("second", config(&["up_proj"]), AddAdapterOptions::default()).unwrap();
    (model, peft, before)
}

fn trained(model: &Model) -> Vec<String> {
    model.store.trainable_parameters().iter().map(|param| param.name().to_owned()).collect()
}

#[test]
fn the_active_adapters_act_and_are_trained() {
    let (model, peft, before) = two_adapters();
    let outputs: Vec<Tensor> = [&["default"][..], &["second"], &["default", "second"], &[]]
        .iter()
        .map(|active| {
            peft.set_adapter(active).unwrap();
            assert_eq!(peft.active_adapters(), *active);
            let trained = trained(&model);
            assert_eq!(trained.len(), 4 * active.len());
            for name in &trained {
                assert!(active.iter().any(|adapter| name.contains(&format!(".{adapter}."))), "{name}");
            }
            output(&model)
        })
        .collect();
    assert_eq!(outputs[3], before);
    for (one, other) in [(0, 1), (0, 2), (1, 2), (0, 3), (1, 3)] {
        assert_ne!(outputs[one], outputs[other]);
    }
    assert_eq!(peft.adapters(), ["default", "second"]);
    assert_eq!(peft.targeted_module_names().len(), 4);

    // Both, merged, are as both beside each other.
    peft.set_adapter(&["default", "second"]).unwrap();
    peft.merge_adapter(None).unwrap();
    assert_eq!(peft.merged_adapters(), ["default", "second"]);
    assert!(output(&model).allclose(&outputs[2], 1e-5, 1e-6, false));
    assert_eq!(peft.disable_adapter(|| output(&model)), before);
    peft.unmerge_adapter();
    assert_eq!(output(&model), outputs[2]);

    // One that is named twice counts once.
    peft.set_adapter(&["second", "second"]).unwrap();
    assert_eq!((peft.active_adapters(), output(&model)), (vec!["second".to_owned()], outputs[1].shallow_clone()));
    peft.set_adapter(&["default", "second"]).unwrap();
    peft.delete_adapter("default").unwrap();
    assert_eq!(peft.active_adapters(), ["second"]);
    assert_eq!(output(&model), outputs[1]);
    assert!(model.store.named_parameters().iter().all(|(name, _)| !name.contains("default")));
    peft.delete_adapter("second").unwrap();
    assert_eq!(output(&model), before);
}

#[test]
fn to_merge_no_adapters_changes_nothing() {
    let (model, peft, before) = two_adapters();
    let adapted = output(&model);
    peft.merge_adapter(Some(&[])).unwrap();
    assert_eq!((peft.merged_adapters().len(), output(&model)), (0, adapted));
    peft.set_adapter(&[]).unwrap();
    peft.merge_adapter(None).unwrap();
    assert_eq!((peft.merged_adapters().len(), output(&model)), (0, before));
}

#[test]
fn unloading_merges_what_is_active_beside_what_is_merged() {
    let (model, peft, _) = two_adapters();
    peft.set_adapter(&["default", "second"]).unwrap();
    let both = output(&model);
    peft.merge_adapter(Some(&["second"])).unwrap();
    let merged = output(&model);
    assert!(!merged.allclose(&both, 1e-5, 1e-6, false), "the merged one acts alone");
    peft.merge_and_unload().unwrap();
    assert!(output(&model).allclose(&both, 1e-5, 1e-6, false));
}

/// As they did before: a layer of codes casts what it gets, and gives its output in that type.
#[test]
fn a_merged_layer_of_codes_takes_inputs_of_any_type() {
    let store = ParamStore::new(Device::Cpu);
    let layer = Linear::new(store.root() / "q_proj", 64, 64, Default::default()).unwrap();
    let _head = Linear::new(store.root() / "score", 64, 3, Default::default()).unwrap();
    let options = BnbQuantizationConfig { load_in_4bit: Some(true), ..Default::default() };
    load_and_quantize_model(&store, &options, None, &Default::default()).unwrap();
    let peft = get_peft_model(&store, config(&["q_proj"])).unwrap();
    let forward = |kind: Kind| {
        let output = layer.forward(&Tensor::ones([2, 64], (kind, Device::Cpu))).unwrap();
        assert_eq!(output.kind(), kind);
        output.to_kind(Kind::Float)
    };
    let kinds = [Kind::Float, Kind::BFloat16, Kind::Half];
    let before = kinds.map(forward);
    peft.merge_adapter(None).unwrap();
    for (merged, before) in kinds.map(forward).iter().zip(before) {
        assert!(merged.allclose(&before, 2e-2, 2e-2, false));
    }
    let error = layer.forward(&Tensor::ones([2, 63], (Kind::Float, Device::Cpu))).unwrap_err().to_string();
    assert!(error.contains("q_proj.weight") && error.contains("[.., 64]"), "{error}");
}

#[test]
fn adapters_come_back_after_a_panic() {
    let (model, peft, before) = two_adapters();
    let adapted = output(&model);
    assert_ne!(adapted, before);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        peft.disable_adapter(|| panic!("the body fails"));
    }));
    assert!(panicked.is_err());
    assert_eq!(output(&model), adapted);
    peft.disable_adapter_layers();
    assert_eq!(output(&model), before);
    peft.enable_adapter_layers();
    assert_eq!(output(&model), adapted);
}

#[test]
fn what_does_not_go_is_an_error_and_changes_nothing() {
    let (model, peft, _) = two_adapters();
    let names = |model: &Model| -> Vec<String> {
        model.store.parameters().iter().map(|param| param.name().to_owned()).collect()
    };
    let (before, num_params) = (output(&model), names(&model));
    let add = |name: &str, config: LoraConfig| peft.add_adapter(name, config, AddAdapterOptions::default());
    let saved = LoraConfig { modules_to_save: vec!["score".to_owned()], ..config(&["down_proj"]) };
    let rows: Vec<(Result<()>, &str)> = vec![
        (add("second", config(&["q_proj"])), "there is an adapter called \"second\" already"),
        (add("a.b", config(&["q_proj"])), "cannot name an adapter"),
        (add("third", config(&["k_proj"])), "its layers are embed, layers.0.q_proj"),
        (add("third", LoraConfig { r: 0, ..config(&["q_proj"]) }), "r is 0"),
        (peft.set_adapter(&["third"]), "there are default, second"),
        (peft.delete_adapter("third"), "no adapter called \"third\""),
        (peft.merge_adapter(Some(&["third"])), "no adapter called \"third\""),
        (get_peft_model(&model.store, config(&["q_proj"])).map(drop), "the model has adapters already"),
    ];
    for (result, wanted) in rows {
        let error = result.unwrap_err();
        assert!(error.is_config() && error.to_string().contains(wanted), "{error}");
        assert_eq!((names(&model), output(&model)), (num_params.clone(), before.shallow_clone()), "{wanted}");
    }
    for name in ["third", "fourth"] {
        add(name, saved.clone()).unwrap();
    }
    let error = peft.set_adapter(&["third", "fourth"]).unwrap_err();
    assert!(error.to_string().contains("two of these adapters have a copy of score"), "{error}");
    add("fifth", LoraConfig { bias: LoraBias::All, ..config(&["q_proj"]) }).unwrap();
    let error = add("sixth", LoraConfig { bias: LoraBias::LoraOnly, ..config(&["q_proj"]) }).unwrap_err();
    assert!(error.to_string().contains("which \"fifth\" trains already"), "{error}");
}

#[test]
fn others_become_active_only_where_none_is_merged() {
    let (_model, peft, _) = two_adapters();
    peft.set_adapter(&["default"]).unwrap();
    peft.merge_adapter(None).unwrap();
    peft.set_adapter(&["default"]).unwrap();
    let error = peft.set_adapter(&["second"]).unwrap_err();
    assert!(error.is_config() && error.to_string().contains("set_adapter"), "{error}");
    assert_eq!(peft.active_adapters(), ["default"]);
    peft.unmerge_adapter();
    peft.set_adapter(&["second"]).unwrap();
}

#[test]
fn a_prepared_model_keeps_what_it_trains() {
    let accelerator = Accelerator::builder().cpu(true).build().unwrap();
    let (model, peft, base) = two_adapters();
    let store = model.store.clone();
    let prepared = accelerator.prepare(model).unwrap();
    for result in [
        peft.set_adapter(&["second"]),
        peft.delete_adapter("second"),
        peft.add_adapter("third", config(&["q_proj"]), AddAdapterOptions::default()),
        peft.clone().merge_and_unload(),
        peft.clone().unload(),
        get_peft_model(&store, config(&["q_proj"])).map(drop),
    ] {
        let error = result.unwrap_err();
        assert!(error.is_config(), "{error}");
    }
    // The same ones, and turning them off, change nothing of that.
    peft.set_adapter(&["default"]).unwrap();
    assert_eq!(peft.disable_adapter(|| output(&prepared)), base);
}

/// Half of the weight's product, counted.
#[derive(Debug, Default)]
struct Halved(AtomicUsize);

impl LinearKernel for Halved {
    fn linear(&self, input: &Tensor, weight: &Param, bias: Option<&Param>) -> Result<Tensor> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(DenseKernel.linear(input, weight, bias)? * 0.5)
    }
}

#[test]
fn an_adapter_goes_around_any_kernel() {
    let store = ParamStore::new(Device::Cpu);
    let layer = Linear::new(store.root() / "proj", 4, 3, Default::default()).unwrap();
    let kernel = Arc::new(Halved::default());
    layer.set_kernel(kernel.clone());
    let input = formula(&[5, 4], 0.0);
    let before = layer.forward(&input).unwrap();
    let peft = get_peft_model(&store, config(&["proj"])).unwrap();
    let [a, b] = ["A", "B"].map(|part| store.get(&format!("proj.lora_{part}.default.weight")).unwrap().get().unwrap());
    let wanted = &before + input.matmul(&a.tr()).matmul(&b.tr()) * 4.0;
    assert!(layer.forward(&input).unwrap().allclose(&wanted, 1e-6, 1e-6, false));
    layer.forward(&input).unwrap().sum(None).backward();
    assert!(layer.weight.grad().is_none());
    peft.unload().unwrap();
    assert_eq!(layer.forward(&input).unwrap(), before);
    assert_eq!(kernel.0.load(Ordering::Relaxed), 4);
}

#[test]
fn adapters_stay_around_a_kernel_that_is_set_later() {
    let store = ParamStore::new(Device::Cpu);
    let layer = Linear::new(store.root() / "proj", 64, 3, Default::default()).unwrap();
    let words = Embedding::new(store.root() / "words", 10, 4, Default::default()).unwrap();
    let (input, ids) = (formula(&[5, 64], 0.0), Tensor::from_slice(&[1i64, 3]));
    let (before, rows) = (layer.forward(&input).unwrap(), words.forward(&ids).unwrap());
    let peft = get_peft_model(&store, config(&["proj", "words"])).unwrap();
    let [added, added_rows] = [layer.forward(&input).unwrap() - &before, words.forward(&ids).unwrap() - &rows];
    assert!(added.abs().min().double_value(&[]) > 0.0 && added_rows.abs().max().double_value(&[]) > 0.0);
    // What is asked for is the kernel without adapters, so one that wraps it does not call itself.
    words.set_kernel(words.kernel());
    assert_eq!(words.forward(&ids).unwrap(), &rows + &added_rows);
    layer.set_kernel(Arc::new(Halved::default()));
    assert!(layer.forward(&input).unwrap().allclose(&(&before * 0.5 + &added), 1e-5, 1e-6, false));
    // Codes that take the place of weights are such a kernel, too.
    let four_bit = BnbQuantizationConfig { load_in_4bit: Some(true), ..Default::default() };
    let skip = BnbQuantizationConfig { llm_int8_skip_modules: Some(Vec::new()), ..four_bit };
    load_and_quantize_model(&store, &skip, None, &Default::default()).unwrap();
    let codes = peft.disable_adapter(|| layer.forward(&input)).unwrap();
    assert!(codes != before && layer.forward(&input).unwrap().allclose(&(&codes + &added), 1e-5, 1e-6, false));
    peft.unload().unwrap();
    assert_eq!(layer.forward(&input).unwrap(), codes);
}

#[test]
fn a_tied_weight_is_merged_for_one_of_its_layers() {
    let store = ParamStore::new(Device::Cpu);
    let words = Embedding::new(store.root() / "words", 10, 4, Default::default()).unwrap();
    let path = store.root() / "decoder";
    let decoder = Linear::from_params(&path, path.alias("weight", &words.weight).unwrap(), None);
    let ids = Tensor::from_slice(&[1i64, 3]);
    let before = words.forward(&ids).unwrap();
    let peft = get_peft_model(&store, config(&["decoder"])).unwrap();
    peft.merge_adapter(None).unwrap();
    assert_eq!(words.forward(&ids).unwrap(), before);
    let input = formula(&[2, 4], 1.0);
    let merged = decoder.forward(&input).unwrap();
    peft.unmerge_adapter();
    assert!(decoder.forward(&input).unwrap().allclose(&merged, 1e-5, 1e-6, false));
    let error = peft.merge_and_unload().unwrap_err();
    assert!(error.is_config() && error.to_string().contains("words.weight is the weight of another layer"), "{error}");
    // "all-linear" leaves the output layer of a language model out.
    let error = get_peft_model(
        &{
            let store = ParamStore::new(Device::Cpu);
            let words = Embedding::new(store.root() / "words", 10, 4, Default::default()).unwrap();
            let path = store.root() / "decoder";
            Linear::from_params(&path, path.alias("weight", &words.weight).unwrap(), None);
            store
        },
        LoraConfig { target_modules: Some("all-linear".into()), ..Default::default() },
    )
    .unwrap_err();
    assert!(error.to_string().contains("no layer of the model"), "{error}");
}

#[test]
fn adapters_of_half_precision_are_in_float32() {
    let store = ParamStore::with_kind(Device::Cpu, Kind::BFloat16);
    let layer = Linear::new(store.root() / "proj", 4, 3, Default::default()).unwrap();
    let peft = get_peft_model(&store, config(&["proj"])).unwrap();
    let options = AddAdapterOptions { autocast_adapter_dtype: false };
    peft.add_adapter("narrow", config(&["proj"]), options).unwrap();
    let kind = |adapter: &str| store.get(&format!("proj.lora_A.{adapter}.weight")).unwrap().kind();
    assert_eq!((kind("default"), kind("narrow")), (Kind::Float, Kind::BFloat16));
    // What the layer gives has the element type that it had, with either and with both.
    let input = formula(&[5, 4], 0.0).to_kind(Kind::BFloat16);
    for active in [&["default"][..], &["narrow"], &["default", "narrow"]] {
        peft.set_adapter(active).unwrap();
        let adapted = layer.forward(&input).unwrap();
        peft.merge_adapter(None).unwrap();
        let merged = layer.forward(&input).unwrap();
        peft.unmerge_adapter();
        assert_eq!((adapted.kind(), merged.kind()), (Kind::BFloat16, Kind::BFloat16));
        assert!(adapted.allclose(&merged, 0.05, 0.05, false), "{active:?}");
    }
}

#[test]
fn broken_adapters_are_not_merged() {
    let store = ParamStore::new(Device::Cpu);
    let layer = Linear::new(store.root() / "proj", 4, 3, Default::default()).unwrap();
    let peft = get_peft_model(&store, config(&["proj"])).unwrap();
    let input = formula(&[5, 4], 0.0);
    let before = layer.forward(&input).unwrap();
    let b = store.get("proj.lora_B.default.weight").unwrap();
    let values = b.local().copy();
    b.copy_(&Tensor::from(f64::INFINITY)).unwrap();
    for result in [peft.merge_adapter(None), peft.clone().merge_and_unload()] {
        assert!(result.unwrap_err().to_string().contains("the adapter seems to be broken"));
    }
    b.copy_(&values).unwrap();
    assert_eq!(layer.forward(&input).unwrap(), before);
}

#[test]
fn layers_of_all_kinds_are_named_in_errors() {
    let store = ParamStore::new(Device::Cpu);
    accelerate::nn::LayerNorm::new(store.root() / "norm", [4], Default::default()).unwrap();
    Linear::new(store.root() / "proj", 4, 3, Default::default()).unwrap();
    assert!(matches!(store.named_layers()[0].1, AnyLayer::TokenWise(_)));
    let error = get_peft_model(&store, config(&["norm", "proj"])).unwrap_err();
    assert!(error.to_string().contains("means norm, which is a LayerNorm"), "{error}");
    let error = get_peft_model(&store, LoraConfig { modules_to_save: vec!["norm".to_owned()], ..config(&["proj"]) })
        .unwrap_err();
    assert!(error.to_string().contains("modules_to_save means norm, which is a LayerNorm"), "{error}");
    assert_eq!(store.trainable_parameters().len(), 4);
}
