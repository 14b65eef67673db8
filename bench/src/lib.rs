//! What the compared programs share: the case that `parity/make_case.py` wrote, and one training loop.
//!
//! The Python counterparts are `parity/case.py` and the loops of `parity/ddp_train.py` and
//! `bench/rival/ddp_step.py`. Settings stand in both places and must stay equal.

pub mod grid;
pub mod steps;

use std::path::Path;
use std::time::Instant;

use accelerate::data::{DataLoader, TensorDataset, stack_tensors};
use accelerate::nn::{Module, Param, ParamStore};
use accelerate::optim::{AdamW, Optimizer, Sgd};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Accelerator, PreparedModel};
use accelerate_models::PretrainedConfig;
use accelerate_models::bert::{Batch, BertConfig, BertForSequenceClassification, load_weights};
use anyhow::{Context, Result, bail, ensure};

/// One training run of the case on this rank.
#[derive(Debug)]
pub struct Settings<'a> {
    /// The folder with `config.json`, `model.safetensors` and `rows.safetensors`.
    pub case: &'a Path,
    /// `sgd` or `adamw`.
    pub optimizer: &'a str,
    /// Optimizer steps.
    pub num_steps: usize,
    /// Rows per rank and step.
    pub batch_size: usize,
}

/// What a run leaves behind.
#[derive(Debug)]
pub struct Trained {
    /// The trained model.
    pub model: PreparedModel<BertForSequenceClassification>,
    /// This rank's loss at every step: the mean over its batch.
    pub losses: Vec<f64>,
    /// Milliseconds from the end of the step before to the end of each step.
    pub step_ms: Vec<f64>,
}

/// Trains the case. Collective.
///
/// # Errors
/// An unknown optimizer, a case that cannot be read or has too few rows, or a failure of training.
pub fn train(accelerator: &Accelerator, settings: &Settings<'_>) -> Result<Trained> {
    let store = ParamStore::new(accelerator.device());
    let config = BertConfig::from_folder(settings.case)?;
    let model = BertForSequenceClassification::new(&store.root(), &config)?;
    load_weights(&store, settings.case)?;
    // The settings of `make_optimizer` in `parity/case.py`.
    match settings.optimizer {
        "sgd" => {
            let optimizer = Sgd::builder(&store).lr(1e-2).momentum(0.9).weight_decay(0.01).build()?;
            train_with(accelerator, settings, model, optimizer)
        }
        "adamw" => {
            let optimizer = AdamW::builder(&store).lr(1e-3).betas((0.9, 0.999)).eps(1e-8).weight_decay(0.01).build()?;
            train_with(accelerator, settings, model, optimizer)
        }
        other => bail!("unknown optimizer {other:?}; known: sgd, adamw"),
    }
}

fn train_with<O: Optimizer>(
    accelerator: &Accelerator,
    settings: &Settings<'_>,
    model: BertForSequenceClassification,
    optimizer: O,
) -> Result<Trained> {
    let rows = TensorDataset::new(read_rows(settings.case)?)?;
    let loader = DataLoader::builder(rows).batch_size(settings.batch_size).collate_fn(stack_tensors).build()?;
    let (model, mut optimizer, loader) = accelerator.prepare((model, optimizer, loader))?;
    let (mut losses, mut step_ms) = (Vec::new(), Vec::new());
    let mut started = Instant::now();
    for batch in loader.iter()?.take(settings.num_steps) {
        let loss = model.forward(&batch?)?.loss;
        accelerator.backward(&loss)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        losses.push(loss.f_double_value(&[])?);
        step_ms.push(started.elapsed().as_secs_f64() * 1e3);
        started = Instant::now();
    }
    let num_steps = losses.len();
    ensure!(
        num_steps == settings.num_steps,
        "the case has rows for {num_steps} steps; {} were asked for",
        settings.num_steps
    );
    Ok(Trained { model, losses, step_ms })
}

/// The rows of the case, int64. The model wants segments as well: all rows are of the first.
fn read_rows(case: &Path) -> Result<Batch> {
    let path = case.join("rows.safetensors");
    let tensors = Tensor::read_safetensors(&path).with_context(|| format!("could not read {}", path.display()))?;
    let tensor = |wanted: &str| {
        let found = tensors.iter().find(|(name, _)| name == wanted);
        found.map(|(_, tensor)| tensor.shallow_clone()).with_context(|| format!("{} has no `{wanted}`", path.display()))
    };
    let input_ids = tensor("input_ids")?;
    let token_type_ids = input_ids.f_zeros_like()?;
    Ok(Batch { input_ids, token_type_ids, attention_mask: tensor("attention_mask")?, labels: tensor("labels")? })
}

/// The highest resident memory of this process so far, as the kernel counts it.
///
/// # Errors
/// Where there is no `/proc/self/status`, or no `VmHWM` line in it.
pub fn peak_resident_bytes() -> Result<u64> {
    status_bytes("VmHWM:")
}

/// The resident memory of this process now.
///
/// # Errors
/// Where there is no `/proc/self/status`, or no `VmRSS` line in it.
pub fn resident_bytes() -> Result<u64> {
    status_bytes("VmRSS:")
}

fn status_bytes(key: &str) -> Result<u64> {
    let text = std::fs::read_to_string("/proc/self/status").context("memory is read from /proc/self/status")?;
    parse_status(&text, key).with_context(|| format!("/proc/self/status has no `{key} <n> kB` line"))
}

fn parse_status(status: &str, key: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix(key))?;
    let kibibytes: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

/// Writes the parameters of a model to one file, under their own names.
///
/// # Errors
/// When the file cannot be written.
pub fn write_parameters(model: &impl Module, path: &Path) -> Result<()> {
    let state = model.params().state_dict()?;
    let tensors: Vec<(&str, Tensor)> = state.iter().map(|(name, tensor)| (name, tensor.shallow_clone())).collect();
    Tensor::write_safetensors(&tensors, path).with_context(|| format!("could not write {}", path.display()))
}

/// Numbers between -1 and 1 that the rivals in Python make alike (`formula` in `rival/optimizer.py`): float32.
///
/// # Errors
/// libtorch's own.
pub fn formula(shape: &[i64], phase: f64) -> Result<Tensor> {
    let count: i64 = shape.iter().product();
    let numbers = Tensor::f_arange(count, (Kind::Double, Device::Cpu))?;
    let numbers = numbers.f_mul_scalar(0.7)?.f_add_scalar(phase)?.f_sin()?;
    Ok(numbers.f_to_kind(Kind::Float)?.f_reshape(shape)?)
}

/// The mean square of all parameters: what both sides of a race compare.
///
/// # Errors
/// libtorch's own.
pub fn mean_square(params: &[Param]) -> Result<f64> {
    let (mut total, mut count) = (0.0, 0);
    for param in params {
        let values = param.get()?.f_detach()?.f_to_kind(Kind::Double)?;
        total += values.f_square()?.f_sum(Kind::Double)?.f_double_value(&[])?;
        count += param.numel();
    }
    Ok(total / count as f64)
}

/// The median; not a number where there is none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => values[count / 2],
        count => f64::midpoint(values[count / 2 - 1], values[count / 2]),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_read_in_bytes() {
        assert_eq!(parse_status("VmPeak:\t 9 kB\nVmHWM:\t    2048 kB\n", "VmHWM:"), Some(2_097_152));
        assert_eq!(parse_status("VmRSS: 2 kB\n", "VmHWM:"), None);
        assert!(peak_resident_bytes().unwrap() > 1 << 20);
    }

    #[test]
    fn rows_without_labels_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let ids = Tensor::from_slice2(&[[1i64, 2], [3, 4]]);
        Tensor::write_safetensors(
            &[("input_ids", &ids), ("attention_mask", &ids)],
            folder.path().join("rows.safetensors"),
        )
        .unwrap();
        let message = read_rows(folder.path()).unwrap_err().to_string();
        assert!(message.contains("rows.safetensors") && message.contains("labels"), "{message}");
    }
}
