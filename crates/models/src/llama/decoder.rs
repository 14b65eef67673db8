//! A layer: attention, then a gated feed-forward block (SwiGLU, <https://arxiv.org/abs/2002.05202>), each behind a norm and with a
//! residual around it.

use super::LlamaConfig;
use super::attention::Attention;
use super::rope::Angles;
use crate::attention::Mask;
use crate::{Activation, KeyValueCache};
use accelerate::Result;
use accelerate::nn::{AttentionKernel, Init, Linear, LinearConfig, Path, RMSNorm, RMSNormConfig};
use accelerate::tch::Tensor;
use std::borrow::Borrow;

#[derive(Debug)]
pub(super) struct DecoderLayer {
    self_attn: Attention,
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
    activation: Activation,
    input_layernorm: RMSNorm,
    post_attention_layernorm: RMSNorm,
}

impl DecoderLayer {
    pub(super) fn new(path: &Path, config: &LlamaConfig, layer: usize) -> Result<Self> {
        let (hidden, inner, bias) = (config.hidden_size, config.intermediate_size, config.mlp_bias);
        let mlp = path / "mlp";
        Ok(Self {
            self_attn: Attention::new(&(path / "self_attn"), config, layer)?,
            gate_proj: linear(&mlp / "gate_proj", (hidden, inner), bias, config)?,
            up_proj: linear(&mlp / "up_proj", (hidden, inner), bias, config)?,
            down_proj: linear(&mlp / "down_proj", (inner, hidden), bias, config)?,
            activation: config.hidden_act,
            input_layernorm: rms_norm(path / "input_layernorm", config)?,
            post_attention_layernorm: rms_norm(path / "post_attention_layernorm", config)?,
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
        let attended = self.self_attn.forward(&self.input_layernorm.forward(hidden)?, angles, mask, kernel, cache)?;
        let hidden = attended.f_add(hidden)?;
        let normed = self.post_attention_layernorm.forward(&hidden)?;
        let gate = self.activation.forward(&self.gate_proj.forward(&normed)?)?;
        let inner = gate.f_mul(&self.up_proj.forward(&normed)?)?;
        Ok(self.down_proj.forward(&inner)?.f_add(&hidden)?)
    }
}

pub(super) fn linear(
    path: impl Borrow<Path>,
    (in_features, out_features): (i64, i64),
    bias: bool,
    config: &LlamaConfig,
) -> Result<Linear> {
    let weight_init = Init::Normal { mean: 0.0, std: config.initializer_range };
    let options = LinearConfig { bias, weight_init, bias_init: Some(Init::Zeros) };
    Linear::new(path, in_features, out_features, options)
}

pub(super) fn rms_norm(path: impl Borrow<Path>, config: &LlamaConfig) -> Result<RMSNorm> {
    RMSNorm::new(path, [config.hidden_size], RMSNormConfig { eps: Some(config.rms_norm_eps), ..Default::default() })
}
