//! Adapters and codes on `Conv1D`, whose weight is stored transposed: what a linear layer with the same numbers gives.

use super::model::formula;
use accelerate::checkpoint::{load_checkpoint_in_model, save_model_weights};
use accelerate::lora::{InitLoraWeights, LoraConfig, PeftModel, get_peft_model};
use accelerate::nn::{Conv1D, Linear, ParamStore, StateDict};
use accelerate::tch::{Device, Tensor};
use accelerate::{BnbQuantizationConfig, FloatType, QuantType, load_and_quantize_model};

const IN: i64 = 64;
const OUT: i64 = 96;

struct Both {
    conv: (ParamStore, Conv1D),
    linear: (ParamStore, Linear),
}

impl Both {
    fn new() -> Self {
        let stores = [(); 2].map(|()| ParamStore::new(Device::Cpu));
        let conv = Conv1D::new(stores[0].root() / "c_attn", IN, OUT, Default::default()).unwrap();
        let linear = Linear::new(stores[1].root() / "c_attn", IN, OUT, Default::default()).unwrap();
        let weight = formula(&[OUT, IN], 1.0) * 0.2;
        conv.weight.copy_(&weight.tr()).unwrap();
        linear.weight.copy_(&weight).unwrap();
        let bias = formula(&[OUT], 2.0);
        conv.bias.copy_(&bias).unwrap();
        linear.bias.as_ref().unwrap().copy_(&bias).unwrap();
        let [first, second] = stores;
        Self { conv: (first, conv), linear: (second, linear) }
    }

    fn stores(&self) -> [&ParamStore; 2] {
        [&self.conv.0, &self.linear.0]
    }

    fn adapt(&self, more: LoraConfig) -> [PeftModel; 2] {
        self.stores().map(|store| {
            let config = LoraConfig { r: 2, init_lora_weights: InitLoraWeights::Random, ..more.clone() };
            let peft = get_peft_model(store, config).unwrap();
            for (index, param) in store.trainable_parameters().iter().enumerate() {
                if param.name().contains("lora_") {
                    param.copy_(&(formula(&param.shape(), index as f64) * 0.3)).unwrap();
                }
            }
            peft
        })
    }

    fn quantize(&self, config: &BnbQuantizationConfig) {
        for store in self.stores() {
            load_and_quantize_model(store, config, None, &Default::default()).unwrap();
        }
    }

    /// Both give the same, also for the gradient of their input.
    fn check(&self, context: &str) -> Tensor {
        let [ours, wanted] = [0, 1].map(|which| {
            let input = formula(&[2, 5, IN], 0.5).set_requires_grad(true);
            let output = if which == 0 { self.conv.1.forward(&input) } else { self.linear.1.forward(&input) }.unwrap();
            output.tanh().sum(None).backward();
            (output.detach(), input.grad())
        });
        assert!(ours.0.allclose(&wanted.0, 1e-5, 1e-5, false), "{context}");
        assert!(ours.1.allclose(&wanted.1, 1e-5, 1e-5, false), "{context}: gradient");
        ours.0
    }
}

fn all_linear() -> LoraConfig {
    LoraConfig { target_modules: Some("all-linear".into()), ..Default::default() }
}

fn four_bit() -> BnbQuantizationConfig {
    BnbQuantizationConfig { load_in_4bit: Some(true), bnb_4bit_quant_type: Some(QuantType::Nf4), ..Default::default() }
}

fn copied(state: StateDict) -> StateDict {
    state.into_iter().map(|(name, tensor)| (name, tensor.copy())).collect()
}

#[test]
fn an_adapter_on_it_is_that_of_a_linear_layer() {
    let both = Both::new();
    let before = both.check("before");
    let [ours, theirs] = both.adapt(all_linear());
    let adapted = both.check("adapted");
    assert_ne!(adapted, before);
    assert_eq!(ours.targeted_module_names(), ["c_attn"]);
    let state = ours.adapter_state_dict("default").unwrap();
    for (name, tensor) in theirs.adapter_state_dict("default").unwrap().iter() {
        assert_eq!(state.get(name).unwrap(), tensor, "{name}");
    }
    // PEFT says so of the layer, whatever it was asked.
    assert_eq!([&ours, &theirs].map(|peft| peft.peft_config("default").unwrap().fan_in_fan_out), [true, false]);
    for peft in [&ours, &theirs] {
        peft.merge_adapter(None).unwrap();
    }
    assert!(both.check("merged").allclose(&adapted, 1e-4, 1e-4, false));
    for peft in [&ours, &theirs] {
        peft.unmerge_adapter();
    }
    assert_eq!(both.check("unmerged"), adapted);
    for peft in [ours, theirs] {
        peft.merge_and_unload().unwrap();
    }
    assert!(both.check("merged for good").allclose(&adapted, 1e-4, 1e-4, false));
    assert_eq!(both.conv.1.weight.shape(), [IN, OUT]);
}

#[test]
fn a_copy_of_it_is_trained_as_that_of_a_linear_layer() {
    let both = Both::new();
    for store in both.stores() {
        Linear::new(store.root() / "other", 2, 2, Default::default()).unwrap();
    }
    let before = both.check("before");
    let modules_to_save = vec!["c_attn".to_owned()];
    both.adapt(LoraConfig { target_modules: Some(["other"].into()), modules_to_save, ..Default::default() });
    assert_eq!(both.check("copied"), before);
    let name = "c_attn.modules_to_save.default.weight";
    let [ours, theirs] = both.stores().map(|store| store.get(name).unwrap());
    ours.copy_(&(ours.get().unwrap().detach() * 2.0)).unwrap();
    theirs.copy_(&(theirs.get().unwrap().detach() * 2.0)).unwrap();
    assert_ne!(both.check("changed"), before);
}

#[test]
fn its_codes_are_those_of_the_transposed_weight() {
    let eight_bit =
        BnbQuantizationConfig { load_in_8bit: Some(true), torch_dtype: Some(FloatType::Float32), ..Default::default() };
    let double = BnbQuantizationConfig { bnb_4bit_use_double_quant: Some(true), ..four_bit() };
    for config in [four_bit(), double, eight_bit] {
        let both = Both::new();
        both.quantize(&config);
        let quantised = both.check("codes");
        let [ours, theirs] = both.stores().map(|store| copied(store.state_dict().unwrap()));
        assert_eq!(ours.len(), theirs.len());
        for (name, tensor) in theirs.iter() {
            assert_eq!(ours.get(name).unwrap(), tensor, "{name}");
        }
        // Files are exchanged with those of a linear layer; numbers are quantised while they are read.
        let (codes, numbers) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        save_model_weights(&both.conv.0, codes.path(), &Default::default()).unwrap();
        save_model_weights(&Both::new().conv.0, numbers.path(), &Default::default()).unwrap();
        for folder in [codes.path(), numbers.path()] {
            let store = ParamStore::init_empty_weights(Device::Cpu);
            Conv1D::new(store.root() / "c_attn", IN, OUT, Default::default()).unwrap();
            load_and_quantize_model(&store, &config, Some(folder), &Default::default()).unwrap();
            for (name, tensor) in store.state_dict().unwrap().iter() {
                assert_eq!(tensor, ours.get(name).unwrap(), "{config:?}: {name}");
            }
        }
        // Numbers are not for a layer of codes, also where a square would fit.
        assert!(load_checkpoint_in_model(&both.conv.0, numbers.path(), &Default::default()).is_err());
        let [ours, theirs] = both.adapt(all_linear());
        let adapted = both.check("adapter beside codes");
        assert_ne!(adapted, quantised);
        for peft in [&ours, &theirs] {
            peft.merge_adapter(None).unwrap();
        }
        assert_ne!(both.check("merged beside codes"), quantised);
    }
}

#[test]
fn weights_of_16_bits_that_are_quantised_in_every_pass_are_refused() {
    let both = Both::new();
    let config =
        BnbQuantizationConfig { load_in_8bit: Some(true), llm_int8_has_fp16_weight: Some(true), ..Default::default() };
    let before = both.check("before");
    let error = load_and_quantize_model(&both.conv.0, &config, None, &Default::default()).unwrap_err();
    assert!(error.to_string().contains("c_attn is a Conv1D"), "{error}");
    assert_eq!(both.check("after"), before);
}

#[test]
fn inputs_that_do_not_fit_are_named() {
    let both = Both::new();
    for shape in [&[2, 5, OUT][..], &[OUT], &[]] {
        let error = both.conv.1.forward(&formula(shape, 0.0)).unwrap_err().to_string();
        assert!(error.contains("Conv1D") && error.contains("c_attn.weight"), "{shape:?}: {error}");
    }
    assert_eq!(both.conv.1.forward(&formula(&[IN], 0.0)).unwrap().size(), [OUT]);
}

#[test]
fn a_copy_of_it_is_saved_and_loads() {
    let (folder, both) = (tempfile::tempdir().unwrap(), Both::new());
    let other = Linear::new(both.conv.0.root() / "proj", 4, 4, Default::default()).unwrap();
    let config = LoraConfig {
        target_modules: Some(["proj"].into()),
        modules_to_save: vec!["c_attn".to_owned()],
        ..Default::default()
    };
    let peft = get_peft_model(&both.conv.0, config).unwrap();
    let copy = both.conv.0.get("c_attn.modules_to_save.default.weight").unwrap();
    copy.copy_(&formula(&copy.shape(), 7.0)).unwrap();
    peft.save_pretrained(folder.path(), &Default::default()).unwrap();
    let again = Both::new();
    Linear::new(again.conv.0.root() / "proj", 4, 4, Default::default()).unwrap();
    for param in [&other.weight, other.bias.as_ref().unwrap()] {
        again.conv.0.get(param.name()).unwrap().copy_(&param.get().unwrap().detach()).unwrap();
    }
    PeftModel::from_pretrained(&again.conv.0, folder.path(), Default::default()).unwrap();
    let loaded = again.conv.0.get("c_attn.modules_to_save.default.weight").unwrap();
    assert_eq!(loaded.get().unwrap().detach(), copy.get().unwrap().detach());
}
