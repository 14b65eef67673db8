//! Lists of tensors that are changed by few kernels, beside the same rules written out in double.

use accelerate::nn::{Module as _, Param, ParamStore};
use accelerate::optim::{
    Adafactor, Adagrad, Adam, AdamW, AdamW8bit, ClipGradNorm, Lion, Optimizer, RMSprop, Sgd, clip_grad_norm_,
    clip_grad_value_,
};
use accelerate::tch::{Device, Kind, Tensor};
use anyhow::{Context as _, Result, ensure};

use crate::check::{Context, Found};
use crate::models::{Classifier, ROWS, loss_of, tokens, wave};

/// Sizes around those at which kernels cut lists, a matrix, a single number, and many small ones.
fn shapes() -> Vec<Vec<i64>> {
    let mut shapes = vec![vec![65_537], vec![300, 211], vec![], vec![1], vec![64, 3, 3]];
    shapes.extend((0..100).map(|index| vec![1 + index % 7, 5]));
    shapes
}

fn parameters(device: Device) -> Result<ParamStore> {
    let store = ParamStore::new(device);
    for (index, shape) in shapes().iter().enumerate() {
        store.root().param(&format!("p{index}"), wave(shape, index as f64)?.f_to_device(device)?)?;
    }
    Ok(store)
}

/// Gives each parameter the gradient of this step.
fn backward(params: &[Param], step: usize) -> Result<()> {
    let mut loss = Tensor::f_zeros([], (Kind::Float, params.first().map_or(Device::Cpu, |p| p.local().device())))?;
    for (index, param) in params.iter().enumerate() {
        let gradient = gradient(param, index, step)?;
        loss = loss.f_add(&param.get()?.f_mul(&gradient)?.f_sum(Kind::Float)?)?;
    }
    Ok(loss.f_backward()?)
}

fn gradient(param: &Param, index: usize, step: usize) -> Result<Tensor> {
    Ok(wave(&param.shape(), 0.5 + index as f64 + 10.0 * step as f64)?.f_to_device(param.local().device())?)
}

/// One step of a rule: the parameter, its gradient, two states that begin as zeros, and the number of the step from 1.
type Rule = fn(&Tensor, &Tensor, &mut [Tensor; 2], i32) -> Result<Tensor>;

const RATE: f64 = 0.01;

fn adamw(param: &Tensor, gradient: &Tensor, state: &mut [Tensor; 2], step: i32) -> Result<Tensor> {
    state[0] = state[0].f_mul_scalar(0.9)?.f_add(&gradient.f_mul_scalar(0.1)?)?;
    state[1] = state[1].f_mul_scalar(0.999)?.f_add(&gradient.f_square()?.f_mul_scalar(0.001)?)?;
    let first = state[0].f_div_scalar(1.0 - 0.9f64.powi(step))?;
    let second = state[1].f_div_scalar(1.0 - 0.999f64.powi(step))?.f_sqrt()?.f_add_scalar(1e-8)?;
    Ok(param.f_mul_scalar(1.0 - RATE * 0.01)?.f_sub(&first.f_div(&second)?.f_mul_scalar(RATE)?)?)
}

/// Decay is a part of the gradient.
fn adam(param: &Tensor, gradient: &Tensor, state: &mut [Tensor; 2], step: i32) -> Result<Tensor> {
    let decay = param.f_mul_scalar(RATE * 0.01)?;
    let gradient = gradient.f_add(&param.f_mul_scalar(0.01)?)?;
    // What AdamW takes away by itself.
    Ok(adamw(param, &gradient, state, step)?.f_add(&decay)?)
}

fn sgd(param: &Tensor, gradient: &Tensor, state: &mut [Tensor; 2], step: i32) -> Result<Tensor> {
    state[0] = if step == 1 { gradient.f_detach_copy()? } else { state[0].f_mul_scalar(0.9)?.f_add(gradient)? };
    Ok(param.f_sub(&state[0].f_mul_scalar(RATE)?)?)
}

fn rmsprop(param: &Tensor, gradient: &Tensor, state: &mut [Tensor; 2], _: i32) -> Result<Tensor> {
    state[0] = state[0].f_mul_scalar(0.99)?.f_add(&gradient.f_square()?.f_mul_scalar(0.01)?)?;
    Ok(param.f_sub(&gradient.f_div(&state[0].f_sqrt()?.f_add_scalar(1e-8)?)?.f_mul_scalar(RATE)?)?)
}

fn adagrad(param: &Tensor, gradient: &Tensor, state: &mut [Tensor; 2], _: i32) -> Result<Tensor> {
    state[0] = state[0].f_add(&gradient.f_square()?)?;
    Ok(param.f_sub(&gradient.f_div(&state[0].f_sqrt()?.f_add_scalar(1e-10)?)?.f_mul_scalar(RATE)?)?)
}

/// Five steps of both. float32 keeps 6e-8 of numbers around 1 in each, and roots of small squares magnify that: 1e-5 is far above
/// that and far below a step, which is 1e-2.
pub(crate) fn rules(context: &Context<'_>) -> Result<Found> {
    type Maker = fn(&ParamStore) -> accelerate::Result<Box<dyn Optimizer>>;
    let rows: [(&str, Maker, Rule); 5] = [
        ("AdamW", |store| Ok(Box::new(AdamW::new(store, RATE)?)), adamw),
        ("Adam", |store| Ok(Box::new(Adam::builder(store).lr(RATE).weight_decay(0.01).build()?)), adam),
        ("SGD", |store| Ok(Box::new(Sgd::builder(store).lr(RATE).momentum(0.9).build()?)), sgd),
        ("RMSprop", |store| Ok(Box::new(RMSprop::builder(store).lr(RATE).build()?)), rmsprop),
        ("Adagrad", |store| Ok(Box::new(Adagrad::builder(store).lr(RATE).build()?)), adagrad),
    ];
    let mut largest = 0f64;
    for (name, make, rule) in rows {
        let store = parameters(context.device)?;
        let params = store.parameters();
        let mut optimizer = make(&store)?;
        let double = |tensor: &Tensor| tensor.f_detach()?.f_to_kind(Kind::Double);
        let mut wanted: Vec<Tensor> = params.iter().map(|param| Ok(double(&param.get()?)?)).collect::<Result<_>>()?;
        let mut states: Vec<[Tensor; 2]> =
            wanted.iter().map(|tensor| Ok([tensor.f_zeros_like()?, tensor.f_zeros_like()?])).collect::<Result<_>>()?;
        for step in 0..5 {
            backward(&params, step)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
            for (index, param) in params.iter().enumerate() {
                let gradient = double(&gradient(param, index, step)?)?;
                wanted[index] = rule(&wanted[index], &gradient, &mut states[index], step as i32 + 1)?;
            }
        }
        for (param, wanted) in params.iter().zip(&wanted) {
            let what = format!("{name}, {} of {:?}", param.name(), param.shape());
            largest = largest.max(context.near(&what, &param.get()?, wanted, 1e-5)?);
        }
    }
    Found::figure(format!("5 rules, 105 tensors, within {largest:.1e}"))
}

/// Makes an optimizer of some rate.
type Make = fn(&ParamStore) -> accelerate::Result<Box<dyn Optimizer>>;

const ALL: [(&str, Make); 8] = [
    ("AdamW", |store| Ok(Box::new(AdamW::new(store, 2e-3)?))),
    ("Adam", |store| Ok(Box::new(Adam::new(store, 2e-3)?))),
    ("SGD", |store| Ok(Box::new(Sgd::builder(store).lr(0.1).momentum(0.9).build()?))),
    ("RMSprop", |store| Ok(Box::new(RMSprop::new(store, 1e-3)?))),
    ("Adagrad", |store| Ok(Box::new(Adagrad::new(store, 1e-2)?))),
    ("Lion", |store| Ok(Box::new(Lion::new(store, 3e-4)?))),
    ("Adafactor", |store| Ok(Box::new(Adafactor::new(store, 1e-2)?))),
    ("AdamW8bit", |store| Ok(Box::new(AdamW8bit::new(store, 2e-3)?))),
];

fn losses(device: Device, make: Make) -> Result<Vec<f64>> {
    let model = Classifier::new(device)?;
    let mut optimizer = make(model.params())?;
    let step = |step: usize| {
        let (tokens, labels) = tokens(step, 0, ROWS, device)?;
        let loss = loss_of(&model.forward(&tokens)?, &labels)?;
        loss.f_backward()?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        Ok(loss.f_double_value(&[])?)
    };
    (0..8).map(step).collect()
}

/// Two devices add up in other orders. Signs and codes of 8 bits turn over where a number is next to the edge, which few are: that moves
/// a loss of 5 by less than 5e-3, and another rule or rate by more than 5e-2.
pub(crate) fn beside_the_cpu(context: &Context<'_>) -> Result<Found> {
    let mut largest = 0f64;
    for (name, make) in ALL {
        let (found, wanted) = (losses(context.device, make)?, losses(Device::Cpu, make)?);
        ensure!(wanted.last() < wanted.first(), "{name}: the loss did not fall: {wanted:?}");
        largest = largest.max(context.all_close(&format!("{name}: loss of step"), &found, &wanted, 5e-3)?);
    }
    Found::figure(format!("{} optimizers within {largest:.1e} of the CPU", ALL.len()))
}

pub(crate) fn clipping(context: &Context<'_>) -> Result<Found> {
    let mut norms = Vec::new();
    for norm_type in [2.0, 1.0, f64::INFINITY] {
        let store = parameters(context.device)?;
        let params = store.parameters();
        backward(&params, 0)?;
        let before: Vec<Tensor> = params
            .iter()
            .map(|param| Ok(param.grad().context("no gradient")?.f_to_kind(Kind::Double)?.f_to_device(Device::Cpu)?))
            .collect::<Result<_>>()?;
        let mut wanted = 0f64;
        for gradient in &before {
            let sizes = gradient.f_abs()?;
            wanted = match norm_type {
                2.0 => wanted + sizes.f_square()?.f_sum(Kind::Double)?.f_double_value(&[])?,
                1.0 => wanted + sizes.f_sum(Kind::Double)?.f_double_value(&[])?,
                _ => wanted.max(sizes.f_max()?.f_double_value(&[])?),
            };
        }
        let wanted = if norm_type == 2.0 { wanted.sqrt() } else { wanted };
        let max_norm = wanted / 4.0;
        let found: Tensor =
            clip_grad_norm_(&params, ClipGradNorm { max_norm, norm_type, ..Default::default() })?.into();
        let found = found.f_double_value(&[])?;
        // Sums of 1e5 numbers in float32.
        context.close(&format!("the {norm_type}-norm"), found / wanted, 1.0, 1e-4)?;
        for (param, before) in params.iter().zip(&before) {
            let after = param.grad().context("no gradient")?;
            context.near(&format!("{} clipped", param.name()), &after, &before.f_div_scalar(4.0)?, 1e-4)?;
        }
        norms.push(format!("{found:.1}"));
    }
    let store = parameters(context.device)?;
    let params = store.parameters();
    backward(&params, 0)?;
    clip_grad_value_(&params, 0.5)?;
    let largest = params.first().and_then(Param::grad).context("no gradient")?.f_abs()?.f_max()?.f_double_value(&[])?;
    context.close("the largest element after clip_grad_value_", largest, 0.5, 0.0)?;
    Found::figure(format!("norms {}", norms.join(", ")))
}
