//! Attention of each rank's queries to the keys of all ranks, whose parts are added up as keys arrive.
//!
//! Method: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", arXiv 2310.01889. The backward pass has
//! keys and values travel once more, and gradients of them with these, to the ranks that they belong to. Keys and values travel all at
//! once (`allgather`), or from rank to rank (`alltoall`).

use super::block::{Attended, Block};
use super::{Sequence, accumulation_kind};
use crate::error::{Result, StateError};
use crate::group::{Group, ReduceOp};
use crate::nn::AttentionOptions;
use accelerate_core::config::ContextParallelStrategy;
use accelerate_core::sequence_parallel::{ChunkPair, HeadDivision, SequenceDivision};
use tch::{Kind, Tensor};
use torch_ext::{Autocast, apply_function};

/// What the passes know.
#[derive(Clone, Debug)]
struct Ring {
    group: Group,
    division: SequenceDivision,
    strategy: ContextParallelStrategy,
    is_causal: bool,
    scale: f64,
    /// How many heads of queries share a head of keys.
    sharing: i64,
    key_shape: Vec<i64>,
    value_shape: Vec<i64>,
}

/// As [`AttentionKernel::attention`](crate::nn::AttentionKernel::attention), where each rank has two chunks of tokens. Collective.
pub(super) fn attention(
    sequence: &Sequence,
    [query, key, value]: [&Tensor; 3],
    options: AttentionOptions<'_>,
) -> Result<Tensor> {
    if options.dropout_p > 0.0 {
        return Err(StateError::DropoutInRing { dropout_p: options.dropout_p }.into());
    }
    let (num_heads, num_key_value_heads) = (query.size4()?.1, key.size4()?.1);
    HeadDivision::new(num_heads as usize, num_key_value_heads as usize, 1)?;
    let ring = Ring {
        group: sequence.group.clone(),
        division: sequence.division,
        strategy: sequence.strategy,
        is_causal: options.is_causal,
        scale: options.scale.unwrap_or_else(|| (query.size4().map_or(1, |size| size.3).max(1) as f64).powf(-0.5)),
        sharing: num_heads / num_key_value_heads.max(1),
        key_shape: key.size(),
        value_shape: value.size(),
    };
    let mask = options.attn_mask.map(Tensor::f_detach).transpose()?;
    let forward_mask = mask.as_ref();
    let outputs = apply_function(
        "RingAttention",
        &[query, key, value],
        |context| {
            context.once_differentiable();
            let [query, key, value] = [query.f_detach()?, key.f_detach()?, value.f_detach()?];
            // What is added up in 32 bits is not to be cast back.
            let without_autocast = Autocast::off(query.device());
            let Attended { output, log_sum } =
                without_autocast.run(|| ring.forward([&query, &key, &value], forward_mask))??;
            let output = output.f_to_kind(query.f_kind()?)?;
            context.save_for_backward(&[&query, &key, &value, &output, &log_sum]);
            Ok(vec![output])
        },
        {
            let (ring, mask) = (ring.clone(), mask.as_ref().map(Tensor::shallow_clone));
            move |context, mut gradients| {
                let saved = context.saved_tensors()?;
                let [query, key, value, output, log_sum] = &saved[..] else { return Ok(vec![None, None, None]) };
                let gradient = match gradients.pop().flatten() {
                    Some(gradient) => gradient,
                    None => output.f_zeros_like()?,
                };
                let found = ring.backward([query, key, value], (&gradient, output, log_sum), mask.as_ref())?;
                Ok(found.into_iter().map(Some).collect())
            }
        },
    )?;
    Ok(outputs.into_iter().next().unwrap_or_else(Tensor::new))
}

impl Ring {
    /// Of the rank's own queries to all keys. Collective.
    fn forward(&self, [query, key, value]: [&Tensor; 3], mask: Option<&Tensor>) -> Result<Attended> {
        let queries = self.chunks(query)?;
        let mut attended: Vec<Option<Attended>> = queries.iter().map(|_| None).collect();
        self.for_each_holder(&pack(key, value)?, |holder, packed| {
            let (keys, values) = self.unpack(packed)?;
            for pair in self.pairs(holder) {
                let chunk_mask = mask.map(|mask| self.chunk_of_mask(mask, holder, pair)).transpose()?;
                let block = self.block(pair, chunk_mask.as_ref());
                let [key, value] = [&keys[pair.key], &values[pair.key]].map(|heads| self.repeated(heads));
                let part = block.forward(&queries[pair.query], &key?, &value?)?;
                let so_far = attended[pair.query].take();
                attended[pair.query] = Some(match so_far {
                    Some(so_far) => so_far.merged(part)?,
                    None => part,
                });
            }
            Ok(())
        })?;
        let (mut outputs, mut log_sums) = (Vec::new(), Vec::new());
        for part in attended.into_iter().flatten() {
            outputs.push(part.output);
            log_sums.push(part.log_sum);
        }
        Ok(Attended { output: Tensor::f_cat(&outputs, 2)?, log_sum: Tensor::f_cat(&log_sums, 2)? })
    }

    /// Gradients of the rank's own queries, keys and values. Collective.
    fn backward(
        &self,
        [query, key, value]: [&Tensor; 3],
        (gradient, output, log_sum): (&Tensor, &Tensor, &Tensor),
        mask: Option<&Tensor>,
    ) -> Result<[Tensor; 3]> {
        let kind = accumulation_kind(query.f_kind()?);
        let (queries, gradients) = (self.chunks(query)?, self.chunks(gradient)?);
        let (outputs, log_sums) = (self.chunks(output)?, self.chunks(log_sum)?);
        let of_query = Tensor::f_zeros(query.size(), (kind, query.device()))?;
        let of_queries = self.chunks(&of_query)?;
        let packed = pack(key, value)?;
        let summed = self.for_each_gradient(&packed, kind, |holder, packed, of_packed| {
            let ((keys, values), (of_keys, of_values)) = (self.unpack(packed)?, self.unpack(of_packed)?);
            for pair in self.pairs(holder) {
                let chunk_mask = mask.map(|mask| self.chunk_of_mask(mask, holder, pair)).transpose()?;
                let block = self.block(pair, chunk_mask.as_ref());
                let (key, value) = (self.repeated(&keys[pair.key])?, self.repeated(&values[pair.key])?);
                let at = pair.query;
                let whole = (&gradients[at], &outputs[at], &log_sums[at]);
                let found = block.backward([&queries[at], &key, &value], whole)?;
                add(&of_queries[at], &found[0], kind)?;
                add(&of_keys[pair.key], &self.shared(&found[1], kind)?, kind)?;
                add(&of_values[pair.key], &self.shared(&found[2], kind)?, kind)?;
            }
            Ok(())
        })?;
        let (of_key, of_value) = self.halves(&summed)?;
        Ok([
            of_query.f_to_kind(query.f_kind()?)?,
            of_key.f_to_kind(key.f_kind()?)?,
            of_value.f_to_kind(value.f_kind()?)?,
        ])
    }

    /// Which of the own chunks look at which of the holder's.
    fn pairs(&self, holder: usize) -> Vec<ChunkPair> {
        self.division.pairs(self.group.rank(), holder, self.is_causal)
    }

    fn block<'a>(&self, pair: ChunkPair, mask: Option<&'a Tensor>) -> Block<'a> {
        Block { is_causal: self.is_causal && pair.is_diagonal, mask, scale: self.scale }
    }

    /// The chunks that a rank holds, of a tensor that has tokens along dim 2.
    fn chunks(&self, tensor: &Tensor) -> Result<Vec<Tensor>> {
        Ok(tensor.f_split(self.division.chunk_length() as i64, 2)?)
    }

    /// Own rows, which lie in the order of own tokens, and columns by the place in the sequence.
    fn chunk_of_mask(&self, mask: &Tensor, holder: usize, pair: ChunkPair) -> Result<Tensor> {
        let length = self.division.chunk_length() as i64;
        let first_key = self.division.ranges(holder).get(pair.key).map_or(0, |range| range.start as i64);
        Ok(mask.f_narrow(-2, pair.query as i64 * length, length)?.f_narrow(-1, first_key, length)?)
    }

    /// A head of keys for each head of queries.
    fn repeated(&self, heads: &Tensor) -> Result<Tensor> {
        match self.sharing {
            1 => Ok(heads.shallow_clone()),
            sharing => Ok(heads.f_repeat_interleave_self_int(sharing, 1, None)?),
        }
    }

    /// The gradient of a head of keys from those of all that it was repeated for.
    fn shared(&self, gradient: &Tensor, kind: Kind) -> Result<Tensor> {
        match self.sharing {
            1 => Ok(gradient.shallow_clone()),
            sharing => Ok(gradient.f_unflatten(1, [-1, sharing])?.f_sum_dim_intlist([2i64].as_slice(), false, kind)?),
        }
    }

    fn halves(&self, packed: &Tensor) -> Result<(Tensor, Tensor)> {
        let num_keys: i64 = self.key_shape.iter().product();
        let key = packed.f_narrow(0, 0, num_keys)?.f_view(&self.key_shape[..])?;
        let value = packed.f_narrow(0, num_keys, packed.numel() as i64 - num_keys)?.f_view(&self.value_shape[..])?;
        Ok((key, value))
    }

    fn unpack(&self, packed: &Tensor) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
        let (key, value) = self.halves(packed)?;
        Ok((self.chunks(&key)?, self.chunks(&value)?))
    }

    /// Calls `body` with what each rank has, its own first. Collective.
    fn for_each_holder(&self, own: &Tensor, mut body: impl FnMut(usize, &Tensor) -> Result<()>) -> Result<()> {
        match self.strategy {
            ContextParallelStrategy::AllGather => {
                let all = self.group.all_gather(own)?;
                self.holders().try_for_each(|holder| body(holder, &all[holder]))
            }
            ContextParallelStrategy::AllToAll => {
                let mut held = own.shallow_clone();
                for (step, holder) in self.holders().enumerate() {
                    if step > 0 {
                        held = self.group.rotate(&held)?;
                    }
                    body(holder, &held)?;
                }
                Ok(())
            }
        }
    }

    /// The same with a gradient beside it, which `body` adds to; the sum of what all ranks have added to this rank's. Collective.
    fn for_each_gradient(
        &self,
        own: &Tensor,
        kind: Kind,
        mut body: impl FnMut(usize, &Tensor, &Tensor) -> Result<()>,
    ) -> Result<Tensor> {
        let numel = own.numel() as i64;
        match self.strategy {
            ContextParallelStrategy::AllGather => {
                let num_ranks = self.group.world_size() as i64;
                let gradients = Tensor::f_zeros([num_ranks * numel], (kind, own.device()))?;
                let all = self.group.all_gather(own)?;
                for holder in self.holders() {
                    body(holder, &all[holder], &gradients.f_narrow(0, holder as i64 * numel, numel)?)?;
                }
                drop(all);
                self.group.reduce_scatter_tensor(&gradients, ReduceOp::Sum)
            }
            ContextParallelStrategy::AllToAll => {
                let mut held = own.shallow_clone();
                let mut gradient = Tensor::f_zeros([numel], (kind, own.device()))?;
                for (step, holder) in self.holders().enumerate() {
                    if step > 0 {
                        held = self.group.rotate(&held)?;
                        gradient = self.group.rotate(&gradient)?;
                    }
                    body(holder, &held, &gradient)?;
                }
                // One step further it is where it belongs.
                self.group.rotate(&gradient)
            }
        }
    }

    /// Whose keys are here, step by step.
    fn holders(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, num_ranks) = (self.group.rank(), self.group.world_size());
        (0..num_ranks).map(move |step| (rank + num_ranks - step) % num_ranks)
    }
}

fn pack(key: &Tensor, value: &Tensor) -> Result<Tensor> {
    Ok(Tensor::f_cat(&[key.f_reshape([-1])?, value.f_reshape([-1])?], 0)?)
}

/// In place.
fn add(sum: &Tensor, part: &Tensor, kind: Kind) -> Result<()> {
    let _ = sum.shallow_clone().f_add_(&part.f_to_kind(kind)?)?;
    Ok(())
}
