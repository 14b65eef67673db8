//! The form in which tensors travel: collectives that only move data take any dtype as bytes.

use super::{ReduceOp, shape_text};
use crate::error::{CollectiveError, Result};
use tch::{Kind, Tensor};
use torch_ext::scalar;

/// A contiguous, detached view or copy whose dtype every backend can move. Shares storage with
/// `tensor` when that is contiguous, so that in-place collectives write through.
pub(super) fn movable(tensor: &Tensor) -> Result<Tensor> {
    // What is only marked as negated or conjugated is so in memory, too, before the memory travels.
    let flat = tensor.f_detach()?.f_resolve_conj()?.f_resolve_neg()?.f_contiguous()?;
    match flat.kind() {
        Kind::Float
        | Kind::Double
        | Kind::Half
        | Kind::BFloat16
        | Kind::Int8
        | Kind::Uint8
        | Kind::Int
        | Kind::Int64 => Ok(flat),
        // A view of another element size needs at least one dim.
        _ => Ok(flat.f_view([-1])?.f_view_dtype(Kind::Uint8)?),
    }
}

/// What arrived as `wire`, in the dtype and shape of `like`.
pub(super) fn restore(wire: &Tensor, like: &Tensor) -> Result<Tensor> {
    let typed = if wire.kind() == like.kind() { wire.shallow_clone() } else { wire.f_view_dtype(like.kind())? };
    Ok(typed.f_view(like.size().as_slice())?)
}

/// Writes what arrived as `wire` into the tensor, where that is not the memory which it arrived in.
pub(super) fn write_back(wire: &Tensor, tensor: &Tensor) -> Result<()> {
    let is_same_memory = wire.data_ptr() == tensor.data_ptr();
    if !is_same_memory {
        tensor.f_detach()?.f_copy_(&restore(wire, tensor)?)?;
    }
    Ok(())
}

/// Makes a mean of a sum over so many ranks, if that is wanted.
pub(super) fn mean(sum: Tensor, op: ReduceOp, world_size: usize) -> Result<Tensor> {
    if op == ReduceOp::Mean {
        scalar::div_(&sum, world_size as f64)?;
    }
    Ok(sum)
}

/// Refuses results that the dtype cannot hold, before anything travels: all ranks have the same dtype.
pub(super) fn check_reduction(op: &'static str, tensor: &Tensor, reduction: ReduceOp) -> Result<()> {
    let found = || shape_text(tensor);
    match (reduction, tensor.f_kind()?) {
        (ReduceOp::Mean, Kind::Bool | Kind::Uint8 | Kind::Int8 | Kind::Int16 | Kind::Int | Kind::Int64) => {
            Err(CollectiveError::MeanOfIntegers { op, found: found() }.into())
        }
        (ReduceOp::Max | ReduceOp::Min, Kind::ComplexHalf | Kind::ComplexFloat | Kind::ComplexDouble) => {
            Err(CollectiveError::NoOrder { op, found: found() }.into())
        }
        _ => Ok(()),
    }
}

/// What the backends can combine in place of a contiguous tensor, and how. It shares memory with the tensor, unless that is
/// `Int16`, which they do not know.
pub(super) fn reducible(tensor: &Tensor, reduction: ReduceOp) -> Result<(Tensor, torch_ext::ReduceOp)> {
    let op = reduction.of_backend();
    match tensor.f_kind()? {
        Kind::ComplexHalf | Kind::ComplexFloat | Kind::ComplexDouble => Ok((tensor.f_view_as_real()?, op)),
        Kind::Int16 => Ok((tensor.f_to_kind(Kind::Int)?, op)),
        // Gloo would add up the bytes, and 256 times true would be false. NCCL takes the largest byte, too.
        Kind::Bool if reduction == ReduceOp::Sum => Ok((tensor.shallow_clone(), torch_ext::ReduceOp::Max)),
        _ => Ok((tensor.shallow_clone(), op)),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_dtype_survives_the_wire() {
        for kind in [Kind::Bool, Kind::Int16, Kind::Float, Kind::ComplexFloat, Kind::Int64] {
            for shape in [vec![], vec![3], vec![2, 3]] {
                let tensor = Tensor::ones(&shape, (kind, tch::Device::Cpu));
                let back = restore(&movable(&tensor).unwrap(), &tensor).unwrap();
                assert_eq!((back.kind(), back.size()), (kind, shape));
                assert!(bool::try_from(back.eq_tensor(&tensor).all()).unwrap());
            }
        }
    }

    #[test]
    fn contiguous_tensors_are_written_through() {
        let flags = Tensor::from_slice(&[false, false]);
        let _ = movable(&flags).unwrap().fill_(1);
        assert_eq!(Vec::<bool>::try_from(&flags).unwrap(), [true, true]);
    }
}
