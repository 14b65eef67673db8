//! From token numbers to vectors: word plus position plus segment.

use super::BertConfig;
use super::init::{embedding, layer_norm};
use crate::attention::positions;
use accelerate::Result;
use accelerate::nn::{Dropout, Embedding, LayerNorm, Path};
use accelerate::tch::Tensor;

/// `[batch, length]` token numbers to `[batch, length, hidden_size]`.
#[derive(Debug)]
pub(super) struct Embeddings {
    words: Embedding,
    positions: Embedding,
    token_types: Embedding,
    norm: LayerNorm,
    dropout: Dropout,
}

impl Embeddings {
    pub(super) fn new(path: &Path, config: &BertConfig) -> Result<Self> {
        let padding = Some(config.pad_token_id);
        Ok(Self {
            words: embedding(path / "word_embeddings", config.vocab_size, padding, config)?,
            positions: embedding(path / "position_embeddings", config.max_position_embeddings, None, config)?,
            token_types: embedding(path / "token_type_embeddings", config.type_vocab_size, None, config)?,
            norm: layer_norm(path / "LayerNorm", config)?,
            dropout: Dropout::new(path / "dropout", config.hidden_dropout_prob)?,
        })
    }

    pub(super) fn forward(&self, input_ids: &Tensor, token_type_ids: &Tensor) -> Result<Tensor> {
        let length = input_ids.size().get(1).copied().unwrap_or_default();
        let positions = positions(0..length, input_ids.device())?;
        let sum = self
            .words
            .forward(input_ids)?
            .f_add(&self.token_types.forward(token_type_ids)?)?
            .f_add(&self.positions.forward(&positions)?)?;
        self.dropout.forward(&self.norm.forward(&sum)?)
    }
}
