//! Causal self-attention with rotary embeddings, in which several heads of queries share one of keys and values
//! (<https://arxiv.org/abs/2305.13245>).

use super::LlamaConfig;
use super::decoder::linear;
use super::rope::Angles;
use crate::KeyValueCache;
use crate::attention::{Mask, attend};
use accelerate::Result;
use accelerate::nn::{AttentionKernel, Linear, Path, TrainingFlag};
use accelerate::tch::Tensor;

#[derive(Debug)]
pub(super) struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    /// Which layer it is in.
    layer: usize,
    head_dim: i64,
    dropout: f64,
    training: TrainingFlag,
}

impl Attention {
    pub(super) fn new(path: &Path, config: &LlamaConfig, layer: usize) -> Result<Self> {
        let (hidden, bias) = (config.hidden_size, config.has_qkv_bias());
        let queries = config.num_attention_heads * config.head_dim;
        let keys = config.num_key_value_heads * config.head_dim;
        Ok(Self {
            q_proj: linear(path / "q_proj", (hidden, queries), bias, config)?,
            k_proj: linear(path / "k_proj", (hidden, keys), bias, config)?,
            v_proj: linear(path / "v_proj", (hidden, keys), bias, config)?,
            o_proj: linear(path / "o_proj", (queries, hidden), config.attention_bias, config)?,
            layer,
            head_dim: config.head_dim,
            dropout: config.attention_dropout,
            training: path.training_flag(),
        })
    }

    /// `hidden [batch, length, hidden_size]` to the same shape.
    pub(super) fn forward(
        &self,
        hidden: &Tensor,
        angles: &Angles,
        mask: &Mask,
        kernel: &dyn AttentionKernel,
        cache: Option<&mut KeyValueCache>,
    ) -> Result<Tensor> {
        // As many heads as this rank has, and all tokens also where it has some of those in `hidden`.
        let heads = |layer: &Linear| -> Result<Tensor> {
            Ok(layer.forward(hidden)?.f_unflatten(-1, [-1, self.head_dim])?.f_transpose(1, 2)?)
        };
        let query = angles.turn(&heads(&self.q_proj)?)?;
        let (mut key, mut value) = (angles.turn(&heads(&self.k_proj)?)?, heads(&self.v_proj)?);
        if let Some(cache) = cache {
            (key, value) = cache.update(self.layer, &key, &value)?;
        }
        let dropout = if self.training.get() { self.dropout } else { 0.0 };
        self.o_proj.forward(&attend(kernel, [&query, &key, &value], mask, dropout, None)?)
    }
}
