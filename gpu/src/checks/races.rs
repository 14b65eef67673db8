//! How long steps take, beside Python Accelerate in the same run. Both sides have fused AdamW, no dropout, and losses that nobody reads.

use accelerate::data::{DataLoader, TensorDataset};
use accelerate::nn::{GraphedModule, Module, Param, ParamStore};
use accelerate::optim::AdamW;
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Accelerator, DataLoaderConfiguration, DynamoBackend, MixedPrecision};
use anyhow::Result;
use torch_ext::autograd::set_gradient;

use crate::check::{Context, Found};
use crate::races::{NUM_ANSWERS, Race, Step, is_full, run};
use crate::transformer::{Size, Transformer, noise};

/// Rounding of float32, or of bfloat16 in a loss that is a mean.
const EXACT: f64 = 1e-4;
const LOW: f64 = 2e-2;

const SMALL: Size = Size { vocabulary: 100, width: 64, layers: 4, heads: 4, length: 16, batch_size: 1 };
const BERT: Size = Size { vocabulary: 30522, width: 768, layers: 12, heads: 12, length: 128, batch_size: 8 };
const GPT2: Size = Size { vocabulary: 50257, length: 1024, ..BERT };
const TINY: Size = Size { vocabulary: 101, width: 32, layers: 2, heads: 2, length: 16, batch_size: 2 };

/// So little computation that the time is that of launches.
pub(crate) fn small(context: &Context<'_>) -> Result<Found> {
    let race = Race { name: "small", unit: "step", tolerance: EXACT, gib: 2 };
    run(context, race, || training(context, SMALL, false, MixedPrecision::No))
}

/// The same with CUDA graphs on both sides: passes here, what `torch.compile` makes of them there.
pub(crate) fn small_graphs(context: &Context<'_>) -> Result<Found> {
    let race = Race { name: "small_graphs", unit: "step", tolerance: EXACT, gib: 2 };
    if !context.is_cuda() {
        return Found::not_here("it needs a GPU");
    }
    run(context, race, || {
        let accelerator = context.builder().dynamo_backend(DynamoBackend::Cudagraphs).build()?;
        let model = GraphedModule::new(Transformer::new(SMALL, false, context.device)?)?;
        steps(accelerator, model, SMALL, false)
    })
}

pub(crate) fn bert_8(context: &Context<'_>) -> Result<Found> {
    let race = Race { name: "bert_8", unit: "step", tolerance: LOW, gib: 10 };
    let size = if is_full(context) { BERT } else { TINY };
    run(context, race, || training(context, size, true, MixedPrecision::Bf16))
}

pub(crate) fn bert_64(context: &Context<'_>) -> Result<Found> {
    let race = Race { name: "bert_64", unit: "step", tolerance: LOW, gib: 24 };
    let size = if is_full(context) { Size { batch_size: 64, ..BERT } } else { Size { batch_size: 4, ..TINY } };
    run(context, race, || training(context, size, true, MixedPrecision::Bf16))
}

pub(crate) fn gpt2(context: &Context<'_>) -> Result<Found> {
    let race = Race { name: "gpt2", unit: "step", tolerance: LOW, gib: 40 };
    let size = if is_full(context) { GPT2 } else { Size { length: 32, ..TINY } };
    run(context, race, || training(context, size, false, MixedPrecision::Bf16))
}

fn training(context: &Context<'_>, size: Size, is_bert: bool, precision: MixedPrecision) -> Result<Step<'static>> {
    let accelerator = context.builder().mixed_precision(precision).build()?;
    let model = Transformer::new(size, is_bert, context.device)?;
    steps(accelerator, model, size, is_bert)
}

fn steps<M>(accelerator: Accelerator, model: M, size: Size, is_bert: bool) -> Result<Step<'static>>
where
    M: Module<Input = Tensor, Output = Tensor> + 'static,
{
    let device = accelerator.device();
    let optimizer = AdamW::builder(model.params()).lr(1e-4).build()?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let Size { vocabulary, length, batch_size, .. } = size;
    let numbers = Tensor::f_arange(batch_size * length, (Kind::Int64, device))?;
    let tokens = numbers.f_mul_scalar(7919)?.f_remainder(vocabulary)?.f_view([batch_size, length])?;
    let labels = if is_bert {
        Tensor::f_arange(batch_size, (Kind::Int64, device))?.f_remainder(2)?
    } else {
        tokens.f_mul_scalar(5)?.f_add_scalar(3)?.f_remainder(vocabulary)?.f_view([-1])?
    };
    Ok(Box::new(move || {
        let logits = model.forward(&tokens)?;
        let classes = logits.size().last().copied().unwrap_or(1);
        let logits = logits.f_view([-1, classes])?;
        let mean = accelerate::tch::Reduction::Mean;
        let loss = logits.f_cross_entropy_loss(&labels, None::<&Tensor>, mean, -100, 0.0)?;
        accelerator.backward(&loss)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        Ok(loss.f_detach()?)
    }))
}

/// All numbers of tensors, as one.
fn flat(tensors: &[Tensor]) -> Result<Tensor> {
    let flat = tensors.iter().map(|tensor| tensor.f_detach()?.f_reshape([-1]));
    Ok(Tensor::f_cat(&flat.collect::<Result<Vec<_>, _>>()?, 0)?)
}

/// 148 tensors of a transformer with 12 layers of width 80.
fn shapes() -> Vec<&'static [i64]> {
    const ENDS: [&[i64]; 4] = [&[100, 80], &[64, 80], &[80], &[80]];
    const LAYER: [&[i64]; 12] =
        [&[240, 80], &[240], &[80, 80], &[80], &[320, 80], &[320], &[80, 320], &[80], &[80], &[80], &[80], &[80]];
    ENDS.into_iter().chain((0..12).flat_map(|_| LAYER)).collect()
}

pub(crate) fn optimizer(context: &Context<'_>) -> Result<Found> {
    let race = Race { name: "optimizer", unit: "step", tolerance: EXACT, gib: 2 };
    run(context, race, || {
        let store = ParamStore::new(context.device);
        for (index, shape) in shapes().into_iter().enumerate() {
            let param = store.root().param(&format!("p{index}"), noise(shape, index as f64, context.device)?)?;
            set_gradient(&param.local(), Some(&noise(shape, index as f64 + 0.5, context.device)?))?;
        }
        let params: Vec<Tensor> = store.parameters().iter().map(Param::local).collect();
        let mut optimizer = context.accelerator()?.prepare(AdamW::new(&store, 1e-3)?)?;
        // What the first steps change shows the rule: a tensor is mostly what it began with.
        let (mut before, mut left) = (flat(&params)?, NUM_ANSWERS);
        Ok(Box::new(move || {
            optimizer.step()?;
            if left == 0 {
                return Ok(params[0].f_detach()?);
            }
            left -= 1;
            let after = flat(&params)?;
            let change = after.f_sub(&before)? * 1e3;
            before = after;
            Ok(change)
        }))
    })
}

/// One pass over the rows, each batch of which is added up on the device.
pub(crate) fn loader(context: &Context<'_>) -> Result<Found> {
    let race = Race { name: "loader", unit: "pass over the rows", tolerance: 1e-3, gib: 2 };
    let num_rows = if is_full(context) { 2048 } else { 128 };
    run(context, race, || {
        let configuration = DataLoaderConfiguration { non_blocking: Some(true), ..Default::default() };
        let accelerator = context.builder().dataloader_config(configuration).build()?;
        let dataset = TensorDataset::new(noise(&[num_rows, 12288], 0.0, Device::Cpu)?)?;
        let batches = accelerator.prepare(DataLoader::builder(dataset).batch_size(64).build()?)?;
        let device = context.device;
        Ok(Box::new(move || {
            let mut total = Tensor::f_zeros([], (Kind::Float, device))?;
            for rows in batches.iter()? {
                let _ = total.f_add_(&rows?.f_sum(Kind::Float)?)?;
            }
            Ok(total)
        }))
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn there_are_148_tensors() {
        assert_eq!(super::shapes().len(), 148);
    }
}
