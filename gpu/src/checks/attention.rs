//! Attention that is put together from parts of the keys, by libtorch's kernels.

use accelerate::tch::{Device, Kind, Tensor};
use anyhow::{Context as _, Result};
use torch_ext::attention::AttentionKernel;

use crate::check::{Context, Found};
use crate::models::wave;

/// `[2, 4, length, 16]`.
fn heads(length: i64, phase: f64, kind: Kind) -> Result<Tensor> {
    Ok(wave(&[2, 4, length, 16], phase)?.f_mul_scalar(2.0)?.f_to_kind(kind)?)
}

fn kernel([query, key, value]: [&Tensor; 3]) -> Result<AttentionKernel> {
    AttentionKernel::find(query, key, value)?.context("no kernel for these heads")
}

/// The device's kernels beside that of the CPU in float32, and gradients of half of the keys beside the same half of all gradients.
pub(crate) fn beside_the_cpu(context: &Context<'_>) -> Result<Found> {
    const SCALE: f64 = 0.25;
    let mut kernels = Vec::new();
    let mut num_calls = 0;
    for (kind, most) in [(Kind::Float, 1e-5), (Kind::BFloat16, 5e-2), (Kind::Half, 1e-2)] {
        for (length, is_causal) in [(8, false), (8, true), (33, true), (64, false), (200, true)] {
            let all = [heads(length, 0.1, kind)?, heads(length, 0.5, kind)?, heads(length, 0.9, kind)?];
            let gradient = heads(length, 0.3, kind)?;
            let on = |device: Device, kind: Kind| -> Result<[Tensor; 4]> {
                let [query, key, value] = &all;
                let moved =
                    [query, key, value, &gradient].map(|it| it.f_to_device(device).and_then(|it| it.f_to_kind(kind)));
                let [query, key, value, gradient] = moved;
                Ok([query?, key?, value?, gradient?])
            };
            let passes = |device: Device, kind: Kind| -> Result<Vec<Tensor>> {
                let [query, key, value, gradient] = on(device, kind)?;
                let heads = [&query, &key, &value];
                let kernel = kernel(heads)?;
                let (output, log_sum) = kernel.forward(heads, is_causal, SCALE)?;
                let gradients = kernel.backward(&gradient, heads, (&output, &log_sum), is_causal, SCALE)?;
                Ok([output, log_sum].into_iter().chain(gradients).collect())
            };
            let (found, wanted) = (passes(context.device, kind)?, passes(Device::Cpu, Kind::Float)?);
            let what = format!("{kind:?}, {length} tokens, causal: {is_causal}");
            for ((part, found), wanted) in
                ["output", "logarithms", "queries", "keys", "values"].iter().zip(&found).zip(&wanted)
            {
                let size = wanted.f_abs()?.f_max()?.f_double_value(&[])?.max(1.0);
                context.near(&format!("{part}: {what}"), &found.f_to_kind(Kind::Float)?, wanted, most * size)?;
            }
            num_calls += 1;
            if is_causal {
                continue;
            }
            let [query, key, value, gradient] = on(context.device, kind)?;
            let half = length / 2;
            let (key, value) = (key.f_narrow(2, 0, half)?, value.f_narrow(2, 0, half)?);
            let heads = [&query, &key, &value];
            let kernel = kernel(heads)?;
            let [_, of_key, of_value] = kernel.backward(&gradient, heads, (&found[0], &found[1]), false, SCALE)?;
            for (part, found, wanted) in [("keys", of_key, &found[3]), ("values", of_value, &found[4])] {
                let wanted = wanted.f_narrow(2, 0, half)?;
                let size = wanted.f_abs()?.f_max()?.f_to_kind(Kind::Float)?.f_double_value(&[])?.max(1.0);
                context.near(&format!("half of the {part}: {what}"), &found, &wanted, most * size)?;
            }
        }
        let example = heads(8, 0.1, kind)?.f_to_device(context.device)?;
        kernels.push(format!("{kind:?} by {:?}", kernel([&example, &example, &example])?));
    }
    Found::figure(format!("{num_calls} sizes, {}", kernels.join(", ")))
}
