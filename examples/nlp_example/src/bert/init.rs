//! New layers with BERT's initial values: normal weights, zero biases.

use super::BertConfig;
use accelerate::Result;
use accelerate::nn::{Embedding, EmbeddingConfig, Init, LayerNorm, LayerNormConfig, Linear, Path};
use std::borrow::Borrow;

pub(super) fn linear(
    path: impl Borrow<Path>,
    in_features: i64,
    out_features: i64,
    config: &BertConfig,
) -> Result<Linear> {
    let path = path.borrow();
    let weight = path.param("weight", ([out_features, in_features], normal(config)))?;
    let bias = path.param("bias", ([out_features], Init::Zeros))?;
    Ok(Linear::from_params(path, weight, Some(bias)))
}

pub(super) fn embedding(
    path: impl Borrow<Path>,
    num_embeddings: i64,
    padding_idx: Option<i64>,
    config: &BertConfig,
) -> Result<Embedding> {
    let shape = [num_embeddings, config.hidden_size];
    let path = path.borrow();
    let weight = path.param("weight", (shape, normal(config)))?;
    let embedding = Embedding::from_params(path, weight, EmbeddingConfig { padding_idx });
    embedding.zero_padding_row()?;
    Ok(embedding)
}

pub(super) fn layer_norm(path: impl Borrow<Path>, config: &BertConfig) -> Result<LayerNorm> {
    let options = LayerNormConfig { eps: config.layer_norm_eps, ..Default::default() };
    LayerNorm::new(path, [config.hidden_size], options)
}

fn normal(config: &BertConfig) -> Init {
    Init::Normal { mean: 0.0, std: config.initializer_range }
}
