//! Draws from libtorch's generators, in the order in which PyTorch's loaders and samplers make them.

use crate::error::Result;
use std::sync::Arc;
use tch::{Device, Kind, Tensor};
use torch_ext::Generator;

/// A generator that a loader and its sampler both draw from.
#[derive(Clone, Debug)]
pub(crate) struct SharedGenerator(Arc<Generator>);

impl SharedGenerator {
    pub(crate) fn new(generator: Generator) -> Self {
        Self(Arc::new(generator))
    }

    /// A generator of its own on the CPU.
    pub(crate) fn seeded(seed: u64) -> Result<Self> {
        let generator = Generator::new_cpu()?;
        generator.manual_seed(seed)?;
        Ok(Self::new(generator))
    }

    pub(crate) fn with_state(state: &[u8]) -> Result<Self> {
        let generator = Generator::new_cpu()?;
        generator.set_state(&Tensor::f_from_slice(state)?)?;
        Ok(Self::new(generator))
    }

    pub(crate) fn state_bytes(&self) -> Result<Vec<u8>> {
        Ok(Vec::try_from(&self.state()?)?)
    }

    pub(crate) fn get(&self) -> &Generator {
        &self.0
    }

    pub(crate) fn state(&self) -> Result<Tensor> {
        Ok(self.0.state()?)
    }

    pub(crate) fn set_state(&self, state: &Tensor) -> Result<()> {
        Ok(self.0.set_state(state)?)
    }
}

/// The state of the default generator.
pub(crate) fn default_state() -> Result<Vec<u8>> {
    Ok(Vec::try_from(&Generator::default_cpu()?.state()?)?)
}

/// What `torch.empty((), dtype=torch.int64).random_()` draws, from the default generator without one.
pub(crate) fn draw_seed(generator: Option<&SharedGenerator>) -> Result<i64> {
    Ok(match generator {
        Some(SharedGenerator(generator)) => generator.random_seed()?,
        None => torch_ext::generator::random_seed_from_default()?,
    })
}

/// A permutation of `0..num_rows`, from the default generator without one.
pub(crate) fn permutation(generator: Option<&Generator>, num_rows: usize) -> Result<Vec<usize>> {
    let num_rows = num_rows as i64;
    indices(&match generator {
        Some(generator) => generator.randperm(num_rows)?,
        None => Tensor::f_randperm(num_rows, (Kind::Int64, Device::Cpu))?,
    })
}

/// The seed the default generator was last given (`torch.initial_seed()`).
pub(crate) fn default_seed() -> Result<u64> {
    Ok(Generator::default_cpu()?.initial_seed()?)
}

/// The entries of an Int64 tensor of shape `[n]` that holds row numbers.
pub(crate) fn indices(tensor: &Tensor) -> Result<Vec<usize>> {
    let numbers = Vec::<i64>::try_from(tensor)?;
    Ok(numbers.into_iter().map(|number| number as usize).collect())
}
