//! Layers and initialisations against values that PyTorch gave for the same seed (see `parity/nn/generate.py`).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod processor;

use accelerate::Result;
use accelerate::nn::init::{self, FanMode, Nonlinearity};
use accelerate::nn::*;
use accelerate::tch::{self, Device, Kind, Reduction, Tensor};
use serde_json::Value;
use std::sync::{Mutex, MutexGuard, PoisonError};

const SEED: i64 = 7;

/// libtorch has one generator per process, and tests of one file may run as threads.
fn seeded() -> MutexGuard<'static, ()> {
    static GENERATOR: Mutex<()> = Mutex::new(());
    let guard = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    tch::manual_seed(SEED);
    guard
}

/// The file made with the random kernels that libtorch chooses on this CPU.
fn expected_initialisation() -> Value {
    #[cfg(target_arch = "x86_64")]
    let vectorised = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    #[cfg(not(target_arch = "x86_64"))]
    let vectorised = false;
    // libtorch obeys this variable, so both files can be checked on one machine.
    let switched_off = std::env::var("ATEN_CPU_CAPABILITY").is_ok_and(|value| value == "default");
    let text = match vectorised && !switched_off {
        true => include_str!("../../../parity/nn/initialisation.avx2.json"),
        false => include_str!("../../../parity/nn/initialisation.default.json"),
    };
    serde_json::from_str(text).unwrap()
}

fn expected_forward() -> Value {
    let mut all: Value = serde_json::from_str(include_str!("../../../parity/nn/forward.json")).unwrap();
    let more: Value = serde_json::from_str(include_str!("../../../parity/nn/layers.json")).unwrap();
    assert_eq!(all["torch"], more["torch"]);
    all["cases"].as_object_mut().unwrap().extend(more["cases"].as_object().unwrap().clone());
    all
}

fn bytes_of(tensor: &Tensor) -> Vec<u8> {
    let mut bytes = vec![0; tensor.numel() * tensor.kind().elt_size_in_bytes()];
    tensor.contiguous().copy_data_u8(&mut bytes, tensor.numel());
    bytes
}

fn fnv1a(bytes: &[u8]) -> String {
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    format!("{:016x}", bytes.iter().fold(0xcbf2_9ce4_8422_2325, step))
}

fn first_bits(tensor: &Tensor) -> Vec<String> {
    let size = tensor.kind().elt_size_in_bytes();
    let hex = |element: &[u8]| element.iter().rev().map(|byte| format!("{byte:02x}")).collect();
    bytes_of(tensor).chunks(size).take(4).map(hex).collect()
}

/// Tensors drawn from the seed have PyTorch's names, order, shapes and bits, and leave the generator where
/// PyTorch leaves it.
fn check_initialisation(name: &str, draw: impl FnOnce() -> Result<Vec<(String, Tensor)>>) {
    let expected = expected_initialisation();
    let expected = &expected["cases"][name];
    let _seeded = seeded();
    let found = draw().unwrap();
    let next = Tensor::rand([1], (Kind::Float, Device::Cpu));
    let describe = |(name, tensor): &(String, Tensor)| {
        serde_json::json!({
            "name": name,
            "shape": tensor.size(),
            "first": first_bits(tensor),
            "fnv1a": fnv1a(&bytes_of(tensor)),
        })
    };
    let mut found = Value::Array(found.iter().map(describe).collect());
    let mut wanted = expected["tensors"].clone();
    if !processor::is_intel() && name.starts_with("trunc_normal") {
        // Names, shapes and the first elements remain.
        for tensor in [&mut found, &mut wanted].into_iter().flat_map(|all| all.as_array_mut().unwrap()) {
            tensor.as_object_mut().unwrap().remove("fnv1a");
        }
    }
    assert_eq!(found, wanted, "{name}");
    assert_eq!(first_bits(&next)[0], expected["next"], "{name}: another number of draws");
}

fn check_layer<L>(name: &str, make: impl FnOnce(Path) -> Result<L>) {
    check_initialisation(name, || {
        let store = ParamStore::new(Device::Cpu);
        make(store.root())?;
        Ok(store.state_dict()?.into_iter().collect())
    });
}

#[test]
fn linear_layers_begin_as_in_pytorch() {
    check_layer("linear", |path| Linear::new(path, 7, 5, Default::default()));
    check_layer("linear_without_bias", |path| {
        Linear::new(path, 7, 5, LinearConfig { bias: false, ..Default::default() })
    });
    check_layer("linear_large", |path| Linear::new(path, 64, 48, Default::default()));
}

#[test]
fn embeddings_begin_as_in_pytorch() {
    check_layer("embedding", |path| Embedding::new(path, 100, 16, Default::default()));
    check_layer("embedding_small", |path| Embedding::new(path, 3, 4, Default::default()));
    let config = EmbeddingConfig { padding_idx: Some(3), ..Default::default() };
    check_layer("embedding_with_padding", |path| Embedding::new(path, 10, 8, config));
}

#[test]
fn norms_begin_as_in_pytorch() {
    check_layer("layer_norm", |path| LayerNorm::new(path, [4, 6], Default::default()));
    let config = LayerNormConfig { bias: false, ..Default::default() };
    check_layer("layer_norm_without_bias", |path| LayerNorm::new(path, [6], config));
    check_layer("rms_norm", |path| RMSNorm::new(path, [6], Default::default()));
    check_layer("group_norm", |path| GroupNorm::new(path, 2, 6, Default::default()));
    check_layer("batch_norm1d", |path| BatchNorm1d::new(path, 6, Default::default()));
    let config = BatchNormConfig { affine: false, ..Default::default() };
    check_layer("batch_norm2d_without_affine", |path| BatchNorm2d::new(path, 6, config));
    let config = BatchNormConfig { track_running_stats: false, ..Default::default() };
    check_layer("batch_norm2d_without_statistics", |path| BatchNorm2d::new(path, 6, config));
}

#[test]
fn convolutions_begin_as_in_pytorch() {
    check_layer("conv1d", |path| Conv1d::new(path, 4, 6, [3], Default::default()));
    check_layer("conv2d", |path| Conv2d::new(path, 3, 8, [3, 5], Default::default()));
    let config = Conv2dConfig { groups: 2, bias: false, ..Default::default() };
    check_layer("conv2d_grouped", |path| Conv2d::new(path, 4, 8, [3, 3], config));
}

#[test]
fn attention_begins_as_in_pytorch() {
    let check = |name, config| {
        check_layer(name, |path| MultiheadAttention::new(path, 16, 4, config));
    };
    check("attention", MultiheadAttentionConfig::default());
    check("attention_without_bias", MultiheadAttentionConfig { bias: false, ..Default::default() });
    let sizes = MultiheadAttentionConfig { kdim: Some(12), vdim: Some(10), ..Default::default() };
    check("attention_other_sizes", sizes);
}

#[test]
fn sequential_begins_as_in_pytorch() {
    check_layer("sequential", |path| {
        Sequential::new(path)
            .push(|path| Linear::new(path, 4, 6, Default::default()))?
            .push(|_| Ok(Relu))?
            .push(|path| LayerNorm::new(path, [6], Default::default()))?
            .push(|path| {
                Sequential::new(path)
                    .push(|path| Linear::new(path, 6, 6, Default::default()))?
                    .push(|path| Dropout::new(path, 0.1))
            })?
            .push(|path| Linear::new(path, 6, 2, Default::default()))
    });
}

#[test]
fn init_functions_give_the_bits_of_pytorch() {
    let check = |name, shape: &[i64], fill: &dyn Fn(&Tensor) -> Result<()>| {
        check_initialisation(name, || {
            let tensor = Tensor::empty(shape, (Kind::Float, Device::Cpu));
            fill(&tensor)?;
            Ok(vec![("tensor".to_owned(), tensor)])
        });
    };
    let leaky = Nonlinearity::LeakyRelu { negative_slope: 0.0 };
    let tanh = init::calculate_gain(Nonlinearity::Tanh);
    check("uniform", &[5, 7], &|t| init::uniform_(t, -0.3, 0.7));
    check("normal_small", &[3, 5], &|t| init::normal_(t, 0.1, 0.5));
    check("normal_large", &[9, 11], &|t| init::normal_(t, 0.0, 0.02));
    check("trunc_normal", &[9, 11], &|t| init::trunc_normal_(t, 0.0, 1.0, -2.0, 2.0));
    check("trunc_normal_shifted", &[9, 11], &|t| init::trunc_normal_(t, 0.3, 0.7, -0.2, 1.1));
    check("trunc_normal_small_std", &[9, 11], &|t| init::trunc_normal_(t, 0.0, 0.02, -2.0, 2.0));
    check("xavier_uniform", &[6, 10], &|t| init::xavier_uniform_(t, 1.0));
    check("xavier_uniform_tanh", &[6, 10, 3], &|t| init::xavier_uniform_(t, tanh));
    check("xavier_normal", &[6, 10], &|t| init::xavier_normal_(t, 1.0));
    check("kaiming_uniform", &[6, 10], &|t| init::kaiming_uniform_(t, FanMode::FanIn, leaky));
    check("kaiming_uniform_fan_out_relu", &[6, 10, 3, 3], &|t| {
        init::kaiming_uniform_(t, FanMode::FanOut, Nonlinearity::Relu)
    });
    check("kaiming_normal", &[6, 10], &|t| init::kaiming_normal_(t, FanMode::FanIn, leaky));
    check("kaiming_normal_selu", &[6, 10], &|t| init::kaiming_normal_(t, FanMode::FanIn, Nonlinearity::Selu));
}

#[test]
fn every_expected_case_has_the_version_of_libtorch_that_is_used_here() {
    assert_eq!(expected_initialisation()["torch"], "2.11.0");
    assert_eq!(expected_forward()["torch"], "2.11.0");
}

// Kernels of matrix products differ between CPUs in the last bits, so results are compared closely and not
// exactly.
fn check_close(what: &str, found: &Tensor, expected: &Value) {
    let shape: Vec<i64> = serde_json::from_value(expected["shape"].clone()).unwrap();
    assert_eq!(found.size(), shape, "{what}");
    let values: Vec<f64> = serde_json::from_value(expected["values"].clone()).unwrap();
    let expected = Tensor::from_slice(&values).view(&shape[..]);
    let difference = (found.to_kind(Kind::Double) - expected).abs().max().double_value(&[]);
    assert!(difference < 3e-6, "{what}: differs by {difference}");
}

/// Where the file has them: names, shapes and first elements of what was drawn.
fn check_drawn(name: &str, store: &ParamStore, expected: &Value) {
    let Some(wanted) = expected.get("parameters") else { return };
    let drawn: Vec<(String, Tensor)> = store.state_dict().unwrap().into_iter().collect();
    assert_eq!(drawn.len(), wanted.as_array().unwrap().len(), "{name}");
    for ((found, tensor), wanted) in drawn.iter().zip(wanted.as_array().unwrap()) {
        let shape: Vec<i64> = serde_json::from_value(wanted["shape"].clone()).unwrap();
        assert_eq!((Some(found.as_str()), tensor.size()), (wanted["name"].as_str(), shape), "{name}");
        let flat = tensor.reshape([-1]);
        for (index, bits) in wanted["first"].as_array().unwrap().iter().enumerate() {
            let value = f32::from_bits(u32::from_str_radix(bits.as_str().unwrap(), 16).unwrap());
            let found = flat.double_value(&[index as i64]);
            assert!((found - f64::from(value)).abs() < 1e-6, "{name}: element {index} of {}", wanted["name"]);
        }
    }
}

/// Output, gradients of `sum(output * cos(i))` and buffers after one call equal PyTorch's.
fn check_forward<L>(
    name: &str,
    make: impl FnOnce(Path) -> Result<L>,
    draw: impl FnOnce() -> Vec<Tensor>,
    call: impl FnOnce(&L, &ParamStore, &[Tensor]) -> Result<Tensor>,
) {
    let expected = expected_forward();
    let expected = &expected["cases"][name];
    let _seeded = seeded();
    let store = ParamStore::new(Device::Cpu);
    let layer = make(store.root()).unwrap();
    check_drawn(name, &store, expected);
    let inputs: Vec<Tensor> = draw()
        .into_iter()
        .map(|input| if input.is_floating_point() { input.set_requires_grad(true) } else { input })
        .collect();

    let output = call(&layer, &store, &inputs).unwrap();
    check_close(&format!("{name}: output"), &output, &expected["output"]);

    let weights = Tensor::arange(output.numel() as i64, (Kind::Float, Device::Cpu)).cos();
    (&output * weights.view_as(&output)).sum(Kind::Float).backward();
    let gradients: Vec<Tensor> = inputs.iter().map(Tensor::grad).filter(Tensor::defined).collect();
    let wanted = expected["input_gradients"].as_array().unwrap();
    assert_eq!(gradients.len(), wanted.len(), "{name}: input gradients");
    for (gradient, wanted) in gradients.iter().zip(wanted) {
        check_close(&format!("{name}: gradient of an input"), gradient, wanted);
    }
    let wanted = expected["gradients"].as_object().unwrap();
    for param in store.parameters() {
        let what = format!("{name}: gradient of {}", param.name());
        check_close(&what, &param.grad().expect(&what), &wanted[param.name()]);
    }
    let wanted = expected["buffers"].as_object().unwrap();
    assert_eq!(store.buffers().len(), wanted.len(), "{name}: buffers");
    for buffer in store.buffers() {
        let what = format!("{name}: {}", buffer.name());
        check_close(&what, &buffer.get().unwrap(), &wanted[buffer.name()]);
    }
}

fn randn(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, (Kind::Float, Device::Cpu))
}

fn check_layer_forward<L: Layer>(name: &str, shape: &[i64], make: impl FnOnce(Path) -> Result<L>) {
    check_forward(name, make, || vec![randn(shape)], |layer, _, inputs| layer.forward(&inputs[0]));
}

#[test]
fn simple_layers_compute_as_in_pytorch() {
    check_layer_forward("linear", &[2, 3, 7], |path| Linear::new(path, 7, 5, Default::default()));
    check_layer_forward("layer_norm", &[4, 6], |path| LayerNorm::new(path, [6], Default::default()));
    check_layer_forward("rms_norm", &[4, 6], |path| RMSNorm::new(path, [6], Default::default()));
    let config = RMSNormConfig { eps: Some(1e-3), ..Default::default() };
    check_layer_forward("rms_norm_with_eps", &[4, 6], |path| RMSNorm::new(path, [6], config));
    check_layer_forward("group_norm", &[2, 6, 3], |path| GroupNorm::new(path, 2, 6, Default::default()));
    check_layer_forward("activations", &[5, 4], |path| {
        Sequential::new(path)
            .push(|path| Linear::new(path, 4, 6, Default::default()))?
            .push(|_| Ok(Gelu::Erf))?
            .push(|path| Linear::new(path, 6, 3, Default::default()))?
            .push(|_| Ok(Gelu::Tanh))?
            .push(|_| Ok(Silu))?
            .push(|_| Ok(Tanh))?
            .push(|_| Ok(Relu))
    });
    let config = EmbeddingConfig { padding_idx: Some(3), ..Default::default() };
    check_forward(
        "embedding",
        |path| Embedding::new(path, 10, 4, config),
        || vec![Tensor::from_slice(&[1i64, 3, 9, 1]).view([2, 2])],
        |layer, _, inputs| layer.forward(&inputs[0]),
    );
}

#[test]
fn convolutions_compute_as_in_pytorch() {
    let config = Conv1dConfig { stride: [2], padding: Padding::Explicit([1]), dilation: [2], ..Default::default() };
    check_layer_forward("conv1d", &[2, 4, 11], |path| Conv1d::new(path, 4, 6, [3], config));
    let config = Conv1dConfig { padding: Padding::Same, ..Default::default() };
    check_layer_forward("conv1d_same", &[2, 4, 7], |path| Conv1d::new(path, 4, 6, [3], config));
    let config = Conv2dConfig { groups: 2, padding: Padding::Explicit([1, 0]), ..Default::default() };
    check_layer_forward("conv2d", &[2, 4, 5, 5], |path| Conv2d::new(path, 4, 6, [3, 2], config));
}

#[test]
fn transposed_convolutions_compute_as_in_pytorch() {
    let config = ConvTransposeConfig { stride: [2], padding: [1], output_padding: [1], ..Default::default() };
    check_layer_forward("conv_transpose1d", &[2, 4, 5], |path| ConvTranspose1d::new(path, 4, 6, [3], config));
    let config = ConvTransposeConfig { stride: [2, 1], groups: 2, dilation: [1, 2], ..Default::default() };
    check_layer_forward("conv_transpose2d", &[2, 4, 3, 4], |path| ConvTranspose2d::new(path, 4, 6, [3, 2], config));
    let config = ConvTransposeConfig { bias: false, ..Default::default() };
    let make = |path| ConvTranspose2d::new(path, 2, 3, [2, 2], config);
    check_layer_forward("conv_transpose2d_without_bias", &[1, 2, 3, 3], make);
}

#[test]
fn layers_without_parameters_compute_as_in_pytorch() {
    fn check<L: Layer>(name: &str, shape: &[i64], layer: L) {
        check_layer_forward(name, shape, |_| Ok(layer));
    }
    let pool = MaxPool2d { stride: Some([2, 2]), padding: [1, 1], ..MaxPool2d::new([3, 3]) };
    check("max_pool2d", &[2, 3, 7, 6], pool);
    let pool = MaxPool2d { dilation: [2, 1], ceil_mode: true, ..MaxPool2d::new([2, 3]) };
    check("max_pool2d_dilated", &[1, 2, 8, 7], pool);
    check("max_pool2d_default", &[1, 2, 5, 4], MaxPool2d::new([2, 2]));
    let pool = AvgPool2d { stride: Some([2, 2]), padding: [1, 1], ..AvgPool2d::new([3, 2]) };
    check("avg_pool2d", &[2, 3, 7, 6], pool);
    let pool = AvgPool2d { padding: [1, 1], count_include_pad: false, ceil_mode: true, ..AvgPool2d::new([3, 3]) };
    check("avg_pool2d_without_padding", &[1, 2, 7, 5], pool);
    check("avg_pool2d_divided", &[2, 4, 4], AvgPool2d { divisor_override: Some(3), ..AvgPool2d::new([2, 2]) });
    check("adaptive_avg_pool2d", &[2, 3, 7, 5], AdaptiveAvgPool2d { output_size: [2, 3] });
    check("flatten", &[2, 3, 2, 2], Flatten::default());
    check("flatten_middle", &[2, 3, 2, 2], Flatten { start_dim: 1, end_dim: 2 });
    check("sigmoid", &[3, 4], Sigmoid);
    check("softmax", &[2, 3, 4], Softmax { dim: 1 });
    check("log_softmax", &[2, 3, 4], LogSoftmax { dim: -1 });
}

#[test]
fn recurrent_layers_compute_as_in_pytorch() {
    let flat = |tensors: &[Tensor]| Tensor::cat(&tensors.iter().map(|part| part.reshape([-1])).collect::<Vec<_>>(), 0);
    let lstm = |name: &str, shape: &[i64], config| {
        let call = |layer: &LSTM, _: &ParamStore, inputs: &[Tensor]| {
            let (output, (hidden, cell)) = layer.forward(&inputs[0], None)?;
            Ok(flat(&[output, hidden, cell]))
        };
        check_forward(name, |path| LSTM::new(path, 3, 4, config), || vec![randn(shape)], call);
    };
    let gru = |name: &str, config| {
        let call = |layer: &GRU, _: &ParamStore, inputs: &[Tensor]| {
            let (output, hidden) = layer.forward(&inputs[0], None)?;
            Ok(flat(&[output, hidden]))
        };
        check_forward(name, |path| GRU::new(path, 3, 4, config), || vec![randn(&[5, 2, 3])], call);
    };
    let stacked = RNNConfig { num_layers: 2, bidirectional: true, ..Default::default() };
    lstm("lstm", &[5, 2, 3], RNNConfig::default());
    lstm("lstm_stacked", &[2, 5, 3], RNNConfig { batch_first: true, ..stacked });
    gru("gru", RNNConfig::default());
    gru("gru_stacked", RNNConfig { bias: false, ..stacked });
}

/// The loss of scores that are drawn, for a target that is drawn after them.
fn check_loss(
    name: &str,
    shape: &[i64],
    draw_target: impl FnOnce() -> Tensor,
    loss: impl FnOnce(&Tensor, &Tensor) -> Result<Tensor>,
) {
    let target = std::cell::OnceCell::new();
    let draw = || {
        let scores = randn(shape);
        target.set(draw_target()).unwrap();
        vec![scores]
    };
    check_forward(name, |_| Ok(()), draw, |(), _, inputs| loss(&inputs[0], target.get().unwrap()));
}

#[test]
fn cross_entropy_computes_as_in_pytorch() {
    let weight = || Some(Tensor::from_slice(&[0.5f32, 1.0, 2.0, 0.25, 3.0]));
    let check = |name: &str, target: &[i64], loss: CrossEntropyLoss| {
        check_loss(name, &[6, 5], || Tensor::from_slice(target), |input, target| loss.forward(input, target));
    };
    let classes = [1, 4, 0, -100, 2, 4];
    check("cross_entropy", &classes, CrossEntropyLoss::default());
    let smoothed = |label_smoothing| CrossEntropyLoss { label_smoothing, ..Default::default() };
    check("cross_entropy_smoothed", &classes, smoothed(0.2));
    check("cross_entropy_weighted", &classes, CrossEntropyLoss { weight: weight(), ..smoothed(0.1) });
    let sum = CrossEntropyLoss { reduction: Reduction::Sum, ignore_index: 4, ..Default::default() };
    check("cross_entropy_sum", &[1, 4, 0, 3, 2, 4], sum);
    check("cross_entropy_each", &classes, CrossEntropyLoss { reduction: Reduction::None, ..Default::default() });
    let probabilities = || randn(&[6, 5]).softmax(-1, Kind::Float);
    let loss = smoothed(0.1);
    check_loss("cross_entropy_probabilities", &[6, 5], probabilities, |input, target| loss.forward(input, target));
    let images = || Tensor::arange(8, (Kind::Int64, Device::Cpu)).view([2, 2, 2]).remainder(3);
    let loss = CrossEntropyLoss::default();
    check_loss("cross_entropy_images", &[2, 3, 2, 2], images, |input, target| loss.forward(input, target));
}

#[test]
fn other_losses_compute_as_in_pytorch() {
    let mse = |name: &str, reduction| {
        let loss = MSELoss { reduction };
        check_loss(name, &[3, 4], || randn(&[3, 4]), |input, target| loss.forward(input, target));
    };
    mse("mse", Reduction::Mean);
    mse("mse_sum", Reduction::Sum);
    let drawn = || randn(&[3, 5]).sigmoid();
    let loss = BCEWithLogitsLoss::default();
    check_loss("bce_with_logits", &[3, 5], drawn, |input, target| loss.forward(input, target));
    let weight = Tensor::from_slice(&[0.5f32, 1.0, 2.0, 0.25, 3.0]);
    let pos_weight = Some(&weight * 2.0);
    let loss = BCEWithLogitsLoss { weight: Some(weight), pos_weight, reduction: Reduction::Sum };
    check_loss("bce_with_logits_weighted", &[3, 5], || drawn().round(), |input, target| loss.forward(input, target));
    let kl = |name: &str, loss: KLDivLoss| {
        let drawn = || match loss.log_target {
            true => randn(&[3, 4]).log_softmax(-1, Kind::Float),
            false => randn(&[3, 4]).softmax(-1, Kind::Float),
        };
        check_loss(name, &[3, 4], drawn, |input, target| loss.forward(input, target));
    };
    kl("kl_div", KLDivLoss::default());
    kl("kl_div_batch_mean", KLDivLoss { reduction: KLDivReduction::BatchMean, ..Default::default() });
    kl("kl_div_log_target", KLDivLoss { reduction: KLDivReduction::Sum, log_target: true });
}

/// PyTorch warns, and compares each element with each.
#[test]
fn targets_of_another_shape_are_errors() {
    let (input, target) = (randn(&[8, 1]), randn(&[8]));
    for error in [
        MSELoss::default().forward(&input, &target).unwrap_err(),
        BCEWithLogitsLoss::default().forward(&input, &target).unwrap_err(),
        KLDivLoss::default().forward(&input, &target).unwrap_err(),
    ] {
        assert!(error.to_string().contains("[8, 1]") && error.to_string().contains("[8]"), "{error}");
    }
}

/// Three training batches, then the first one in evaluation mode.
fn check_batch_norm<const N: usize>(name: &str, num_features: i64, shape: &[i64], config: BatchNormConfig)
where
    BatchNorm<N>: Layer,
{
    check_forward(
        name,
        |path| BatchNorm::<N>::new(path, num_features, config),
        || (0..3).map(|_| randn(shape)).collect(),
        |layer, store, batches| {
            let mut outputs = Vec::new();
            for batch in batches {
                outputs.push(layer.forward(&(batch * 2 + 1))?);
            }
            store.eval();
            outputs.push(layer.forward(&batches[0])?);
            Ok(Tensor::stack(&outputs, 0))
        },
    );
}

#[test]
fn batch_norm_computes_and_remembers_as_in_pytorch() {
    let default = BatchNormConfig::default();
    check_batch_norm::<1>("batch_norm1d", 3, &[4, 3], default);
    let config = BatchNormConfig { eps: 1e-3, momentum: Some(0.3), ..default };
    check_batch_norm::<1>("batch_norm1d_sequence", 3, &[4, 3, 5], config);
    check_batch_norm::<2>("batch_norm2d", 2, &[3, 2, 2, 3], default);
    let config = BatchNormConfig { momentum: None, ..default };
    check_batch_norm::<2>("batch_norm2d_cumulative", 2, &[3, 2, 2, 3], config);
    let config = BatchNormConfig { track_running_stats: false, ..default };
    check_batch_norm::<2>("batch_norm2d_without_statistics", 2, &[3, 2, 2, 3], config);
}

fn check_self_attention(name: &str, shape: &[i64], config: MultiheadAttentionConfig, mask: AttentionMask<'_>) {
    check_forward(
        name,
        |path| MultiheadAttention::new(path, 8, 2, config),
        || vec![randn(shape)],
        |layer, _, inputs| layer.forward(&inputs[0], &inputs[0], &inputs[0], mask),
    );
}

#[test]
fn self_attention_computes_as_in_pytorch() {
    let sequence_first = MultiheadAttentionConfig::default();
    let config = MultiheadAttentionConfig { batch_first: true, ..sequence_first };
    let (shape, none) = ([2, 4, 8], AttentionMask::default());
    check_self_attention("attention_self", &shape, config, none);
    check_self_attention("attention_sequence_first", &[4, 2, 8], sequence_first, none);
    let config_without_bias = MultiheadAttentionConfig { bias: false, ..config };
    check_self_attention("attention_without_bias", &shape, config_without_bias, none);

    let padding = Tensor::from_slice(&[false, false, false, true, false, false, false, false]).view([2, 4]);
    let mask = AttentionMask { key_padding_mask: Some(&padding), ..none };
    check_self_attention("attention_padding", &shape, config, mask);

    let cpu = (Kind::Float, Device::Cpu);
    let minus_infinity = Tensor::zeros([2, 4], cpu).masked_fill(&padding, f64::NEG_INFINITY);
    let additive = Tensor::linspace(-1, 1, 16, cpu).view([4, 4]);
    let mask = AttentionMask { key_padding_mask: Some(&minus_infinity), attn_mask: Some(&additive), ..none };
    check_self_attention("attention_padding_and_additive", &shape, config, mask);

    let causal = AttentionMask { is_causal: true, ..none };
    check_self_attention("attention_causal", &shape, config, causal);
    let triangle = Tensor::ones([4, 4], (Kind::Bool, Device::Cpu)).triu(1);
    let mask = AttentionMask { attn_mask: Some(&triangle), ..none };
    check_self_attention("attention_boolean_mask", &shape, config, mask);

    let per_head = Tensor::linspace(-2, 1, 64, cpu).view([4, 4, 4]);
    let mask = AttentionMask { attn_mask: Some(&per_head), ..none };
    check_self_attention("attention_mask_per_head", &shape, config, mask);
}

/// As in PyTorch, so that dropout of the result draws its mask in the same order of memory. `parity precision` compares it.
#[test]
fn attention_with_the_batch_first_computes_with_the_length_first() {
    let _seeded = seeded();
    let input = randn(&[2, 4, 8]);
    let attend = |batch_first, input: &Tensor| {
        tch::manual_seed(1);
        let config = MultiheadAttentionConfig { batch_first, ..Default::default() };
        let layer = MultiheadAttention::new(ParamStore::new(Device::Cpu).root(), 8, 2, config).unwrap();
        layer.forward(input, input, input, AttentionMask::default()).unwrap()
    };
    let (batch_first, length_first) = (attend(true, &input), attend(false, &input.transpose(0, 1).contiguous()));
    assert_eq!(batch_first.transpose(0, 1), length_first);
    assert!(batch_first.transpose(0, 1).is_contiguous() && !batch_first.is_contiguous());
}

#[test]
fn cross_attention_computes_as_in_pytorch() {
    let config = MultiheadAttentionConfig { batch_first: true, ..Default::default() };
    check_forward(
        "attention_cross",
        |path| MultiheadAttention::new(path, 8, 2, config),
        || vec![randn(&[2, 3, 8]), randn(&[2, 5, 8])],
        |layer, _, inputs| layer.forward(&inputs[0], &inputs[1], &inputs[1], Default::default()),
    );
    let config = MultiheadAttentionConfig { kdim: Some(6), vdim: Some(5), ..config };
    check_forward(
        "attention_other_sizes",
        |path| MultiheadAttention::new(path, 8, 2, config),
        || vec![randn(&[2, 3, 8]), randn(&[2, 5, 6]), randn(&[2, 5, 5])],
        |layer, _, inputs| layer.forward(&inputs[0], &inputs[1], &inputs[2], Default::default()),
    );
}

#[test]
fn a_causal_flag_together_with_padding_is_a_causal_mask_together_with_padding() {
    let _seeded = seeded();
    let config = MultiheadAttentionConfig { batch_first: true, ..Default::default() };
    let attention = MultiheadAttention::new(ParamStore::new(Device::Cpu).root(), 8, 2, config).unwrap();
    let x = randn(&[2, 4, 8]);
    let padding = Tensor::from_slice(&[false, false, true, true, false, false, false, true]).view([2, 4]);
    let triangle = Tensor::ones([4, 4], (Kind::Bool, Device::Cpu)).triu(1);
    let key_padding_mask = Some(&padding);
    let by_flag = AttentionMask { key_padding_mask, is_causal: true, ..Default::default() };
    let by_mask = AttentionMask { key_padding_mask, attn_mask: Some(&triangle), is_causal: false };
    let [by_flag, by_mask] = [by_flag, by_mask].map(|mask| attention.forward(&x, &x, &x, mask).unwrap());
    assert_eq!(by_flag, by_mask);
}
