//! A block: attention, then a feed-forward layer, each behind a norm and with a residual around it.

use super::GPT2Config;
use super::attention::Attention;
use crate::attention::Mask;
use crate::{Activation, KeyValueCache};
use accelerate::Result;
use accelerate::nn::{AttentionKernel, Conv1D, Conv1DConfig, Dropout, Init, LayerNorm, LayerNormConfig, Path};
use accelerate::tch::Tensor;

#[derive(Debug)]
pub(super) struct Block {
    ln_1: LayerNorm,
    attn: Attention,
    ln_2: LayerNorm,
    c_fc: Conv1D,
    activation: Activation,
    c_proj: Conv1D,
    dropout: Dropout,
}

impl Block {
    pub(super) fn new(path: &Path, config: &GPT2Config, layer: usize) -> Result<Self> {
        let (width, inner, mlp) = (config.n_embd, config.inner_size(), path / "mlp");
        Ok(Self {
            ln_1: layer_norm(&(path / "ln_1"), config)?,
            attn: Attention::new(&(path / "attn"), config, layer)?,
            ln_2: layer_norm(&(path / "ln_2"), config)?,
            c_fc: Conv1D::new(&mlp / "c_fc", width, inner, normal(config.initializer_range))?,
            activation: config.activation_function,
            c_proj: Conv1D::new(&mlp / "c_proj", inner, width, normal(residual_std(config)))?,
            dropout: Dropout::new(&mlp / "dropout", config.resid_pdrop)?,
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
        let hidden = self.attn.forward(&self.ln_1.forward(hidden)?, mask, kernel, cache)?.f_add(hidden)?;
        let inner = self.activation.forward(&self.c_fc.forward(&self.ln_2.forward(&hidden)?)?)?;
        Ok(self.dropout.forward(&self.c_proj.forward(&inner)?)?.f_add(&hidden)?)
    }
}

/// A linear layer that begins with weights of this deviation.
pub(super) fn normal(std: f64) -> Conv1DConfig {
    Conv1DConfig { weight_init: Init::Normal { mean: 0.0, std }, ..Default::default() }
}

/// Of layers that write to the stream of activations, of which there are two in each block.
pub(super) fn residual_std(config: &GPT2Config) -> f64 {
    config.initializer_range / (2.0 * config.n_layer as f64).sqrt()
}

pub(super) fn layer_norm(path: &Path, config: &GPT2Config) -> Result<LayerNorm> {
    LayerNorm::new(path, [config.n_embd], LayerNormConfig { eps: config.layer_norm_epsilon, ..Default::default() })
}
