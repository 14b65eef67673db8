//! Results of unknown number: the shim calls back for each, and they are appended to a vector.

use crate::border::{Handle, adopt};
use std::ffi::c_void;
use tch::Tensor;

pub(crate) type PushTensor = extern "C" fn(*mut c_void, Handle);

/// Appends to the `Vec<Tensor>` behind `list`.
pub(crate) extern "C" fn push_tensor(list: *mut c_void, tensor: Handle) {
    // SAFETY: the shim passes on the `list` that this crate gave it, a `Vec<Tensor>` that lives for the call and is touched
    // by nobody else during it, and a fresh tensor that is taken over here.
    unsafe { (*list.cast::<Vec<Tensor>>()).push(adopt(tensor)) }
}

/// The pointer to give to the shim with [`push_tensor`].
pub(crate) fn list_of(tensors: &mut Vec<Tensor>) -> *mut c_void {
    std::ptr::from_mut(tensors).cast()
}

/// The text that C++ lends for a call.
///
/// # Safety
/// `pointer` must have `length` valid bytes.
pub(crate) unsafe fn text(pointer: *const u8, length: usize) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: the caller upholds it.
    String::from_utf8_lossy(unsafe { std::slice::from_raw_parts(pointer, length) }).into_owned()
}
