//! Layers and sequences that two processes divide: on one device, connected by Gloo.

use accelerate::nn::{Module, ParamStore, Pipelined};
use accelerate::optim::AdamW;
use accelerate::tch::{Device, Kind, Tensor, no_grad};
use accelerate::{
    Accelerator, MixedPrecision, ParallelismConfig, PippyOptions, ReduceOp, Result as AccelerateResult,
    TorchTensorParallelPlugin, notebook_launcher, prepare_pippy,
};
use accelerate_models::gpt2::{GPT2Config, GPT2LMHeadModel};
use accelerate_models::llama::{LlamaConfig, LlamaForCausalLM};
use accelerate_models::{CausalLMInput, CausalLMOutput, GenerationConfig, generate};
use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use super::ranks::{Place, processes};
use crate::check::{Context, Found};
use crate::models::wave;

const VOCABULARY: i64 = 64;
const LENGTH: i64 = 16;
const NUM_STEPS: i64 = 6;

/// What ranks divide, and how.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum Division {
    Layers,
    /// By heads: Ulysses.
    Heads,
    /// All keys to every rank.
    Keys,
    Ring,
}

const DIVISIONS: [Division; 4] = [Division::Layers, Division::Heads, Division::Keys, Division::Ring];

/// What a rank of two is told.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    place: Place,
    division: Division,
    is_llama: bool,
    precision: MixedPrecision,
}

fn fill(store: &ParamStore) -> AccelerateResult<()> {
    for (index, param) in store.parameters().iter().enumerate() {
        let is_norm = param.name().contains("norm") || param.name().contains("ln_");
        let shift = if is_norm && param.name().ends_with("weight") { 1.0 } else { 0.0 };
        param.copy_(
            &wave(&param.shape(), index as f64)
                .map_err(accelerate::Error::other)?
                .f_mul_scalar(0.1)?
                .f_add_scalar(shift)?,
        )?;
    }
    Ok(())
}

fn gpt2(device: Device) -> AccelerateResult<GPT2LMHeadModel> {
    let sizes =
        GPT2Config { vocab_size: VOCABULARY, n_positions: 32, n_embd: 32, n_layer: 2, n_head: 4, ..Default::default() };
    let config = GPT2Config { resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0, eos_token_id: Vec::new(), ..sizes };
    let store = ParamStore::new(device);
    let model = GPT2LMHeadModel::new(&store.root(), &config)?;
    fill(&store)?;
    Ok(model)
}

fn llama(device: Device) -> AccelerateResult<LlamaForCausalLM> {
    let sizes = LlamaConfig {
        vocab_size: VOCABULARY,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 2,
        eos_token_id: Vec::new(),
        ..Default::default()
    };
    let store = ParamStore::new(device);
    let model = LlamaForCausalLM::new(&store.root(), &sizes.with_heads(4, 2))?;
    fill(&store)?;
    Ok(model)
}

fn losses<M>(accelerator: &Accelerator, model: M) -> Result<Vec<f64>>
where
    M: Module<Input = CausalLMInput, Output = CausalLMOutput>,
{
    let optimizer = AdamW::new(model.params(), 2e-3)?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let mut losses = Vec::new();
    for step in 0..NUM_STEPS {
        let numbers = Tensor::f_arange(4 * LENGTH, (Kind::Int64, accelerator.device()))?;
        let tokens = numbers.f_mul_scalar(7)?.f_add_scalar(5 * step)?.f_remainder(VOCABULARY)?.f_view([4, LENGTH])?;
        let labels = Some(tokens.shallow_clone());
        let input = CausalLMInput { input_ids: tokens, attention_mask: None, labels };
        let loss = accelerator.maybe_context_parallel(&input, &Default::default(), |own| {
            let loss = model.forward(&own)?.loss.ok_or_else(|| accelerate::Error::other("there is no loss"))?;
            accelerator.backward(&loss)?;
            Ok(loss.f_detach()?)
        })?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        losses.push(accelerator.reduce(&loss, ReduceOp::Mean)?.f_double_value(&[])?);
    }
    Ok(losses)
}

fn losses_of(accelerator: &Accelerator, is_llama: bool) -> Result<Vec<f64>> {
    match is_llama {
        true => losses(accelerator, llama(accelerator.device())?),
        false => losses(accelerator, gpt2(accelerator.device())?),
    }
}

pub(crate) fn divided_rank(order: Order) -> Result<Vec<f64>> {
    let builder = order.place.builder(40).mixed_precision(order.precision);
    let axes = |cp_size, sp_size, strategy: &str| ParallelismConfig {
        cp_size,
        sp_size,
        cp_comm_strategy: Some(strategy.to_owned()),
        ..Default::default()
    };
    let builder = match order.division {
        Division::Layers => {
            builder.torch_tp_plugin(TorchTensorParallelPlugin { tensor_parallel_degree: Some(2), ..Default::default() })
        }
        Division::Heads => builder.parallelism_config(axes(None, Some(2), "allgather")),
        Division::Keys => builder.parallelism_config(axes(Some(2), None, "allgather")),
        Division::Ring => builder.parallelism_config(axes(Some(2), None, "alltoall")),
    };
    losses_of(&builder.build()?, order.is_llama)
}

/// Both ranks have the losses of one process with whole layers and sequences.
pub(crate) fn by_two(context: &Context<'_>) -> Result<Found> {
    let place = Place::of(context);
    let mut runs = Vec::new();
    for precision in [MixedPrecision::No, MixedPrecision::Bf16] {
        // One model shows what another type changes.
        for is_llama in if precision == MixedPrecision::No { &[false, true][..] } else { &[true] } {
            let is_llama = *is_llama;
            for division in DIVISIONS {
                let order = Order { place, division, is_llama, precision };
                runs.push((order, notebook_launcher(context.workers, divided_rank, order, &processes(2))?));
            }
        }
    }
    let mut figures = Vec::new();
    for (order, ranks) in runs {
        let accelerator = context.builder().mixed_precision(order.precision).build()?;
        let wanted = losses_of(&accelerator, order.is_llama)?;
        // A sum of two halves is rounded to 8 bits twice, and AdamW's first steps divide rounding by rounding.
        let most = if order.precision == MixedPrecision::No { 1e-4 } else { 0.1 };
        for found in &ranks {
            let apart = context.all_close(&format!("{order:?}: loss of step"), found, &wanted, most)?;
            figures.push(apart);
        }
        ensure!(wanted.last() < wanted.first(), "the loss did not fall: {wanted:?}");
    }
    Found::figure(format!(
        "{} trainings of two ranks within {:.0e}",
        figures.len() / 2,
        figures.iter().copied().fold(0.0, f64::max)
    ))
}

/// Texts of which one is shorter, as a model is given them.
fn texts(device: Device, rows: i64) -> Result<CausalLMInput> {
    let tokens = Tensor::f_arange(rows * LENGTH, (Kind::Int64, device))?.f_mul_scalar(7)?.f_remainder(VOCABULARY)?;
    let mask = Tensor::f_ones([rows, LENGTH], (Kind::Int64, device))?;
    let _ = mask.f_narrow(0, 0, 1)?.f_narrow(1, LENGTH - 3, 3)?.f_fill_(0)?;
    Ok(CausalLMInput { input_ids: tokens.f_view([rows, LENGTH])?, attention_mask: Some(mask), labels: None })
}

const NUM_TEXTS: i64 = 5;

fn logits<M>(model: &M, device: Device) -> Result<Tensor>
where
    M: Module<Input = CausalLMInput, Output = CausalLMOutput>,
{
    model.params().eval();
    Ok(no_grad(|| model.forward(&texts(device, NUM_TEXTS).map_err(|e| accelerate::Error::other(e.to_string()))?))?
        .logits)
}

/// The logits that every process has of texts which go through the blocks of both; where they are, and they themselves.
fn pipelined<M>(accelerator: &Accelerator, model: M) -> Result<(String, Vec<f32>)>
where
    M: Pipelined<Input = CausalLMInput>,
{
    let options = PippyOptions { num_chunks: Some(3), gather_output: true, ..Default::default() };
    let model = prepare_pippy(accelerator, model, &options)?;
    let input = texts(accelerator.device(), NUM_TEXTS)?;
    // The second time memory is used again.
    model.forward(&input)?;
    let logits = model.forward(&input)?.context("no logits")?;
    let values = Vec::try_from(logits.f_to_device(Device::Cpu)?.f_reshape([-1])?)?;
    Ok((format!("{:?}", logits.device()), values))
}

pub(crate) fn pipelined_rank((place, is_llama): (Place, bool)) -> Result<(String, Vec<f32>)> {
    let accelerator = place.builder(40).build()?;
    match is_llama {
        true => pipelined(&accelerator, llama(accelerator.device())?),
        false => pipelined(&accelerator, gpt2(accelerator.device())?),
    }
}

/// Chunks of a batch through two processes: the same kernels on fewer rows.
pub(crate) fn pipelined_by_two(context: &Context<'_>) -> Result<Found> {
    let place = Place::of(context);
    let run = |is_llama| notebook_launcher(context.workers, pipelined_rank, (place, is_llama), &processes(2));
    let runs = [run(false)?, run(true)?];
    let wanted = [logits(&gpt2(context.device)?, context.device)?, logits(&llama(context.device)?, context.device)?];
    let mut largest = 0f64;
    for (ranks, wanted) in runs.into_iter().zip(wanted) {
        for (device, values) in ranks {
            ensure!(device == format!("{:?}", context.device), "the logits are on {device}");
            let found = Tensor::f_from_slice(&values)?.f_reshape(wanted.size())?;
            // Logits of 0.1 and less, by products of 32 and 48 numbers.
            largest = largest.max(context.near("logits", &found, &wanted, 1e-5)?);
        }
    }
    Found::figure(format!("2 models, {NUM_TEXTS} texts in 3 chunks, within {largest:.0e}"))
}

/// Greedy texts are those of the CPU: in float32 the largest logit is the same one.
pub(crate) fn generated(context: &Context<'_>) -> Result<Found> {
    let config = GenerationConfig { max_new_tokens: 12, ..Default::default() };
    let texts = |device: Device| -> Result<Vec<Tensor>> {
        let prompts = Tensor::f_from_slice(&[3i64, 1, 4, 1, 5, 9, 2, 6])?.f_view([2, 4])?.f_to_device(device)?;
        let mask = Tensor::f_from_slice(&[1i64, 1, 1, 1, 0, 1, 1, 1])?.f_view([2, 4])?.f_to_device(device)?;
        let (first, second) = (gpt2(device)?, llama(device)?);
        first.params().eval();
        second.params().eval();
        Ok(vec![generate(&first, &prompts, None, &config)?, generate(&second, &prompts, Some(&mask), &config)?])
    };
    let (found, wanted) = (texts(context.device)?, texts(Device::Cpu)?);
    for ((name, found), wanted) in ["gpt2", "llama"].iter().zip(&found).zip(&wanted) {
        ensure!(found.device() == context.device, "{name}: the text is on {:?}", found.device());
        context.same(&format!("the text of {name}"), &found.f_to_device(Device::Cpu)?, wanted)?;
    }
    let first = found.first().context("no text")?;
    Found::figure(format!("2 models, texts {:?}", first.size()))
}
