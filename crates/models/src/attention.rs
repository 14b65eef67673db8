//! What the models' attention has in common: positions, what a token may look at, and the product itself.

use accelerate::nn::{AttentionKernel, AttentionOptions, DividedSequence};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Error, Result};
use std::ops::Range;
use torch_ext::scalar;

/// The numbers of a range `[length]`, int64.
pub(crate) fn positions(range: Range<i64>, device: Device) -> Result<Tensor> {
    let positions: Vec<i64> = range.collect();
    Ok(Tensor::f_from_slice(&positions)?.f_to(device)?)
}

/// Where the tokens that a model was given are in their sequence: from 0 on, unless ranks divide it.
pub(crate) fn own_positions(kernel: &dyn AttentionKernel, length: i64, device: Device) -> Result<Tensor> {
    match kernel.sequence() {
        None => positions(0..length, device),
        Some(sequence) => sequence.positions(length, device),
    }
}

/// How many tokens stand in front of each; 0 for what fills up a row in front.
pub(crate) fn token_positions(attention_mask: &Tensor) -> Result<Tensor> {
    let counted = attention_mask.f_cumsum(1, Kind::Int64)?;
    Ok(scalar::clamp_min(&scalar::add(&counted, -1)?, 0)?)
}

/// Which keys a query may look at.
#[derive(Debug)]
pub(crate) enum Mask {
    /// All of them.
    None,
    /// Those up to its own position; as many queries as keys.
    Causal,
    /// Where it is true, `[batch or 1, 1, num_queries, num_keys]`.
    Tensor(Tensor),
}

impl Mask {
    pub(crate) fn tensor(&self) -> Option<&Tensor> {
        if let Self::Tensor(mask) = self { Some(mask) } else { None }
    }

    /// The same for a function that gets tensors alone.
    pub(crate) fn of(is_causal: bool, mask: Option<&Tensor>) -> Self {
        match mask {
            Some(mask) => Self::Tensor(mask.shallow_clone()),
            None if is_causal => Self::Causal,
            None => Self::None,
        }
    }

    /// For the `length` tokens that a model was given, and as many columns of `attention_mask`: all of a sequence, or those that this
    /// rank has of it. Collective then.
    pub(crate) fn of_own_tokens(
        kernel: &dyn AttentionKernel,
        length: i64,
        attention_mask: Option<&Tensor>,
        window: Option<i64>,
        device: Device,
    ) -> Result<Self> {
        match kernel.sequence() {
            None => Self::causal(length, 0, attention_mask, window, device),
            Some(sequence) => Self::of_sequence(sequence, attention_mask, window, device),
        }
    }

    /// Texts are continued with all of their tokens.
    ///
    /// # Errors
    /// Ranks divide the sequence.
    pub(crate) fn check_goes_on(kernel: &dyn AttentionKernel) -> Result<()> {
        match kernel.sequence() {
            None => Ok(()),
            Some(_) => Err(Error::other(
                "a text is continued within maybe_context_parallel, where this rank has some of its tokens alone; generate before or after it",
            )),
        }
    }

    /// Rows for the queries that the kernel wants them for, columns for all tokens of the sequence.
    fn of_sequence(
        sequence: &dyn DividedSequence,
        attention_mask: Option<&Tensor>,
        window: Option<i64>,
        device: Device,
    ) -> Result<Self> {
        let num_keys = sequence.length();
        let window = window.filter(|window| *window < num_keys);
        // A mask of tokens alone, as collators make, hides none; it would cost the kernel that needs no scores.
        let attention_mask = attention_mask.map(|own| sequence.gather(own, 1)).transpose()?;
        let hides = |mask: &Tensor| Ok::<_, Error>(scalar::ne(mask, 0)?.f_all()?.f_int64_value(&[])? == 0);
        let attention_mask = match attention_mask {
            Some(mask) if hides(&mask)? => Some(mask),
            _ => None,
        };
        if attention_mask.is_none() && window.is_none() {
            return Ok(Self::Causal);
        }
        let queries = sequence.mask_positions(device)?.f_unsqueeze(1)?;
        let keys = positions(0..num_keys, device)?.f_unsqueeze(0)?;
        let mut seen = keys.f_le_tensor(&queries)?;
        if let Some(window) = window {
            seen = seen.f_logical_and(&keys.f_gt_tensor(&scalar::add(&queries, -window)?)?)?;
        }
        let seen = seen.f_unsqueeze(0)?.f_unsqueeze(0)?;
        let Some(attention_mask) = attention_mask else { return Ok(Self::Tensor(seen)) };
        let own = keys.f_eq_tensor(&queries)?;
        Ok(Self::Tensor(of_tokens(&seen, &attention_mask, &own)?))
    }

    /// For `num_queries` tokens that come after `num_past` others. `attention_mask [batch, num_past + num_queries]` is 1 for a
    /// token and 0 for what fills up a row. With a `window`, a query looks at that many keys, its own the last of them.
    ///
    /// What fills up a row in front has no key to look at, and looks at itself: without any, gradients would be no numbers, and spread.
    pub(crate) fn causal(
        num_queries: i64,
        num_past: i64,
        attention_mask: Option<&Tensor>,
        window: Option<i64>,
        device: Device,
    ) -> Result<Self> {
        let num_keys = num_past + num_queries;
        let window = window.filter(|window| *window < num_keys);
        if attention_mask.is_none() && window.is_none() {
            // A single query comes after all keys.
            return Ok(match (num_queries, num_past) {
                (1, _) => Self::None,
                (_, 0) => Self::Causal,
                _ => Self::Tensor(seen(num_queries, num_past, None, device)?),
            });
        }
        let seen = seen(num_queries, num_past, window, device)?;
        let Some(attention_mask) = attention_mask else { return Ok(Self::Tensor(seen)) };
        Ok(Self::Tensor(of_tokens(&seen, attention_mask, &own(num_queries, num_past, device)?)?))
    }
}

/// Without what fills up rows, `[batch, num_keys]`; a query that sees nothing else sees its own key.
fn of_tokens(seen: &Tensor, attention_mask: &Tensor, own: &Tensor) -> Result<Tensor> {
    let is_token = attention_mask.f_to_kind(Kind::Bool)?.f_unsqueeze(1)?.f_unsqueeze(1)?;
    let seen = seen.f_logical_and(&is_token)?;
    let sees_nothing = seen.f_any_dim(-1, true)?.f_logical_not()?;
    Ok(seen.f_logical_or(&own.f_logical_and(&sees_nothing)?)?)
}

/// `[1, 1, num_queries, num_keys]`: keys up to the query's position and within its window.
fn seen(num_queries: i64, num_past: i64, window: Option<i64>, device: Device) -> Result<Tensor> {
    let ones = Tensor::f_ones([num_queries, num_past + num_queries], (Kind::Bool, device))?;
    let mut seen = ones.f_tril(num_past)?;
    if let Some(window) = window {
        seen = seen.f_triu(num_past - window + 1)?;
    }
    Ok(seen.f_unsqueeze(0)?.f_unsqueeze(0)?)
}

/// `[num_queries, num_keys]`: each query's own key.
fn own(num_queries: i64, num_past: i64, device: Device) -> Result<Tensor> {
    let ones = Tensor::f_ones([num_queries, num_past + num_queries], (Kind::Bool, device))?;
    Ok(ones.f_tril(num_past)?.f_triu(num_past)?)
}

/// `query [batch, num_heads, num_queries, head_dim]`, `key` and `value [batch, num_key_value_heads, num_keys, head_dim]` to
/// `[batch, num_queries, num_heads * head_dim]`. A head of keys serves as many heads of queries as there are times more of them.
pub(crate) fn attend(
    kernel: &dyn AttentionKernel,
    [query, key, value]: [&Tensor; 3],
    mask: &Mask,
    dropout_p: f64,
    scale: impl Into<Option<f64>>,
) -> Result<Tensor> {
    let (batch, num_heads, num_queries, head_dim) = query.size4()?;
    let is_causal = matches!(mask, Mask::Causal);
    let options = AttentionOptions { attn_mask: mask.tensor(), dropout_p, is_causal, scale: scale.into() };
    let attended = kernel.attention(query, key, value, options)?;
    Ok(attended.f_transpose(1, 2)?.f_reshape([batch, num_queries, num_heads * head_dim])?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Rows of `.` and `x`, one for each query, of each row of the batch.
    fn drawn(mask: &Mask) -> Vec<String> {
        let mask = mask.tensor().unwrap();
        let (batch, _, num_queries, num_keys) = mask.size4().unwrap();
        let place = |b, q, k| if mask.int64_value(&[b, 0, q, k]) == 1 { 'x' } else { '.' };
        let row = |b, q| (0..num_keys).map(|k| place(b, q, k)).collect();
        (0..batch).flat_map(|b| (0..num_queries).map(move |q| (b, q))).map(|(b, q)| row(b, q)).collect()
    }

    #[test]
    fn a_query_sees_tokens_up_to_its_own_within_its_window() {
        let cpu = Device::Cpu;
        let causal =
            |queries, past, mask: Option<&Tensor>, window| Mask::causal(queries, past, mask, window, cpu).unwrap();
        assert!(matches!(causal(4, 0, None, None), Mask::Causal));
        assert!(matches!(causal(4, 0, None, Some(4)), Mask::Causal));
        assert!(matches!(causal(1, 7, None, None), Mask::None));
        assert_eq!(drawn(&causal(2, 2, None, None)), ["xxx.", "xxxx"]);
        assert_eq!(drawn(&causal(4, 0, None, Some(2))), ["x...", "xx..", ".xx.", "..xx"]);
        assert_eq!(drawn(&causal(1, 4, None, Some(3))), ["..xxx"]);
        let padded = Tensor::from_slice2(&[[0i64, 0, 1], [1, 1, 0]]);
        assert_eq!(drawn(&causal(3, 0, Some(&padded), None)), ["x..", ".x.", "..x", "x..", "xx.", "xx."]);
    }
}
