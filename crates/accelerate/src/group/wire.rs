//! The form in which tensors travel: collectives that only move data take any dtype as bytes.

use crate::error::Result;
use tch::{Kind, Tensor};

/// A contiguous, detached view or copy whose dtype every backend can move. Shares storage with
/// `tensor` when that is contiguous, so that in-place collectives write through.
pub(super) fn movable(tensor: &Tensor) -> Result<Tensor> {
    let flat = tensor.f_detach()?.f_contiguous()?;
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
