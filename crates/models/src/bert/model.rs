//! The model without a head: embeddings, encoder, pooled first token.

use super::BertConfig;
use super::embeddings::Embeddings;
use super::encoder::Encoder;
use super::init::linear;
use accelerate::nn::{Linear, Path};
use accelerate::tch::{Kind, Tensor};
use accelerate::{Error, Result};

/// `transformers.BertModel`: a vector for each token.
///
/// ```
/// use accelerate::nn::ParamStore;
/// use accelerate::tch::{Device, Tensor};
/// use accelerate_models::bert::{BertConfig, BertModel};
///
/// let model = BertModel::new(&ParamStore::new(Device::Cpu).root(), &BertConfig::small(50, 2, 16))?;
/// let hidden = model.forward(&Tensor::from_slice2(&[[2i64, 7, 3]]), None, None)?;
/// assert_eq!(hidden.size(), [1, 3, 128]);
/// assert_eq!(model.pooled(&hidden)?.size(), [1, 128]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct BertModel {
    embeddings: Embeddings,
    encoder: Encoder,
    pooler: Linear,
}

impl BertModel {
    /// Registers all parameters under `path`, with BERT's random initial values.
    ///
    /// # Errors
    /// Sizes that make no model; the names are taken.
    pub fn new(path: &Path, config: &BertConfig) -> Result<Self> {
        crate::PretrainedConfig::check(config).map_err(Error::other)?;
        let hidden = config.hidden_size;
        Ok(Self {
            embeddings: Embeddings::new(&(path / "embeddings"), config)?,
            encoder: Encoder::new(&(path / "encoder"), config)?,
            pooler: linear(path / "pooler" / "dense", hidden, hidden, config)?,
        })
    }

    /// `input_ids [batch, length]` to `[batch, length, hidden_size]`. `attention_mask [batch, length]` is 1 for a token and 0 for
    /// what fills up a row (default: tokens alone); `token_type_ids [batch, length]` are the segments (default: the first).
    ///
    /// # Errors
    /// A token, a position or a segment that the model does not have; texts longer than it allows.
    pub fn forward(
        &self,
        input_ids: &Tensor,
        attention_mask: Option<&Tensor>,
        token_type_ids: Option<&Tensor>,
    ) -> Result<Tensor> {
        let mask = match attention_mask {
            Some(mask) => Some(mask.f_to_kind(Kind::Bool)?.f_unsqueeze(1)?.f_unsqueeze(1)?),
            None => None,
        };
        let token_type_ids = token_type_ids.map_or_else(|| input_ids.f_zeros_like(), |ids| Ok(ids.shallow_clone()))?;
        let hidden = self.embeddings.forward(input_ids, &token_type_ids)?;
        self.encoder.forward(hidden, mask.as_ref())
    }

    /// What [`forward`](Self::forward) gave to one vector for each text, `[batch, hidden_size]`: the first token, through a layer.
    ///
    /// # Errors
    /// Another shape.
    pub fn pooled(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(self.pooler.forward(&hidden.f_select(1, 0)?)?.f_tanh()?)
    }
}
