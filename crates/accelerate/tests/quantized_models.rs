//! Quantised models: each setting has its effect, weights are frozen, and what files say is not believed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::checkpoint::{LoadOptions, load_checkpoint_in_model, load_file, save_file, save_model_weights};
use accelerate::nn::{
    Checkpointed, Embedding, LayerNorm, Linear, LinearKernel, ModuleFn, Param, ParamStore, StateDict,
};
use accelerate::optim::Sgd;
use accelerate::tch::{self, Device, Kind, Tensor};
use accelerate::{
    Accelerator, BnbQuantizationConfig, FloatType, FullyShardedDataParallelPlugin, QuantStorage, QuantType,
    load_and_quantize_model, testing,
};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// libtorch's generator, of which a process has one.
fn generator() -> MutexGuard<'static, ()> {
    static GENERATOR: Mutex<()> = Mutex::new(());
    GENERATOR.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Model {
    store: ParamStore,
    up: Linear,
    down: Linear,
    head: Linear,
}

fn model(store: ParamStore) -> Model {
    let _generator = generator();
    drawn(store)
}

fn drawn(store: ParamStore) -> Model {
    let (mlp, root) = (store.root() / "mlp", store.root());
    Embedding::new(&root / "words", 10, 64, Default::default()).unwrap();
    let up = Linear::new(&mlp / "up", 64, 128, Default::default()).unwrap();
    let down = Linear::new(&mlp / "down", 128, 64, Default::default()).unwrap();
    LayerNorm::new(&root / "norm", [64], Default::default()).unwrap();
    let head = Linear::new(&root / "head", 64, 10, Default::default()).unwrap();
    Model { store, up, down, head }
}

/// The same in every run: how far codes are from numbers depends on these.
fn saved(folder: &Path) -> Model {
    let exact = {
        let _generator = generator();
        tch::manual_seed(11);
        drawn(ParamStore::new(Device::Cpu))
    };
    save_model_weights(&exact.store, folder, &Default::default()).unwrap();
    exact
}

fn four_bit() -> BnbQuantizationConfig {
    BnbQuantizationConfig { load_in_4bit: Some(true), bnb_4bit_quant_type: Some(QuantType::Nf4), ..Default::default() }
}

fn int8() -> BnbQuantizationConfig {
    BnbQuantizationConfig { load_in_8bit: Some(true), ..Default::default() }
}

fn load(config: &BnbQuantizationConfig, folder: &Path) -> accelerate::Result<Model> {
    let model = model(ParamStore::init_empty_weights(Device::Cpu));
    load_and_quantize_model(&model.store, config, Some(folder), &LoadOptions::default())?;
    Ok(model)
}

fn input(kind: Kind) -> Tensor {
    let _generator = generator();
    Tensor::randn([5, 64], (Kind::Float, Device::Cpu)).to_kind(kind)
}

fn apart(a: &Tensor, b: &Tensor) -> f64 {
    (a.to_kind(Kind::Float) - b.to_kind(Kind::Float)).abs().max().double_value(&[])
}

#[test]
fn settings_of_quantisation_decide_on_the_type_of_each_parameter() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path());
    let kinds = |config: &BnbQuantizationConfig| {
        let state = load(config, folder.path()).unwrap().store.state_dict().unwrap();
        let kind = |name: &str| state.get(name).map(Tensor::kind);
        ["mlp.up.weight", "mlp.down.weight", "head.weight", "norm.weight", "words.weight"]
            .map(|name| kind(name).unwrap())
    };
    use Kind::{BFloat16, Float, Half, Int8, Uint8};
    let list = |modules: &[&str]| Some(modules.iter().map(|&module| module.to_owned()).collect::<Vec<_>>());
    let rows = [
        (four_bit(), [Uint8, Uint8, Float, Float, Float]),
        (
            BnbQuantizationConfig { bnb_4bit_compute_dtype: Some(FloatType::BFloat16), ..four_bit() },
            [Uint8, Uint8, BFloat16, BFloat16, BFloat16],
        ),
        (
            BnbQuantizationConfig { torch_dtype: Some(FloatType::BFloat16), ..four_bit() },
            [Uint8, Uint8, BFloat16, BFloat16, BFloat16],
        ),
        (int8(), [Int8, Int8, Half, Half, Half]),
        (BnbQuantizationConfig { torch_dtype: Some(FloatType::Float32), ..int8() }, [Int8, Int8, Float, Float, Float]),
        (BnbQuantizationConfig { llm_int8_skip_modules: list(&["down"]), ..int8() }, [Int8, Half, Int8, Half, Half]),
        (BnbQuantizationConfig { llm_int8_skip_modules: list(&[]), ..four_bit() }, [Uint8, Uint8, Uint8, Float, Float]),
        (
            BnbQuantizationConfig { keep_in_fp32_modules: list(&["up", "norm"]), ..int8() },
            [Float, Int8, Half, Float, Half],
        ),
        (BnbQuantizationConfig { llm_int8_has_fp16_weight: Some(true), ..int8() }, [Half; 5]),
        (
            BnbQuantizationConfig { bnb_4bit_quant_storage: Some(QuantStorage::BFloat16), ..four_bit() },
            [BFloat16, BFloat16, Float, Float, Float],
        ),
    ];
    for (config, wanted) in rows {
        assert_eq!(kinds(&config), wanted, "{config:?}");
    }
}

#[test]
fn settings_of_quantisation_have_their_effect_on_results() {
    let folder = tempfile::tempdir().unwrap();
    let exact = saved(folder.path());
    // Codes are the same in every storage type, and doubly quantised scales are a little less exact.
    let plain = load(&four_bit(), folder.path()).unwrap();
    let x = input(Kind::Float);
    let wanted = plain.up.forward(&x).unwrap();
    for storage in QuantStorage::ALL {
        let config = BnbQuantizationConfig { bnb_4bit_quant_storage: Some(*storage), ..four_bit() };
        assert_eq!(load(&config, folder.path()).unwrap().up.forward(&x).unwrap(), wanted, "{storage}");
    }
    let double = BnbQuantizationConfig { bnb_4bit_use_double_quant: Some(true), ..four_bit() };
    let error = apart(&load(&double, folder.path()).unwrap().up.forward(&x).unwrap(), &wanted);
    assert!(error > 0.0 && error < 0.05, "{error}");
    let small = BnbQuantizationConfig { bnb_4bit_blocksize: Some(32), ..four_bit() };
    assert_eq!(
        load(&small, folder.path()).unwrap().store.state_dict().unwrap().get("mlp.up.weight.absmax").unwrap().size(),
        [256]
    );

    // What computes in 16 bits differs by their rounding, and the result has the type of the input.
    let config = BnbQuantizationConfig {
        bnb_4bit_compute_dtype: Some(FloatType::BFloat16),
        torch_dtype: Some(FloatType::Float32),
        ..four_bit()
    };
    let in_16 = load(&config, folder.path()).unwrap().up.forward(&x).unwrap();
    assert_eq!(in_16.kind(), Kind::Float);
    let error = apart(&in_16, &wanted);
    assert!(error > 0.0 && error < 0.05, "{error}");

    // An outlier is computed with as it is; without a threshold it spoils its row.
    let spoilt = input(Kind::Float);
    let _ = spoilt.get(0).get(3).fill_(300.0);
    let exact = exact.up.forward(&spoilt).unwrap();
    let error = |threshold: f64| {
        let config = BnbQuantizationConfig { llm_int8_threshold: Some(threshold), ..int8() };
        let model = load(&config, folder.path()).unwrap();
        model.store.eval();
        apart(&model.up.forward(&spoilt).unwrap(), &exact)
    };
    assert!(error(6.0) * 4.0 < error(0.0), "{} {}", error(6.0), error(0.0));
}

#[test]
fn settings_of_quantisation_that_contradict_are_refused_before_anything_is_read() {
    let rows = [
        (BnbQuantizationConfig::default(), "neither load_in_8bit nor load_in_4bit is set"),
        (BnbQuantizationConfig { load_in_8bit: Some(true), ..four_bit() }, "load_in_8bit and load_in_4bit contradict"),
        (BnbQuantizationConfig { llm_int8_threshold: Some(-1.0), ..int8() }, "llm_int8_threshold is -1"),
        (BnbQuantizationConfig { llm_int8_threshold: Some(f64::NAN), ..int8() }, "llm_int8_threshold is NaN"),
        (BnbQuantizationConfig { bnb_4bit_blocksize: Some(48), ..four_bit() }, "bnb_4bit_blocksize is 48"),
        (BnbQuantizationConfig { llm_int8_skip_modules: Some(vec!["lm_head".to_owned()]), ..int8() }, "\"lm_head\""),
        (
            BnbQuantizationConfig { keep_in_fp32_modules: Some(vec!["mlp".to_owned(), "head".to_owned()]), ..int8() },
            "all of them are skipped",
        ),
    ];
    for (config, wanted) in rows {
        let error = load(&config, Path::new("/absent")).map(|_| ()).unwrap_err();
        assert!(error.is_config() && error.to_string().contains(wanted), "{config:?}: {error}");
    }
}

#[test]
fn a_quantised_layer_is_frozen_and_passes_gradients_on() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path());
    for config in [four_bit(), BnbQuantizationConfig { torch_dtype: Some(FloatType::Float32), ..int8() }] {
        let model = load(&config, folder.path()).unwrap();
        let names: Vec<_> = model.store.trainable_parameters().iter().map(|param| param.name().to_owned()).collect();
        assert_eq!(names, ["words.weight", "norm.weight", "norm.bias", "head.weight", "head.bias"]);
        let error = model.up.weight.set_requires_grad(true).unwrap_err().to_string();
        assert!(error.contains("mlp.up.weight is quantised"), "{error}");
        assert_eq!((model.up.weight.shape(), model.up.in_features()), (vec![128, 64], 64));
        assert_eq!(model.store.num_parameters(), 640 + 128 * 64 * 2 + 128 + 64 + 128 + 650);

        // The gradients are those of a dense layer with the numbers that the codes stand for.
        model.up.bias.as_ref().unwrap().set_requires_grad(true).unwrap();
        let x = input(Kind::Float).set_requires_grad(true);
        let output = model.down.forward(&model.up.forward(&x).unwrap().relu()).unwrap();
        output.square().sum(Kind::Float).backward();
        let (found, found_bias) = (x.grad().copy(), model.up.bias.as_ref().unwrap().grad().unwrap().copy());
        let (w1, w2) = (model.up.weight.get().unwrap(), model.down.weight.get().unwrap());
        let bias = model.up.bias.as_ref().unwrap().get().unwrap().detach().set_requires_grad(true);
        let y = x.detach().set_requires_grad(true);
        let hidden = y.linear(&w1, Some(&bias)).relu();
        hidden
            .linear(&w2, model.down.bias.as_ref().map(|bias| bias.get().unwrap()))
            .square()
            .sum(Kind::Float)
            .backward();
        assert!(apart(&found, &y.grad()) < 1e-4 && apart(&found_bias, &bias.grad()) < 1e-3);
    }
}

#[test]
fn weights_that_stay_in_16_bits_are_trained() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path());
    let config = BnbQuantizationConfig {
        llm_int8_has_fp16_weight: Some(true),
        torch_dtype: Some(FloatType::BFloat16),
        ..int8()
    };
    let model = load(&config, folder.path()).unwrap();
    let x = input(Kind::BFloat16).set_requires_grad(true);
    for is_training in [true, false] {
        model.store.set_training(is_training);
        let output = model.up.forward(&x).unwrap();
        let dense = x.linear(&model.up.weight.get().unwrap(), model.up.bias.as_ref().map(|bias| bias.get().unwrap()));
        let error = apart(&output, &dense);
        assert!(error > 0.0 && error < 0.1, "{error}");
        output.sum(Kind::Float).backward();
    }
    let wanted = x.detach().to_kind(Kind::Float).sum_dim_intlist([0i64].as_slice(), false, Kind::Float) * 2.0;
    assert!(apart(&model.up.weight.grad().unwrap().get(7), &wanted) < 0.2);
}

/// What an adapter does: it wraps the kernel that is there, and is given the same parameters.
#[derive(Debug)]
struct Added(Arc<dyn LinearKernel>);

impl LinearKernel for Added {
    fn linear(&self, input: &Tensor, weight: &Param, bias: Option<&Param>) -> accelerate::Result<Tensor> {
        Ok(self.0.linear(input, weight, bias)? + 1.0)
    }
}

#[test]
fn a_kernel_may_wrap_that_of_a_quantised_layer() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path());
    let model = load(&four_bit(), folder.path()).unwrap();
    let x = input(Kind::Float);
    let before = model.up.forward(&x).unwrap();
    model.up.set_kernel(Arc::new(Added(model.up.kernel())));
    assert_eq!(model.up.forward(&x).unwrap(), before + 1.0);
}

#[test]
fn a_quantised_model_is_saved_and_loaded_again() {
    let (folder, again) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    saved(folder.path());
    let double = BnbQuantizationConfig { bnb_4bit_use_double_quant: Some(true), ..four_bit() };
    for config in [four_bit(), double, int8()] {
        let model = load(&config, folder.path()).unwrap();
        save_model_weights(&model.store, again.path(), &Default::default()).unwrap();
        let x = input(model.up.bias.as_ref().unwrap().kind());
        let wanted = model.up.forward(&x).unwrap();
        assert_eq!(load(&config, again.path()).unwrap().up.forward(&x).unwrap(), wanted);
        // Of the same kind, a model that is quantised already takes the tensors by name.
        let other = load(&config, folder.path()).unwrap();
        other.up.weight.copy_(&Tensor::zeros([128, 64], (Kind::Float, Device::Cpu))).unwrap();
        assert_ne!(other.up.forward(&x).unwrap(), wanted);
        if config.bnb_4bit_use_double_quant.is_none() {
            load_checkpoint_in_model(&other.store, again.path(), &LoadOptions::default()).unwrap();
            assert_eq!(other.up.forward(&x).unwrap(), wanted);
        }
        // Weights of a model in memory become the same codes.
        let exact = self::model(ParamStore::new(Device::Cpu));
        load_checkpoint_in_model(&exact.store, folder.path(), &LoadOptions::default()).unwrap();
        load_and_quantize_model(&exact.store, &config, None, &LoadOptions::default()).unwrap();
        assert_eq!(exact.up.forward(&x).unwrap(), wanted);
        let error = load_and_quantize_model(&exact.store, &config, None, &LoadOptions::default()).unwrap_err();
        assert!(error.to_string().contains("is quantised already"), "{error}");
    }
}

#[test]
fn weights_without_memory_become_the_codes_of_those_that_would_have_been_drawn() {
    let quantised = |store: ParamStore| {
        let _generator = generator();
        tch::manual_seed(3);
        let model = drawn(store);
        load_and_quantize_model(&model.store, &four_bit(), None, &LoadOptions::default()).unwrap();
        model
    };
    let (wanted, found) =
        (quantised(ParamStore::new(Device::Cpu)), quantised(ParamStore::init_empty_weights(Device::Cpu)));
    let wanted = wanted.store.state_dict().unwrap();
    let state = found.store.state_dict().unwrap();
    assert_eq!(state.len(), wanted.len());
    for (name, tensor) in wanted.iter() {
        assert_eq!(state.get(name).unwrap(), tensor, "{name}");
    }
    assert!(!found.up.weight.requires_grad() && found.head.weight.requires_grad());
    // Nothing is left to be drawn.
    found.store.materialize().unwrap();
    assert_eq!(found.store.state_dict().unwrap().get("head.weight"), wanted.get("head.weight"));
}

/// Changes one tensor of a file, or takes it away.
fn changed(state: &StateDict, name: &str, change: impl Fn(&Tensor) -> Option<Tensor>) -> StateDict {
    let tensors = state.iter().filter_map(|(found, tensor)| {
        let tensor = if found == name { change(tensor) } else { Some(tensor.shallow_clone()) };
        Some((found.to_owned(), tensor?))
    });
    tensors.collect()
}

fn with_json(state: &StateDict, name: &str, from: &str, to: &str) -> StateDict {
    changed(state, name, |tensor| {
        let text = String::from_utf8(Vec::<u8>::try_from(tensor).unwrap()).unwrap();
        assert!(text.contains(from), "{text}");
        Some(Tensor::from_slice(text.replace(from, to).as_bytes()))
    })
}

#[test]
fn what_a_file_says_of_codes_is_not_believed() {
    let (folder, quantised) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    saved(folder.path());
    let config = BnbQuantizationConfig { bnb_4bit_use_double_quant: Some(true), ..four_bit() };
    let file = &save_model_weights(&load(&config, folder.path()).unwrap().store, quantised.path(), &Default::default())
        .unwrap()[0];
    let state = load_file(file).unwrap();
    let json = "mlp.up.weight.quant_state.bitsandbytes__nf4";
    let lie = |from: &str, to: &str| with_json(&state, json, from, to);
    let part = |name: &str, change: &dyn Fn(&Tensor) -> Option<Tensor>| {
        changed(&state, &format!("mlp.up.weight{name}"), change)
    };
    let renamed: StateDict = state
        .iter()
        .map(|(name, tensor)| (name.replace("bitsandbytes__nf4", "bitsandbytes__fp4"), tensor.shallow_clone()))
        .collect();
    let rows = [
        (lie("\"blocksize\": 64", "\"blocksize\": 32"), "absmax has 128 elements of uint8 in place of 256"),
        (lie("\"blocksize\": 64", "\"blocksize\": 0"), "blocksize is 0"),
        (lie("\"blocksize\": 64", "\"blocksize\": -1"), "cannot be understood"),
        (lie("[128, 64]", "[64, 128]"), "shape [64, 128], but the model has [128, 64]"),
        (lie("[128, 64]", "[9223372036854775807, 64]"), "is not the shape of a weight"),
        (lie("[128, 64]", "[]"), "is not the shape of a weight"),
        (lie("[128, 64]", "[128, -64]"), "is not the shape of a weight"),
        (lie("float32\", \"shape", "int8\", \"shape"), "is not a floating-point type"),
        (lie("\"nf4\"", "\"fp4\""), "quant_type \"fp4\", but its name says \"nf4\""),
        (lie("{", "["), "it is no JSON object"),
        (lie("\"nested_blocksize\": 256", "\"nested_blocksize\": 128"), "nested_blocksize Some(128)"),
        (lie("\"nested_dtype\": \"float32\", ", ""), "nested_dtype None"),
        (lie("\"quant_type\"", "\"quant_type\": \"nf4\", \"quant_type\""), "duplicate field"),
        (lie("\"blocksize\"", "\"__proto__\": 1, \"blocksize\""), "unknown field"),
        (part("", &|tensor| Some(tensor.narrow(0, 0, 4095).copy())), "4095 bytes of codes in place of 4096"),
        (part("", &|tensor| Some(tensor.to_kind(Kind::Int64))), "32768 bytes of codes in place of 4096"),
        (part(".absmax", &|tensor| Some(tensor.narrow(0, 0, 127).copy())), "absmax has 127 elements"),
        (part(".absmax", &|tensor| Some(tensor.to_kind(Kind::Float))), "of float32 in place of 128 of uint8"),
        (part(".quant_map", &|tensor| Some(tensor * 2.0)), "quant_map has other numbers"),
        (part(".quant_map", &|tensor| Some(tensor.narrow(0, 0, 15).copy())), "quant_map has other numbers"),
        (part(".nested_absmax", &|tensor| Some(tensor.repeat([2]))), "nested_absmax has 2 elements in place of 1"),
        (part(".nested_quant_map", &|tensor| Some(tensor * f64::NAN)), "not 256 rising numbers"),
        (part("", &|_| None), "mlp.up.weight is not there"),
        (part(".absmax", &|_| None), "mlp.up.weight.absmax is not there"),
        (part(".nested_absmax", &|_| None), "mlp.up.weight.nested_absmax is not there"),
        (part(".quant_map", &|_| None), "mlp.up.weight.quant_map is not there"),
        (part(".quant_state.bitsandbytes__nf4", &|_| None), "mlp.up.weight.quant_state is not there"),
        (renamed, "4 bits (fp4, double)"),
    ];
    for (hostile, wanted) in rows {
        check_refused(&config, &hostile, wanted);
    }
    // Other kinds than the configuration asks for, and codes for a layer that is not quantised.
    check_refused(&int8(), &state, "the configuration asks for 8 bits");
    let skip = BnbQuantizationConfig { llm_int8_skip_modules: Some(vec!["up".to_owned()]), ..config.clone() };
    check_refused(&skip, &state, "the configuration asks for numbers, because the layer is not quantised");
}

#[test]
fn parts_of_eight_bits_that_do_not_fit_are_refused() {
    let (folder, quantised) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    saved(folder.path());
    let file = &save_model_weights(&load(&int8(), folder.path()).unwrap().store, quantised.path(), &Default::default())
        .unwrap()[0];
    let state = load_file(file).unwrap();
    let part =
        |name: &str, change: &dyn Fn(&Tensor) -> Option<Tensor>| changed(&state, &format!("mlp.up.{name}"), change);
    let rows = [
        (part("SCB", &|tensor| Some(tensor.narrow(0, 0, 127).copy())), "Float of shape [127]"),
        (part("SCB", &|tensor| Some(tensor.to_kind(Kind::Half))), "Half of shape [128]"),
        (part("weight", &|tensor| Some(tensor.tr().contiguous())), "Int8 of shape [64, 128]"),
        (part("weight", &|tensor| Some(tensor.to_kind(Kind::Uint8))), "Uint8 of shape [128, 64]"),
        (part("weight", &|_| None), "mlp.up.weight is not there"),
        (part("weight_format", &|_| Some(Tensor::from(2u8))), "another order"),
        (part("weight_format", &|_| Some(Tensor::from_slice(&[0u8, 0]))), "another order"),
    ];
    for (hostile, wanted) in rows {
        check_refused(&int8(), &hostile, wanted);
    }
    check_refused(&four_bit(), &state, "the configuration asks for 4 bits");
}

/// The error is one of weights, and nothing has been loaded.
fn check_refused(config: &BnbQuantizationConfig, state: &StateDict, wanted: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    save_file(state, &path).unwrap();
    let model = model(ParamStore::init_empty_weights(Device::Cpu));
    let error = load_and_quantize_model(&model.store, config, Some(&path), &LoadOptions::default()).unwrap_err();
    assert!(error.is_weights() && error.to_string().contains(wanted), "{wanted}: {error}");
    let is_untouched = |param: &Param| tch::no_grad(|| param.get().unwrap().isnan().all().int64_value(&[]) == 1);
    assert!(model.store.parameters().iter().all(is_untouched));
}

#[test]
fn numbers_that_float16_does_not_hold_do_not_become_8_bits() {
    let folder = tempfile::tempdir().unwrap();
    let exact = model(ParamStore::new(Device::Cpu));
    exact.up.weight.copy_(&Tensor::from(1e6f32)).unwrap();
    save_model_weights(&exact.store, folder.path(), &Default::default()).unwrap();
    let error = load(&int8(), folder.path()).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("mlp.up.weight has numbers that float16 does not hold"), "{error}");
    load(&four_bit(), folder.path()).unwrap();
}

#[test]
fn an_overwritten_state_is_noticed_when_it_is_used() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path());
    let model = load(&four_bit(), folder.path()).unwrap();
    let state = model.store.state_dict().unwrap();
    let name = "mlp.up.weight.quant_state.bitsandbytes__nf4";
    let lies = with_json(&state, name, "\"blocksize\": 64", "\"blocksize\": 32");
    model.store.load_state_dict(&lies, Default::default()).unwrap();
    let error = model.up.forward(&input(Kind::Float)).unwrap_err().to_string();
    assert!(error.contains("was overwritten with another quant_state"), "{error}");
}

#[test]
fn ranks_train_beside_the_codes_of_rank_0() {
    let codes = |store: &ParamStore| -> Vec<Vec<f64>> {
        let state = store.state_dict().unwrap();
        let names = ["mlp.up.weight", "mlp.up.weight.absmax", "mlp.down.weight.absmax"];
        names.map(|name| Vec::try_from(state.get(name).unwrap().to_kind(Kind::Double).reshape([-1])).unwrap()).to_vec()
    };
    let config = four_bit();
    let found = testing::ranks(2, Accelerator::builder(), |accelerator| {
        let model = model(ParamStore::new(accelerator.device()));
        // Each rank has weights of its own, and rank 0's count.
        model.up.weight.copy_(&(model.up.weight.get()?.detach() * (1.0 + accelerator.process_index() as f64)))?;
        load_and_quantize_model(&model.store, &config, None, &LoadOptions::default())?;
        let before = codes(&model.store);
        let Model { store, up, down, head } = model;
        for name in ["words.weight", "norm.weight", "norm.bias"] {
            store.get(name).unwrap().set_requires_grad(false)?;
        }
        let optimizer = Sgd::builder(&store).lr(0.1).build()?;
        let forward = move |x: &Tensor| head.forward(&down.forward(&up.forward(x)?.relu())?);
        let (model, mut optimizer) = accelerator.prepare((ModuleFn::new(&store, forward), optimizer))?;
        let x = Tensor::ones([3, 64], (Kind::Float, Device::Cpu)) * (accelerator.process_index() as f64 + 1.0);
        let loss = model.forward(&x)?.square().mean(Kind::Float);
        accelerator.backward(&loss)?;
        optimizer.step()?;
        let head: Vec<f64> =
            Vec::try_from(store.get("head.weight").unwrap().get()?.to_kind(Kind::Double).reshape([-1]))?;
        Ok((before, codes(&store), head))
    })
    .unwrap();
    let [(before, after, head), (other_before, other_after, other_head)] = &found[..] else { panic!("two ranks") };
    assert_ne!(before, other_before);
    assert_eq!((before, before), (after, other_after));
    assert_eq!(head, other_head);
}

#[test]
fn shards_of_codes_give_the_losses_of_whole_ones() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path());
    let double = BnbQuantizationConfig { bnb_4bit_use_double_quant: Some(true), ..four_bit() };
    let int8 = BnbQuantizationConfig { torch_dtype: Some(FloatType::Float32), ..int8() };
    for config in [four_bit(), double, int8] {
        let losses = |world_size: usize, builder| {
            testing::ranks(world_size, builder, |accelerator: Accelerator| {
                let Model { store, up, down, head } = load(&config, folder.path())?;
                let before = store.state_dict()?;
                let optimizer = Sgd::builder(&store).lr(0.5).build()?;
                let forward = move |x: &Tensor| head.forward(&down.forward(&up.forward(x)?.relu())?);
                let (model, mut optimizer) = accelerator.prepare((ModuleFn::new(&store, forward), optimizer))?;
                let local = store.get("mlp.up.weight").unwrap().local().numel();
                let mut losses = Vec::new();
                for step in 0..3 {
                    let x = Tensor::ones([6, 64], (Kind::Float, Device::Cpu)) * (0.1 + f64::from(step));
                    let loss = model.forward(&x)?.square().mean(Kind::Float);
                    accelerator.backward(&loss)?;
                    optimizer.step()?;
                    optimizer.zero_grad()?;
                    losses.push(loss.double_value(&[]));
                }
                // The whole is what it was, in memory and in files.
                let after = store.state_dict()?;
                let saved = folder.path().join(format!("again-{world_size}"));
                accelerator.save_model(&store, &saved, &Default::default())?;
                let again = load(&config, &saved)?.store.state_dict()?;
                for (name, tensor) in before.iter().filter(|(name, _)| name.starts_with("mlp")) {
                    assert_eq!(after.get(name).unwrap(), tensor, "{name}");
                    assert_eq!(again.get(name).unwrap(), tensor, "{name}");
                }
                Ok((losses, local))
            })
            .unwrap()
        };
        let (whole, all) = losses(1, Accelerator::builder()).swap_remove(0);
        for world_size in [2, 3] {
            let fsdp = || Accelerator::builder().fsdp_plugin(FullyShardedDataParallelPlugin::default());
            for (found, local) in losses(world_size, fsdp()) {
                assert!(local <= all.div_ceil(world_size) + 64, "{local} of {all}");
                let near = |(found, wanted): (&f64, &f64)| (found - wanted).abs() <= 1e-5 * wanted.abs();
                assert!(found.iter().zip(&whole).all(near), "{found:?} {whole:?}");
            }
        }
    }
}

#[test]
fn a_checkpointed_layer_with_codes_gives_the_same_gradient() {
    let store = ParamStore::new(Device::Cpu);
    let block = Checkpointed::new(store.root() / "body", |path| Linear::new(path, 64, 64, Default::default())).unwrap();
    Linear::new(store.root() / "head", 64, 2, Default::default()).unwrap();
    load_and_quantize_model(&store, &four_bit(), None, &LoadOptions::default()).unwrap();
    let gradient = || {
        let x = Tensor::ones([3, 64], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        block.forward(&x).unwrap().square().sum(Kind::Float).backward();
        x.grad()
    };
    let wanted = gradient();
    store.gradient_checkpointing_enable(Default::default()).unwrap();
    assert_eq!(gradient(), wanted);
}
