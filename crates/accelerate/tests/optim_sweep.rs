//! `clip_step_and_zero_grad` does what clipping, stepping and dropping gradients do one after the other.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{Init, Param, ParamStore};
use accelerate::optim::{AcceleratedOptimizer, AdamW, Optimizer, Sgd, TotalNorm};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Accelerator, GradScalerKwargs, MixedPrecision, Result};

const MAX_NORM: f64 = 0.5;

fn accelerator(precision: MixedPrecision) -> Accelerator {
    let scaling = GradScalerKwargs { init_scale: Some(256.0), growth_interval: Some(3), ..Default::default() };
    Accelerator::builder().cpu(true).mixed_precision(precision).kwargs_handler(scaling).build().unwrap()
}

fn weights(kind: Kind) -> (ParamStore, Vec<Param>) {
    let store = ParamStore::new(Device::Cpu);
    let shapes: [&[i64]; 3] = [&[7, 5], &[40_003], &[]];
    for (index, shape) in shapes.into_iter().enumerate() {
        let param = store.root().param(&format!("w{index}"), (shape, Init::Zeros)).unwrap();
        let values = Tensor::arange(param.numel() as i64, (Kind::Float, Device::Cpu)).sin().reshape(shape);
        param.copy_(&values).unwrap();
    }
    if kind != Kind::Float {
        store.to_kind(kind).unwrap();
    }
    let params = store.trainable_parameters();
    (store, params)
}

/// Gradients that differ from step to step, small ones and large ones; that of step 4 is infinite.
fn backward(accelerator: &Accelerator, params: &[Param], step: usize) -> Result<()> {
    let factor = if step == 4 { f64::INFINITY } else { 10f64.powi(step as i32 % 3 - 4) };
    for param in params {
        let slope = Tensor::arange(param.numel() as i64, (Kind::Float, Device::Cpu)).cos() + step as f64;
        let weight = param.get().unwrap();
        accelerator.backward(&((weight.reshape([-1]) * slope.to_kind(weight.kind())).sum(Kind::Float) * factor))?;
    }
    Ok(())
}

type Seen = (Vec<f64>, Vec<bool>, Vec<Tensor>);

/// Norms, skipped steps and parameters of six steps.
fn train<O: Optimizer>(
    precision: MixedPrecision,
    kind: Kind,
    make: impl Fn(&ParamStore) -> O,
    step: impl Fn(&Accelerator, &[Param], &mut AcceleratedOptimizer<O>) -> Result<TotalNorm>,
) -> Seen {
    let accelerator = accelerator(precision);
    let (store, params) = weights(kind);
    let mut optimizer = accelerator.prepare(make(&store)).unwrap();
    let (mut norms, mut skipped) = (Vec::new(), Vec::new());
    let last = if precision == MixedPrecision::Fp16 { 6 } else { 4 };
    for index in 0..last {
        backward(&accelerator, &params, index).unwrap();
        norms.push(step(&accelerator, &params, &mut optimizer).unwrap().double_value(&[]));
        skipped.push(optimizer.step_was_skipped());
        assert!(params.iter().all(|param| param.grad().is_none()));
    }
    (norms, skipped, params.iter().map(|param| param.get().unwrap().detach().copy()).collect())
}

fn compare<O: Optimizer>(precision: MixedPrecision, kind: Kind, unscale_first: bool, make: impl Fn(&ParamStore) -> O) {
    let one_by_one = |accelerator: &Accelerator, params: &[Param], optimizer: &mut AcceleratedOptimizer<O>| {
        let norm = accelerator.clip_grad_norm_(params, MAX_NORM)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        Ok(norm)
    };
    let at_once = |accelerator: &Accelerator, _: &[Param], optimizer: &mut AcceleratedOptimizer<O>| {
        if unscale_first {
            accelerator.unscale_gradients()?;
        }
        Ok(optimizer.clip_step_and_zero_grad(MAX_NORM)?.unwrap())
    };
    let (norms, skipped, wanted) = train(precision, kind, &make, one_by_one);
    let (our_norms, our_skipped, found) = train(precision, kind, &make, at_once);
    assert_eq!(our_skipped, skipped);
    assert_eq!(skipped.iter().filter(|skipped| **skipped).count(), usize::from(precision == MixedPrecision::Fp16));
    for (ours, theirs) in our_norms.iter().zip(&norms) {
        let close = (ours - theirs).abs() <= 1e-4 * theirs || (!ours.is_finite() && !theirs.is_finite());
        assert!(close, "{our_norms:?} {norms:?}");
    }
    for (found, wanted) in found.iter().zip(&wanted) {
        let difference = (found - wanted).abs().max().double_value(&[]);
        assert!(difference <= 2e-6, "{precision:?} {kind:?} {difference}");
    }
}

#[test]
fn one_sweep_does_what_three_calls_do() {
    for precision in [MixedPrecision::No, MixedPrecision::Fp16] {
        for unscale_first in [false, true] {
            compare(precision, Kind::Float, unscale_first, |store| AdamW::new(store, 1e-2).unwrap());
            compare(precision, Kind::Float, unscale_first, |store| {
                Sgd::builder(store).lr(0.1).momentum(0.9).build().unwrap()
            });
        }
    }
}

#[test]
fn tensors_that_the_sweep_is_not_made_for_take_the_long_way() {
    compare(MixedPrecision::No, Kind::Double, false, |store| AdamW::new(store, 1e-2).unwrap());
}

#[test]
fn nothing_happens_while_gradients_are_being_accumulated() {
    let accelerator = Accelerator::builder().cpu(true).build().unwrap();
    let (store, params) = weights(Kind::Float);
    let mut optimizer = accelerator.prepare(AdamW::new(&store, 1e-2).unwrap()).unwrap();
    backward(&accelerator, &params, 0).unwrap();
    accelerator.set_sync_gradients(false);
    assert!(optimizer.clip_step_and_zero_grad(1.0).unwrap().is_none());
    assert!(params.iter().all(|param| param.grad().is_some()));
}
