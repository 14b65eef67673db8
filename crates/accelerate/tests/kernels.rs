//! Layers that are computed in another way: reached by path, on any number of ranks.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::*;
use accelerate::optim::AdamW;
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Accelerator, FullyShardedDataParallelPlugin, Result, testing};
use std::sync::Arc;

/// A low-rank adapter (LoRA, arXiv 2106.09685) beside a frozen product.
#[derive(Debug)]
struct Adapter {
    a: Param,
    b: Param,
}

impl LinearKernel for Adapter {
    fn linear(&self, input: &Tensor, weight: &Param, bias: Option<&Param>) -> Result<Tensor> {
        let low_rank = input.f_linear(&self.a.get()?, None::<Tensor>)?.f_linear(&self.b.get()?, None::<Tensor>)?;
        Ok(DenseKernel.linear(input, weight, bias)?.f_add(&low_rank)?)
    }
}

/// Rows of the table, negated.
#[derive(Debug)]
struct Negated;

impl EmbeddingKernel for Negated {
    fn embedding(&self, indices: &Tensor, weight: &Param, padding_idx: Option<i64>) -> Result<Tensor> {
        Ok(DenseEmbeddingKernel.embedding(indices, weight, padding_idx)?.f_neg()?)
    }
}

fn waves(shape: &[i64], phase: f64) -> Tensor {
    let count: i64 = shape.iter().product();
    ((Tensor::arange(count, (Kind::Float, Device::Cpu)) * 0.7 + phase).sin() * 0.5).view(shape)
}

fn model(store: &ParamStore) -> Result<impl Module<Input = Tensor, Output = Tensor> + use<>> {
    let root = store.root();
    let words = Embedding::new(&root / "words", 7, 6, Default::default())?;
    let norm = LayerNorm::new(&root / "norm", [6], Default::default())?;
    let projections = [
        Linear::new(&root / "layers" / 0 / "q_proj", 6, 6, Default::default())?,
        Linear::new(&root / "layers" / 0 / "k_proj", 6, 6, Default::default())?,
    ];
    for (index, param) in store.parameters().iter().enumerate() {
        param.copy_(&waves(&param.shape(), index as f64))?;
    }
    Ok(ModuleFn::new(store, move |indices: &Tensor| {
        let hidden = norm.forward(&words.forward(indices)?)?;
        Ok(projections[0].forward(&hidden)? * projections[1].forward(&hidden)?)
    }))
}

/// Freezes everything and puts adapters on the layers whose path ends like this.
fn adapt(store: &ParamStore, suffix: &str) -> Result<()> {
    for param in store.parameters() {
        param.set_requires_grad(false)?;
    }
    for (path, layer) in store.named_layers() {
        if let AnyLayer::Linear(linear) = layer
            && path.ends_with(suffix)
        {
            let path = store.root() / &path;
            let a = path.param("lora_A.weight", waves(&[2, linear.in_features()], 0.3))?;
            let b = path.param("lora_B.weight", waves(&[linear.out_features(), 2], 0.9))?;
            linear.set_kernel(Arc::new(Adapter { a, b }));
        }
    }
    Ok(())
}

#[test]
fn every_layer_is_reached_by_its_path() {
    let store = ParamStore::new(Device::Cpu);
    let root = store.root();
    let _model = model(&store).unwrap();
    Conv1d::new(&root / "conv1", 2, 2, [1], Default::default()).unwrap();
    Conv2d::new(&root / "conv2", 2, 2, [1, 1], Default::default()).unwrap();
    BatchNorm1d::new(&root / "bn1", 2, Default::default()).unwrap();
    BatchNorm2d::new(&root / "bn2", 2, Default::default()).unwrap();
    GroupNorm::new(&root / "group", 1, 2, Default::default()).unwrap();
    RMSNorm::new(&root / "rms", [2], Default::default()).unwrap();
    MultiheadAttention::new(&root / "attention", 4, 2, Default::default()).unwrap();
    let layers = store.named_layers();
    let found: Vec<_> = layers.iter().map(|(path, layer)| (path.as_str(), layer.kind())).collect();
    let wanted = [
        ("words", "Embedding"),
        ("norm", "LayerNorm"),
        ("layers.0.q_proj", "Linear"),
        ("layers.0.k_proj", "Linear"),
        ("conv1", "Conv1d"),
        ("conv2", "Conv2d"),
        ("bn1", "BatchNorm1d"),
        ("bn2", "BatchNorm2d"),
        ("group", "GroupNorm"),
        ("rms", "RMSNorm"),
        ("attention.out_proj", "Linear"),
        ("attention", "MultiheadAttention"),
    ];
    assert_eq!(found, wanted);
    // Together they have every parameter and buffer once, each under its own path.
    let mut params: Vec<_> = Vec::new();
    for (path, layer) in &layers {
        let own = layer.params();
        assert!(own.iter().all(|param| param.name().starts_with(&format!("{path}."))), "{path}");
        params.extend(own.iter().map(|param| param.name().to_owned()));
    }
    params.sort();
    let mut all: Vec<_> =
        store.parameters().iter().chain(&store.buffers()).map(|param| param.name().to_owned()).collect();
    all.sort();
    assert_eq!(params, all);
}

#[test]
fn a_kernel_set_from_outside_computes_the_layers_of_the_model() {
    let store = ParamStore::new(Device::Cpu);
    let words = Embedding::new(store.root() / "words", 3, 2, Default::default()).unwrap();
    let indices = Tensor::from_slice(&[2i64, 0]);
    let before = words.forward(&indices).unwrap();
    let layers = store.named_layers();
    let AnyLayer::Embedding(found) = &layers[0].1 else { panic!("{layers:?}") };
    found.set_kernel(Arc::new(Negated));
    assert_eq!(words.forward(&indices).unwrap(), -before);
}

#[test]
fn adapters_of_a_sharded_model_train_as_on_one_rank() {
    let train = |accelerator: &Accelerator| {
        let store = ParamStore::new(accelerator.device());
        let module = model(&store)?;
        adapt(&store, "q_proj")?;
        let names: Vec<_> = store.trainable_parameters().iter().map(|param| param.name().to_owned()).collect();
        assert_eq!(names, ["layers.0.q_proj.lora_A.weight", "layers.0.q_proj.lora_B.weight"]);
        let optimizer = AdamW::builder(&store).lr(0.05).build()?;
        let (model, mut optimizer) = accelerator.prepare((module, optimizer))?;
        let mut losses = Vec::new();
        for step in 0..4 {
            let indices = Tensor::from_slice(&[step, 6 - step, 3]);
            let loss = (model.forward(&indices)? - 0.2).f_square()?.f_mean(None)?;
            accelerator.backward(&loss)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
            losses.push(loss.double_value(&[]));
        }
        Ok(losses)
    };
    let alone = train(&Accelerator::builder().cpu(true).build().unwrap()).unwrap();
    assert!(alone.windows(2).all(|losses| losses[0] != losses[1]), "{alone:?}");
    for world_size in 1..=3 {
        let builder = Accelerator::builder().fsdp_plugin(FullyShardedDataParallelPlugin::default());
        let ranks = testing::ranks(world_size, builder, |accelerator| train(&accelerator)).unwrap();
        for losses in ranks {
            let difference = losses.iter().zip(&alone).map(|(one, other)| (one - other).abs()).fold(0.0, f64::max);
            assert!(difference < 1e-6, "{world_size} ranks: {losses:?}, not {alone:?}");
        }
    }
}
