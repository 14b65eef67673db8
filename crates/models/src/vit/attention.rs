//! Self-attention with many heads.

use super::ViTConfig;
use super::layer::linear;
use crate::attention::{Mask, attend};
use accelerate::Result;
use accelerate::nn::{DenseAttention, Linear, Path, TrainingFlag};
use accelerate::tch::Tensor;

#[derive(Debug)]
pub(super) struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    head_dim: i64,
    dropout: f64,
    training: TrainingFlag,
}

impl Attention {
    pub(super) fn new(path: &Path, config: &ViTConfig) -> Result<Self> {
        let (hidden, bias, heads) = (config.hidden_size, config.qkv_bias, path / "attention");
        Ok(Self {
            query: linear(&heads / "query", (hidden, hidden), bias, config)?,
            key: linear(&heads / "key", (hidden, hidden), bias, config)?,
            value: linear(&heads / "value", (hidden, hidden), bias, config)?,
            output: linear(path / "output" / "dense", (hidden, hidden), true, config)?,
            head_dim: hidden / config.num_attention_heads,
            dropout: config.attention_probs_dropout_prob,
            training: path.training_flag(),
        })
    }

    /// `hidden [batch, length, hidden_size]` to the same shape.
    pub(super) fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        let (batch, length, _) = hidden.size3()?;
        let heads = |layer: &Linear| -> Result<Tensor> {
            // As many heads as this rank has.
            Ok(layer.forward(hidden)?.f_view([batch, length, -1, self.head_dim])?.f_transpose(1, 2)?)
        };
        let dropout = if self.training.get() { self.dropout } else { 0.0 };
        let (query, key, value) = (heads(&self.query)?, heads(&self.key)?, heads(&self.value)?);
        self.output.forward(&attend(&DenseAttention, [&query, &key, &value], &Mask::None, dropout, None)?)
    }
}
