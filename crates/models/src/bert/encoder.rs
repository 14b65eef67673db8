//! Encoder layers: attention, then a feed-forward block, each with a residual around it.

use super::BertConfig;
use super::attention::Attention;
use super::init::{layer_norm, linear};
use crate::Activation;
use accelerate::Result;
use accelerate::nn::{Checkpointed, Dropout, LayerNorm, Linear, Path};
use accelerate::tch::Tensor;

#[derive(Debug)]
pub(super) struct Encoder {
    layers: Vec<Checkpointed<EncoderLayer>>,
}

impl Encoder {
    pub(super) fn new(path: &Path, config: &BertConfig) -> Result<Self> {
        let layer = |index: usize| Checkpointed::new(path / "layer" / index, |path| EncoderLayer::new(path, config));
        Ok(Self { layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()? })
    }

    /// `hidden [batch, length, hidden_size]`, `mask [batch, 1, 1, length]`, true where there is a token.
    pub(super) fn forward(&self, hidden: Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        self.layers.iter().try_fold(hidden, |hidden, layer| {
            let inputs: Vec<&Tensor> = std::iter::once(&hidden).chain(mask).collect();
            layer.call(&inputs, |layer, inputs| layer.forward(&inputs[0], inputs.get(1)))
        })
    }
}

#[derive(Debug)]
struct EncoderLayer {
    attention: Attention,
    intermediate: Linear,
    activation: Activation,
    output: Linear,
    norm: LayerNorm,
    dropout: Dropout,
}

impl EncoderLayer {
    fn new(path: &Path, config: &BertConfig) -> Result<Self> {
        let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
        let output = path / "output";
        Ok(Self {
            attention: Attention::new(&(path / "attention"), config)?,
            intermediate: linear(path / "intermediate" / "dense", hidden, intermediate, config)?,
            activation: config.hidden_act,
            output: linear(&output / "dense", intermediate, hidden, config)?,
            norm: layer_norm(&output / "LayerNorm", config)?,
            dropout: Dropout::new(&output / "dropout", config.hidden_dropout_prob)?,
        })
    }

    fn forward(&self, hidden: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        let attended = self.attention.forward(hidden, mask)?;
        let inner = self.intermediate.forward(&attended)?;
        let inner = self.activation.forward(&inner)?;
        let output = self.dropout.forward(&self.output.forward(&inner)?)?;
        self.norm.forward(&output.f_add(&attended)?)
    }
}
