//! What graphs keep in the place of unsharded parameters.

use super::FullyShard;
use crate::error::{Error, StateError};
use crate::group::NeededBy;
use tch::Tensor;
use torch_ext::autograd::CallbackResult;
use torch_ext::saved_tensors::{Packed, SavedTensorHooks, SavedToken};
use torch_ext::storage::storage_offset;

impl SavedTensorHooks for FullyShard {
    fn pack(&self, tensor: &Tensor) -> Packed {
        let Some((unit, version)) = self.0.units.add_token(tensor) else { return Packed::Keep };
        Packed::Token(Box::new(Token {
            engine: self.clone(),
            unit,
            sizes: tensor.size(),
            strides: tensor.stride(),
            offset: storage_offset(tensor),
            version,
        }))
    }
}

/// Stands in the graph for (a view of) an unsharded parameter.
struct Token {
    engine: FullyShard,
    unit: usize,
    sizes: Vec<i64>,
    strides: Vec<i64>,
    offset: i64,
    /// Of the parameters when the graph was made.
    version: i64,
}

impl SavedToken for Token {
    fn unpack(&self) -> CallbackResult<Tensor> {
        let units = &self.engine.0.units;
        // As libtorch does with tensors that it has saved itself.
        if units.version(self.unit)? != self.version {
            return Err(Error::from(StateError::ChangedSinceForward { unit: units.label(self.unit) }).into());
        }
        let full = self.engine.gather(self.unit, NeededBy::Backward)?;
        Ok(full.f_as_strided(&self.sizes[..], &self.strides[..], self.offset)?)
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        drop(self.engine.0.units.remove_token(self.unit));
    }
}
