//! `tests/test_kwargs_handlers.py`: settings arrive where they act.
//!
//! The reference looks at fields; here only what settings do is visible. Its `to_kwargs`, which lists the values that are
//! not the default, has no counterpart: a record is given as it is.

use crate::regression::{RegressionModel, mse, rank_batch};
use accelerate::nn::{Init, Module, ModuleFn, ParamStore};
use accelerate::optim::Sgd;
use accelerate::tch::{Kind, Tensor};
use accelerate::{
    Accelerator, AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs,
    KwargsHandler, MixedPrecision, ReduceOp, main_println,
};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;
use torch_ext::storage::storage_id;

pub(crate) fn run() -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).build()?;
    test_values_that_are_not_given(&accelerator)?;
    test_grad_scaler_kwargs(&accelerator)?;
    test_ddp_bucket_size(&accelerator)?;
    test_ddp_find_unused_parameters(&accelerator)?;
    test_autocast_kwargs(&accelerator)?;
    test_refused_handlers(&accelerator)?;
    main_println!(accelerator, "test_kwargs_handlers: all checks passed");
    Ok(())
}

/// A record that says one thing has the defaults in all others, and no words of its own.
fn test_values_that_are_not_given(accelerator: &Accelerator) -> Result<()> {
    let scaler: GradScalerKwargs = serde_json::from_str(r#"{"init_scale": 1024, "growth_factor": 3}"#)?;
    ensure!(scaler == GradScalerKwargs { init_scale: Some(1024.0), growth_factor: Some(3.0), ..Default::default() });
    let ddp: DistributedDataParallelKwargs = serde_json::from_str(r#"{"bucket_cap_mb": 15}"#)?;
    ensure!(ddp == DistributedDataParallelKwargs { bucket_cap_mb: Some(15.0), ..Default::default() });
    let error = serde_json::from_str::<GradScalerKwargs>(r#"{"initial_scale": 1024}"#).err();
    ensure!(error.is_some_and(|error| error.to_string().contains("initial_scale")), "an unknown word was accepted");
    Accelerator::builder().kwargs_handler(scaler).kwargs_handler(ddp).build_from(accelerator)?;
    Ok(())
}

/// The scale is what a backward pass multiplies gradients by. It grows after `growth_interval` good steps by
/// `growth_factor`, shrinks after a bad one by `backoff_factor`.
fn test_grad_scaler_kwargs(accelerator: &Accelerator) -> Result<()> {
    let given = GradScalerKwargs {
        init_scale: Some(1024.0),
        growth_factor: Some(4.0),
        backoff_factor: Some(0.125),
        growth_interval: Some(2),
        enabled: Some(true),
    };
    let disabled = GradScalerKwargs { enabled: Some(false), ..given.clone() };
    for (kwargs, wanted) in [
        (given, [1024.0, 1024.0, f64::INFINITY, 512.0, 512.0, 2048.0]),
        (GradScalerKwargs::default(), [65536.0, 65536.0, f64::INFINITY, 32768.0, 32768.0, 32768.0]),
        (disabled, [1.0; 6]),
    ] {
        let found = scales(accelerator, &kwargs, wanted.map(f64::is_finite))?;
        for (found, wanted) in found.iter().zip(wanted) {
            let is_close = *found == wanted || (found / wanted - 1.0).abs() < 1e-5;
            ensure!(is_close, "{kwargs:?}: scaled by {found} where it should be {wanted}");
        }
    }
    Ok(())
}

/// By how much each backward pass multiplied the gradient; an infinite loss where a step is to be bad.
fn scales(accelerator: &Accelerator, kwargs: &GradScalerKwargs, good: [bool; 6]) -> Result<Vec<f64>> {
    let configured = Accelerator::builder()
        .mixed_precision(MixedPrecision::Fp16)
        .kwargs_handler(kwargs.clone())
        .build_from(accelerator)?;
    let model = RegressionModel::new(configured.device(), 0.0, 0.0)?;
    // A rate of 0: the true gradient is the same in every step.
    let optimizer = Sgd::new(model.params(), 0.0)?;
    let (model, mut optimizer) = configured.prepare((model, optimizer))?;
    let (x, y) = rank_batch(&configured, 0)?;
    let mine = y.f_mean(Kind::Float)?.f_mul_scalar(-2.0)?;
    let gradient = configured.reduce(&mine, ReduceOp::Mean)?.f_double_value(&[])?;
    let mut scales = Vec::new();
    for good in good {
        let loss = mse(&model.forward(&x)?, &y)?;
        configured.backward(&(loss * if good { 1.0 } else { f64::INFINITY }))?;
        scales.push(model.gradients()?[1] / gradient);
        optimizer.step()?;
        optimizer.zero_grad()?;
    }
    Ok(scales)
}

/// Four parameters of 1 MiB: the first bucket is full with one, the others share buckets of `bucket_cap_mb`, from the second
/// step on. Gradients that are views show which lie in one bucket.
fn test_ddp_bucket_size(accelerator: &Accelerator) -> Result<()> {
    for (bucket_cap_mb, buckets) in [(25.0, 2), (2.0, 3), (0.5, 4)] {
        let kwargs = DistributedDataParallelKwargs {
            bucket_cap_mb: Some(bucket_cap_mb),
            gradient_as_bucket_view: Some(true),
            ..Default::default()
        };
        let configured = Accelerator::builder().kwargs_handler(kwargs).build_from(accelerator)?;
        let store = ParamStore::new(configured.device());
        let params = (0..4)
            .map(|index| store.root().param(&format!("p{index}"), ([512, 512], Init::Ones)))
            .collect::<accelerate::Result<Vec<_>>>()?;
        let model = configured.prepare(ModuleFn::new(&store, move |x: &Tensor| {
            let mut sum = x.f_zeros_like()?;
            for param in &params {
                sum = sum.f_add(&param.get()?.f_sum(Kind::Float)?.f_mul(x)?)?;
            }
            Ok(sum)
        }))?;
        for _ in 0..2 {
            configured.backward(&model.forward(&Tensor::from(1f32))?)?;
        }
        let gradients: Vec<Tensor> = store.parameters().iter().filter_map(|param| param.grad()).collect();
        ensure!(gradients.len() == 4);
        let found = gradients.iter().map(storage_id).collect::<BTreeSet<_>>().len();
        let wanted = if accelerator.num_processes() == 1 { 4 } else { buckets };
        ensure!(found == wanted, "bucket_cap_mb {bucket_cap_mb}: {found} buckets, not {wanted}");
    }
    Ok(())
}

/// A parameter that takes no part is an error that names it, unless it is looked for.
fn test_ddp_find_unused_parameters(accelerator: &Accelerator) -> Result<()> {
    for find_unused_parameters in [true, false] {
        let kwargs = DistributedDataParallelKwargs {
            find_unused_parameters: Some(find_unused_parameters),
            ..Default::default()
        };
        let configured = Accelerator::builder().kwargs_handler(kwargs).build_from(accelerator)?;
        let store = ParamStore::new(configured.device());
        let used = store.root().param("used", ([1], Init::Ones))?;
        store.root().param("idle", ([1], Init::Ones))?;
        let optimizer = Sgd::new(&store, 1.0)?;
        let model = ModuleFn::new(&store, {
            let used = used.clone();
            move |x: &Tensor| Ok(used.get()?.f_mul(x)?)
        });
        let (model, mut optimizer) = configured.prepare((model, optimizer))?;
        configured.backward(&model.forward(&Tensor::from(configured.process_index() as f32))?.f_sum(Kind::Float)?)?;
        let outcome = optimizer.step();
        if find_unused_parameters || configured.num_processes() == 1 {
            outcome?;
            let wanted = 1.0 - (configured.num_processes() - 1) as f64 / 2.0;
            let found = used.get()?.f_double_value(&[0])?;
            ensure!((found - wanted).abs() < 1e-6, "a step by the mean of all ranks gives {wanted}, not {found}");
        } else {
            let error = outcome.err().context("an unused parameter went unnoticed")?.to_string();
            ensure!(error.contains("idle") && error.contains("find_unused_parameters"), "{error}");
        }
    }
    Ok(())
}

/// In which kind products are computed: everywhere, in one block, and in prepared models.
fn test_autocast_kwargs(accelerator: &Accelerator) -> Result<()> {
    let off = AutocastKwargs { enabled: Some(false), ..Default::default() };
    let ones = Tensor::f_ones([2, 2], (Kind::Float, accelerator.device()))?;
    let product = || -> accelerate::Result<Kind> { Ok(ones.f_matmul(&ones)?.f_kind()?) };
    for (kwargs, wanted) in [(None, Kind::BFloat16), (Some(off.clone()), Kind::Float)] {
        let builder = Accelerator::builder().mixed_precision(MixedPrecision::Bf16).outputs_to_fp32(false);
        let builder = match kwargs {
            Some(kwargs) => builder.kwargs_handler(kwargs),
            None => builder,
        };
        let configured = builder.build_from(accelerator)?;
        ensure!(configured.autocast(None, product)? == wanted, "in autocast");
        let nested = configured.autocast(None, || {
            let within = configured.autocast(off.clone(), product)?;
            Ok((within, product()?))
        })?;
        ensure!(nested == (Kind::Float, wanted), "switched off in a block, and what it was after it: {nested:?}");
        ensure!(product()? == Kind::Float, "outside of autocast");
        let store = ParamStore::new(configured.device());
        let weight = store.root().param("weight", ([2, 2], Init::Ones))?;
        let model = configured.prepare(ModuleFn::new(&store, move |x: &Tensor| Ok(x.f_matmul(&weight.get()?)?)))?;
        ensure!(model.forward(&ones)?.f_kind()? == wanted, "in a prepared model");
    }
    Ok(())
}

/// What cannot be meant is an error on every rank, before any rank waits for another.
fn test_refused_handlers(accelerator: &Accelerator) -> Result<()> {
    let handlers: [(&str, KwargsHandler); 4] = [
        ("DistributedDataParallelKwargs", DistributedDataParallelKwargs::default().into()),
        ("GradScalerKwargs", GradScalerKwargs::default().into()),
        ("InitProcessGroupKwargs", InitProcessGroupKwargs::default().into()),
        ("AutocastKwargs", AutocastKwargs::default().into()),
    ];
    for (kind, handler) in handlers {
        let twice = Accelerator::builder().kwargs_handler(handler.clone()).kwargs_handler(handler);
        let error = twice.build_from(accelerator).err().context("two handlers of a kind were accepted")?;
        ensure!(error.is_config() && error.to_string().contains(kind), "{error}");
    }
    let power_sgd = |option: &str| -> Result<KwargsHandler> {
        let text = format!(r#"{{"comm_hook": "power_sgd", "comm_state_option": {{{option}}}}}"#);
        Ok(serde_json::from_str::<DistributedDataParallelKwargs>(&text)?.into())
    };
    let growth = GradScalerKwargs { growth_factor: Some(1.0), ..Default::default() };
    for (handler, words) in [
        (power_sgd(r#""matrix_rank": 2"#)?, "matrix_rank"),
        (power_sgd(r#""matrix_approximation_rank": 0"#)?, "matrix_approximation_rank"),
        (power_sgd(r#""start_powerSGD_iter": 1"#)?, "start_powerSGD_iter is 1"),
        (DistributedDataParallelKwargs { bucket_cap_mb: Some(0.0), ..Default::default() }.into(), "bucket_cap_mb"),
        (growth.into(), "growth_factor"),
    ] {
        let builder = Accelerator::builder().mixed_precision(MixedPrecision::Fp16).kwargs_handler(handler);
        let error = builder.build_from(accelerator).err().context("impossible settings were accepted")?;
        ensure!(error.is_config() && error.to_string().contains(words), "{error}");
    }
    Ok(())
}
