//! `training_check` of `test_script.py`: training on many ranks gives the model that one process alone gives.

use crate::regression::{RegressionLoader, RegressionModel, ensure_close, mse, regression_data};
use accelerate::data::{DataLoader, Generator, SeedableRandomSampler, TensorDataset};
use accelerate::nn::{Linear, LinearConfig, Module, ModuleFn, ParamStore};
use accelerate::optim::{Optimizer, Sgd};
use accelerate::tch::Tensor;
use accelerate::{Accelerator, DataLoaderConfiguration, GradScalerKwargs, MixedPrecision};
use anyhow::{Result, ensure};

const BATCH_SIZE: usize = 8;
const NUM_EPOCHS: usize = 3;
const SEED: u64 = 42;

/// In all precisions, with batches per rank and batches that are split, over the same shuffled batches of the whole run.
/// After 12 steps neither weight has arrived, so that every step counts.
pub(crate) fn training_check(accelerator: &Accelerator, use_seedable_sampler: bool) -> Result<()> {
    for split_batches in [false, true] {
        for precision in [MixedPrecision::No, MixedPrecision::Bf16, MixedPrecision::Fp16] {
            let case = Case { use_seedable_sampler, split_batches, precision };
            same_as_alone(accelerator, &case)?;
            same_in_low_precision(accelerator, &case)?;
        }
    }
    Ok(())
}

#[derive(Debug)]
struct Case {
    use_seedable_sampler: bool,
    split_batches: bool,
    precision: MixedPrecision,
}

/// The reference's own model: no operation in it is computed in low precision, so all precisions give the same.
fn same_as_alone(accelerator: &Accelerator, case: &Case) -> Result<()> {
    let start = || RegressionModel::new(accelerator.device(), 0.0, 0.0);
    let wanted = mock_training(accelerator, case, start()?)?;
    let found = training(accelerator, case, start()?)?;
    Ok(ensure_close(found, wanted, 1e-5, &format!("{case:?} on {} ranks", accelerator.num_processes()))?)
}

/// A layer that is computed in low precision, where sums round otherwise than over the rows of other ranks.
fn same_in_low_precision(accelerator: &Accelerator, case: &Case) -> Result<()> {
    let wanted = mock_training(accelerator, case, layer(accelerator)?)?;
    let found = training(accelerator, case, layer(accelerator)?)?;
    let tolerance = match case.precision {
        MixedPrecision::Bf16 => 1e-2,
        MixedPrecision::Fp16 => 2e-3,
        _ => 1e-5,
    };
    ensure_close(found, wanted, tolerance, &format!("a layer, {case:?} on {} ranks", accelerator.num_processes()))?;
    let is_float32 = ensure_close(found, wanted, 1e-5, "").is_ok();
    ensure!(is_float32 == (case.precision == MixedPrecision::No), "{case:?}: computed in float32 is {is_float32}");
    Ok(())
}

fn layer(accelerator: &Accelerator) -> Result<impl Module<Input = Tensor, Output = Tensor> + use<>> {
    let store = ParamStore::new(accelerator.device());
    let linear = Linear::new(store.root(), 1, 1, LinearConfig::default())?;
    for param in store.parameters() {
        param.copy_(&param.get()?.f_zeros_like()?)?;
    }
    Ok(ModuleFn::new(&store, move |x: &Tensor| Ok(linear.forward(&x.f_unsqueeze(-1)?)?.f_squeeze_dim(-1)?)))
}

/// Weight and bias.
fn values(model: &impl Module) -> Result<[f64; 2]> {
    let params = model.params().parameters();
    ensure!(params.len() == 2, "a line has two parameters, not {}", params.len());
    Ok([params[0].get()?.f_reshape([-1])?.f_double_value(&[0])?, params[1].get()?.f_double_value(&[0])?])
}

fn loader(accelerator: &Accelerator, case: &Case, batch_size: usize, seed: u64) -> Result<RegressionLoader> {
    let length = BATCH_SIZE * 4 * accelerator.num_processes();
    let builder = DataLoader::builder(TensorDataset::new(regression_data(length as i64)?)?).batch_size(batch_size);
    if case.use_seedable_sampler {
        return Ok(builder.sampler(SeedableRandomSampler::new(length, seed)).build()?);
    }
    let generator = Generator::new_cpu()?;
    generator.manual_seed(seed)?;
    Ok(builder.shuffle(true).generator(generator).build()?)
}

/// Plain training, without any accelerator, on batches of the whole run.
fn mock_training(
    accelerator: &Accelerator,
    case: &Case,
    model: impl Module<Input = Tensor, Output = Tensor>,
) -> Result<[f64; 2]> {
    let loader = loader(accelerator, case, BATCH_SIZE * accelerator.num_processes(), SEED)?;
    let mut optimizer = Sgd::new(model.params(), 0.1)?;
    for _ in 0..NUM_EPOCHS {
        for batch in loader.iter()? {
            let (x, y) = batch?;
            mse(&model.forward(&x)?, &y)?.f_backward()?;
            optimizer.step()?;
            optimizer.zero_grad()?;
        }
    }
    values(&model)
}

fn training(
    accelerator: &Accelerator,
    case: &Case,
    model: impl Module<Input = Tensor, Output = Tensor> + 'static,
) -> Result<[f64; 2]> {
    let config = DataLoaderConfiguration {
        split_batches: Some(case.split_batches),
        use_seedable_sampler: Some(case.use_seedable_sampler),
        ..Default::default()
    };
    // The default scale is too large for a layer in float16, and the first steps would be skipped.
    let scaler = GradScalerKwargs { init_scale: Some(1024.0), ..Default::default() };
    let configured = Accelerator::builder()
        .dataloader_config(config)
        .mixed_precision(case.precision)
        .kwargs_handler(scaler)
        .build_from(accelerator)?;
    let batch_size = if case.split_batches { BATCH_SIZE * configured.num_processes() } else { BATCH_SIZE };
    // Every rank has another seed: preparing makes that of rank 0 everyone's.
    let loader = loader(&configured, case, batch_size, SEED + configured.process_index() as u64)?;
    let optimizer = Sgd::new(model.params(), 0.1)?;
    let (loader, model, mut optimizer) = configured.prepare((loader, model, optimizer))?;
    for _ in 0..NUM_EPOCHS {
        for batch in loader.iter()? {
            let (x, y) = batch?;
            configured.backward(&mse(&model.forward(&x)?, &y)?)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
        }
    }
    let values = values(&*model)?;
    let everywhere = configured.gather_object(&[values])?;
    ensure!(everywhere.iter().all(|other| *other == values), "{case:?}: ranks have different models, {everywhere:?}");
    Ok(values)
}
