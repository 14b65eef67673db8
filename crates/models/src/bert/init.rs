//! New layers with BERT's initial values: normal weights, zero biases.

use super::BertConfig;
use accelerate::Result;
use accelerate::nn::{Embedding, EmbeddingConfig, Init, LayerNorm, LayerNormConfig, Linear, LinearConfig, Path};
use std::borrow::Borrow;

pub(super) fn linear(
    path: impl Borrow<Path>,
    in_features: i64,
    out_features: i64,
    config: &BertConfig,
) -> Result<Linear> {
    let options = LinearConfig { weight_init: normal(config), bias_init: Some(Init::Zeros), ..Default::default() };
    Linear::new(path, in_features, out_features, options)
}

pub(super) fn embedding(
    path: impl Borrow<Path>,
    num_embeddings: i64,
    padding_idx: Option<i64>,
    config: &BertConfig,
) -> Result<Embedding> {
    let options = EmbeddingConfig { padding_idx, weight_init: normal(config) };
    Embedding::new(path, num_embeddings, config.hidden_size, options)
}

pub(super) fn layer_norm(path: impl Borrow<Path>, config: &BertConfig) -> Result<LayerNorm> {
    let options = LayerNormConfig { eps: config.layer_norm_eps, ..Default::default() };
    LayerNorm::new(path, [config.hidden_size], options)
}

fn normal(config: &BertConfig) -> Init {
    Init::Normal { mean: 0.0, std: config.initializer_range }
}
