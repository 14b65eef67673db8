//! Multi-head attention on `scaled_dot_product_attention`, libtorch's fused one or that of ranks that divide sequences.

use super::layer::forward_error;
use super::{
    AnyLayer, AttentionOptions, DividedSequence, Init, Linear, LinearConfig, Param, Path, ScaledDotProductAttention,
    TrainingFlag, functional,
};
use crate::error::{NnError, Result};
use std::borrow::Borrow;
use tch::{Kind, Tensor};
use torch_ext::scalar;

/// What a [`MultiheadAttention`] may be told besides its sizes; defaults are PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MultiheadAttentionConfig {
    /// Probability with which an attention weight is dropped while training. Default: 0.
    pub dropout: f64,
    /// Add learned biases to the projections? Default: true.
    pub bias: bool,
    /// Number of features of the keys, where it is not `embed_dim`.
    pub kdim: Option<i64>,
    /// Number of features of the values, where it is not `embed_dim`.
    pub vdim: Option<i64>,
    /// Is the batch the first dim (`true`) or the second? Default: false.
    pub batch_first: bool,
}

impl Default for MultiheadAttentionConfig {
    fn default() -> Self {
        Self { dropout: 0.0, bias: true, kdim: None, vdim: None, batch_first: false }
    }
}

/// What must not be looked at.
///
/// A mask of booleans says `true` where attention is *forbidden*; a mask of floats is added to the scores.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionMask<'a> {
    /// Keys that are only padding: `[batch, num_keys]`.
    pub key_padding_mask: Option<&'a Tensor>,
    /// Which query may see which key: `[num_queries, num_keys]`, or with a first dim `batch * num_heads`.
    pub attn_mask: Option<&'a Tensor>,
    /// A query sees no key after its own position. Needs no `attn_mask`.
    pub is_causal: bool,
}

/// How queries, keys and values are made from the inputs.
#[derive(Clone, Debug)]
pub enum InProjection {
    /// `in_proj_weight [3 * embed_dim, embed_dim]`: one multiplication where the three inputs are one.
    Packed(Param),
    /// `q_proj_weight`, `k_proj_weight` and `v_proj_weight`, where keys or values have other sizes.
    Separate {
        /// `[embed_dim, embed_dim]`.
        q_proj_weight: Param,
        /// `[embed_dim, kdim]`.
        k_proj_weight: Param,
        /// `[embed_dim, vdim]`.
        v_proj_weight: Param,
    },
}

/// `torch.nn.MultiheadAttention` (<https://arxiv.org/abs/1706.03762>), without attention weights in the result.
///
/// ```
/// use accelerate::nn::{AttentionMask, MultiheadAttention, MultiheadAttentionConfig, ParamStore};
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let store = ParamStore::new(Device::Cpu);
/// let config = MultiheadAttentionConfig { batch_first: true, ..Default::default() };
/// let attention = MultiheadAttention::new(store.root() / "self_attn", 8, 2, config)?;
/// let x = Tensor::ones([1, 5, 8], (Kind::Float, Device::Cpu));
/// let causal = AttentionMask { is_causal: true, ..Default::default() };
/// assert_eq!(attention.forward(&x, &x, &x, causal)?.size(), [1, 5, 8]);
/// assert!(store.get("self_attn.out_proj.bias").is_some());
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct MultiheadAttention {
    /// Weights of the projections of queries, keys and values.
    pub in_proj: InProjection,
    /// `[3 * embed_dim]`.
    pub in_proj_bias: Option<Param>,
    /// `embed_dim` to `embed_dim`, applied to the heads' outputs side by side.
    pub out_proj: Linear,
    /// Number of features of queries and outputs.
    pub embed_dim: i64,
    /// Number of heads; each has `embed_dim / num_heads` features.
    pub num_heads: i64,
    /// As given to [`new`](Self::new).
    pub config: MultiheadAttentionConfig,
    /// The store's mode.
    pub training: TrainingFlag,
    /// What the heads compute.
    pub attention: ScaledDotProductAttention,
}

impl MultiheadAttention {
    /// Registers the parameters under `path`.
    ///
    /// # Errors
    /// The features cannot be split evenly into heads; the dropout is no probability; the names are taken.
    pub fn new(
        path: impl Borrow<Path>,
        embed_dim: i64,
        num_heads: i64,
        config: MultiheadAttentionConfig,
    ) -> Result<Self> {
        let path = path.borrow();
        let name = || path.name().to_owned();
        if num_heads <= 0 || embed_dim % num_heads != 0 {
            let (layer, whole, parts) = ("MultiheadAttention", embed_dim, num_heads);
            let (what, by) = ("embed_dim", "num_heads");
            return Err(NnError::NotDivisible { layer, path: name(), what, whole, by, parts }.into());
        }
        if !(0.0..=1.0).contains(&config.dropout) {
            return Err(NnError::Probability { path: name(), p: config.dropout }.into());
        }
        let (kdim, vdim) = (config.kdim.unwrap_or(embed_dim), config.vdim.unwrap_or(embed_dim));
        // PyTorch declares these first but draws them last, after the output projection; the order of
        // declaration is that of the state dict, the order of drawing decides the values.
        let declare = |name, rows, columns| path.param(name, ([rows, columns], Init::Zeros));
        let in_proj = if kdim == embed_dim && vdim == embed_dim {
            InProjection::Packed(declare("in_proj_weight", 3 * embed_dim, embed_dim)?)
        } else {
            InProjection::Separate {
                q_proj_weight: declare("q_proj_weight", embed_dim, embed_dim)?,
                k_proj_weight: declare("k_proj_weight", embed_dim, kdim)?,
                v_proj_weight: declare("v_proj_weight", embed_dim, vdim)?,
            }
        };
        let in_proj_bias =
            config.bias.then(|| path.param("in_proj_bias", ([3 * embed_dim], Init::Zeros))).transpose()?;
        let out_config = LinearConfig { bias: config.bias, ..Default::default() };
        let out_proj = Linear::new(path / "out_proj", embed_dim, embed_dim, out_config)?;
        for weight in in_proj.weights() {
            weight.initialise(None, Init::XavierUniform { gain: 1.0 })?;
        }
        if let Some(bias) = &out_proj.bias {
            bias.initialise(None, Init::Zeros)?;
        }
        let training = path.training_flag();
        let params = in_proj.weights().into_iter().chain(&in_proj_bias).cloned().collect();
        path.register_layer(AnyLayer::Other { kind: "MultiheadAttention", params });
        let attention = ScaledDotProductAttention::new(path);
        Ok(Self { in_proj, in_proj_bias, out_proj, embed_dim, num_heads, config, training, attention })
    }

    /// Queries `[batch, num_queries, embed_dim]` look at keys `[batch, num_keys, kdim]` and take from values
    /// `[batch, num_keys, vdim]`; the result is `[batch, num_queries, embed_dim]`. Without `batch_first`,
    /// the first two dims are exchanged everywhere.
    ///
    /// Self-attention is `forward(&x, &x, &x, mask)`: the same reference three times is projected in one
    /// multiplication.
    ///
    /// Where ranks divide sequences, lengths are those of this rank's tokens.
    ///
    /// # Errors
    /// Shapes that do not fit; `is_causal` together with an `attn_mask` that is not square. An `attn_mask` where ranks divide
    /// sequences.
    pub fn forward(&self, query: &Tensor, key: &Tensor, value: &Tensor, mask: AttentionMask<'_>) -> Result<Tensor> {
        for (input, features) in [(query, None), (key, self.config.kdim), (value, self.config.vdim)] {
            if input.dim() != 3 {
                return Err(self.error(input, features, format!("the input has {} dims", input.dim())));
            }
        }
        let heads = self.project(&Inputs::of(query, key, value, self.config.batch_first)?)?;
        let mask = self.merged_mask(mask, &heads)?;
        let dropout = if self.training.get() { self.config.dropout } else { 0.0 };
        let [queries, keys, values] = &heads;
        let options = AttentionOptions {
            attn_mask: mask.merged.as_ref(),
            dropout_p: dropout,
            is_causal: mask.is_causal,
            scale: None,
        };
        let attended = self.attention.forward(queries, keys, values, options)?;
        let output = self.out_proj.forward(&attended.f_permute([2, 0, 1, 3])?.f_flatten(2, 3)?)?;
        Ok(if self.config.batch_first { output.f_transpose(0, 1)? } else { output })
    }

    /// Queries, keys and values as `[batch, num_heads, length, features of a head]`.
    fn project(&self, inputs: &Inputs) -> Result<[Tensor; 3]> {
        let (bias, embed_dim) = (self.in_proj_bias.as_ref(), self.embed_dim);
        let part = |packed: &Tensor, index| self.split_heads(&packed.f_narrow(2, index * embed_dim, embed_dim)?);
        // Rows `first..first + count` of the packed weight, in units of `embed_dim`.
        let packed = |input: &Tensor, weight: &Param, first: i64, count: i64| {
            let rows = first * embed_dim..(first + count) * embed_dim;
            let output = functional::linear_rows(input, (weight, rows.clone()), bias.map(|bias| (bias, rows)))?;
            output.map_err(|source| self.projection_error(input, None, source))
        };
        match (&self.in_proj, inputs) {
            (InProjection::Packed(weight), Inputs::One(input)) => {
                let all = functional::linear(input, weight, bias)?;
                let all = all.map_err(|source| self.projection_error(input, None, source))?;
                Ok([part(&all, 0)?, part(&all, 1)?, part(&all, 2)?])
            }
            (InProjection::Packed(weight), Inputs::Two { query, key_and_value }) => {
                let (queries, others) = (packed(query, weight, 0, 1)?, packed(key_and_value, weight, 1, 2)?);
                Ok([self.split_heads(&queries)?, part(&others, 0)?, part(&others, 1)?])
            }
            (InProjection::Packed(weight), Inputs::Three([query, key, value])) => {
                let projected = |input, index| self.split_heads(&packed(input, weight, index, 1)?);
                Ok([projected(query, 0)?, projected(key, 1)?, projected(value, 2)?])
            }
            (InProjection::Separate { q_proj_weight, k_proj_weight, v_proj_weight }, _) => {
                let [query, key, value] = inputs.all();
                let projected = |input: &Tensor, weight: &Param, index: i64, features| {
                    let own = index * embed_dim..(index + 1) * embed_dim;
                    let output = functional::linear_rows(input, (weight, 0..embed_dim), bias.map(|bias| (bias, own)))?;
                    self.split_heads(&output.map_err(|source| self.projection_error(input, features, source))?)
                };
                Ok([
                    projected(query, q_proj_weight, 0, None)?,
                    projected(key, k_proj_weight, 1, self.config.kdim)?,
                    projected(value, v_proj_weight, 2, self.config.vdim)?,
                ])
            }
        }
    }

    fn split_heads(&self, projected: &Tensor) -> Result<Tensor> {
        let heads = projected.f_unflatten(2, [self.num_heads, self.embed_dim / self.num_heads])?;
        Ok(heads.f_permute([1, 2, 0, 3])?)
    }

    /// The two masks as one that is added to the scores `[batch, num_heads, num_queries, num_keys]`.
    fn merged_mask(&self, mask: AttentionMask<'_>, heads: &[Tensor; 3]) -> Result<MergedMask> {
        if mask.key_padding_mask.is_none() && mask.attn_mask.is_none() {
            return Ok(MergedMask { merged: None, is_causal: mask.is_causal });
        }
        if let Some(sequence) = self.attention.kernel().sequence() {
            return divided_mask(sequence, mask, heads[0].f_kind()?);
        }
        let (batch, _, num_queries, _) = heads[0].size4()?;
        let (_, _, num_keys, _) = heads[1].size4()?;
        let kind = heads[0].f_kind()?;
        let mut merged: Option<Tensor> = None;
        if let Some(attn_mask) = mask.attn_mask {
            let additive = additive(attn_mask, kind)?;
            merged = Some(
                match attn_mask.dim() {
                    2 => additive.f_view([1, 1, num_queries, num_keys]),
                    _ => additive.f_view([batch, self.num_heads, num_queries, num_keys]),
                }
                .map_err(|source| self.mask_error("attn_mask", attn_mask, [num_queries, num_keys], source))?,
            );
        } else if mask.is_causal {
            // The fused kernel takes either the flag or a mask; with padding, the flag becomes a mask.
            let all = scalar::full(&[num_queries, num_keys], f64::NEG_INFINITY, (kind, heads[0].device()))?;
            merged = Some(all.f_triu(1)?.f_view([1, 1, num_queries, num_keys])?);
        }
        if let Some(padding) = mask.key_padding_mask {
            let additive = additive(padding, kind)?
                .f_view([batch, 1, 1, num_keys])
                .map_err(|source| self.mask_error("key_padding_mask", padding, [batch, num_keys], source))?;
            merged = Some(match merged {
                Some(other) => other.f_add(&additive)?,
                None => additive,
            });
        }
        Ok(MergedMask { merged, is_causal: false })
    }

    #[cold]
    fn error(&self, input: &Tensor, features: Option<i64>, message: String) -> crate::Error {
        let features = features.unwrap_or(self.embed_dim);
        let wanted = match self.config.batch_first {
            true => format!("[batch, length, {features}]"),
            false => format!("[length, batch, {features}]"),
        };
        let source = tch::TchError::Shape(message);
        forward_error("MultiheadAttention", self.out_proj.weight.name(), wanted, input, source)
    }

    /// Of an input with its length first.
    #[cold]
    fn projection_error(&self, input: &Tensor, features: Option<i64>, source: tch::TchError) -> crate::Error {
        let as_given = if self.config.batch_first { input.f_transpose(0, 1) } else { Ok(input.shallow_clone()) };
        as_given.map_or_else(crate::Error::from, |input| self.error(&input, features, source.to_string()))
    }

    #[cold]
    fn mask_error(&self, which: &str, mask: &Tensor, wanted: [i64; 2], source: tch::TchError) -> crate::Error {
        let wanted = format!("{which} {wanted:?}");
        forward_error("MultiheadAttention", self.out_proj.weight.name(), wanted, mask, source)
    }
}

impl InProjection {
    /// The weights in the order of the state dict.
    pub fn weights(&self) -> Vec<&Param> {
        match self {
            Self::Packed(weight) => vec![weight],
            Self::Separate { q_proj_weight, k_proj_weight, v_proj_weight } => {
                vec![q_proj_weight, k_proj_weight, v_proj_weight]
            }
        }
    }
}

/// Queries, keys and values `[length, batch, features]`. What is the same tensor is projected in one multiplication.
///
/// PyTorch computes with the length first even if the batch comes first in the inputs and the result. So it is here: sums
/// round alike, and dropout of the result draws its mask in the same order of memory.
enum Inputs {
    One(Tensor),
    Two { query: Tensor, key_and_value: Tensor },
    Three([Tensor; 3]),
}

impl Inputs {
    fn of(query: &Tensor, key: &Tensor, value: &Tensor, batch_first: bool) -> Result<Self> {
        let length_first =
            |input: &Tensor| if batch_first { input.f_transpose(0, 1) } else { Ok(input.shallow_clone()) };
        Ok(match (std::ptr::eq(query, key), std::ptr::eq(key, value)) {
            (true, true) => Self::One(length_first(query)?),
            (false, true) => Self::Two { query: length_first(query)?, key_and_value: length_first(key)? },
            _ => Self::Three([length_first(query)?, length_first(key)?, length_first(value)?]),
        })
    }

    fn all(&self) -> [&Tensor; 3] {
        match self {
            Self::One(input) => [input; 3],
            Self::Two { query, key_and_value } => [query, key_and_value, key_and_value],
            Self::Three(inputs) => inputs.each_ref(),
        }
    }
}

/// The same where ranks divide sequences: rows for the queries that the kernel wants them for, columns for all keys. Collective.
fn divided_mask(sequence: &dyn DividedSequence, mask: AttentionMask<'_>, kind: Kind) -> Result<MergedMask> {
    let (Some(padding), None) = (mask.key_padding_mask, mask.attn_mask) else {
        return Err(NnError::MaskOfDividedSequence.into());
    };
    let batch_and_one = |padding: Tensor| padding.f_unsqueeze(1)?.f_unsqueeze(1);
    let mut merged = batch_and_one(additive(&sequence.gather(padding, 1)?, kind)?)?;
    if mask.is_causal {
        let device = padding.device();
        let queries = sequence.mask_positions(device)?.f_unsqueeze(1)?;
        let keys = Tensor::f_from_slice(&(0..sequence.length()).collect::<Vec<i64>>())?.f_to(device)?.f_unsqueeze(0)?;
        merged = merged.f_add(&additive(&keys.f_gt_tensor(&queries)?, kind)?)?;
    }
    // Ranks of a ring cut columns, and rows.
    let (num_queries, num_keys) = (sequence.mask_positions(padding.device())?.size1()?, sequence.length());
    let merged = merged.f_expand([-1, -1, num_queries, num_keys], false)?;
    Ok(MergedMask { merged: Some(merged), is_causal: false })
}

struct MergedMask {
    merged: Option<Tensor>,
    is_causal: bool,
}

/// A mask as numbers to add: booleans become 0 and minus infinity.
fn additive(mask: &Tensor, kind: Kind) -> Result<Tensor> {
    match mask.f_kind()? {
        Kind::Bool => {
            let zeros = Tensor::f_zeros(mask.size(), (kind, mask.device()))?;
            Ok(scalar::masked_fill(&zeros, mask, f64::NEG_INFINITY)?)
        }
        _ => Ok(mask.f_to_kind(kind)?),
    }
}
