//! What graphs keep in the place of gathered parameters.

use super::gather::{Pass, Released};
use super::{Phase, Shard};
use crate::error::{Error, StateError};
use tch::Tensor;
use torch_ext::autograd::CallbackResult;
use torch_ext::saved_tensors::{Packed, SavedTensorHooks, SavedToken};
use torch_ext::storage::{storage_id, storage_offset};

impl SavedTensorHooks for Shard {
    fn pack(&self, tensor: &Tensor) -> Packed {
        let mut state = self.lock();
        let Some(&unit) = state.gathered.get(&storage_id(tensor)) else { return Packed::Keep };
        state.units[unit].num_tokens += 1;
        let version = state.units[unit].gathered_version();
        Packed::Token(Box::new(Token {
            shard: self.clone(),
            unit,
            sizes: tensor.size(),
            strides: tensor.stride(),
            offset: storage_offset(tensor),
            version,
        }))
    }
}

/// Stands in the graph for (a view of) a gathered parameter.
struct Token {
    shard: Shard,
    unit: usize,
    sizes: Vec<i64>,
    strides: Vec<i64>,
    offset: i64,
    /// Of the parameters when the graph was made.
    version: i64,
}

impl SavedToken for Token {
    fn unpack(&self) -> CallbackResult<Tensor> {
        // As libtorch does with tensors that it has saved itself.
        if self.shard.lock().units[self.unit].version()? != self.version {
            let unit = self.shard.label(self.unit);
            return Err(Error::from(StateError::ChangedSinceForward { unit }).into());
        }
        let whole = self.shard.gather(self.unit, Pass::Backward)?;
        Ok(whole.f_as_strided(&self.sizes[..], &self.strides[..], self.offset)?)
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        let released = {
            let mut state = self.shard.lock();
            state.units[self.unit].num_tokens -= 1;
            let is_done = state.units[self.unit].num_tokens == 0 && state.phase != Phase::Forward;
            if is_done { state.release(self.unit) } else { Released::default() }
        };
        drop(released);
    }
}
