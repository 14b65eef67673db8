//! Sequence and context parallelism: ranks have some tokens of each sequence, and compute attention together.
//!
//! Along `sp` ranks exchange heads (`ulysses`), along `cp` keys and values (`ring`). Everything else in a transformer goes token by
//! token, so each rank computes it for its own.

mod block;
mod ring;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod ulysses;

use super::tensor_parallel::{compare_numbers, hash_of};
use crate::error::{Result, StateError};
use crate::group::{Group, ReduceOp, shape_text};
use crate::nn::{AnyLayer, AttentionKernel, AttentionOptions, DividedSequence, ParamStore, is_floating};
use crate::session::DeviceMesh;
use accelerate_core::config::{ContextParallelStrategy, ParallelismSettings};
use accelerate_core::mesh::Axis;
use accelerate_core::sequence_parallel::{SequenceDivision, check_length};
use tch::{Device, Kind, Tensor};
use torch_ext::autocast::{autocast_dtype, is_autocast_enabled};
use torch_ext::{apply_function, scalar};

/// Sequences of one length that ranks divide, and the kernel that computes attention meanwhile.
#[derive(Debug)]
pub(crate) struct Sequence {
    group: Group,
    axis: Axis,
    division: SequenceDivision,
    strategy: ContextParallelStrategy,
}

impl Sequence {
    /// Sequences of `length` tokens, divided along the axis of the mesh that is for it. `None` where there is no such axis. Collective
    /// when it is first called.
    ///
    /// # Errors
    /// A length that does not divide, or is not the one that all sequences are said to have.
    pub(crate) fn divide(mesh: &DeviceMesh, settings: &ParallelismSettings, length: usize) -> Result<Option<Self>> {
        let Some((axis, num_ranks)) = mesh.shape().divided_sequences() else { return Ok(None) };
        let group = mesh.group(&[axis])?;
        if axis == Axis::Sp {
            check_length(length, settings.fixed_sequence_length())?;
        }
        let division = SequenceDivision::new(axis, length, num_ranks)?;
        Ok(Some(Self { group, axis, division, strategy: settings.cp_comm_strategy()? }))
    }

    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn num_own_tokens(&self) -> i64 {
        (self.division.length() / self.division.num_ranks()) as i64
    }

    /// This rank's tokens of a tensor that has all of them along a dim.
    ///
    /// # Errors
    /// It has another number of tokens.
    pub(crate) fn own(&self, whole: &Tensor, dim: i64) -> Result<Tensor> {
        let found = whole.size().get(index_of(whole, dim)).copied();
        if found != Some(self.length()) {
            return Err(StateError::OtherSequence { found: whole.size(), dim, wanted: Some(self.length()) }.into());
        }
        let chunk = |range: std::ops::Range<usize>| whole.f_narrow(dim, range.start as i64, range.len() as i64);
        let chunks: Vec<Tensor> = self.division.ranges(self.rank()).into_iter().map(chunk).collect::<Result<_, _>>()?;
        Ok(Tensor::f_cat(&chunks, dim)?)
    }

    fn check_own(&self, found: i64) -> Result<()> {
        let wanted = self.num_own_tokens();
        let length = self.length();
        if found == wanted { Ok(()) } else { Err(StateError::OtherTokens { found, wanted, length }.into()) }
    }
}

fn index_of(tensor: &Tensor, dim: i64) -> usize {
    usize::try_from(if dim < 0 { dim + tensor.dim() as i64 } else { dim }).unwrap_or(usize::MAX)
}

fn int64(positions: Vec<usize>, device: Device) -> Result<Tensor> {
    let positions: Vec<i64> = positions.into_iter().map(|position| position as i64).collect();
    Ok(Tensor::f_from_slice(&positions)?.f_to(device)?)
}

impl DividedSequence for Sequence {
    fn length(&self) -> i64 {
        self.division.length() as i64
    }

    fn positions(&self, num_own_tokens: i64, device: Device) -> Result<Tensor> {
        self.check_own(num_own_tokens)?;
        int64(self.division.positions(self.rank()), device)
    }

    fn mask_positions(&self, device: Device) -> Result<Tensor> {
        match self.axis {
            // Each rank computes some heads for all tokens.
            Axis::Sp => int64((0..self.division.length()).collect(), device),
            _ => int64(self.division.positions(self.rank()), device),
        }
    }

    fn gather(&self, own: &Tensor, dim: i64) -> Result<Tensor> {
        let _no_grad = tch::no_grad_guard();
        self.check_own(own.size().get(index_of(own, dim)).copied().unwrap_or_default())?;
        let all = self.group.all_gather(own)?;
        let chunk_length = self.division.chunk_length() as i64;
        let chunk = |(rank, place): (usize, usize)| all[rank].f_narrow(dim, place as i64 * chunk_length, chunk_length);
        let chunks: Vec<Tensor> = self.division.holders().into_iter().map(chunk).collect::<Result<_, _>>()?;
        Ok(Tensor::f_cat(&chunks, dim)?)
    }

    fn shift_labels(&self, labels: &Tensor, ignore_index: i64) -> Result<Tensor> {
        let all = self.gather(labels, 1)?;
        let last = scalar::full(&[all.size2()?.0, 1], ignore_index, (all.f_kind()?, all.device()))?;
        self.own(&Tensor::f_cat(&[all.f_narrow(1, 1, self.length() - 1)?, last], 1)?, 1)
    }

    fn mean(&self, sum: &Tensor, count: &Tensor) -> Result<Tensor> {
        let num_ranks = self.division.num_ranks() as f64;
        let outputs = apply_function(
            "MeanOverTokens",
            &[sum],
            |context| {
                let kind = sum.f_kind()?;
                let totals = Tensor::f_stack(&[sum.f_detach()?, count.f_to_kind(kind)?.f_to(sum.device())?], 0)?;
                self.group.all_reduce(&totals, ReduceOp::Sum)?;
                let count = totals.f_select(0, 1)?;
                context.save_for_backward(&[&count]);
                Ok(vec![totals.f_select(0, 0)?.f_div(&count)?])
            },
            move |context, mut gradients| {
                let Some(gradient) = gradients.pop().flatten() else { return Ok(vec![None]) };
                let count = &context.saved_tensors()?[0];
                Ok(vec![Some(scalar::mul(&gradient.f_div(count)?, num_ranks)?)])
            },
        )?;
        Ok(outputs.into_iter().next().unwrap_or_else(Tensor::new))
    }
}

impl AttentionKernel for Sequence {
    fn attention(&self, query: &Tensor, key: &Tensor, value: &Tensor, options: AttentionOptions<'_>) -> Result<Tensor> {
        for heads in [query, key, value] {
            self.check_own(heads.size4()?.2)?;
        }
        let [query, key, value] = cast([query, key, value])?;
        match self.axis {
            Axis::Sp => ulysses::attention(&self.group, [&query, &key, &value], options),
            _ => ring::attention(self, [&query, &key, &value], options),
        }
    }

    fn sequence(&self) -> Option<&dyn DividedSequence> {
        Some(self)
    }
}

/// To the type that autocast computes attention in, before anything travels.
fn cast(heads: [&Tensor; 3]) -> Result<[Tensor; 3]> {
    let device = heads[0].device();
    if !is_autocast_enabled(device)? {
        return Ok(heads.map(Tensor::shallow_clone));
    }
    let kind = autocast_dtype(device)?;
    let [query, key, value] = heads.map(|heads| heads.f_to_kind(kind));
    Ok([query?, key?, value?])
}

/// What each of the ranks that divide a sequence has, if these tensors, or their `dims`, are not the same on all of them: whole numbers
/// to the bit, others up to their last digits. Collective.
pub(crate) fn compare_buffers(
    group: &Group,
    op: &'static str,
    buffers: &[Tensor],
    dims: &[i64],
) -> Result<Option<String>> {
    let _no_grad = tch::no_grad_guard();
    let describe = |tensor: &Tensor| -> Result<String> {
        let content = if is_floating(tensor.f_kind()?) { 0 } else { hash_of(&tensor.f_detach()?)? };
        Ok(format!("{} {content:016x}", shape_text(tensor)))
    };
    let texts = buffers.iter().map(describe).collect::<Result<Vec<_>>>()?;
    let dims = if dims.is_empty() { String::new() } else { format!(" along dims {dims:?}") };
    if let Some(texts) = group.disagreement(op, &format!("{}{dims}", texts.join(", ")))? {
        return Ok(Some(group.per_rank(&texts)));
    }
    for buffer in buffers.iter().filter(|buffer| buffer.numel() > 0) {
        if is_floating(buffer.f_kind()?)
            && let Some(per_rank) = compare_numbers(group, &buffer.f_detach()?)?
        {
            return Ok(Some(per_rank));
        }
    }
    Ok(None)
}

/// Number of tokens that the first buffer has.
pub(crate) fn sequence_length(buffer: Option<&Tensor>, dim: Option<i64>) -> Result<usize> {
    let (Some(buffer), Some(dim)) = (buffer, dim) else {
        return Err(StateError::SequenceDims { found: 0, wanted: 1 }.into());
    };
    match buffer.size().get(index_of(buffer, dim)).map(|&length| usize::try_from(length).unwrap_or_default()) {
        Some(length) => Ok(length),
        None => Err(StateError::OtherSequence { found: buffer.size(), dim, wanted: None }.into()),
    }
}

/// Layers that mix tokens, or count them, otherwise than by attention.
const MIXES_TOKENS: [&str; 5] = ["Conv", "BatchNorm", "GroupNorm", "RNN", "LSTM"];

/// Can ranks divide the sequences of a model?
///
/// # Errors
/// It does not compute attention by the kernel of its store, or has layers that mix tokens otherwise.
pub(crate) fn check_model(store: &ParamStore) -> Result<()> {
    if !store.uses_attention_kernel() {
        return Err(StateError::NoAttentionKernel.into());
    }
    for (path, layer) in store.named_layers() {
        let kind = layer.kind();
        let is_linear = matches!(layer, AnyLayer::Conv1D(_));
        if !is_linear && (kind == "GRU" || MIXES_TOKENS.iter().any(|mixing| kind.starts_with(mixing))) {
            return Err(StateError::MixesTokens { path, kind }.into());
        }
    }
    if !store.attention_kernel().is_dense() {
        return Err(StateError::OwnAttentionKernel.into());
    }
    Ok(())
}

/// Kind of the numbers that parts of attention are added up in.
fn accumulation_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}
