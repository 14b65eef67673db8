//! A small model whose numbers follow from formulas, so that `python/train.py` makes the same, and loops that train it.

use accelerate::nn::{Checkpointed, Embedding, Layer, LayerNorm, Linear, Module, ParamStore};
use accelerate::optim::AdamW;
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Accelerator, Result};

pub(crate) const VOCABULARY: i64 = 97;
const WIDTH: i64 = 48;
const NUM_BLOCKS: usize = 3;
pub(crate) const ROWS: i64 = 16;
const LEARNING_RATE: f64 = 2e-3;

/// Numbers between -1 and 1 of any shape: float32, made in double, so that every device has the same.
pub(crate) fn wave(shape: &[i64], phase: f64) -> Result<Tensor> {
    let numbers = Tensor::f_arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu))?;
    let numbers = numbers.f_mul_scalar(0.61)?.f_add_scalar(phase)?.f_sin()?;
    Ok(numbers.f_to_kind(Kind::Float)?.f_reshape(shape)?)
}

/// An embedding, blocks of two layers behind a norm, and a head: enough of a transformer for units, kernels and dtypes. Its blocks are
/// computed twice where gradient checkpointing is enabled.
pub(crate) struct Classifier {
    store: ParamStore,
    embed: Embedding,
    blocks: Vec<Checkpointed<Block>>,
    head: Linear,
}

#[derive(Debug)]
struct Block {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Layer for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let hidden = self.up.forward(&self.norm.forward(x)?)?.f_gelu("none")?;
        Ok(x.f_add(&self.down.forward(&hidden)?)?)
    }
}

impl Classifier {
    pub(crate) fn new(device: Device) -> Result<Self> {
        let store = ParamStore::new(device);
        let root = store.root();
        let embed = Embedding::new(&root / "embed", VOCABULARY, WIDTH, Default::default())?;
        let block = |index: usize| {
            Checkpointed::new(&root / "blocks" / index, |path| {
                Ok(Block {
                    norm: LayerNorm::new(path / "norm", [WIDTH], Default::default())?,
                    up: Linear::new(path / "up", WIDTH, 2 * WIDTH, Default::default())?,
                    down: Linear::new(path / "down", 2 * WIDTH, WIDTH, Default::default())?,
                })
            })
        };
        let blocks = (0..NUM_BLOCKS).map(block).collect::<Result<_>>()?;
        let head = Linear::new(&root / "head", WIDTH, VOCABULARY, Default::default())?;
        for (index, param) in store.parameters().iter().enumerate() {
            param.copy_(&wave(&param.shape(), index as f64)?.f_mul_scalar(0.2)?)?;
        }
        Ok(Self { store, embed, blocks, head })
    }
}

impl Module for Classifier {
    type Input = Tensor;
    type Output = Tensor;

    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let mut x = self.embed.forward(tokens)?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        self.head.forward(&x)
    }

    fn params(&self) -> &ParamStore {
        &self.store
    }
}

/// The tokens of one step, `[rows, 8]`, and what is to be said of them.
pub(crate) fn tokens(step: usize, first_row: i64, rows: i64, device: Device) -> Result<(Tensor, Tensor)> {
    let numbers = Tensor::f_arange_start(first_row * 8, (first_row + rows) * 8, (Kind::Int64, device))?;
    let tokens = numbers.f_mul_scalar(31)?.f_add_scalar(7 * step as i64)?.f_remainder(VOCABULARY)?.f_view([rows, 8])?;
    let labels = tokens.f_mul_scalar(5)?.f_add_scalar(3)?.f_remainder(VOCABULARY)?;
    Ok((tokens, labels))
}

/// Cross entropy in float32, the mean over all tokens.
pub(crate) fn loss_of(logits: &Tensor, labels: &Tensor) -> Result<Tensor> {
    let logits = logits.f_to_kind(Kind::Float)?.f_view([-1, VOCABULARY])?;
    Ok(logits.f_cross_entropy_loss(
        &labels.f_view([-1])?,
        None::<&Tensor>,
        accelerate::tch::Reduction::Mean,
        -100,
        0.0,
    )?)
}

/// What a training leaves: the losses of this rank, and the parameters on the CPU.
#[derive(Debug)]
pub(crate) struct Trained {
    pub(crate) losses: Vec<f64>,
    /// Of the gradients before they were clipped, where they were. AdamW divides a gradient by its own size, so that neither losses nor
    /// parameters show one that is twice as large.
    pub(crate) norms: Vec<f64>,
    pub(crate) parameters: Vec<(String, Tensor)>,
    /// What is gathered together, of a sharded model.
    pub(crate) num_units: usize,
    /// How much of the elements of all parameters this rank has in memory between steps.
    pub(crate) share: f64,
}

/// Trains with AdamW on `accelerator`'s device; the ranks share the rows of a step.
pub(crate) fn train(accelerator: &Accelerator, num_steps: usize, max_norm: Option<f64>) -> Result<Trained> {
    train_around(accelerator, num_steps, max_norm, |_, step| step())
}

/// The same, with each step handed to `around` by its number, which has to run it once.
pub(crate) fn train_around(
    accelerator: &Accelerator,
    num_steps: usize,
    max_norm: Option<f64>,
    mut around: impl FnMut(usize, &mut dyn FnMut() -> Result<()>) -> Result<()>,
) -> Result<Trained> {
    let model = Classifier::new(accelerator.device())?;
    let store = model.store.clone();
    let optimizer = AdamW::new(&store, LEARNING_RATE)?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let rows = ROWS / accelerator.num_processes() as i64;
    let first_row = rows * accelerator.process_index() as i64;
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..num_steps {
        around(step, &mut || {
            let (tokens, labels) = tokens(step, first_row, rows, accelerator.device())?;
            let loss = loss_of(&model.forward(&tokens)?, &labels)?;
            accelerator.backward(&loss)?;
            if let Some(max_norm) = max_norm {
                norms.push(accelerator.clip_grad_norm_(&model, max_norm)?.f_double_value(&[])?);
            }
            optimizer.step()?;
            optimizer.zero_grad()?;
            losses.push(loss.f_double_value(&[])?);
            Ok(())
        })?;
    }
    let params = store.parameters();
    let num_elements = |sizes: Vec<i64>| sizes.iter().product::<i64>() as f64;
    let own: f64 = params.iter().map(|param| num_elements(param.local().size())).sum();
    let share = own / params.iter().map(|param| num_elements(param.shape())).sum::<f64>();
    let num_units = accelerator.plan().last().map_or(0, |plan| plan.units.len());
    Ok(Trained { losses, norms, parameters: on_cpu(&store)?, num_units, share })
}

/// All parameters, whole, in the order of their names.
pub(crate) fn on_cpu(store: &ParamStore) -> Result<Vec<(String, Tensor)>> {
    let state = store.state_dict()?;
    let copy = |(name, tensor): (&str, &Tensor)| {
        Ok((name.to_owned(), tensor.f_detach()?.f_to_device(Device::Cpu)?.f_detach_copy()?))
    };
    state.iter().map(copy).collect()
}
