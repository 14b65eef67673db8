//! Which device a process computes on. Each answer is that of a process of its own, with variables of its own.

use accelerate::tch::{Kind, Tensor};
use anyhow::{Result, ensure};

use crate::check::{Context, Found};
use crate::machine::probe_of;

pub(crate) fn choice(context: &Context<'_>) -> Result<Found> {
    let program = std::env::current_exe()?;
    let own = if context.is_cuda() { "cuda:0" } else { "cpu" };
    let hidden: &[(&str, &str)] = if context.is_cuda() { &[] } else { &[("CUDA_VISIBLE_DEVICES", "")] };
    let with = |more: &[(&'static str, &'static str)]| [hidden, more].concat();
    for (variables, wanted) in [
        (with(&[]), own),
        (with(&[("ACCELERATE_USE_CPU", "true")]), "cpu"),
        (with(&[("ACCELERATE_TORCH_DEVICE", "cpu")]), "cpu"),
    ] {
        let found = probe_of(&program, &variables)?.device;
        ensure!(found == wanted, "with {variables:?}: an accelerator took {found}, not {wanted}");
    }
    let error = probe_of(&program, &with(&[("ACCELERATE_TORCH_DEVICE", "cuda:99")]));
    let error = error.err().map(|error| error.to_string()).unwrap_or_default();
    ensure!(error.contains("cuda:99"), "a device that is not there was not refused by name: {error:?}");
    // What is asked of the device is done there.
    let accelerator = context.accelerator()?;
    ensure!(accelerator.device() == context.device, "{:?} and not {:?}", accelerator.device(), context.device);
    let sum = Tensor::f_arange(100, (Kind::Float, accelerator.device()))?.f_sum(Kind::Float)?;
    ensure!(sum.device() == context.device);
    context.close("the sum of 0 to 99", sum.f_double_value(&[])?, 4950.0, 0.0)?;
    Found::figure(own)
}

pub(crate) fn visible(context: &Context<'_>) -> Result<Found> {
    if !context.is_cuda() {
        return Found::not_here("there is no device to hide");
    }
    let program = std::env::current_exe()?;
    let all = probe_of(&program, &[])?.num_devices;
    for (value, num_devices, device) in [("", 0, "cpu"), ("0", 1, "cuda:0"), ("-1", 0, "cpu")] {
        let found = probe_of(&program, &[("CUDA_VISIBLE_DEVICES", value)])?;
        context.close(&format!("devices with {value:?}"), found.num_devices as f64, f64::from(num_devices), 0.0)?;
        ensure!(found.device == device, "with CUDA_VISIBLE_DEVICES={value:?}: {} and not {device}", found.device);
    }
    // The last one alone is the first one of its process.
    let last = (all - 1).to_string();
    let found = probe_of(&program, &[("CUDA_VISIBLE_DEVICES", &last)])?;
    ensure!(
        (found.num_devices, found.device.as_str()) == (1, "cuda:0"),
        "with CUDA_VISIBLE_DEVICES={last:?}: {found:?}"
    );
    Found::figure(format!("{all} in all"))
}
