//! Attention of some queries to some keys, as parts that add up: with each output comes the logarithm of the sum that its weights were
//! divided by.
//!
//! Method: Dao et al., "FlashAttention", arXiv 2205.14135: outputs of parts are weighted by these sums, and the backward pass of a part
//! needs the sum over all parts alone.

use super::accumulation_kind;
use crate::error::Result;
use tch::Tensor;
use torch_ext::attention::AttentionKernel;
use torch_ext::scalar;

/// How a part is computed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block<'a> {
    /// Queries and keys are the same tokens, and a query sees none after its own.
    pub(super) is_causal: bool,
    /// `[batch or 1, num_heads or 1, num_queries, num_keys]`.
    pub(super) mask: Option<&'a Tensor>,
    pub(super) scale: f64,
}

/// Attention to some keys, `[batch, num_heads, num_queries, width]` in full precision, and the logarithm of the sum of its weights
/// `[batch, num_heads, num_queries]`.
#[derive(Debug)]
pub(super) struct Attended {
    pub(super) output: Tensor,
    pub(super) log_sum: Tensor,
}

impl Attended {
    /// Attention to the keys of both.
    pub(super) fn merged(self, other: Self) -> Result<Self> {
        let log_sum = self.log_sum.f_logaddexp(&other.log_sum)?;
        let weighted = |part: &Self| -> Result<Tensor> {
            // Where a query has seen no key yet, both are minus infinity, and there is nothing to weigh.
            let weight = part.log_sum.f_sub(&log_sum)?.f_exp()?.f_nan_to_num(0.0, None, None)?;
            Ok(part.output.f_mul(&weight.f_unsqueeze(-1)?)?)
        };
        Ok(Self { output: weighted(&self)?.f_add(&weighted(&other)?)?, log_sum })
    }
}

impl Block<'_> {
    /// libtorch's kernels give the sums, too, and need no memory for the scores. None takes a mask.
    fn kernel(&self, [query, key, value]: [&Tensor; 3]) -> Result<Option<AttentionKernel>> {
        if self.mask.is_some() { Ok(None) } else { Ok(AttentionKernel::find(query, key, value)?) }
    }

    /// `query [batch, num_heads, num_queries, head_dim]`; keys and values have as many heads.
    pub(super) fn forward(&self, query: &Tensor, key: &Tensor, value: &Tensor) -> Result<Attended> {
        let kind = accumulation_kind(query.f_kind()?);
        if let Some(kernel) = self.kernel([query, key, value])? {
            let (output, log_sum) = kernel.forward([query, key, value], self.is_causal, self.scale)?;
            return Ok(Attended { output: output.f_to_kind(kind)?, log_sum: log_sum.f_to_kind(kind)? });
        }
        let scores = self.scores(query, key)?;
        let log_sum = scores.f_logsumexp([-1i64], false)?;
        let output = weights(&scores, &log_sum)?.f_matmul(&value.f_to_kind(kind)?)?;
        Ok(Attended { output, log_sum })
    }

    /// Gradients of queries, keys and values of the part, from what belongs to all parts together: the output, its gradient and the
    /// logarithm of the sum.
    pub(super) fn backward(
        &self,
        [query, key, value]: [&Tensor; 3],
        (gradient, output, log_sum): (&Tensor, &Tensor, &Tensor),
    ) -> Result<[Tensor; 3]> {
        if let Some(kernel) = self.kernel([query, key, value])? {
            let kind = query.f_kind()?;
            let (gradient, output) = (gradient.f_to_kind(kind)?, output.f_to_kind(kind)?);
            let whole = (&output, log_sum);
            return Ok(kernel.backward(&gradient, [query, key, value], whole, self.is_causal, self.scale)?);
        }
        let kind = accumulation_kind(query.f_kind()?);
        let [wide_query, wide_key, wide_value] = [query, key, value].map(|heads| heads.f_to_kind(kind));
        let gradient = gradient.f_to_kind(kind)?;
        let weights = weights(&self.scores(query, key)?, log_sum)?;
        let of_value = weights.f_transpose(-2, -1)?.f_matmul(&gradient)?;
        let of_weights = gradient.f_matmul(&wide_value?.f_transpose(-2, -1)?)?;
        let mean = gradient.f_mul(&output.f_to_kind(kind)?)?.f_sum_dim_intlist([-1i64].as_slice(), true, kind)?;
        let of_scores = scalar::mul(&weights.f_mul(&of_weights.f_sub(&mean)?)?, self.scale)?;
        let of_query = of_scores.f_matmul(&wide_key?)?;
        let of_key = of_scores.f_transpose(-2, -1)?.f_matmul(&wide_query?)?;
        Ok([of_query, of_key, of_value])
    }

    fn scores(&self, query: &Tensor, key: &Tensor) -> Result<Tensor> {
        let kind = accumulation_kind(query.f_kind()?);
        let product = query.f_to_kind(kind)?.f_matmul(&key.f_to_kind(kind)?.f_transpose(-2, -1)?)?;
        let mut scores = scalar::mul(&product, self.scale)?;
        if self.is_causal {
            let (num_queries, num_keys) = (query.size4()?.2, key.size4()?.2);
            let later = Tensor::f_ones([num_queries, num_keys], (tch::Kind::Bool, query.device()))?.f_triu(1)?;
            scores = scalar::masked_fill(&scores, &later, f64::NEG_INFINITY)?;
        }
        match self.mask {
            None => Ok(scores),
            Some(mask) if mask.f_kind()? == tch::Kind::Bool => {
                Ok(scalar::masked_fill(&scores, &mask.f_logical_not()?, f64::NEG_INFINITY)?)
            }
            Some(mask) => Ok(scores.f_add(&mask.f_to_kind(kind)?)?),
        }
    }
}

/// None where a query sees no key.
fn weights(scores: &Tensor, log_sum: &Tensor) -> Result<Tensor> {
    Ok(scores.f_sub(&log_sum.f_unsqueeze(-1)?)?.f_exp()?.f_nan_to_num(0.0, None, None)?)
}
