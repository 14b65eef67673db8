//! Attention of which each rank computes some heads for all tokens.
//!
//! Method: Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer Models",
//! arXiv 2309.14509. Ranks exchange their tokens for heads before attention, and heads for tokens after it; each exchange is the
//! backward pass of the other.

use crate::error::Result;
use crate::group::Group;
use crate::nn::{AttentionKernel, AttentionOptions, DenseAttention};
use accelerate_core::sequence_parallel::HeadDivision;
use tch::Tensor;
use torch_ext::apply_function;

/// As [`AttentionKernel::attention`], where each rank has the tokens of its place. Collective.
pub(super) fn attention(group: &Group, heads: [&Tensor; 3], options: AttentionOptions<'_>) -> Result<Tensor> {
    let [query, key, value] = heads;
    let num_ranks = group.world_size();
    let (num_heads, num_key_value_heads) = (query.size4()?.1, key.size4()?.1);
    let division = HeadDivision::new(num_heads as usize, num_key_value_heads as usize, num_ranks)?;
    let repeated = |heads: &Tensor| -> Result<Tensor> {
        match division.repeats {
            1 => Ok(heads.shallow_clone()),
            repeats => Ok(heads.f_repeat_interleave_self_int(repeats as i64, 1, None)?),
        }
    };
    let [query, key, value]: [Tensor; 3] =
        exchanged(group, Direction::ToHeads, [query, &repeated(key)?, &repeated(value)?])?;
    let mask = options.attn_mask.map(|mask| own_heads(mask, num_heads, group)).transpose()?;
    let options = AttentionOptions { attn_mask: mask.as_ref(), ..options };
    let attended = DenseAttention.attention(&query, &key, &value, options)?;
    let [attended] = exchanged(group, Direction::ToTokens, [&attended])?;
    Ok(attended)
}

/// Rows of a mask that differ from head to head.
fn own_heads(mask: &Tensor, num_heads: i64, group: &Group) -> Result<Tensor> {
    let of_heads = mask.size().iter().rev().nth(2).copied();
    if of_heads != Some(num_heads) || num_heads == 1 {
        return Ok(mask.shallow_clone());
    }
    let own = num_heads / group.world_size() as i64;
    Ok(mask.f_narrow(-3, group.rank() as i64 * own, own)?)
}

#[derive(Clone, Copy)]
enum Direction {
    /// `[batch, num_heads, own tokens, width]` to `[batch, own heads, num_tokens, width]`.
    ToHeads,
    /// Back.
    ToTokens,
}

impl Direction {
    fn back(self) -> Self {
        match self {
            Self::ToHeads => Self::ToTokens,
            Self::ToTokens => Self::ToHeads,
        }
    }

    /// Which dim is cut into a part for each rank, and which one the ranks' parts are put together along.
    fn dims(self) -> (usize, usize) {
        match self {
            Self::ToHeads => (1, 2),
            Self::ToTokens => (2, 1),
        }
    }
}

/// The exchange as an operation that records gradients.
fn exchanged<const N: usize>(group: &Group, direction: Direction, tensors: [&Tensor; N]) -> Result<[Tensor; N]> {
    let shapes = tensors.map(Tensor::size);
    let shapes = shapes.map(|shape| after(&shape, direction, group.world_size() as i64));
    let kind = tensors.first().map_or(Ok(tch::Kind::Float), |tensor| tensor.f_kind())?;
    let backward_group = group.clone();
    let outputs = apply_function(
        "ExchangeHeadsAndTokens",
        &tensors,
        |context| {
            context.once_differentiable();
            let detached: Vec<Tensor> = tensors.iter().map(|tensor| tensor.f_detach()).collect::<Result<_, _>>()?;
            Ok(detached.iter().map(|tensor| exchange(group, direction, tensor)).collect::<Result<_>>()?)
        },
        move |_, gradients| {
            // All ranks send the same, whatever the loss of one of them depends on.
            let missing = |(gradient, shape): (Option<Tensor>, &Vec<i64>), device| match gradient {
                Some(gradient) => Ok(gradient),
                None => Tensor::f_zeros(shape, (kind, device)),
            };
            let device = gradients.iter().flatten().next().map_or(tch::Device::Cpu, Tensor::device);
            let gradients: Vec<Tensor> =
                gradients.into_iter().zip(&shapes).map(|pair| missing(pair, device)).collect::<Result<_, _>>()?;
            let back = |gradient: &Tensor| exchange(&backward_group, direction.back(), gradient).map(Some);
            Ok(gradients.iter().map(back).collect::<Result<_>>()?)
        },
    )?;
    outputs.try_into().map_err(|_| crate::Error::other("an exchange has another number of outputs"))
}

fn after(shape: &[i64], direction: Direction, num_ranks: i64) -> Vec<i64> {
    let (cut, joined) = direction.dims();
    let mut shape = shape.to_vec();
    shape[cut] /= num_ranks;
    shape[joined] *= num_ranks;
    shape
}

/// One collective: its result is a view of what it has received, in which the tokens or heads of all ranks follow each other.
fn exchange(group: &Group, direction: Direction, tensor: &Tensor) -> Result<Tensor> {
    let num_ranks = group.world_size() as i64;
    let (cut, joined) = direction.dims();
    let mut shape = tensor.size();
    shape[cut] /= num_ranks;
    shape.insert(cut, num_ranks);
    let joined_by_rank = if cut < joined { joined + 1 } else { joined };
    let sent = tensor.f_reshape(&shape)?.f_movedim([cut as i64, joined_by_rank as i64], [0i64, 1])?.f_contiguous()?;
    Ok(group.all_to_all_single(&sent)?.f_flatten(0, 1)?.f_movedim_int(0, joined as i64)?)
}
