//! The model without a head: tokens and positions, blocks, a last norm.

use super::GPT2Config;
use super::block::{Block, layer_norm};
use crate::attention::{Mask, own_positions, positions, token_positions};
use crate::{KeyValueCache, PretrainedConfig};
use accelerate::nn::{
    AttentionKernel, Checkpointed, Dropout, Embedding, EmbeddingConfig, Init, LayerNorm, Path,
    ScaledDotProductAttention,
};
use accelerate::tch::Tensor;
use accelerate::{Error, Result};
use std::ops::Range;
use std::sync::Arc;

/// `transformers.GPT2Model`: a vector for each token, which has seen the tokens before it.
///
/// ```
/// use accelerate::nn::ParamStore;
/// use accelerate::tch::{Device, Tensor};
/// use accelerate_models::gpt2::{GPT2Config, GPT2Model};
///
/// let config = GPT2Config { vocab_size: 40, n_embd: 8, n_layer: 1, n_head: 2, n_positions: 16, ..Default::default() };
/// let model = GPT2Model::new(&ParamStore::new(Device::Cpu).root(), &config)?;
/// assert_eq!(model.forward(&Tensor::from_slice2(&[[2i64, 7, 3]]), None)?.size(), [1, 3, 8]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct GPT2Model {
    /// Vectors of tokens.
    pub wte: Embedding,
    wpe: Embedding,
    dropout: Dropout,
    blocks: Vec<Checkpointed<Block>>,
    ln_f: LayerNorm,
    attention: ScaledDotProductAttention,
    path: Path,
}

impl GPT2Model {
    /// Registers all parameters under `path`, with GPT-2's random initial values.
    ///
    /// # Errors
    /// Sizes that make no model; the names are taken.
    pub fn new(path: &Path, config: &GPT2Config) -> Result<Self> {
        config.check().map_err(Error::other)?;
        let normal = Init::Normal { mean: 0.0, std: config.initializer_range };
        let table = EmbeddingConfig { weight_init: normal, ..Default::default() };
        let block = |layer: usize| Checkpointed::new(path / "h" / layer, |path| Block::new(path, config, layer));
        Ok(Self {
            wte: Embedding::new(path / "wte", config.vocab_size, config.n_embd, table)?,
            wpe: Embedding::new(path / "wpe", config.n_positions, config.n_embd, table)?,
            dropout: Dropout::new(path / "drop", config.embd_pdrop)?,
            blocks: (0..config.n_layer).map(block).collect::<Result<_>>()?,
            ln_f: layer_norm(&(path / "ln_f"), config)?,
            attention: ScaledDotProductAttention::new(path),
            path: path.clone(),
        })
    }

    /// What computes attention now.
    pub(super) fn attention_kernel(&self) -> Arc<dyn AttentionKernel> {
        self.attention.kernel()
    }

    /// `input_ids [batch, length]` to `[batch, length, n_embd]`. `attention_mask [batch, length]` is 1 for a token and 0 for what
    /// fills up a row; positions count all of them, as in Transformers. Where ranks divide sequences, the tokens are those of this
    /// rank, and so are the positions.
    ///
    /// # Errors
    /// A token that the model does not have; texts longer than it allows.
    pub fn forward(&self, input_ids: &Tensor, attention_mask: Option<&Tensor>) -> Result<Tensor> {
        let carried = self.begin(input_ids, attention_mask)?;
        let (_, length) = input_ids.size2()?;
        self.end(&self.through(0..self.blocks.len(), carried, length)?)
    }

    pub(super) fn block_paths(&self) -> Vec<String> {
        (0..self.blocks.len()).map(|layer| (&self.path / "h" / layer).name().to_owned()).collect()
    }

    /// What goes from block to block: vectors `[batch, length, n_embd]`, and the mask if there is one.
    pub(super) fn begin(&self, input_ids: &Tensor, attention_mask: Option<&Tensor>) -> Result<Vec<Tensor>> {
        let ((_, length), kernel) = (input_ids.size2()?, self.attention_kernel());
        let positions = own_positions(&*kernel, length, input_ids.device())?;
        let hidden = self.embed(input_ids, &positions)?;
        Ok(std::iter::once(hidden).chain(attention_mask.map(Tensor::shallow_clone)).collect())
    }

    /// Some of the blocks. `length` is that of the texts: ranks that divide layers may have vectors of some of their tokens alone.
    pub(super) fn through(&self, blocks: Range<usize>, mut carried: Vec<Tensor>, length: i64) -> Result<Vec<Tensor>> {
        let (device, kernel) = (carried[0].device(), self.attention_kernel());
        let mask = Mask::of_own_tokens(&*kernel, length, carried.get(1), None, device)?;
        let (is_causal, mask) = (matches!(mask, Mask::Causal), mask.tensor());
        for block in &self.blocks[blocks] {
            let inputs: Vec<&Tensor> = std::iter::once(&carried[0]).chain(mask).collect();
            let kernel = Arc::clone(&kernel);
            carried[0] = block.call(&inputs, move |block, inputs| {
                block.forward(&inputs[0], &Mask::of(is_causal, inputs.get(1)), &*kernel, None)
            })?;
        }
        Ok(carried)
    }

    pub(super) fn end(&self, carried: &[Tensor]) -> Result<Tensor> {
        self.ln_f.forward(&carried[0])
    }

    /// The same for tokens that come after those in `cache`; positions count tokens alone.
    pub(super) fn go_on(
        &self,
        input_ids: &Tensor,
        attention_mask: Option<&Tensor>,
        cache: &mut KeyValueCache,
    ) -> Result<Tensor> {
        Mask::check_goes_on(&*self.attention_kernel())?;
        let ((_, length), past, device) = (input_ids.size2()?, cache.len(), input_ids.device());
        let positions = match attention_mask {
            None => positions(past..past + length, device)?,
            Some(mask) => token_positions(mask)?.f_narrow(1, past, length)?,
        };
        let (mask, kernel) = (Mask::causal(length, past, attention_mask, None, device)?, self.attention_kernel());
        let mut hidden = self.embed(input_ids, &positions)?;
        for block in &self.blocks {
            hidden = block.layer.forward(&hidden, &mask, &*kernel, Some(cache))?;
        }
        cache.advance(length);
        self.ln_f.forward(&hidden)
    }

    fn embed(&self, input_ids: &Tensor, positions: &Tensor) -> Result<Tensor> {
        let sum = self.wte.forward(input_ids)?.f_add(&self.wpe.forward(positions)?)?;
        self.dropout.forward(&sum)
    }
}
