//! A linear layer whose weight is stored the other way round, as the first GPT was written with convolutions.

use super::GPT2Config;
use accelerate::Result;
use accelerate::nn::{Init, Param, Path};
use accelerate::tch::Tensor;
use std::borrow::Borrow;
use torch_ext::few_rows;

/// `transformers.pytorch_utils.Conv1D`: `[.., in_features]` to `[.., out_features]`.
#[derive(Debug)]
pub(super) struct Conv1D {
    /// `[in_features, out_features]`.
    weight: Param,
    /// `[out_features]`.
    bias: Param,
}

impl Conv1D {
    pub(super) fn new(path: impl Borrow<Path>, in_features: i64, out_features: i64, std: f64) -> Result<Self> {
        let path = path.borrow();
        let weight = path.param("weight", ([in_features, out_features], Init::Normal { mean: 0.0, std }))?;
        let bias = path.param("bias", ([out_features], Init::Zeros))?;
        Ok(Self { weight, bias })
    }

    pub(super) fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let weight = self.weight.get()?;
        let (in_features, out_features) = weight.size2()?;
        let mut size = input.size();
        if let Some(last) = size.last_mut() {
            *last = out_features;
        }
        let (rows, bias) = (input.f_reshape([-1, in_features])?, self.bias.get()?);
        let product = match few_rows::addmm(&bias, &rows, &weight)? {
            Some(product) => product,
            None => bias.f_addmm(&rows, &weight)?,
        };
        Ok(product.f_view(&size[..])?)
    }
}

/// Of layers that write to the stream of activations, of which there are two in each block.
pub(super) fn residual_std(config: &GPT2Config) -> f64 {
    config.initializer_range / (2.0 * config.n_layer as f64).sqrt()
}
