//! Trains a sharded or replicated model and reports time, memory and losses: our half of `cargo xtask bench fsdp`.
//!
//! Each rank prints one line of JSON, as `bench/rival/fsdp_step.py` does. Sizes stand in that program as well.

use std::path::PathBuf;

use accelerate::nn::{Embedding, LayerNorm, Linear, Module, ModuleFn, ParamStore, Path};
use accelerate::optim::AdamW;
use accelerate::tch::{Device, Kind, Reduction, Tensor};
use accelerate::{
    Accelerator, AutoWrapPolicy, BackwardPrefetch, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin,
    ShardingStrategy, set_seed,
};
use anyhow::Result;
use bench::peak_resident_bytes;
use bench::steps::{NUM_HEADS, NUM_LAYERS, Steps, VOCABULARY, WIDTH, fill, noise, texts};
use clap::{Parser, ValueEnum};

/// Train a sharded or replicated model and report milliseconds per step, memory and losses.
#[derive(Debug, Parser)]
struct Arguments {
    /// What is trained
    #[arg(long)]
    model: Model,
    /// What each rank keeps only a part of: nothing (0), optimizer state (1), gradients too (2), everything (3)
    #[arg(long, default_value_t = 3)]
    stage: u8,
    /// Ask for units before they are used
    #[arg(long)]
    prefetch: bool,
    /// Rows per rank and step
    #[arg(long = "batch_size")]
    batch_size: i64,
    /// Width of the transformer
    #[arg(long, default_value_t = WIDTH)]
    width: i64,
    #[command(flatten)]
    steps: Steps,
    /// Save the model to this folder after the last step, and load it from there
    #[arg(long)]
    folder: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Model {
    /// Linear layers: 12.6 million parameters
    Mlp,
    /// Layers of attention and two linear ones: 10 million parameters at width 256
    Transformer,
    /// The smallest GPT-2, its head tied to its embedding: 124 million parameters
    Gpt2,
}

const MLP_WIDTH: i64 = 1024;

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let accelerator = accelerator(&arguments)?;
    // Before there is a model: what memory is measured against.
    let idle_resident_bytes = peak_resident_bytes()?;
    let store = match arguments.model {
        // Drawn where it is built, and the same in every run.
        Model::Gpt2 => {
            set_seed(0);
            ParamStore::init_empty_weights(Device::Cpu)
        }
        Model::Mlp | Model::Transformer => ParamStore::new(Device::Cpu),
    };
    match arguments.model {
        Model::Gpt2 => train(&accelerator, &arguments, gpt2(&store)?, idle_resident_bytes),
        Model::Mlp => train(&accelerator, &arguments, mlp(&store)?, idle_resident_bytes),
        Model::Transformer => {
            train(&accelerator, &arguments, transformer(&store, arguments.width)?, idle_resident_bytes)
        }
    }
}

fn accelerator(arguments: &Arguments) -> Result<Accelerator> {
    let builder = Accelerator::builder().cpu(true);
    let sharding_strategy = match arguments.stage {
        // Otherwise c10d keeps every gradient twice.
        0 => {
            let kwargs = DistributedDataParallelKwargs { gradient_as_bucket_view: Some(true), ..Default::default() };
            return Ok(builder.kwargs_handler(kwargs).build()?);
        }
        1 => ShardingStrategy::OptimizerState,
        2 => ShardingStrategy::OptimizerStateAndGradients,
        _ => ShardingStrategy::FullShard,
    };
    let plugin = FullyShardedDataParallelPlugin {
        sharding_strategy: Some(sharding_strategy),
        auto_wrap_policy: Some(AutoWrapPolicy::TransformerBasedWrap),
        forward_prefetch: Some(arguments.prefetch),
        backward_prefetch: if arguments.prefetch {
            Some(BackwardPrefetch::BackwardPre)
        } else {
            Some(BackwardPrefetch::NoPrefetch)
        },
        ..Default::default()
    };
    Ok(builder.fsdp_plugin(plugin).build()?)
}

fn train(
    accelerator: &Accelerator,
    arguments: &Arguments,
    model: impl Module<Input = Tensor, Output = Tensor>,
    idle_resident_bytes: u64,
) -> Result<()> {
    if arguments.model != Model::Gpt2 {
        fill(model.params())?;
    }
    let num_parameters: usize = model.params().parameters().iter().map(|param| param.numel()).sum();
    let rank = accelerator.process_index() as i64;
    let (input, target) = batch(arguments, rank)?;
    let optimizer = AdamW::builder(model.params()).lr(1e-4).weight_decay(0.01).build()?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let compute_loss = || loss(arguments.model, &model.forward(&input)?, &target);
    let timed = arguments.steps.train(accelerator, &mut optimizer, compute_loss)?;
    if let Some(folder) = &arguments.folder {
        accelerator.save_model(&model, folder, &Default::default())?;
        accelerator.wait_for_everyone()?;
        accelerator.load_checkpoint_in_model(&model, folder)?;
    }
    let mut report = timed.report(accelerator)?;
    report["num_parameters"] = num_parameters.into();
    report["idle_resident_bytes"] = idle_resident_bytes.into();
    println!("report={report}");
    accelerator.wait_for_everyone()?;
    Ok(())
}

fn mlp(store: &ParamStore) -> Result<impl Module<Input = Tensor, Output = Tensor> + use<>> {
    let root = store.root();
    let layers = (0..NUM_LAYERS)
        .map(|layer| Linear::new(&root / "layers" / layer, MLP_WIDTH, MLP_WIDTH, Default::default()))
        .collect::<accelerate::Result<Vec<_>>>()?;
    Ok(ModuleFn::new(store, move |input: &Tensor| {
        let mut x = input.shallow_clone();
        for layer in &layers {
            x = layer.forward(&x)?.f_relu()?;
        }
        Ok(x)
    }))
}

fn transformer(store: &ParamStore, width: i64) -> Result<impl Module<Input = Tensor, Output = Tensor> + use<>> {
    let root = store.root();
    let embed = Embedding::new(&root / "embed", VOCABULARY, width, Default::default())?;
    let layers = (0..NUM_LAYERS)
        .map(|layer| Block::new(&(&root / "layers" / layer), width))
        .collect::<accelerate::Result<Vec<_>>>()?;
    let head = Linear::new(&root / "head", width, VOCABULARY, Default::default())?;
    Ok(ModuleFn::new(store, move |tokens: &Tensor| {
        let mut x = embed.forward(tokens)?;
        for layer in &layers {
            x = layer.forward(&x)?;
        }
        head.forward(&x)
    }))
}

/// As published, but for dropout: 50257 tokens, 1024 positions, 12 layers of width 768.
fn gpt2(store: &ParamStore) -> Result<impl Module<Input = Tensor, Output = Tensor> + use<>> {
    const WIDTH: i64 = 768;
    let root = store.root();
    let tokens = Embedding::new(&root / "wte", 50257, WIDTH, Default::default())?;
    let positions = Embedding::new(&root / "wpe", 1024, WIDTH, Default::default())?;
    let layers = (0..NUM_LAYERS)
        .map(|layer| Block::new(&(&root / "h" / layer), WIDTH))
        .collect::<accelerate::Result<Vec<_>>>()?;
    let norm = LayerNorm::new(&root / "ln_f", [WIDTH], Default::default())?;
    let head = Linear::from_params(&root / "lm_head", (&root / "lm_head").alias("weight", &tokens.weight)?, None);
    Ok(ModuleFn::new(store, move |input: &Tensor| {
        let place = Tensor::f_arange(input.size()[1], (Kind::Int64, Device::Cpu))?;
        let mut x = tokens.forward(input)?.f_add(&positions.forward(&place)?)?;
        for layer in &layers {
            x = layer.forward(&x)?;
        }
        head.forward(&norm.forward(&x)?)
    }))
}

/// One layer of the transformer.
struct Block {
    norm_1: LayerNorm,
    qkv: Linear,
    out: Linear,
    norm_2: LayerNorm,
    up: Linear,
    down: Linear,
    width: i64,
}

impl Block {
    fn new(path: &Path, width: i64) -> accelerate::Result<Self> {
        Ok(Self {
            norm_1: LayerNorm::new(path / "norm_1", [width], Default::default())?,
            qkv: Linear::new(path / "qkv", width, 3 * width, Default::default())?,
            out: Linear::new(path / "out", width, width, Default::default())?,
            norm_2: LayerNorm::new(path / "norm_2", [width], Default::default())?,
            up: Linear::new(path / "up", width, 4 * width, Default::default())?,
            down: Linear::new(path / "down", 4 * width, width, Default::default())?,
            width,
        })
    }

    fn forward(&self, x: &Tensor) -> accelerate::Result<Tensor> {
        let heads = self.qkv.forward(&self.norm_1.forward(x)?)?;
        let heads = heads.f_unflatten(2, [3, NUM_HEADS, self.width / NUM_HEADS])?.f_permute([2, 0, 3, 1, 4])?;
        let heads = heads.f_unbind(0)?;
        let none = None::<Tensor>;
        let attended =
            Tensor::f_scaled_dot_product_attention(&heads[0], &heads[1], &heads[2], none, 0.0, true, None, false)?;
        let x = x.f_add(&self.out.forward(&attended.f_transpose(1, 2)?.f_flatten(2, 3)?)?)?;
        let hidden = self.up.forward(&self.norm_2.forward(&x)?)?.f_gelu("none")?;
        Ok(x.f_add(&self.down.forward(&hidden)?)?)
    }
}

/// Input and target, other ones on each rank.
fn batch(arguments: &Arguments, rank: i64) -> Result<(Tensor, Tensor)> {
    let batch_size = arguments.batch_size;
    if arguments.model == Model::Mlp {
        let shape = [batch_size, MLP_WIDTH];
        return Ok((noise(&shape, 1000 + rank)?, noise(&shape, 2000 + rank)?));
    }
    let tokens = texts(batch_size, rank)?;
    let target = (&tokens + 1).f_remainder(VOCABULARY)?;
    Ok((tokens, target))
}

fn loss(model: Model, output: &Tensor, target: &Tensor) -> Result<Tensor> {
    Ok(match model {
        Model::Mlp => output.f_mse_loss(target, Reduction::Mean)?,
        Model::Transformer | Model::Gpt2 => {
            let none = None::<Tensor>;
            output.f_flatten(0, 1)?.f_cross_entropy_loss(&target.f_flatten(0, -1)?, none, Reduction::Mean, -100, 0.0)?
        }
    })
}
