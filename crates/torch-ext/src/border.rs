//! The border to the C++ shim: status codes become [`Error`], panics stop here.

use crate::error::{Error, ErrorKind, Result};
use crate::hooks::drop_without_unwinding;
use smallvec::SmallVec;
use std::any::Any;
use std::ffi::{c_char, c_void};
use tch::Tensor;

pub(crate) type Handle = *mut c_void;

unsafe extern "C" {
    fn te_last_error(message: *mut *const c_char, length: *mut usize) -> i32;
    fn te_keep_callback_failure(data: *mut c_void, drop: unsafe extern "C" fn(*mut c_void));
    fn te_take_failure_of_last_error() -> *mut c_void;
    fn te_take_callback_failure() -> *mut c_void;
}

/// Why a Rust callback failed. The exception that ends the call around it carries it to whoever made that call.
pub(crate) enum CallbackFailure {
    Error(Box<dyn std::error::Error + Send + Sync>),
    Panic(Box<dyn Any + Send>),
}

/// Runs a closure that libtorch called; returns 0, or -1 after keeping the error or panic.
///
/// A panic must not unwind into C++. It is kept and raised again by [`check`] on the thread that made the outermost call: for graph
/// nodes of a GPU, which libtorch runs on a thread of its own, that is another one.
pub(crate) fn run_callback(
    body: impl FnOnce() -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>>,
) -> i32 {
    let failure = match std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)) {
        Ok(Ok(())) => return 0,
        Ok(Err(error)) => CallbackFailure::Error(error),
        Err(payload) => CallbackFailure::Panic(payload),
    };
    // SAFETY: the pointer is fresh; C++ gives it back once or drops it once.
    unsafe { te_keep_callback_failure(Box::into_raw(Box::new(failure)).cast(), drop_failure) };
    -1
}

unsafe extern "C" fn drop_failure(data: *mut c_void) {
    // SAFETY: made by `run_callback`, dropped once.
    drop_without_unwinding(|| drop(unsafe { adopt_failure(data) }));
}

/// # Safety
/// `data` must be null or come from `run_callback`, and be passed here once.
unsafe fn adopt_failure(data: *mut c_void) -> Option<CallbackFailure> {
    // SAFETY: the caller upholds that it is a box of ours that nobody else has.
    (!data.is_null()).then(|| *unsafe { Box::from_raw(data.cast::<CallbackFailure>()) })
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
    if kind == ErrorKind::Callback {
        // SAFETY: C++ gives each failure away once.
        match unsafe { adopt_failure(te_take_failure_of_last_error()) } {
            Some(CallbackFailure::Panic(payload)) => std::panic::resume_unwind(payload),
            Some(CallbackFailure::Error(source)) => return Error::callback(operation, source),
            None => {}
        }
    }
    Error::new(kind, operation, text)
}

/// What the last failed callback of this thread left behind, if nobody picked it up yet.
pub(crate) fn take_callback_failure() -> Option<CallbackFailure> {
    // SAFETY: C++ gives each failure away once.
    unsafe { adopt_failure(te_take_callback_failure()) }
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
