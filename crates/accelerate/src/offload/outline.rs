//! Tensors that stand for what is kept elsewhere.

use crate::error::Result;
use tch::{Device, Kind, Tensor};
use torch_ext::storage::{free_storage, is_allocated};

/// A tensor on the CPU with sizes and a type, and without memory.
pub(crate) fn outline(size: &[i64], kind: Kind) -> Result<Tensor> {
    // The system gives memory when it is written to, and this is not.
    let tensor = Tensor::f_empty(size, (kind, Device::Cpu))?;
    // One without elements has nothing to be read, and may be used as it is.
    if tensor.numel() > 0 {
        free_storage(&tensor)?;
    }
    Ok(tensor)
}

/// Is it without memory, although it has elements?
pub(crate) fn is_outline(tensor: &Tensor) -> bool {
    tensor.numel() > 0 && !is_allocated(tensor)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_outline_has_sizes_and_no_memory() {
        for (size, has_elements) in [(&[3i64, 5][..], true), (&[0], false), (&[], true)] {
            let tensor = outline(size, Kind::BFloat16).unwrap();
            assert_eq!((tensor.size(), tensor.kind()), (size.to_vec(), Kind::BFloat16));
            assert_eq!(torch_ext::storage::storage_bytes(&tensor).unwrap(), 0);
            assert_eq!((is_outline(&tensor), is_outline(&tensor.detach())), (has_elements, has_elements));
            assert_eq!(tensor.f_detach_copy().is_err(), has_elements, "what is not there is not read by mistake");
            assert!(!is_outline(&Tensor::zeros(size, (Kind::Float, Device::Cpu))));
        }
    }
}
