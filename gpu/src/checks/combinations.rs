//! Random combinations of features, each of which trains beside a plain engine with the same numbers. Every run has the same ones.

use std::path::Path;

use accelerate::data::{DataLoader, TensorDataset};
use accelerate::nn::{GraphedModule, Module, ParamStore};
use accelerate::optim::{Adagrad, Adam, AdamW, Optimizer, StepLr};
use accelerate::tch::{Device, Tensor};
use accelerate::{
    Accelerator, DataLoaderConfiguration, DynamoBackend, FullyShardedDataParallelPlugin, GradScalerKwargs,
    MixedPrecision, OffloadTarget, ShardingStrategy, set_seed,
};
use anyhow::{Context as _, Result, ensure};
use torch_ext::stream::Stream;

use super::sharding::{MAX_NORM, plugin};
use crate::check::{Context, Found};
use crate::models::{Classifier, loss_of, on_cpu, tokens};

const NUM_ON_GPU: u64 = 60;
const NUM_REHEARSED: u64 = 20;

const NUM_ROWS: i64 = 48;
const BATCH_SIZE: usize = 8;
const NUM_BATCHES: usize = NUM_ROWS as usize / BATCH_SIZE;
const NUM_EPOCHS: usize = 2;

const PRECISIONS: [MixedPrecision; 3] = [MixedPrecision::No, MixedPrecision::Bf16, MixedPrecision::Fp16];
/// How far losses may be apart, of each precision.
const TOLERANCES: [f64; 3] = [1e-4, 2e-2, 5e-3];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Engine {
    Plain,
    FullShard,
    ShardGradOp,
    /// The optimizer's state in the host's memory.
    StateInMemory,
    /// Parameters as well.
    AllInMemory,
    AllInFiles,
}

const ENGINES: [Engine; 6] = [
    Engine::Plain,
    Engine::FullShard,
    Engine::ShardGradOp,
    Engine::StateInMemory,
    Engine::AllInMemory,
    Engine::AllInFiles,
];

#[derive(Clone, Copy, Debug)]
enum Clipping {
    None,
    Norm,
    Value,
}

#[derive(Clone, Copy, Debug)]
enum Rule {
    AdamW,
    Adam,
    Adagrad,
}

impl Rule {
    fn optimizer(self, store: &ParamStore) -> accelerate::Result<Box<dyn Optimizer>> {
        Ok(match self {
            Self::AdamW => Box::new(AdamW::new(store, 2e-3)?),
            Self::Adam => Box::new(Adam::new(store, 2e-3)?),
            Self::Adagrad => Box::new(Adagrad::new(store, 1e-2)?),
        })
    }
}

/// What is drawn. The first four fields change the numbers, and the plain engine has them too; the others must not.
#[derive(Clone, Copy, Debug)]
struct Combination {
    precision: MixedPrecision,
    accumulation: usize,
    clipping: Clipping,
    rule: Rule,
    engine: Engine,
    /// After how many batches the run is saved, ends, and is gone on with by another accelerator.
    resumes_after: Option<usize>,
    recomputes: bool,
    /// Passes as CUDA graphs: of a plain engine on a GPU, whose passes are computed once.
    has_graphs: bool,
    non_blocking: bool,
    num_workers: usize,
    aside: bool,
}

impl Combination {
    /// Combination `number` of all: the digits of a number that a counter is mixed to (the finaliser of SplitMix64, Steele et al.,
    /// "Fast splittable pseudorandom number generators", OOPSLA 2014), so that every run has the same ones.
    fn drawn(number: u64) -> Self {
        let mut bits = (number + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        bits ^= bits >> 31;
        let mut below = |choices: usize| {
            let digit = bits % choices as u64;
            bits /= choices as u64;
            digit as usize
        };
        Self {
            precision: PRECISIONS[below(PRECISIONS.len())],
            accumulation: 1 + below(3),
            clipping: [Clipping::None, Clipping::Norm, Clipping::Value][below(3)],
            rule: [Rule::AdamW, Rule::Adam, Rule::Adagrad][below(3)],
            engine: ENGINES[below(ENGINES.len())],
            resumes_after: [None, Some(3), Some(4), Some(8)][below(4)],
            recomputes: below(2) == 1,
            has_graphs: below(2) == 1,
            non_blocking: below(2) == 1,
            num_workers: 2 * below(2),
            aside: below(2) == 1,
        }
    }

    /// The same numbers by the shortest way.
    fn plainly(self) -> Self {
        Self {
            engine: Engine::Plain,
            resumes_after: None,
            recomputes: false,
            has_graphs: false,
            non_blocking: false,
            num_workers: 0,
            aside: false,
            ..self
        }
    }

    fn is_graphed(self, context: &Context<'_>) -> bool {
        self.has_graphs && context.is_cuda() && self.engine == Engine::Plain && !self.recomputes
    }

    fn accelerator(self, context: &Context<'_>, folder: &Path) -> Result<Accelerator> {
        let offloaded = |target: OffloadTarget, with_parameters: bool| FullyShardedDataParallelPlugin {
            offload_optimizer: Some(target.clone()),
            offload_params: with_parameters.then_some(target),
            ..plugin(ShardingStrategy::FullShard)
        };
        let sharded = match self.engine {
            Engine::Plain => None,
            Engine::FullShard => Some(plugin(ShardingStrategy::FullShard)),
            Engine::ShardGradOp => Some(plugin(ShardingStrategy::ShardGradOp)),
            Engine::StateInMemory => Some(offloaded(OffloadTarget::Cpu, false)),
            Engine::AllInMemory => Some(offloaded(OffloadTarget::Cpu, true)),
            Engine::AllInFiles => Some(offloaded(OffloadTarget::Nvme(folder.to_owned()), true)),
        };
        let mut builder = context
            .builder()
            .mixed_precision(self.precision)
            .gradient_accumulation_steps(self.accumulation)
            .dataloader_config(DataLoaderConfiguration {
                non_blocking: Some(self.non_blocking),
                use_seedable_sampler: Some(true),
                ..Default::default()
            });
        if self.precision == MixedPrecision::Fp16 {
            builder = builder.kwargs_handler(GradScalerKwargs { init_scale: Some(1024.0), ..Default::default() });
        }
        if self.is_graphed(context) {
            builder = builder.dynamo_backend(DynamoBackend::Cudagraphs);
        }
        if let Some(plugin) = sharded {
            builder = builder.fsdp_plugin(plugin);
        }
        Ok(builder.build()?)
    }
}

/// By name.
type Parameters = Vec<(String, Tensor)>;

/// Which batches of all epochs: those before are in the checkpoint in `folder`, those behind go on from one there.
#[derive(Clone, Copy)]
struct Part<'a> {
    folder: &'a Path,
    from: usize,
    to: usize,
}

/// Trains on some batches and adds their losses; returns the parameters.
fn train_part(
    context: &Context<'_>,
    combination: Combination,
    part: Part<'_>,
    losses: &mut Vec<f64>,
) -> Result<Parameters> {
    set_seed(5);
    let accelerator = combination.accelerator(context, part.folder)?;
    let model = Classifier::new(accelerator.device())?;
    if combination.recomputes {
        model.params().gradient_checkpointing_enable(Default::default())?;
    }
    match combination.is_graphed(context) {
        true => train_model(&accelerator, GraphedModule::new(model)?, combination, part, losses),
        false => train_model(&accelerator, model, combination, part, losses),
    }
}

fn train_model<M: Module<Input = Tensor, Output = Tensor>>(
    accelerator: &Accelerator,
    model: M,
    combination: Combination,
    part: Part<'_>,
    losses: &mut Vec<f64>,
) -> Result<Parameters> {
    let Part { folder, from, to } = part;
    let store = model.params().clone();
    let rows = tokens(0, 0, NUM_ROWS, Device::Cpu)?;
    let loader = DataLoader::builder(TensorDataset::new(rows)?)
        .batch_size(BATCH_SIZE)
        .shuffle(true)
        .num_workers(combination.num_workers)
        .build()?;
    let optimizer = combination.rule.optimizer(&store)?;
    let scheduler = StepLr::new(&optimizer, 2, 0.9)?;
    let (model, mut optimizer, loader, mut scheduler) = accelerator.prepare((model, optimizer, loader, scheduler))?;
    let checkpoint = folder.join("checkpoint");
    if from > 0 {
        accelerator.load_state(&*checkpoint)?;
    }
    let mut place = from;
    while place < to {
        for batch in loader.iter()? {
            let (tokens, labels) = batch?;
            losses.push(accelerator.accumulate(&model, || {
                let loss = loss_of(&model.forward(&tokens)?, &labels)?;
                accelerator.backward(&loss)?;
                if accelerator.sync_gradients() {
                    match combination.clipping {
                        Clipping::None => {}
                        Clipping::Norm => drop(accelerator.clip_grad_norm_(&model, MAX_NORM)?),
                        Clipping::Value => accelerator.clip_grad_value_(&model, 0.01)?,
                    }
                }
                optimizer.step()?;
                scheduler.step()?;
                optimizer.zero_grad()?;
                Ok(loss.f_double_value(&[])?)
            })?);
            place += 1;
            if place == to {
                break;
            }
        }
    }
    if to < NUM_EPOCHS * NUM_BATCHES {
        accelerator.save_state(&*checkpoint)?;
    }
    Ok(on_cpu(&store)?)
}

/// The whole run, on a stream of its own where that was drawn.
fn run(context: &Context<'_>, combination: Combination, folder: &Path) -> Result<(Vec<f64>, Parameters)> {
    let stream = if combination.aside { Stream::from_pool(context.device)? } else { Stream::current(context.device)? };
    stream.run(|| {
        let mut losses = Vec::new();
        let end = NUM_EPOCHS * NUM_BATCHES;
        let middle = combination.resumes_after.unwrap_or(0);
        if middle > 0 {
            train_part(context, combination, Part { folder, from: 0, to: middle }, &mut losses)?;
        }
        let parameters = train_part(context, combination, Part { folder, from: middle, to: end }, &mut losses)?;
        Ok((losses, parameters))
    })?
}

/// Kernels of the CPU and of a GPU round differently, and AdamW's first steps magnify that where a gradient is almost zero. In few bits a weight that is rounded to its neighbour moves a loss by so much more.
pub(crate) fn drawn(context: &Context<'_>) -> Result<Found> {
    let mut largest = [0f64; 3];
    let mut num_graphed = 0;
    for number in 0..if context.is_cuda() { NUM_ON_GPU } else { NUM_REHEARSED } {
        let combination = Combination::drawn(number);
        let folder = context.folder.join(number.to_string());
        std::fs::create_dir(&folder)?;
        let what = format!("{number}, {combination:?}");
        num_graphed += usize::from(combination.is_graphed(context));
        let (found, parameters) = run(context, combination, &folder).with_context(|| what.clone())?;
        let (wanted, plain) =
            run(context, combination.plainly(), &folder).with_context(|| format!("the plain one of {what}"))?;
        ensure!(wanted.last() < wanted.first(), "{what}: the loss did not fall: {wanted:?}");
        let place = PRECISIONS.iter().position(|precision| *precision == combination.precision).unwrap_or_default();
        let tolerance = TOLERANCES[place];
        let far = context.all_close(&format!("{what}: loss of batch"), &found, &wanted, tolerance)?;
        largest[place] = largest[place].max(far);
        for ((name, found), (_, wanted)) in parameters.iter().zip(&plain) {
            context.near(&format!("{what}: {name}"), found, wanted, 10.0 * tolerance)?;
        }
    }
    let figures = PRECISIONS.iter().zip(largest).map(|(precision, far)| format!("{precision} within {far:.0e}"));
    Found::figure(format!("{}, {num_graphed} by CUDA graphs", figures.collect::<Vec<_>>().join(", ")))
}
