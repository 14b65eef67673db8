//! Causal self-attention with many heads; queries, keys and values come out of one product.

use super::GPT2Config;
use super::block::{normal, residual_std};
use crate::KeyValueCache;
use crate::attention::{Mask, attend};
use accelerate::Result;
use accelerate::nn::{AttentionKernel, Conv1D, Dropout, Path, TrainingFlag};
use accelerate::tch::Tensor;

#[derive(Debug)]
pub(super) struct Attention {
    c_attn: Conv1D,
    c_proj: Conv1D,
    dropout: Dropout,
    /// Which block it is in.
    layer: usize,
    head_dim: i64,
    scale: f64,
    attn_pdrop: f64,
    training: TrainingFlag,
}

impl Attention {
    pub(super) fn new(path: &Path, config: &GPT2Config, layer: usize) -> Result<Self> {
        let width = config.n_embd;
        let of_head = if config.scale_attn_weights { ((width / config.n_head) as f64).powf(-0.5) } else { 1.0 };
        let of_layer = if config.scale_attn_by_inverse_layer_idx { (layer + 1) as f64 } else { 1.0 };
        Ok(Self {
            c_attn: Conv1D::new(path / "c_attn", width, 3 * width, normal(config.initializer_range))?,
            c_proj: Conv1D::new(path / "c_proj", width, width, normal(residual_std(config)))?,
            dropout: Dropout::new(path / "resid_dropout", config.resid_pdrop)?,
            layer,
            head_dim: width / config.n_head,
            scale: of_head / of_layer,
            attn_pdrop: config.attn_pdrop,
            training: path.training_flag(),
        })
    }

    /// `hidden [batch, length, n_embd]` to the same shape.
    pub(super) fn forward(
        &self,
        hidden: &Tensor,
        mask: &Mask,
        kernel: &dyn AttentionKernel,
        cache: Option<&mut KeyValueCache>,
    ) -> Result<Tensor> {
        // As many heads as this rank has, and all tokens also where it has some of those in `hidden`.
        let packed = self.c_attn.forward(hidden)?.f_unflatten(-1, [3, -1, self.head_dim])?;
        let part = |index: i64| packed.f_select(2, index)?.f_transpose(1, 2);
        let (query, mut key, mut value) = (part(0)?, part(1)?, part(2)?);
        if let Some(cache) = cache {
            (key, value) = cache.update(self.layer, &key, &value)?;
        }
        let dropout = if self.training.get() { self.attn_pdrop } else { 0.0 };
        let attended = attend(kernel, [&query, &key, &value], mask, dropout, self.scale)?;
        self.dropout.forward(&self.c_proj.forward(&attended)?)
    }
}
