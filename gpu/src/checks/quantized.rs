//! Weights of 4 and 8 bits, and adapters that are trained beside them.

use accelerate::checkpoint::{LoadOptions, save_model_weights};
use accelerate::lora::{LoraConfig, get_peft_model};
use accelerate::nn::{Linear, LinearConfig, ModuleFn, ParamStore};
use accelerate::optim::AdamW;
use accelerate::tch::{Device, Kind, Tensor, no_grad};
use accelerate::{Accelerator, BnbQuantizationConfig, FloatType, QuantType, load_and_quantize_model};
use anyhow::{Context as _, Result, ensure};
use std::path::Path;
use std::time::Instant;
use torch_ext::stream::synchronize;

use crate::check::{Context, Found};
use crate::models::wave;

const WIDTH: i64 = 256;
const HIDDEN: i64 = 1536;
const NUM_STEPS: usize = 6;
/// Rows and columns of a layer of a large model.
const LARGE: i64 = 4096;
const NUM_TIMED: usize = 200;

/// Two layers that become codes, and a head that stays as it is.
struct Mlp {
    store: ParamStore,
    layers: [Linear; 3],
}

impl Mlp {
    fn new(store: ParamStore) -> Result<Self> {
        let layer = |name: &str, from: i64, to: i64| Linear::new(store.root() / name, from, to, Default::default());
        let layers = [layer("up", WIDTH, HIDDEN)?, layer("down", HIDDEN, WIDTH)?, layer("head", WIDTH, 10)?];
        Ok(Self { store, layers })
    }

    fn forward(&self, input: &Tensor) -> accelerate::Result<Tensor> {
        let [up, down, head] = &self.layers;
        head.forward(&down.forward(&up.forward(input)?.f_relu()?)?)
    }
}

fn save(folder: &Path) -> Result<()> {
    let model = Mlp::new(ParamStore::new(Device::Cpu))?;
    for (index, param) in model.store.parameters().iter().enumerate() {
        param.copy_(&wave(&param.shape(), index as f64)?.f_mul_scalar(0.07)?)?;
    }
    save_model_weights(&model.store, folder, &Default::default())?;
    Ok(())
}

fn configs() -> Vec<(&'static str, BnbQuantizationConfig)> {
    let four = |quant_type, double: bool, dtype| BnbQuantizationConfig {
        load_in_4bit: Some(true),
        bnb_4bit_quant_type: Some(quant_type),
        bnb_4bit_use_double_quant: Some(double),
        bnb_4bit_compute_dtype: Some(dtype),
        torch_dtype: Some(dtype),
        ..Default::default()
    };
    let eight = |threshold, dtype| BnbQuantizationConfig {
        load_in_8bit: Some(true),
        llm_int8_threshold: Some(threshold),
        torch_dtype: Some(dtype),
        ..Default::default()
    };
    vec![
        ("nf4", four(QuantType::Nf4, false, FloatType::Float32)),
        ("nf4 twice", four(QuantType::Nf4, true, FloatType::BFloat16)),
        ("fp4", four(QuantType::Fp4, false, FloatType::Float16)),
        ("int8", eight(6.0, FloatType::Float16)),
        ("int8 without outliers", eight(0.0, FloatType::Float32)),
    ]
}

fn load(config: &BnbQuantizationConfig, folder: &Path, device: Device) -> Result<Mlp> {
    let model = Mlp::new(ParamStore::init_empty_weights(device))?;
    load_and_quantize_model(&model.store, config, Some(folder), &LoadOptions::default())?;
    Ok(model)
}

/// What training mode and evaluation make of an input of 24 rows, one column of which has outliers, and the gradient of the input.
fn passes(model: &Mlp, device: Device, kind: Kind) -> Result<[Tensor; 3]> {
    let input = wave(&[24, WIDTH], 0.4)?;
    let _ = input.f_narrow(1, 3, 1)?.f_fill_(9.0)?;
    let input = input.f_to_device(device)?.f_to_kind(kind)?.f_set_requires_grad(true)?;
    let trained = model.forward(&input)?;
    let seed = wave(&trained.size(), 0.9)?.f_to_device(device)?.f_to_kind(trained.f_kind()?)?;
    torch_ext::autograd::backward(&[&trained], Some(&[&seed]), Default::default())?;
    let gradient = input.f_grad()?;
    model.store.eval();
    let evaluated = no_grad(|| model.forward(&input))?;
    model.store.train();
    Ok([trained, evaluated, gradient])
}

/// Losses of a training of adapters alone.
fn adapters(accelerator: &Accelerator, config: &BnbQuantizationConfig, kind: Kind, folder: &Path) -> Result<Vec<f64>> {
    let model = load(config, folder, accelerator.device())?;
    let store = model.store.clone();
    let lora = LoraConfig { r: 8, target_modules: Some(["up", "down"].into()), ..Default::default() };
    let _adapters = get_peft_model(&store, lora)?;
    for (index, param) in store.parameters().iter().filter(|param| param.requires_grad()).enumerate() {
        param.copy_(&wave(&param.shape(), index as f64)?.f_mul_scalar(0.05)?)?;
    }
    let optimizer = AdamW::new(&store, 1e-3)?;
    let module = ModuleFn::new(&store, move |input: &Tensor| model.forward(input));
    let (module, mut optimizer) = accelerator.prepare((module, optimizer))?;
    let mut losses = Vec::new();
    for step in 0..NUM_STEPS {
        let input = wave(&[16, WIDTH], step as f64)?.f_to_device(accelerator.device())?.f_to_kind(kind)?;
        let loss =
            module.forward(&input)?.f_to_kind(Kind::Float)?.f_sub_scalar(1.0)?.f_square()?.f_mean(Kind::Float)?;
        accelerator.backward(&loss)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        losses.push(loss.f_double_value(&[])?);
    }
    Ok(losses)
}

/// Codes and scales are those of the CPU's kernels to the bit; products come within the type in which they are computed.
pub(crate) fn beside_the_cpu(context: &Context<'_>) -> Result<Found> {
    save(context.folder)?;
    let mut figures = Vec::new();
    for (name, config) in configs() {
        let kind = match config.torch_dtype {
            Some(FloatType::Float16) => Kind::Half,
            Some(FloatType::BFloat16) => Kind::BFloat16,
            _ => Kind::Float,
        };
        let (wanted, found) =
            (load(&config, context.folder, Device::Cpu)?, load(&config, context.folder, context.device)?);
        let (codes, own) = (wanted.store.state_dict()?, found.store.state_dict()?);
        ensure!(codes.len() == own.len(), "{name}: {} tensors, and {} on the CPU", own.len(), codes.len());
        for (tensor, value) in codes.iter() {
            let found = own.get(tensor).with_context(|| format!("{name}: no {tensor}"))?;
            // The mean of the scales is a sum in another order, and what is written of it are its digits.
            let is_of_mean = name == "nf4 twice" && (tensor.contains("absmax") || tensor.contains("quant_state"));
            if !is_of_mean {
                context.same(&format!("{name}: {tensor}"), &found.f_to_device(Device::Cpu)?, value)?;
            }
        }
        let most = if kind == Kind::Float { 1e-5 } else { 2e-2 };
        let (wanted, found) = (passes(&wanted, Device::Cpu, kind)?, passes(&found, context.device, kind)?);
        let mut largest = 0f64;
        for ((what, found), wanted) in ["training", "evaluation", "gradient"].iter().zip(&found).zip(&wanted) {
            let size = wanted.f_to_kind(Kind::Double)?.f_abs()?.f_max()?.f_double_value(&[])?;
            largest = largest.max(context.near(&format!("{name}: {what}"), found, wanted, most * size)? / size);
        }
        let losses = adapters(&context.accelerator()?, &config, kind, context.folder)?;
        let wanted = adapters(&Accelerator::builder().cpu(true).build()?, &config, kind, context.folder)?;
        ensure!(losses.last() < losses.first(), "{name}: the loss of the adapters did not fall: {losses:?}");
        let scale = wanted.first().copied().unwrap_or(1.0);
        let apart = context.all_close(&format!("{name}: loss of step"), &losses, &wanted, most * scale)? / scale;
        figures.push(format!("{name} {largest:.0e}, adapters {apart:.0e}"));
    }
    Found::figure(figures.join("; "))
}

/// The layer of a large model, one row of input: microseconds of a product beside that of bfloat16.
pub(crate) fn speed(context: &Context<'_>) -> Result<Found> {
    if !context.is_cuda() {
        return Found::not_here("it is about a GPU's time");
    }
    torch_ext::load_cuda_kernels(context.device)?;
    let plain = LinearConfig { bias: false, ..Default::default() };
    let layer = |store: &ParamStore| Linear::new(store.root() / "layer", LARGE, LARGE, plain);
    let exact = ParamStore::new(context.device);
    let numbers = Tensor::f_randn([LARGE, LARGE], (Kind::Float, context.device))?.f_mul_scalar(0.02)?;
    let dense = layer(&exact)?;
    dense.weight.copy_(&numbers)?;
    save_model_weights(&exact, context.folder, &Default::default())?;
    exact.to_kind(Kind::BFloat16)?;
    let mut figures = vec![format!("bf16 {}", times_of(&exact, &dense)?)];
    let four = BnbQuantizationConfig {
        load_in_4bit: Some(true),
        bnb_4bit_quant_type: Some(QuantType::Nf4),
        ..Default::default()
    };
    let eight = BnbQuantizationConfig { load_in_8bit: Some(true), ..Default::default() };
    for (name, config) in [("nf4", four), ("int8", eight)] {
        let skip = Some(Vec::new());
        let config =
            BnbQuantizationConfig { torch_dtype: Some(FloatType::BFloat16), llm_int8_skip_modules: skip, ..config };
        let store = ParamStore::init_empty_weights(context.device);
        let layer = layer(&store)?;
        load_and_quantize_model(&store, &config, Some(context.folder), &LoadOptions::default())?;
        figures.push(format!("{name} {}", times_of(&store, &layer)?));
    }
    Found::figure(format!("4096 x 4096 with 1, 16 and 512 rows: {}", figures.join("; ")))
}

/// Microseconds of a product with few rows and with many.
fn times_of(store: &ParamStore, layer: &Linear) -> Result<String> {
    store.eval();
    let device = store.device();
    let mut times = Vec::new();
    for rows in [1, 16, 512] {
        let input = Tensor::f_ones([rows, LARGE], (Kind::BFloat16, device))?;
        for _ in 0..5 {
            let _ = no_grad(|| layer.forward(&input))?;
        }
        synchronize(device)?;
        let start = Instant::now();
        for _ in 0..NUM_TIMED {
            let _ = no_grad(|| layer.forward(&input))?;
        }
        synchronize(device)?;
        times.push(format!("{:.0}", 1e6 * start.elapsed().as_secs_f64() / NUM_TIMED as f64));
    }
    Ok(format!("{} us", times.join(", ")))
}
