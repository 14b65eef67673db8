//! Meta tensors: shape, kind and strides without memory.
//!
//! tch has no name for the meta device, so `Tensor::device` panics on these; ask [`is_meta`] first.

use crate::border::{Handle, adopt, check, handle};
use crate::error::Result;
use crate::kinds::scalar_type;
use tch::{Kind, Tensor};

unsafe extern "C" {
    fn te_meta_empty(shape: *const i64, num_dims: usize, kind: i32, result: *mut Handle) -> i32;
    fn te_meta_like(tensor: Handle, result: *mut Handle) -> i32;
    fn te_is_meta(tensor: Handle) -> bool;
}

/// A meta tensor: `torch.empty(shape, dtype=kind, device="meta")`.
///
/// # Errors
/// A dimension is negative.
///
/// ```
/// let x = torch_ext::meta::empty_meta(&[1 << 20, 1 << 20], tch::Kind::Float)?; // four terabytes
/// assert_eq!(x.matmul(&x).size(), [1 << 20, 1 << 20]);
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn empty_meta(shape: &[i64], kind: Kind) -> Result<Tensor> {
    let mut raw = std::ptr::null_mut();
    // SAFETY: the shape lives through the call; the result is fresh and adopted once.
    unsafe {
        check("empty_meta", te_meta_empty(shape.as_ptr(), shape.len(), scalar_type(kind), &mut raw))?;
        Ok(adopt(raw))
    }
}

/// A meta tensor of the same shape, strides and kind.
///
/// ```
/// let x = tch::Tensor::from_slice(&[1f32, 2.0]);
/// let meta = torch_ext::meta::to_meta(&x)?;
/// assert_eq!((meta.size(), meta.kind()), (vec![2], tch::Kind::Float));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn to_meta(tensor: &Tensor) -> Result<Tensor> {
    let mut raw = std::ptr::null_mut();
    // SAFETY: the handle is borrowed for the call; the result is fresh and adopted once.
    unsafe {
        check("to_meta", te_meta_like(handle(tensor), &mut raw))?;
        Ok(adopt(raw))
    }
}

/// Whether a tensor is on the meta device.
///
/// ```
/// assert!(!torch_ext::meta::is_meta(&tch::Tensor::from(1f32)));
/// assert!(torch_ext::meta::is_meta(&torch_ext::meta::empty_meta(&[2], tch::Kind::Float)?));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn is_meta(tensor: &Tensor) -> bool {
    // SAFETY: the handle is borrowed for the call.
    unsafe { te_is_meta(handle(tensor)) }
}
