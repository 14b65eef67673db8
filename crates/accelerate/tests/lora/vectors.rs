//! Values that PEFT gave for the same weights and the same seed (`parity/lora/generate.py`).

use super::model::{Model, cases, ids, labels};
use accelerate::lora::{LoraConfig, PeftModel, get_peft_model};
use accelerate::nn::Module;
use accelerate::optim::{AdamW, Optimizer};
use accelerate::tch::{self, Device, Tensor};
use serde_json::Value;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// libtorch has one generator per process, and tests of one file may run as threads.
pub(crate) fn generator() -> MutexGuard<'static, ()> {
    static GENERATOR: Mutex<()> = Mutex::new(());
    GENERATOR.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn expected() -> Value {
    serde_json::from_str(include_str!("../../../../parity/lora/lora.json")).unwrap()
}

fn tensor(numbers: &Value) -> Tensor {
    let shape: Vec<i64> = serde_json::from_value(numbers["shape"].clone()).unwrap();
    let values: Vec<f64> = serde_json::from_value(numbers["values"].clone()).unwrap();
    Tensor::from_slice(&values).reshape(&shape)
}

pub(crate) fn assert_close(found: &Tensor, wanted: &Value, what: &str) {
    let wanted = tensor(wanted);
    assert_eq!(found.size(), wanted.size(), "{what}");
    let apart = (found.to_kind(tch::Kind::Double) - wanted).abs().max().double_value(&[]);
    assert!(apart <= 2e-6, "{what}: {apart:e}");
}

pub(crate) fn output(model: &Model) -> Tensor {
    tch::no_grad(|| model.forward(&ids(0)).unwrap())
}

fn train(model: &Model, peft: &PeftModel, wanted: &Value, name: &str) {
    assert_eq!(peft.active_adapters(), ["default"]);
    let mut optimizer = AdamW::new(&model.store, 0.05).unwrap();
    for (step, loss) in wanted["losses"].as_array().unwrap().iter().enumerate() {
        tch::manual_seed(step as i64);
        let found = model.forward(&ids(step as i64)).unwrap().cross_entropy_for_logits(&labels(step as i64));
        found.backward();
        optimizer.step().unwrap();
        optimizer.zero_grad().unwrap();
        let apart = (found.double_value(&[]) - loss.as_f64().unwrap()).abs();
        assert!(apart <= 1e-6, "{name}, step {step}: {apart:e}");
    }
}

fn check(name: &str, config: LoraConfig, wanted: &Value) {
    let _generator = generator();
    let model = Model::new(Device::Cpu).unwrap();
    let biases = config.bias;
    let before = output(&model);
    let base: Vec<(String, Tensor)> =
        model.store.named_parameters().iter().map(|(name, param)| (name.clone(), param.local().copy())).collect();
    tch::manual_seed(7);
    let peft = get_peft_model(&model.store, config).unwrap();

    let initial = peft.adapter_state_dict("default").unwrap();
    let wanted_initial = wanted["initial"].as_object().unwrap();
    assert_eq!(initial.len(), wanted_initial.len(), "{name}: {:?}", initial.names().collect::<Vec<_>>());
    for (key, numbers) in wanted_initial {
        let found = initial.get(key).unwrap_or_else(|| panic!("{name}: no {key}"));
        assert_close(found, numbers, &format!("{name}: {key}"));
    }
    // In PEFT the model is `base_model.model`, and the layer below an adapter `base_layer`.
    let mut trained: Vec<String> = model.store.trainable_parameters().iter().map(|it| it.name().to_owned()).collect();
    trained.sort();
    let shorter =
        |name: &Value| name.as_str().unwrap().trim_start_matches("base_model.model.").replace(".base_layer.", ".");
    let mut wanted_trained: Vec<String> = wanted["trainable"].as_array().unwrap().iter().map(shorter).collect();
    wanted_trained.sort();
    assert_eq!(trained, wanted_trained, "{name}");

    train(&model, &peft, wanted, name);
    model.store.eval();
    assert_close(&output(&model), &wanted["output"], &format!("{name}: output"));
    assert_close(&peft.disable_adapter(|| output(&model)), &wanted["disabled"], &format!("{name}: disabled"));
    let adapted = output(&model);
    peft.merge_adapter(None).unwrap();
    assert_close(&output(&model), &wanted["merged"], &format!("{name}: merged"));
    assert!(peft.merge_adapter(None).unwrap_err().is_config());
    peft.unmerge_adapter();
    assert_eq!(output(&model), adapted, "{name}: unmerged");

    let is_trained = |name: &str| wanted_trained.iter().any(|trained| trained == name);
    for (param, values) in &base {
        let is_same = model.store.get(param).unwrap().local() == *values;
        assert_eq!(is_same, !is_trained(param), "{name}: {param}");
    }
    peft.unload().unwrap();
    assert_eq!(model.store.parameters().len(), base.len());
    if biases == accelerate::lora::LoraBias::None {
        assert_eq!(output(&model), before, "{name}: unloaded");
    }
}

#[test]
fn losses_and_outputs_are_those_of_peft() {
    let expected = expected();
    for (name, config) in cases() {
        check(name, config, &expected["cases"][name]);
    }
}

#[test]
fn a_model_that_adapters_were_merged_into_is_as_the_merged_one() {
    let expected = expected();
    for name in ["list", "embedding", "modules_to_save", "lora_bias"] {
        let wanted = &expected["cases"][name];
        let _generator = generator();
        let model = Model::new(Device::Cpu).unwrap();
        tch::manual_seed(7);
        let peft = get_peft_model(&model.store, super::model::case(name)).unwrap();
        train(&model, &peft, wanted, name);
        model.store.eval();
        let num_parameters = Model::new(Device::Cpu).unwrap().store.num_parameters();
        peft.merge_and_unload().unwrap();
        assert_close(&output(&model), &wanted["merged"], name);
        assert_eq!(model.store.num_parameters(), num_parameters);
        let names: Vec<_> = model.store.state_dict().unwrap().names().map(str::to_owned).collect();
        assert!(names.iter().all(|name| !name.contains("lora_") && !name.contains("modules_to_save")), "{names:?}");
    }
}
