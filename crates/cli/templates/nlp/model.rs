//! A small classifier of words: each is judged with its neighbours.

use accelerate::nn::{Conv1d, Conv1dConfig, Embedding, Linear, Padding};
use accelerate::prelude::*;

use crate::data::{NUM_TAGS, vocabulary};

/// Number of features of a word.
const HIDDEN: i64 = 32;

/// Words `[batch, length]` to scores `[batch, length, NUM_TAGS]`.
pub struct Model {
    store: ParamStore,
    words: Embedding,
    neighbours: Conv1d,
    head: Linear,
}

impl Model {
    /// A model with random weights.
    pub fn new(device: Device) -> accelerate::Result<Self> {
        let store = ParamStore::new(device);
        let num_words = vocabulary().len() as i64;
        let same_size = Conv1dConfig { padding: Padding::Same, ..Default::default() };
        Ok(Self {
            words: Embedding::new(store.root() / "words", num_words, HIDDEN, Default::default())?,
            neighbours: Conv1d::new(store.root() / "neighbours", HIDDEN, HIDDEN, [3], same_size)?,
            head: Linear::new(store.root() / "head", HIDDEN, NUM_TAGS, Default::default())?,
            store,
        })
    }
}

impl Module for Model {
    type Input = Tensor;
    type Output = Tensor;

    fn forward(&self, words: &Tensor) -> accelerate::Result<Tensor> {
        // Convolutions want features before positions.
        let words = self.words.forward(words)?.transpose(1, 2);
        let hidden = self.neighbours.forward(&words)?.relu();
        self.head.forward(&hidden.transpose(1, 2))
    }

    fn params(&self) -> &ParamStore {
        &self.store
    }
}
