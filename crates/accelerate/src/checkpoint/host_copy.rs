//! Where tensors are copied to: the memory of the host, pinned for those of a CUDA device.

use super::elsewhere::fitting;
use super::memory::TensorMemory;
use crate::error::Result;
use crate::messages;
use tch::Tensor;

/// libtorch gives pinned memory in sizes of powers of two, so that one piece for everything could take twice as much as asked for.
const PINNED_PIECE_BYTES: usize = 64 << 20;

/// A place for each of these tensors, with anything in it.
pub(super) fn places_for(tensors: &[&Tensor]) -> Result<Vec<Tensor>> {
    let is_pinned = |tensor: &Tensor| tensor.device().is_cuda();
    let mut places = Vec::with_capacity(tensors.len());
    for pinned in [false, true] {
        let own: Vec<(usize, &Tensor)> =
            tensors.iter().enumerate().filter(|(_, it)| is_pinned(it) == pinned).map(|(at, it)| (at, *it)).collect();
        let mut left = own.as_slice();
        while !left.is_empty() {
            let sizes = left.iter().map(|(_, tensor)| tensor.numel() * tensor.kind().elt_size_in_bytes());
            let count = if pinned { fitting(sizes, PINNED_PIECE_BYTES) } else { left.len() };
            let (together, later) = left.split_at(count);
            let mut memory = memory_for(together, pinned)?;
            for (position, tensor) in together {
                places.push((*position, memory.tensor_like(tensor)?));
            }
            left = later;
        }
    }
    places.sort_by_key(|(position, _)| *position);
    Ok(places.into_iter().map(|(_, place)| place).collect())
}

fn memory_for(tensors: &[(usize, &Tensor)], pinned: bool) -> Result<TensorMemory> {
    let sizes = tensors.iter().map(|(_, tensor)| Ok((tensor.f_kind()?, tensor.numel()))).collect::<Result<Vec<_>>>()?;
    let num_bytes = TensorMemory::num_bytes(sizes.into_iter());
    if !pinned {
        return TensorMemory::new(num_bytes);
    }
    // There is less of it than of other memory, and copies only take longer without.
    TensorMemory::pinned(num_bytes).or_else(|error| {
        messages::debug!("{num_bytes} bytes of a checkpoint are copied into memory that is not pinned: {error}");
        TensorMemory::new(num_bytes)
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    #[test]
    fn places_are_in_the_order_of_their_tensors() {
        let tensors: Vec<Tensor> = [(3, Kind::Float), (0, Kind::Double), (5, Kind::Bool), (2, Kind::Int64)]
            .map(|(numel, kind)| Tensor::zeros([numel, 2], (kind, Device::Cpu)))
            .into();
        let places = places_for(&tensors.iter().collect::<Vec<_>>()).unwrap();
        for (tensor, place) in tensors.iter().zip(&places) {
            assert_eq!((tensor.size(), tensor.kind()), (place.size(), place.kind()));
        }
        assert_eq!(places.len(), tensors.len());
    }
}
