//! The border to the C++ shim: status codes become [`Error`], panics stop here.

use crate::error::{Error, ErrorKind, Result};
use smallvec::SmallVec;
use std::any::Any;
use std::cell::RefCell;
use std::ffi::{c_char, c_void};
use tch::Tensor;

pub(crate) type Handle = *mut c_void;

unsafe extern "C" {
    fn te_last_error(message: *mut *const c_char, length: *mut usize) -> i32;
}

/// Why a Rust callback failed, kept on the thread that ran it until the calling side can pick it up.
pub(crate) enum CallbackFailure {
    Error(Box<dyn std::error::Error + Send + Sync>),
    Panic(Box<dyn Any + Send>),
}

thread_local! {
    static CALLBACK_FAILURE: RefCell<Option<CallbackFailure>> = const { RefCell::new(None) };
}

/// Runs a closure that libtorch called; returns 0, or -1 after keeping the error or panic.
///
/// A panic must not unwind into C++. It is kept here and raised again by [`check`] on the thread that
/// made the outermost call. libtorch runs CPU graph nodes on the thread that called `backward`, so both
/// sides are the same thread there; failures on device threads surface as errors without the payload.
pub(crate) fn run_callback(
    body: impl FnOnce() -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>>,
) -> i32 {
    let failure = match std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)) {
        Ok(Ok(())) => return 0,
        Ok(Err(error)) => CallbackFailure::Error(error),
        Err(payload) => CallbackFailure::Panic(payload),
    };
    CALLBACK_FAILURE.with(|slot| *slot.borrow_mut() = Some(failure));
    -1
}

/// Turns a status of the shim into a result. Re-raises a panic that a callback left behind.
pub(crate) fn check(operation: &'static str, status: i32) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(last_error(operation)) }
}

#[cold]
fn last_error(operation: &'static str) -> Error {
    let mut message = std::ptr::null();
    let mut length = 0;
    // SAFETY: the shim fills both out-parameters and keeps the bytes until this thread's next failing call.
    let (kind, text) = unsafe {
        let kind = te_last_error(&mut message, &mut length);
        let bytes = if message.is_null() { &[][..] } else { std::slice::from_raw_parts(message.cast::<u8>(), length) };
        (ErrorKind::from_border(kind), String::from_utf8_lossy(bytes).into_owned())
    };
    // A failure left over from a call that was made around this crate must not be blamed on this one.
    if kind == ErrorKind::Callback {
        match take_callback_failure() {
            Some(CallbackFailure::Panic(payload)) => std::panic::resume_unwind(payload),
            Some(CallbackFailure::Error(source)) => return Error::callback(operation, source),
            None => {}
        }
    }
    Error::new(kind, operation, text)
}

/// What the last failed callback of this thread left behind, if nobody picked it up yet.
pub(crate) fn take_callback_failure() -> Option<CallbackFailure> {
    CALLBACK_FAILURE.with(|slot| slot.borrow_mut().take())
}

/// The borrowed `at::Tensor*` of a tensor.
pub(crate) fn handle(tensor: &Tensor) -> Handle {
    tensor.as_ptr().cast_mut().cast()
}

/// The borrowed handles of some tensors, valid while the tensors live. For few of them no memory is taken.
pub(crate) fn handles<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> SmallVec<[Handle; 4]> {
    tensors.into_iter().map(handle).collect()
}

/// Takes ownership of a tensor that the shim made with `te::hand_over`.
///
/// # Safety
/// `raw` must come from `te::hand_over` and be passed here exactly once.
pub(crate) unsafe fn adopt(raw: Handle) -> Tensor {
    // SAFETY: the caller upholds that `raw` is a fresh, owned `at::Tensor*`, which is what tch frees on drop.
    unsafe { Tensor::from_ptr(raw.cast()) }
}

/// Gives a tensor away to the shim, which takes it over with `te::take`.
pub(crate) fn give(tensor: Tensor) -> Handle {
    handle(&std::mem::ManuallyDrop::new(tensor))
}

/// A tensor that C++ lends to a callback: it is not freed here.
///
/// # Safety
/// `raw` must be a valid `at::Tensor*` for as long as the result is used.
pub(crate) unsafe fn borrow(raw: Handle) -> std::mem::ManuallyDrop<Tensor> {
    // SAFETY: the caller upholds validity, and `ManuallyDrop` keeps tch from freeing what C++ owns.
    std::mem::ManuallyDrop::new(unsafe { Tensor::from_ptr(raw.cast()) })
}
