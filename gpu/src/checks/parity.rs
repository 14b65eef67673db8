//! The same training by Python Accelerate, on the same device, in the same run.

use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{GradScalerKwargs, MixedPrecision};
use anyhow::Result;
use serde::Deserialize;

use crate::check::{Context, Found, NO_PYTHON};
use crate::models::train;

const NUM_STEPS: usize = 20;

#[derive(Deserialize)]
struct Answer {
    losses: Vec<f64>,
}

fn beside_python(context: &Context<'_>, precision: MixedPrecision, tolerance: f64) -> Result<Found> {
    if precision == MixedPrecision::Fp16 && !context.is_cuda() {
        return Found::not_here("Python Accelerate has no float16 on a CPU");
    }
    let name = precision.to_string();
    let arguments = ["--precision", name.as_str(), "--steps", &NUM_STEPS.to_string()];
    let Some(wanted) = context.python::<Answer>("train.py", &arguments)? else {
        return Found::not_here(NO_PYTHON);
    };
    let scaler = GradScalerKwargs { init_scale: Some(1024.0), ..Default::default() };
    let builder = context.builder().mixed_precision(precision);
    let builder = if precision == MixedPrecision::Fp16 { builder.kwargs_handler(scaler) } else { builder };
    let found = train(&builder.build()?, NUM_STEPS, Some(1.0))?;
    let difference = context.all_close("loss of step", &found.losses, &wanted.losses, tolerance)?;
    Found::figure(format!("{NUM_STEPS} steps within {difference:.1e}"))
}

#[derive(Deserialize)]
struct Numbers {
    normal: Vec<f64>,
    kept: Vec<f64>,
}

/// One libtorch draws on both sides, so the numbers are the same to the bit.
pub(crate) fn random(context: &Context<'_>) -> Result<Found> {
    const SEED: u64 = 1234;
    let Some(wanted) = context.python::<Numbers>("random_numbers.py", &["--seed", &SEED.to_string()])? else {
        return Found::not_here(NO_PYTHON);
    };
    accelerate::set_seed(SEED);
    let options = (Kind::Float, context.device);
    let numbers = |tensor: Tensor| Vec::<f64>::try_from(tensor.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?);
    let normal = numbers(Tensor::f_randn([wanted.normal.len() as i64], options)?)?;
    context.all_close("normal number", &normal, &wanted.normal, 0.0)?;
    let kept = numbers(Tensor::f_ones([wanted.kept.len() as i64], options)?.f_dropout(0.3, true)?)?;
    context.all_close("dropout at", &kept, &wanted.kept, 0.0)?;
    Found::figure(format!("{} numbers to the bit", normal.len() + kept.len()))
}

/// Sums in float32 may come in another order, which is 1e-7 of a loss of 6; AdamW divides small gradients by their size and so
/// doubles what differs in some steps. Another rule, rate or decay shows at 1e-3.
pub(crate) fn float32(context: &Context<'_>) -> Result<Found> {
    beside_python(context, MixedPrecision::No, 1e-4)
}

/// bfloat16 keeps 8 bits: 4e-3 of each number, whose mean over 128 tokens moves a tenth as far. In a loss of 6 that is 2e-3 for
/// each order of sums, and 20 steps add up.
pub(crate) fn bfloat16(context: &Context<'_>) -> Result<Found> {
    beside_python(context, MixedPrecision::Bf16, 2e-2)
}

/// float16 keeps 11 bits, 8 times as much as bfloat16.
pub(crate) fn float16(context: &Context<'_>) -> Result<Found> {
    beside_python(context, MixedPrecision::Fp16, 5e-3)
}
