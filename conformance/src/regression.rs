//! The reference's toy problem: y = a x + b (`test_utils/training.py`).

use accelerate::data::{DataLoader, TensorDataset};
use accelerate::nn::{Module, Param, ParamStore};
use accelerate::tch::{Kind, Tensor};
use accelerate::{Accelerator, Error, Result};

/// A line with one weight and one bias.
pub(crate) struct RegressionModel {
    store: ParamStore,
    pub(crate) a: Param,
    pub(crate) b: Param,
}

impl RegressionModel {
    pub(crate) fn new(device: accelerate::tch::Device, a: f32, b: f32) -> Result<Self> {
        let store = ParamStore::new(device);
        let path = store.root();
        let a = path.param("a", Tensor::from_slice(&[a]))?;
        let b = path.param("b", Tensor::from_slice(&[b]))?;
        Ok(Self { store, a, b })
    }

    pub(crate) fn values(&self) -> Result<[f64; 2]> {
        Ok([self.a.get()?.f_double_value(&[0])?, self.b.get()?.f_double_value(&[0])?])
    }

    pub(crate) fn gradients(&self) -> Result<[f64; 2]> {
        let value = |param: &Param| param.grad().map_or(Ok(0.0), |grad| grad.f_double_value(&[0]));
        Ok([value(&self.a)?, value(&self.b)?])
    }
}

impl Module for RegressionModel {
    type Input = Tensor;
    type Output = Tensor;

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.f_mul(&self.a.get()?)?.f_add(&self.b.get()?)?)
    }

    fn params(&self) -> &ParamStore {
        &self.store
    }
}

/// Mean squared error.
pub(crate) fn mse(prediction: &Tensor, target: &Tensor) -> Result<Tensor> {
    Ok(prediction.f_mse_loss(target, accelerate::tch::Reduction::Mean)?)
}

pub(crate) type RegressionLoader = DataLoader<(Tensor, Tensor)>;

/// `length` points of y = 2 x + 3 with a little noise, the same on every rank.
pub(crate) fn regression_data(length: i64) -> Result<(Tensor, Tensor)> {
    let x = Tensor::f_arange(length, (Kind::Float, accelerate::tch::Device::Cpu))?;
    // A fixed spread in place of random numbers: no generator has to agree between ranks.
    let x = x.f_mul_scalar(0.7548776)?.f_frac()?.f_mul_scalar(2.0)?.f_sub_scalar(1.0)?;
    let noise = x.f_mul_scalar(37.0)?.f_sin()?.f_mul_scalar(0.1)?;
    let y = x.f_mul_scalar(2.0)?.f_add_scalar(3.0)?.f_add(&noise)?;
    Ok((x, y))
}

/// A batch of its own for every rank; four of them, over and over.
pub(crate) fn rank_batch(accelerator: &Accelerator, step: usize) -> Result<(Tensor, Tensor)> {
    let (x, y) = regression_data(16 * accelerator.num_processes() as i64)?;
    let start = (accelerator.process_index() * 16 + 4 * (step % 4)) as i64;
    Ok((x.f_narrow(0, start, 4)?, y.f_narrow(0, start, 4)?))
}

pub(crate) fn regression_loader(length: i64, batch_size: usize, shuffle: bool) -> Result<RegressionLoader> {
    DataLoader::builder(TensorDataset::new(regression_data(length)?)?).batch_size(batch_size).shuffle(shuffle).build()
}

/// Fails unless two pairs of numbers agree to within `tolerance`.
pub(crate) fn ensure_close(found: [f64; 2], wanted: [f64; 2], tolerance: f64, what: &str) -> Result<()> {
    let far = found.iter().zip(wanted).any(|(found, wanted)| (found - wanted).abs() > tolerance);
    if far { Err(Error::other(format!("{what}: found {found:?}, wanted {wanted:?}"))) } else { Ok(()) }
}
