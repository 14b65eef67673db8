//! Keys and values of tokens that a model has seen, so that each is computed once.

use accelerate::Result;
use accelerate::tch::Tensor;

/// Memory is taken for so many tokens at once.
const BLOCK: i64 = 128;

/// What the layers of a model keep of the tokens so far; `DynamicCache` of Transformers.
///
/// One cache belongs to one generation: its rows are those of the batch.
#[derive(Debug, Default)]
pub struct KeyValueCache {
    layers: Vec<(Tensor, Tensor)>,
    /// Tokens that all layers have.
    length: i64,
}

impl KeyValueCache {
    /// No tokens yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of tokens so far, what fills up rows included.
    pub fn len(&self) -> i64 {
        self.length
    }

    /// No tokens?
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Adds the keys and values of new tokens, `[batch, num_heads, num_new, head_dim]`, to those of a layer, and returns all of
    /// them. Layers come in order, and [`advance`](Self::advance) after the last.
    pub(crate) fn update(&mut self, layer: usize, key: &Tensor, value: &Tensor) -> Result<(Tensor, Tensor)> {
        let (length, wanted) = (self.length, self.length + key.size4()?.2);
        if self.layers.len() <= layer {
            self.layers.push((grown(key, None, length, wanted)?, grown(value, None, length, wanted)?));
        }
        let (keys, values) = &mut self.layers[layer];
        Ok((added(keys, key, length, wanted)?, added(values, value, length, wanted)?))
    }

    /// All layers have seen `num_new` more tokens.
    pub(crate) fn advance(&mut self, num_new: i64) {
        self.length += num_new;
    }
}

/// Writes `new` behind the first `length` tokens of `kept`, and returns all `wanted`.
fn added(kept: &mut Tensor, new: &Tensor, length: i64, wanted: i64) -> Result<Tensor> {
    if kept.size4()?.2 < wanted {
        *kept = grown(new, Some(kept), length, wanted)?;
    }
    kept.f_narrow(2, length, wanted - length)?.f_copy_(new)?;
    Ok(kept.f_narrow(2, 0, wanted)?)
}

/// Room for `wanted` tokens and some more, with the first `length` of `old`.
fn grown(like: &Tensor, old: Option<&Tensor>, length: i64, wanted: i64) -> Result<Tensor> {
    let (batch, num_heads, _, head_dim) = like.size4()?;
    let capacity = wanted.saturating_add(BLOCK - 1) / BLOCK * BLOCK;
    let room = Tensor::f_empty([batch, num_heads, capacity, head_dim], (like.f_kind()?, like.device()))?;
    if let Some(old) = old {
        room.f_narrow(2, 0, length)?.f_copy_(&old.f_narrow(2, 0, length)?)?;
    }
    Ok(room)
}
