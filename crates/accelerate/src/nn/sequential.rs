//! Layers one after the other.

use super::Path;
use super::layer::{Layer, impl_layer};
use crate::error::Result;
use std::borrow::Borrow;
use tch::Tensor;

/// `torch.nn.Sequential`: each layer takes the output of the one before. Children are named by their
/// position, `0`, `1`, ..., counting those without parameters.
///
/// ```
/// use accelerate::nn::{Gelu, Linear, ParamStore, Sequential};
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let store = ParamStore::new(Device::Cpu);
/// let model = Sequential::new(store.root() / "head")
///     .push(|path| Linear::new(path, 4, 8, Default::default()))?
///     .push(|_| Ok(Gelu::Erf))?
///     .push(|path| Linear::new(path, 8, 2, Default::default()))?;
/// assert!(store.get("head.2.weight").is_some());
/// assert_eq!(model.forward(&Tensor::ones([3, 4], (Kind::Float, Device::Cpu)))?.size(), [3, 2]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct Sequential {
    path: Path,
    /// The layers in order.
    pub layers: Vec<Box<dyn Layer>>,
}

impl Sequential {
    /// No layers yet: the identity.
    pub fn new(path: impl Borrow<Path>) -> Self {
        Self { path: path.borrow().clone(), layers: Vec::new() }
    }

    /// Adds the layer that `make` builds at the next position's path.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn push<L: Layer + 'static>(mut self, make: impl FnOnce(Path) -> Result<L>) -> Result<Self> {
        let layer = make(&self.path / self.layers.len())?;
        self.layers.push(Box::new(layer));
        Ok(self)
    }

    /// The last layer's output; without layers, the input.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let Some((first, rest)) = self.layers.split_first() else {
            return Ok(input.shallow_clone());
        };
        rest.iter().try_fold(first.forward(input)?, |hidden, layer| layer.forward(&hidden))
    }
}

impl_layer!(Sequential);
