//! A small convolutional network.

use accelerate::nn::{Conv2d, Conv2dConfig, Linear, Padding};
use accelerate::prelude::*;

use crate::data::NUM_PATTERNS;

/// Images `[batch, 1, height, width]` to scores `[batch, NUM_PATTERNS]`.
pub struct Model {
    store: ParamStore,
    first: Conv2d,
    second: Conv2d,
    head: Linear,
}

impl Model {
    /// A model with random weights.
    pub fn new(device: Device) -> accelerate::Result<Self> {
        let store = ParamStore::new(device);
        let same_size = Conv2dConfig { padding: Padding::Same, ..Default::default() };
        Ok(Self {
            first: Conv2d::new(store.root() / "first", 1, 8, [3, 3], same_size)?,
            second: Conv2d::new(store.root() / "second", 8, 16, [3, 3], same_size)?,
            head: Linear::new(store.root() / "head", 16, NUM_PATTERNS, Default::default())?,
            store,
        })
    }
}

impl Module for Model {
    type Input = Tensor;
    type Output = Tensor;

    fn forward(&self, images: &Tensor) -> accelerate::Result<Tensor> {
        let halves = self.first.forward(images)?.relu().max_pool2d_default(2);
        let features = self.second.forward(&halves)?.relu();
        self.head.forward(&features.amax([2, 3], false))
    }

    fn params(&self) -> &ParamStore {
        &self.store
    }
}
