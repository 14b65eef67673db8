//! A layer: attention, then a feed-forward block, each behind a norm and with a residual around it.

use super::ViTConfig;
use super::attention::Attention;
use crate::Activation;
use accelerate::Result;
use accelerate::nn::{Dropout, Init, Layer, LayerNorm, LayerNormConfig, Linear, LinearConfig, Path};
use accelerate::tch::Tensor;
use std::borrow::Borrow;

#[derive(Debug)]
pub(super) struct ViTLayer {
    attention: Attention,
    intermediate: Linear,
    activation: Activation,
    output: Linear,
    layernorm_before: LayerNorm,
    layernorm_after: LayerNorm,
    dropout: Dropout,
}

impl ViTLayer {
    pub(super) fn new(path: &Path, config: &ViTConfig) -> Result<Self> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        Ok(Self {
            attention: Attention::new(&(path / "attention"), config)?,
            intermediate: linear(path / "intermediate" / "dense", (hidden, inner), true, config)?,
            activation: config.hidden_act,
            output: linear(path / "output" / "dense", (inner, hidden), true, config)?,
            layernorm_before: layer_norm(path / "layernorm_before", config)?,
            layernorm_after: layer_norm(path / "layernorm_after", config)?,
            dropout: Dropout::new(path / "dropout", config.hidden_dropout_prob)?,
        })
    }
}

impl Layer for ViTLayer {
    fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        let attended = self.attention.forward(&self.layernorm_before.forward(hidden)?)?;
        let hidden = self.dropout.forward(&attended)?.f_add(hidden)?;
        let inner = self.activation.forward(&self.intermediate.forward(&self.layernorm_after.forward(&hidden)?)?)?;
        Ok(self.dropout.forward(&self.output.forward(&inner)?)?.f_add(&hidden)?)
    }
}

pub(super) fn linear(
    path: impl Borrow<Path>,
    (in_features, out_features): (i64, i64),
    bias: bool,
    config: &ViTConfig,
) -> Result<Linear> {
    let weight_init = Init::Normal { mean: 0.0, std: config.initializer_range };
    let options = LinearConfig { bias, weight_init, bias_init: Some(Init::Zeros) };
    Linear::new(path, in_features, out_features, options)
}

pub(super) fn layer_norm(path: impl Borrow<Path>, config: &ViTConfig) -> Result<LayerNorm> {
    let options = LayerNormConfig { eps: config.layer_norm_eps, ..Default::default() };
    LayerNorm::new(path, [config.hidden_size], options)
}
