//! How activations travel where ranks also divide the tokens of what is between divided layers: a sum over ranks becomes one of which
//! each rank keeps some tokens, and an input is collected from all ranks.
//!
//! Method: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198. Activations are
//! `[.., tokens, features]`. Where no gradients are recorded, nothing is kept for a backward pass, and every rank has all tokens.

use super::products::ProductOfTokens;
use super::region::{Region, apply_to_one, gather};
use crate::error::{Result, StateError};
use crate::group::{Group, ReduceOp};
use crate::nn::{AroundTokens, DenseEmbeddingKernel, EmbeddingKernel, Param, is_recomputing};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::Tensor;
use torch_ext::autograd::is_grad_enabled;

/// What ranks know of activations whose tokens they divide.
#[derive(Debug, Default)]
pub(super) struct Tokens {
    /// The sizes that activations had before they were divided, without the features. Parts of anything else are not collected.
    sizes: Mutex<BTreeSet<Vec<i64>>>,
    /// In a forward pass that records gradients, also where a part of it does not.
    records: AtomicBool,
    /// What came last is divided: it must not be what the model gives.
    is_divided: AtomicBool,
}

impl Tokens {
    // A set of values of their own: whole after every statement, also where another thread panicked.
    fn sizes(&self) -> MutexGuard<'_, BTreeSet<Vec<i64>>> {
        self.sizes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A forward pass begins.
    pub(super) fn begin(&self) {
        self.records.store(is_grad_enabled(), Ordering::Relaxed);
        self.is_divided.store(false, Ordering::Relaxed);
    }

    /// It has ended, or failed. Is what came last divided?
    pub(super) fn end(&self) -> bool {
        self.records.store(false, Ordering::Relaxed);
        self.is_divided.swap(false, Ordering::Relaxed)
    }
}

/// Which tokens of a sequence each rank has: the first ranks have one more where they do not divide evenly.
fn shares(length: usize, num_ranks: usize) -> Vec<Range<usize>> {
    let start = |rank: usize| rank * (length / num_ranks) + rank.min(length % num_ranks);
    (0..num_ranks).map(|rank| start(rank)..start(rank + 1)).collect()
}

/// Of `[.., tokens, features]`.
fn num_tokens(tensor: &Tensor) -> Result<usize> {
    match tensor.size()[..] {
        [.., tokens, _] => Ok(tokens.max(0) as usize),
        _ => Err(StateError::NoTokens { found: tensor.size() }.into()),
    }
}

/// The sizes of `[.., tokens, features]` without the last one, and with this number of tokens.
fn without_features(tensor: &Tensor, length: usize) -> Vec<i64> {
    let mut sizes = tensor.size();
    sizes.pop();
    if let Some(tokens) = sizes.last_mut() {
        *tokens = length as i64;
    }
    sizes
}

impl Region {
    /// Does each rank have some of the tokens between divided layers, here and now?
    pub(super) fn divides_tokens(&self) -> bool {
        // Activations are computed again outside of a forward pass, and parts of them are not recorded.
        let records = |tokens: &Tokens| tokens.records.load(Ordering::Relaxed) || is_grad_enabled() || is_recomputing();
        self.tokens().is_some_and(records)
    }

    /// Have ranks divided tokens, in this pass or an earlier one?
    pub(super) fn has_divided_tokens(&self) -> bool {
        self.tokens().is_some_and(|tokens| !tokens.sizes().is_empty())
    }

    /// By its sizes, is it this rank's part of activations whose tokens were divided?
    fn has_some_tokens(&self, tensor: &Tensor) -> bool {
        let (Some(tokens), [batch @ .., length, _]) = (self.tokens(), &tensor.size()[..]) else { return false };
        let is_whole =
            |sizes: &Vec<i64>| matches!(&sizes[..], [others @ .., whole] if others == batch && whole == length);
        let is_part = |sizes: &Vec<i64>| match &sizes[..] {
            [others @ .., whole] => {
                let own = shares((*whole).max(0) as usize, self.group().world_size());
                others == batch && own.get(self.rank()).is_some_and(|own| own.len() as i64 == *length)
            }
            [] => false,
        };
        let sizes = tokens.sizes();
        sizes.iter().any(is_part) && !sizes.iter().any(is_whole)
    }

    fn shares_of(&self, tensor: &Tensor) -> Result<Vec<Range<usize>>> {
        let length = num_tokens(tensor)?;
        if let Some(tokens) = self.tokens() {
            tokens.sizes().insert(without_features(tensor, length));
        }
        Ok(shares(length, self.group().world_size()))
    }

    /// This rank's tokens of the sum of all ranks' parts of an output; its gradient is collected. Collective.
    pub(super) fn sum_tokens(&self, part: &Tensor) -> Result<Tensor> {
        self.forget_input();
        let (group, shares) = (self.group().clone(), self.shares_of(part)?);
        self.divided("TensorParallelSumTokens", part, &shares, || own_sum(&group, &part.f_detach()?, &shares))
    }

    /// The same of a product with a slice of a rowwise layer, `[out_features, in_features]`, where tokens travel beside it; `None` where
    /// they do not. Collective in both passes.
    pub(super) fn sum_product(&self, input: &Tensor, matrix: &Tensor) -> Result<Option<Tensor>> {
        if !self.divides_tokens() {
            return Ok(None);
        }
        let Some(beside) = ProductOfTokens::new(self, (input, matrix, None), &self.shares_of(input)?)? else {
            return Ok(None);
        };
        self.forget_input();
        let sum = beside.summed(input, matrix)?;
        self.note_divided(true);
        Ok(Some(sum))
    }

    /// This rank's tokens of what all ranks have; its gradient is collected. Collective in the backward pass.
    pub(super) fn own_tokens(&self, full: &Tensor) -> Result<Tensor> {
        let shares = self.shares_of(full)?;
        let Some(own) = shares.get(self.rank()).cloned() else { return Ok(full.shallow_clone()) };
        self.divided("TensorParallelOwnTokens", full, &shares, || {
            Ok(full.f_narrow(-2, own.start as i64, own.len() as i64)?.f_detach_copy()?)
        })
    }

    fn divided(
        &self,
        name: &str,
        input: &Tensor,
        shares: &[Range<usize>],
        forward: impl Fn() -> Result<Tensor>,
    ) -> Result<Tensor> {
        let (group, shares) = (self.group().clone(), shares.to_vec());
        let own = apply_to_one(name, input, forward, move |gradient| gather(&group, &gradient, -2, &shares))?;
        self.note_divided(true);
        Ok(own)
    }

    /// Remembers whether each rank has some tokens of what came last.
    pub(super) fn note_divided(&self, is_divided: bool) {
        if let Some(tokens) = self.tokens() {
            tokens.is_divided.store(is_divided, Ordering::Relaxed);
        }
    }

    /// All tokens of an input of which each rank has some, for a layer of which each rank computes a part: its gradient is the sum of
    /// all ranks' parts. `is_used` is set by the backward pass. Collective in both passes.
    pub(super) fn enter_tokens(
        &self,
        own: &Tensor,
        shares: Vec<Range<usize>>,
        is_used: Arc<AtomicBool>,
    ) -> Result<Tensor> {
        let (group, divided) = (self.group().clone(), shares.clone());
        let backward = move |gradient: Tensor| {
            is_used.store(true, Ordering::Relaxed);
            own_sum(&group, &gradient, &divided)
        };
        apply_to_one("TensorParallelTokens", own, || gather(self.group(), own, -2, &shares), backward)
    }

    /// All tokens of an output of which each rank has some, for what is the same on all ranks: so is its gradient. Collective.
    pub(super) fn all_tokens(&self, own: &Tensor) -> Result<Tensor> {
        let shares = self.shares_of_parts(own)?;
        self.note_divided(false);
        self.gather(own, -2, &shares)
    }

    /// Collective.
    ///
    /// # Errors
    /// What ranks have are not the parts of a sequence that a layer has divided, on all ranks.
    pub(super) fn shares_of_parts(&self, own: &Tensor) -> Result<Vec<Range<usize>>> {
        let group = self.group();
        let length = group.agree_on_success("forward", num_tokens(own))?;
        let lengths = group.all_gather_bytes(&(length as u64).to_le_bytes())?;
        let lengths = lengths.iter().map(|bytes| bytes.as_slice().try_into().map(u64::from_le_bytes).unwrap_or(0));
        let lengths: Vec<usize> = lengths.map(|length| length as usize).collect();
        let whole = lengths.iter().sum();
        let shares = shares(whole, group.world_size());
        let are_parts = shares.iter().map(ExactSizeIterator::len).eq(lengths.iter().copied());
        let sizes = without_features(own, whole);
        if are_parts && self.tokens().is_some_and(|tokens| tokens.sizes().contains(&sizes)) {
            return Ok(shares);
        }
        let texts: Vec<String> = lengths.iter().map(|length| format!("{length} tokens")).collect();
        Err(StateError::TokensNotDivided { per_rank: group.per_rank(&texts) }.into())
    }

    /// A parameter that each rank has whole, and of whose gradient it has a part: the gradient is the sum of all ranks'. Collective in
    /// the backward pass.
    pub(super) fn sum_gradient(&self, parameter: &Tensor) -> Result<Tensor> {
        if !parameter.requires_grad() || !is_grad_enabled() {
            return Ok(parameter.shallow_clone());
        }
        let group = self.group().clone();
        let backward = move |gradient: Tensor| {
            // Another branch of the graph may have the same tensor.
            let sum =
                if gradient.is_sparse() { gradient.f_to_dense(None, false)? } else { gradient.f_detach_copy()? };
            let sum = sum.f_contiguous()?;
            group.all_reduce(&sum, ReduceOp::Sum)?;
            Ok(sum)
        };
        apply_to_one("TensorParallelParameter", parameter, || Ok(parameter.f_detach()?), backward)
    }
}

/// This rank's tokens of the sum over ranks. Collective.
fn own_sum(group: &Group, part: &Tensor, shares: &[Range<usize>]) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let largest = shares.first().map_or(0, ExactSizeIterator::len) as i64;
    let own = shares.get(group.rank()).map_or(0, ExactSizeIterator::len) as i64;
    let dim = part.dim() as i64 - 2;
    let rows = part.f_transpose(0, dim)?;
    let is_even = shares.iter().all(|share| share.len() as i64 == largest);
    let rows = match is_even {
        true => rows.f_contiguous()?,
        // All ranks get as many rows.
        false => {
            let mut padded = rows.size();
            padded[0] = largest * shares.len() as i64;
            let padded = Tensor::f_zeros(&padded, (rows.f_kind()?, rows.device()))?;
            for (rank, share) in shares.iter().enumerate() {
                let (start, length) = (share.start as i64, share.len() as i64);
                let mut place = padded.f_narrow(0, rank as i64 * largest, length)?;
                place.f_copy_(&rows.f_narrow(0, start, length)?)?;
            }
            padded
        }
    };
    let sum = group.reduce_scatter_tensor(&rows, ReduceOp::Sum)?.f_narrow(0, 0, own)?;
    Ok(sum.f_transpose(0, dim)?.f_contiguous()?)
}

/// A model that is built wrongly shows in its first passes.
const NUM_CHECKS: usize = 3;

/// Around a norm whose input each rank has some tokens of.
#[derive(Debug)]
pub(super) struct NormOfTokens {
    region: Region,
    gathers_tokens: bool,
    /// In so many passes the input is still to be looked at: of all tokens on each rank, gradients would be too large.
    checks_left: AtomicUsize,
}

impl NormOfTokens {
    pub(super) fn new(region: Region, gathers_tokens: bool) -> Self {
        Self { region, gathers_tokens, checks_left: AtomicUsize::new(NUM_CHECKS) }
    }
}

impl AroundTokens for NormOfTokens {
    fn forward(&self, input: &Tensor, layer: &dyn Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let left = self.checks_left.load(Ordering::Relaxed);
        if left > 0 && self.region.divides_tokens() {
            self.checks_left.store(left - 1, Ordering::Relaxed);
            self.region.shares_of_parts(input)?;
        }
        let output = layer(input)?;
        match self.gathers_tokens && self.region.divides_tokens() {
            true => self.region.all_tokens(&output),
            false => Ok(output),
        }
    }
}

/// Around a dropout whose input each rank has some tokens of: it drops what it would drop of all of them.
#[derive(Debug)]
pub(super) struct DropoutOfTokens {
    pub(super) region: Region,
    pub(super) gathers_tokens: bool,
}

impl AroundTokens for DropoutOfTokens {
    fn forward(&self, input: &Tensor, layer: &dyn Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        if !self.region.divides_tokens() {
            return layer(input);
        }
        let shares = self.region.shares_of_parts(input)?;
        let mut size = input.size();
        let own = shares.get(self.region.rank()).cloned().unwrap_or(0..0);
        if let [.., tokens, _] = &mut size[..] {
            *tokens = shares.last().map_or(0, |last| last.end as i64);
        }
        // Ones become the factors that the dropout has for all tokens. They are not recorded: nothing but their values is needed.
        let factors = {
            let _no_grad = tch::no_grad_guard();
            layer(&Tensor::f_ones(&size, (input.f_kind()?, input.device()))?)?
        };
        let output = input.f_mul(&factors.f_narrow(-2, own.start as i64, own.len() as i64)?.f_contiguous()?)?;
        if self.gathers_tokens { self.region.all_tokens(&output) } else { Ok(output) }
    }

    fn identity(&self, input: &Tensor) -> Result<Tensor> {
        match self.gathers_tokens && self.region.divides_tokens() {
            true => self.region.all_tokens(input),
            false => Ok(input.shallow_clone()),
        }
    }
}

/// Around a dropout that the plan does not name, where it divides tokens: on some of them it would drop others than on one rank, and
/// ranks would draw different numbers from then on.
#[derive(Debug)]
pub(super) struct UnnamedDropout {
    pub(super) region: Region,
    pub(super) path: String,
}

impl AroundTokens for UnnamedDropout {
    fn forward(&self, input: &Tensor, layer: &dyn Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        if self.region.divides_tokens() && self.region.has_some_tokens(input) {
            return Err(StateError::UnnamedDropout { path: self.path.clone() }.into());
        }
        layer(input)
    }

    fn identity(&self, input: &Tensor) -> Result<Tensor> {
        Ok(input.shallow_clone())
    }
}

/// A lookup of which each rank makes that of some tokens, such as of positions. Indices are `[.., tokens]`, the same on all ranks.
#[derive(Debug)]
pub(super) struct EmbeddingOfTokens {
    pub(super) region: Region,
    pub(super) gathers_tokens: bool,
}

impl EmbeddingKernel for EmbeddingOfTokens {
    fn embedding(&self, indices: &Tensor, weight: &Param, padding_idx: Option<i64>) -> Result<Tensor> {
        if !self.region.divides_tokens() {
            return DenseEmbeddingKernel.embedding(indices, weight, padding_idx);
        }
        self.region.compare_input(indices)?;
        let shares = self.region.shares_of(&indices.f_unsqueeze(-1)?)?;
        let own = shares.get(self.region.rank()).cloned().unwrap_or(0..0);
        let own = indices.f_narrow(-1, own.start as i64, own.len() as i64)?;
        let rows = DenseEmbeddingKernel.embedding(&own, weight, padding_idx)?;
        self.region.note_divided(true);
        if self.gathers_tokens { self.region.all_tokens(&rows) } else { Ok(rows) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_that_do_not_divide_go_to_the_first_ranks() {
        for (length, num_ranks, wanted) in [
            (6, 3, vec![0..2, 2..4, 4..6]),
            (5, 3, vec![0..2, 2..4, 4..5]),
            (1, 3, vec![0..1, 1..1, 1..1]),
            (0, 2, vec![0..0, 0..0]),
        ] {
            assert_eq!(shares(length, num_ranks), wanted, "{length} {num_ranks}");
        }
    }
}
