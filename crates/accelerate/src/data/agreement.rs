//! What all ranks must agree on before a pass: one small collective per epoch.

use super::random::SharedGenerator;
use super::sampler::{
    RandomSampler, Sampler, SeedableRandomSampler, SequentialSampler, downcast, generator_of, order_of,
};
use crate::error::{DataError, Result};
use crate::messages;
use crate::session::Session;
use accelerate_core::names::RngType;
use accelerate_core::sampler::RowOrder;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use tch::{Device, Tensor};
use torch_ext::Generator;

/// The two collectives that loaders need; collective like those of `Group`.
pub(crate) trait Exchange: Send + Sync + fmt::Debug {
    /// Rank 0's tensor on every rank, of the shape and dtype that all ranks pass in.
    fn of_rank_zero(&self, tensor: &Tensor) -> Result<Tensor>;

    /// Every rank's tensor, in rank order; shapes and dtypes are equal.
    fn of_all_ranks(&self, tensor: &Tensor) -> Result<Vec<Tensor>>;
}

impl Exchange for Session {
    fn of_rank_zero(&self, tensor: &Tensor) -> Result<Tensor> {
        // A copy, because the tensor may share its storage with a generator or with the caller. Collectives
        // of GPU groups want it on their device.
        let mut copy = tensor.f_empty_like()?;
        copy.f_copy_(tensor)?;
        let copy = copy.f_to_device(self.device)?;
        self.group.broadcast(&copy, 0)?;
        Ok(copy.f_to_device(Device::Cpu)?)
    }

    fn of_all_ranks(&self, tensor: &Tensor) -> Result<Vec<Tensor>> {
        let gathered = self.group.all_gather(&tensor.f_to_device(self.device)?)?;
        gathered.iter().map(|tensor| Ok(tensor.f_to_device(Device::Cpu)?)).collect()
    }
}

/// The order of a pass, the same on all ranks: that of rank 0, with the seed if that alone decides it.
///
/// The generators of all ranks are in the same state already, see [`agree_on_generator`].
pub(crate) fn agreed_indices(
    exchange: &dyn Exchange,
    sampler: &dyn Sampler,
    epoch: usize,
    rank: usize,
) -> Result<(RowOrder, Option<u64>)> {
    if downcast::<SequentialSampler>(sampler).is_some() {
        return Ok((order_of(sampler, epoch)?, None));
    }
    if let Some(seedable) = downcast::<SeedableRandomSampler>(sampler) {
        let mine = [seedable.seed() as i64, epoch as i64, seedable.len() as i64];
        let agreed = Vec::<i64>::try_from(&exchange.of_rank_zero(&Tensor::f_from_slice(&mine)?)?)?;
        check_length(rank, seedable.len(), agreed[2] as usize)?;
        let seed = agreed[0] as u64;
        return Ok((order_of(&seedable.with_seed(seed), agreed[1] as usize)?, Some(seed)));
    }
    let permutes_all = downcast::<RandomSampler>(sampler).is_some();
    if permutes_all && generator_of(sampler).is_some_and(|generator| generator.get().is_some()) {
        return Ok((order_of(sampler, epoch)?, None));
    }
    // Weights and subsets may differ between ranks, whatever they draw from.
    let mine = sampler.indices(epoch)?.into_iter().map(|index| index as i64).collect();
    let agreed = agreed_numbers(exchange, mine)?;
    let order: Vec<usize> = agreed.into_iter().map(|index| index as usize).collect();
    Ok((order.into(), None))
}

/// Sets the generator's state to that of rank 0 (`synchronize_rng_states` of the reference with
/// `rng_types=["generator"]`, `utils/random.py`), and checks in the same message that all ranks are about to
/// shuffle as many rows.
pub(crate) fn agree_on_generator(
    exchange: &dyn Exchange,
    generator: &SharedGenerator,
    num_rows: usize,
    rank: usize,
) -> Result<()> {
    let state = generator.state()?;
    let length = Tensor::f_from_slice(&(num_rows as u64).to_le_bytes())?;
    let agreed = exchange.of_rank_zero(&Tensor::f_cat(&[&state, &length], 0)?)?;
    let state_bytes = state.size1()?;
    let mut length = [0; 8];
    length.copy_from_slice(&Vec::<u8>::try_from(&agreed.f_slice(0, state_bytes, None, 1)?)?);
    check_length(rank, num_rows, u64::from_le_bytes(length) as usize)?;
    generator.set_state(&agreed.f_slice(0, 0, state_bytes, 1)?)
}

/// Sets generators to the states of rank 0's (`synchronize_rng_states` of the reference, `utils/random.py`).
///
/// The sampler's own generator is not among them: whatever is asked for, the order of rows is rank 0's.
pub(crate) fn synchronize_rng_states(
    exchange: &dyn Exchange,
    rng_types: &[RngType],
    device: Option<Device>,
) -> Result<()> {
    for rng_type in rng_types {
        let generator = match (rng_type, device) {
            (RngType::Generator, _) => continue,
            (RngType::Torch, _) => Generator::default_cpu()?,
            (RngType::Cuda, Some(Device::Cuda(index))) => Generator::default_cuda(index)?,
            (other, _) => return Err(DataError::NoSuchGenerator { rng_type: other.to_string() }.into()),
        };
        generator.set_state(&exchange.of_rank_zero(&generator.state()?)?)?;
    }
    Ok(())
}

/// Ranks that shuffle different numbers of rows would end up with rows seen twice and never.
fn check_length(rank: usize, found: usize, wanted: usize) -> Result<()> {
    if found == wanted { Ok(()) } else { Err(DataError::UnequalPasses { rank, found, wanted }.into()) }
}

/// The batches of a pass, the same on all ranks: those of rank 0.
pub(crate) fn agreed_batches(exchange: &dyn Exchange, batches: Vec<Vec<usize>>) -> Result<Vec<Vec<usize>>> {
    // Every batch is written as its length followed by its rows.
    let with_length =
        |batch: Vec<usize>| std::iter::once(batch.len()).chain(batch).map(|number| number as i64).collect::<Vec<_>>();
    let numbers = agreed_numbers(exchange, batches.into_iter().flat_map(with_length).collect())?;
    let mut numbers = numbers.into_iter().map(|number| number as usize);
    let mut batches = Vec::new();
    while let Some(length) = numbers.next() {
        batches.push(numbers.by_ref().take(length).collect());
    }
    Ok(batches)
}

/// Rank 0's numbers on all ranks. As they are almost always the same everywhere, only their count and a
/// digest travel unless they differ.
fn agreed_numbers(exchange: &dyn Exchange, mine: Vec<i64>) -> Result<Vec<i64>> {
    // Ranks run the same program, so the standard hasher, whose keys are fixed, gives the same digest.
    let mut hasher = DefaultHasher::new();
    mine.hash(&mut hasher);
    let digest = Tensor::f_from_slice(&[mine.len() as i64, hasher.finish() as i64])?;
    let digests = exchange.of_all_ranks(&digest)?;
    let Some(first) = digests.first() else {
        return Ok(mine);
    };
    if digests.iter().all(|digest| digest == first) {
        return Ok(mine);
    }
    messages::warning!(
        "the sampler gives another order on some ranks than on rank 0; all ranks use that of rank 0. Seed it \
         the same on all ranks to save sending the order every epoch, or set \
         DataLoaderConfiguration.use_configured_sampler if it picks the rows of its own rank on purpose"
    );
    let mut numbers = mine;
    numbers.resize(first.f_int64_value(&[0])? as usize, 0);
    Ok(Vec::try_from(&exchange.of_rank_zero(&Tensor::f_from_slice(&numbers)?)?)?)
}
