//! A small transformer that predicts the next letter.

use accelerate::nn::{AttentionMask, Embedding, LayerNorm, Linear};
use accelerate::nn::{MultiheadAttention, MultiheadAttentionConfig};
use accelerate::prelude::*;

use crate::data::{LENGTH, NUM_LETTERS};

/// Number of features of a letter.
const HIDDEN: i64 = 32;

/// Letters `[batch, LENGTH]` to scores of the letter after each, `[batch, LENGTH, NUM_LETTERS]`.
pub struct Model {
    store: ParamStore,
    letters: Embedding,
    positions: Embedding,
    attention_norm: LayerNorm,
    attention: MultiheadAttention,
    norm: LayerNorm,
    up: Linear,
    down: Linear,
    head: Linear,
}

impl Model {
    /// A model with random weights.
    pub fn new(device: Device) -> accelerate::Result<Self> {
        let store = ParamStore::new(device);
        let path = |name| store.root() / name;
        let config = MultiheadAttentionConfig { batch_first: true, ..Default::default() };
        Ok(Self {
            letters: Embedding::new(path("letters"), NUM_LETTERS, HIDDEN, Default::default())?,
            positions: Embedding::new(path("positions"), LENGTH, HIDDEN, Default::default())?,
            attention_norm: LayerNorm::new(path("attention_norm"), [HIDDEN], Default::default())?,
            attention: MultiheadAttention::new(path("attention"), HIDDEN, 2, config)?,
            norm: LayerNorm::new(path("norm"), [HIDDEN], Default::default())?,
            up: Linear::new(path("up"), HIDDEN, 4 * HIDDEN, Default::default())?,
            down: Linear::new(path("down"), 4 * HIDDEN, HIDDEN, Default::default())?,
            head: Linear::new(path("head"), HIDDEN, NUM_LETTERS, Default::default())?,
            store,
        })
    }
}

impl Module for Model {
    type Input = Tensor;
    type Output = Tensor;

    fn forward(&self, letters: &Tensor) -> accelerate::Result<Tensor> {
        let places = Tensor::arange(letters.size()[1], (Kind::Int64, letters.device()));
        let hidden = self.letters.forward(letters)? + self.positions.forward(&places)?;
        // A letter sees only what stands before it.
        let mask = AttentionMask { is_causal: true, ..Default::default() };
        let input = self.attention_norm.forward(&hidden)?;
        let hidden = hidden + self.attention.forward(&input, &input, &input, mask)?;
        let wide = self.up.forward(&self.norm.forward(&hidden)?)?.gelu("none");
        self.head.forward(&(hidden + self.down.forward(&wide)?))
    }

    fn params(&self) -> &ParamStore {
        &self.store
    }
}
