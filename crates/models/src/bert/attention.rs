//! Self-attention with many heads, the residual around it, and the norm behind it.

use super::BertConfig;
use super::init::{layer_norm, linear};
use accelerate::Result;
use accelerate::nn::{Dropout, LayerNorm, Linear, Path, TrainingFlag};
use accelerate::tch::Tensor;

// Shapes: B = batch, L = length, H = hidden size.

#[derive(Debug)]
pub(super) struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    norm: LayerNorm,
    dropout: Dropout,
    head_dim: i64,
    probs_dropout: f64,
    training: TrainingFlag,
}

impl Attention {
    pub(super) fn new(path: &Path, config: &BertConfig) -> Result<Self> {
        let hidden = config.hidden_size;
        let projection = |name: &str| linear(path / "self" / name, hidden, hidden, config);
        let output = path / "output";
        Ok(Self {
            query: projection("query")?,
            key: projection("key")?,
            value: projection("value")?,
            output: linear(&output / "dense", hidden, hidden, config)?,
            norm: layer_norm(&output / "LayerNorm", config)?,
            dropout: Dropout::new(&output / "dropout", config.hidden_dropout_prob)?,
            head_dim: hidden / config.num_attention_heads,
            probs_dropout: config.attention_probs_dropout_prob,
            training: path.training_flag(),
        })
    }

    /// `hidden` is BLH; `mask` is B11L, true where there is a token, and nothing where there are tokens alone.
    pub(super) fn forward(&self, hidden: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        let (batch, length, _) = hidden.size3()?;
        let heads = |layer: &Linear| -> Result<Tensor> {
            let projected = layer.forward(hidden)?;
            // As many heads as this rank has.
            Ok(projected.f_view([batch, length, -1, self.head_dim])?.f_transpose(1, 2)?)
        };
        let (query, key, value) = (heads(&self.query)?, heads(&self.key)?, heads(&self.value)?);
        let dropout = if self.training.get() { self.probs_dropout } else { 0.0 };
        let context = Tensor::f_scaled_dot_product_attention(&query, &key, &value, mask, dropout, false, None, false)?;
        let context = context.f_transpose(1, 2)?.f_reshape([batch, length, -1])?;
        let output = self.dropout.forward(&self.output.forward(&context)?)?;
        self.norm.forward(&output.f_add(hidden)?)
    }
}
