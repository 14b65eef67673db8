//! Memory for the tensors of a checkpoint.

use crate::error::Result;
use tch::{Device, Kind, Tensor};
use torch_ext::device::pinned_bytes;
use torch_ext::file::aligned_bytes;
use torch_ext::storage::{LARGE_PAGE_BYTES, prefer_large_pages};

/// No two tensors share a cache line.
const ALIGNMENT: usize = 64;

/// Memory for many tensors in one piece, on large pages where the system has some: the first use of a page costs more than to
/// fill it, and there are hundreds of times fewer of these.
///
/// It lives as long as one of its tensors.
#[derive(Debug)]
pub(super) struct TensorMemory {
    bytes: Tensor,
    num_used: usize,
}

impl TensorMemory {
    /// What tensors of these element types and numbers of elements take.
    pub(super) fn num_bytes(tensors: impl Iterator<Item = (Kind, usize)>) -> usize {
        tensors.map(|(kind, numel)| (kind.elt_size_in_bytes() * numel).next_multiple_of(ALIGNMENT)).sum()
    }

    /// # Errors
    /// libtorch's own: there is not as much memory.
    pub(super) fn new(num_bytes: usize) -> Result<Self> {
        let is_large = num_bytes >= LARGE_PAGE_BYTES;
        let bytes = aligned_bytes(num_bytes, if is_large { LARGE_PAGE_BYTES } else { ALIGNMENT })?;
        if is_large {
            prefer_large_pages(&bytes);
        }
        Ok(Self { bytes, num_used: 0 })
    }

    /// Memory from which CUDA devices copy without a detour.
    ///
    /// # Errors
    /// There is no such memory.
    pub(super) fn pinned(num_bytes: usize) -> Result<Self> {
        Ok(Self { bytes: pinned_bytes(num_bytes)?, num_used: 0 })
    }

    /// The next tensor, `[numel]` on the CPU, with anything in it.
    ///
    /// # Errors
    /// libtorch's own: the memory is used up.
    pub(super) fn tensor(&mut self, kind: Kind, numel: usize) -> Result<Tensor> {
        let num_bytes = kind.elt_size_in_bytes() * numel;
        if num_bytes == 0 {
            return Ok(Tensor::f_empty([numel as i64], (kind, Device::Cpu))?);
        }
        let part = self.bytes.f_narrow(0, self.num_used as i64, num_bytes as i64)?;
        self.num_used += num_bytes.next_multiple_of(ALIGNMENT);
        Ok(part.f_view_dtype(kind)?)
    }

    /// The next tensor, of the sizes and type of another.
    pub(super) fn tensor_like(&mut self, other: &Tensor) -> Result<Tensor> {
        Ok(self.tensor(other.f_kind()?, other.numel())?.f_view(&*other.size())?)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn tensors_lie_one_behind_the_other_and_share_nothing() {
        for scale in [1, 1 << 16] {
            let wanted =
                [(Kind::Float, 3 * scale), (Kind::Bool, 1), (Kind::Double, 0), (Kind::BFloat16, 70), (Kind::Int64, 5)];
            let num_bytes = TensorMemory::num_bytes(wanted.into_iter());
            let mut memory = TensorMemory::new(num_bytes).unwrap();
            let mut tensors: Vec<Tensor> =
                wanted.iter().map(|&(kind, numel)| memory.tensor(kind, numel).unwrap()).collect();
            for (tensor, (kind, numel)) in tensors.iter().zip(wanted) {
                assert_eq!((tensor.kind(), tensor.size(), tensor.is_contiguous()), (kind, vec![numel as i64], true));
                assert!(numel == 0 || (tensor.data_ptr() as usize).is_multiple_of(ALIGNMENT));
            }
            for (number, tensor) in tensors.iter_mut().enumerate() {
                let _ = tensor.fill_(number as f64);
            }
            for (number, tensor) in tensors.iter().enumerate() {
                let wanted = tensor.full_like(number as f64);
                assert_eq!(*tensor, wanted);
            }
            assert!(memory.tensor(Kind::Uint8, 1).is_err(), "there is more than was asked for");
        }
    }
}
