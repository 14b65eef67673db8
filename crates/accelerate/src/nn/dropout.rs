//! Random zeros while training.

use super::layer::impl_layer;
use super::{AnyLayer, Path, TokenWise, TrainingFlag};
use crate::error::{NnError, Result};
use std::borrow::Borrow;
use tch::Tensor;

/// `torch.nn.Dropout`: while the store is in training mode, each element is zeroed with probability `p`
/// and the others grow by `1/(1-p)`; in evaluation mode the input passes unchanged.
///
/// ```
/// use accelerate::nn::{Dropout, ParamStore};
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let store = ParamStore::new(Device::Cpu);
/// let dropout = Dropout::new(store.root(), 0.5)?;
/// let ones = Tensor::ones([1000], (Kind::Float, Device::Cpu));
/// assert_ne!(dropout.forward(&ones)?, ones);
/// store.eval();
/// assert_eq!(dropout.forward(&ones)?, ones);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Dropout {
    /// Probability of a zero, from 0 to 1.
    pub p: f64,
    /// The store's mode.
    pub training: TrainingFlag,
    token_wise: TokenWise,
}

impl Dropout {
    /// Obeys the mode of `path`'s store. It has no parameters; its path is where plans of tensor parallelism find it, so it is made once,
    /// with the model.
    ///
    /// # Errors
    /// `p` is not a probability.
    pub fn new(path: impl Borrow<Path>, p: f64) -> Result<Self> {
        let path = path.borrow();
        if !(0.0..=1.0).contains(&p) {
            return Err(NnError::Probability { path: path.name().to_owned(), p }.into());
        }
        let token_wise = TokenWise::new("Dropout", []);
        path.register_layer(AnyLayer::TokenWise(token_wise.clone()));
        Ok(Self { p, training: path.training_flag(), token_wise })
    }

    /// Any shape to the same shape.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        match self.training.get() && self.p > 0.0 {
            true => self.token_wise.forward(input, |input| Ok(input.f_dropout(self.p, true)?)),
            false => self.token_wise.identity(input),
        }
    }
}

impl_layer!(Dropout);
