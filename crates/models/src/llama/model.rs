//! The model without a head: tokens, layers, a last norm.

use super::LlamaConfig;
use super::decoder::{DecoderLayer, rms_norm};
use super::rope::{Angles, RotaryEmbedding};
use crate::attention::{Mask, own_positions, positions, token_positions};
use crate::{KeyValueCache, PretrainedConfig};
use accelerate::nn::{
    AttentionKernel, Checkpointed, Embedding, EmbeddingConfig, Init, Path, RMSNorm, ScaledDotProductAttention,
};
use accelerate::tch::Tensor;
use accelerate::{Error, Result};
use std::ops::Range;
use std::sync::Arc;

/// `transformers.LlamaModel`, `MistralModel` or `Qwen2Model`: a vector for each token, which has seen the tokens before it.
///
/// ```
/// use accelerate::nn::ParamStore;
/// use accelerate::tch::{Device, Tensor};
/// use accelerate_models::llama::{LlamaConfig, LlamaModel};
///
/// let config = LlamaConfig { vocab_size: 40, hidden_size: 8, intermediate_size: 16, num_hidden_layers: 1, ..Default::default() }
///     .with_heads(4, 2);
/// let model = LlamaModel::new(&ParamStore::new(Device::Cpu).root(), &config)?;
/// assert_eq!(model.forward(&Tensor::from_slice2(&[[2i64, 7, 3]]), None)?.size(), [1, 3, 8]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct LlamaModel {
    /// Vectors of tokens.
    pub embed_tokens: Embedding,
    layers: Vec<Checkpointed<DecoderLayer>>,
    /// By layer; empty for none in all of them.
    windows: Vec<Option<i64>>,
    norm: RMSNorm,
    rotary: RotaryEmbedding,
    attention: ScaledDotProductAttention,
    path: Path,
}

impl LlamaModel {
    /// Registers all parameters under `path`, with the random initial values of Transformers.
    ///
    /// # Errors
    /// Sizes that make no model; the names are taken.
    pub fn new(path: &Path, config: &LlamaConfig) -> Result<Self> {
        config.check().map_err(Error::other)?;
        let weight_init = Init::Normal { mean: 0.0, std: config.initializer_range };
        let table = EmbeddingConfig { padding_idx: config.pad_token_id, weight_init };
        let layer =
            |layer: usize| Checkpointed::new(path / "layers" / layer, |path| DecoderLayer::new(path, config, layer));
        Ok(Self {
            embed_tokens: Embedding::new(path / "embed_tokens", config.vocab_size, config.hidden_size, table)?,
            layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?,
            windows: config.sliding_windows.clone(),
            norm: rms_norm(path / "norm", config)?,
            rotary: RotaryEmbedding::new(config)?,
            attention: ScaledDotProductAttention::new(path),
            path: path.clone(),
        })
    }

    /// What computes attention now.
    pub(super) fn attention_kernel(&self) -> Arc<dyn AttentionKernel> {
        self.attention.kernel()
    }

    /// `input_ids [batch, length]` to `[batch, length, hidden_size]`. `attention_mask [batch, length]` is 1 for a token and 0 for
    /// what fills up a row; positions count all of them, as in Transformers. Where ranks divide sequences, the tokens are those of this
    /// rank, and so are the positions.
    ///
    /// # Errors
    /// A token that the model does not have.
    pub fn forward(&self, input_ids: &Tensor, attention_mask: Option<&Tensor>) -> Result<Tensor> {
        let carried = self.begin(input_ids, attention_mask)?;
        let (_, length) = input_ids.size2()?;
        self.end(&self.through(0..self.layers.len(), carried, length)?)
    }

    pub(super) fn block_paths(&self) -> Vec<String> {
        (0..self.layers.len()).map(|layer| (&self.path / "layers" / layer).name().to_owned()).collect()
    }

    /// What goes from layer to layer: vectors `[batch, length, hidden_size]`, and the mask if there is one.
    pub(super) fn begin(&self, input_ids: &Tensor, attention_mask: Option<&Tensor>) -> Result<Vec<Tensor>> {
        let (_batch, _length) = input_ids.size2()?;
        let hidden = self.embed_tokens.forward(input_ids)?;
        Ok(std::iter::once(hidden).chain(attention_mask.map(Tensor::shallow_clone)).collect())
    }

    /// Some of the layers. `length` is that of the texts: ranks that divide layers may have vectors of some of their tokens alone.
    pub(super) fn through(&self, layers: Range<usize>, mut carried: Vec<Tensor>, length: i64) -> Result<Vec<Tensor>> {
        let (device, kernel) = (carried[0].device(), self.attention_kernel());
        let positions = own_positions(&*kernel, length, device)?.f_unsqueeze(0)?;
        let Angles { cos, sin } = self.rotary.at(&positions, carried[0].f_kind()?)?;
        let attention_mask = carried.get(1).map(Tensor::shallow_clone);
        let mask = |window| Mask::of_own_tokens(&*kernel, length, attention_mask.as_ref(), window, device);
        let masks = Masks::new(&self.windows, mask)?;
        for index in layers {
            let mask = masks.of_layer(index);
            let is_causal = matches!(mask, Mask::Causal);
            let inputs: Vec<&Tensor> = [&carried[0], &cos, &sin].into_iter().chain(mask.tensor()).collect();
            let kernel = Arc::clone(&kernel);
            carried[0] = self.layers[index].call(&inputs, move |layer, inputs| {
                let angles = Angles { cos: inputs[1].shallow_clone(), sin: inputs[2].shallow_clone() };
                layer.forward(&inputs[0], &angles, &Mask::of(is_causal, inputs.get(3)), &*kernel, None)
            })?;
        }
        Ok(carried)
    }

    pub(super) fn end(&self, carried: &[Tensor]) -> Result<Tensor> {
        self.norm.forward(&carried[0])
    }

    /// The same for tokens that come after those in `cache`; positions count tokens alone.
    pub(super) fn go_on(
        &self,
        input_ids: &Tensor,
        attention_mask: Option<&Tensor>,
        cache: &mut KeyValueCache,
    ) -> Result<Tensor> {
        Mask::check_goes_on(&*self.attention_kernel())?;
        let ((_, length), past) = (input_ids.size2()?, cache.len());
        let positions = match attention_mask {
            None => positions(past..past + length, input_ids.device())?.f_unsqueeze(0)?,
            Some(mask) => token_positions(mask)?.f_narrow(1, past, length)?,
        };
        let mut hidden = self.embed_tokens.forward(input_ids)?;
        let angles = self.rotary.at(&positions, hidden.f_kind()?)?;
        let mask = |window| Mask::causal(length, past, attention_mask, window, input_ids.device());
        let (masks, kernel) = (Masks::new(&self.windows, mask)?, self.attention_kernel());
        for (index, layer) in self.layers.iter().enumerate() {
            hidden = layer.layer.forward(&hidden, &angles, masks.of_layer(index), &*kernel, Some(cache))?;
        }
        cache.advance(length);
        self.norm.forward(&hidden)
    }
}

/// What tokens look at in layers with and without a window.
struct Masks<'a> {
    windows: &'a [Option<i64>],
    full: Mask,
    sliding: Option<Mask>,
}

impl<'a> Masks<'a> {
    fn new(windows: &'a [Option<i64>], mask: impl Fn(Option<i64>) -> Result<Mask>) -> Result<Self> {
        // A model has one window, in some layers or in all.
        let window = windows.iter().flatten().next().copied();
        let sliding = window.map(|window| mask(Some(window))).transpose()?;
        Ok(Self { windows, full: mask(None)?, sliding })
    }

    fn of_layer(&self, layer: usize) -> &Mask {
        let has_window = self.windows.get(layer).is_some_and(Option::is_some);
        self.sliding.as_ref().filter(|_| has_window).unwrap_or(&self.full)
    }
}
